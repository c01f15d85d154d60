"""How many windows a knob needs before it can be moved with confidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hdet.engine.probe_size import PROOF, growth, testable
from hdet.record import WindowRecord


@dataclass(frozen=True)
class Need:
    """What a knob needs.

    Attributes:
        knob: its name.
        windows: until a slope worth knowing shows with |t| = 2, if the windows' errors are independent; infinite where
            nothing would show ever, NaN where nothing was measured.
        of: the windows that the run has.
        t: the median |t| of a window's slope; NaN without a pilot.
    """

    knob: str
    windows: float
    of: int
    t: float = math.nan

    @property
    def words(self) -> str:
        """The need in words.

        >>> Need("dropout", 12, 30).words
        '12 windows of 30'
        >>> Need("dropout", 60, 30).words
        'cannot be identified in this run: 60 windows at best, and it has 30; take 2 times the probe, or a longer run'
        """
        if math.isnan(self.windows):
            return "not measured: no window of the pilot judged it; take a longer pilot"
        if self.windows == math.inf:
            return "cannot be identified: its slope is 0, so it does nothing here"
        count = math.ceil(self.windows)
        if count <= self.of:
            return f"{count} window{'s' * (count > 1)} of {self.of}"
        factor = f"{math.ceil(10 * self.windows / self.of) / 10:g}"
        return (
            f"cannot be identified in this run: {count} windows at best, and it has {self.of}; take {factor} times the "
            f"probe, or a longer run"
        )


def by_noise(knob: str, stderr: float, effect: float, windows: int) -> Need:
    """By the standard error of a window's slope and the slope that is to show, both in loss per coordinate unit.

    >>> by_noise("dropout", stderr=0.02, effect=0.01, windows=30).windows
    16.0
    """
    return Need(knob, max(1.0, (PROOF * stderr / effect) ** 2), windows)


def by_pilot(knob: str, records: Sequence[WindowRecord], windows: int) -> Need:
    """By what the windows of a pilot measured: their noise, and the largest effect that they make believable."""
    estimates = [record.estimates[knob] for record in records if testable(record.estimates.get(knob, {}))]
    if not estimates:
        return Need(knob, math.nan, windows)
    t, factor, _ = growth(estimates)
    return Need(knob, max(1.0, factor), windows, t)
