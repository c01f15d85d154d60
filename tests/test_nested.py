"""Nested mappings, lists and tuples, changed value by value."""

from __future__ import annotations

from collections import Counter

from hdet.nested import mapped


def test_a_counter_keeps_its_counts() -> None:
    """Its own `update` adds."""
    assert mapped({"milestones": Counter({30: 1})}, lambda one: one) == {"milestones": Counter({30: 1})}
