"""These tests need the frameworks; without one, its file is not collected."""

from __future__ import annotations

from importlib.util import find_spec

NEEDS = {"test_transformers.py": "transformers"}

collect_ignore = [name for name, package in NEEDS.items() if find_spec(package) is None]
