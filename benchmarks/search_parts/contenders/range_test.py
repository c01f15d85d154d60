"""The learning-rate range test followed by OneCycle, which is what most people use."""

from __future__ import annotations

from search_parts.option import Option
from search_parts.range_test import RangeTest

CONTENDER = RangeTest("valley", "onecycle")
OPTION = Option(
    "factor on the rate", (RangeTest("valley", "onecycle", 1 / 3), CONTENDER, RangeTest("valley", "onecycle", 3.0))
)
