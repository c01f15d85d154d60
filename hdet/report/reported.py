"""One run as a report shows it: its windows, and what lies beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hdet.errors import ConfigError
from hdet.record import WindowRecord, knobs_of
from hdet.report.series import DrawnCourse, course


@dataclass(frozen=True)
class ReportedRun:
    """One run of a report.

    Args:
        name: what it is called.
        windows: its history, in order.
        configuration: the declaration it was run with, as YAML text.
        declared: the same as plain mappings and lists, by which several runs are compared.
        result: what it ended with: `test_loss`, `None` where it was not finite, and `plain` for the same run without
            hdet.
    """

    name: str
    windows: Sequence[WindowRecord]
    configuration: str = ""
    declared: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def held_out_loss(self) -> float | None:
        """Of the final model, where the result tells; NaN where it was not finite."""
        return self._test_loss(self.result)

    @property
    def plain_loss(self) -> float | None:
        """Of the same run without hdet, where there is one; NaN where it was not finite."""
        plain = self.result.get("plain")
        return self._test_loss(plain) if isinstance(plain, dict) else None

    @property
    def comparing(self) -> bool:
        """Whether it is trained, and the same run without hdet has not ended yet."""
        return self.result.get("comparing") is True

    @property
    def over(self) -> bool:
        """Whether nothing of it is still to come."""
        return bool(self.result) and not self.comparing

    def _test_loss(self, result: dict[str, Any]) -> float | None:
        if "test_loss" not in result:
            return None
        given = result["test_loss"]
        if given is None:
            return math.nan
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            raise ConfigError(
                f"the result of {self.name} has test_loss {given!r}; give a number, or null for one that is not finite"
            )
        return float(given)

    @cached_property
    def knobs(self) -> list[str]:
        """The knobs its history names, in order."""
        return knobs_of(self.windows)

    @cached_property
    def courses(self) -> dict[str, DrawnCourse]:
        """What is drawn and told of each knob's values."""
        return {knob: course(self.windows, knob) for knob in self.knobs}


def reported(runs: ReportedRun | Iterable[ReportedRun] | Iterable[WindowRecord]) -> list[ReportedRun]:
    """One run, several, or the bare history of one, as a list of runs with names that differ.

    Raises:
        ConfigError: it is none of these.
    """
    given: list[object] = list(runs) if isinstance(runs, Iterable) and not isinstance(runs, str) else [runs]
    windows = [one for one in given if isinstance(one, WindowRecord)]
    if len(windows) == len(given):
        return [ReportedRun("run", windows)]
    several = [one for one in given if isinstance(one, ReportedRun)]
    if len(several) < len(given):
        other = next(one for one in given if not isinstance(one, ReportedRun))
        raise ConfigError(
            f"a report is of one history or of ReportedRun objects, got {type(other).__name__}; read a file by "
            f"hdet.History(path), and give each of several histories as ReportedRun(name, history.windows)"
        )
    named: dict[str, ReportedRun] = {}
    for one in several:
        name, number = one.name, 2
        while name in named:
            name, number = f"{one.name} ({number})", number + 1
        named[name] = replace(one, name=name)
    return list(named.values())
