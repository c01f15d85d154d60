"""The learning-rate range test followed by OneCycle, which is what most people use."""

from __future__ import annotations

from search_parts.range_test import RangeTest

CONTENDER = RangeTest("valley", "onecycle")
