"""For each knob: where it started, where it ended and how sure one may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hdet.history import WindowRecord

SURE = 2.0
BELIEVABLE = 10.0


@dataclass(frozen=True)
class Verdict:
    """A knob's course over a run.

    Attributes:
        knob: its name.
        start: its base as declared; at the schedule's peak, for a knob that has a schedule.
        end: the same with all that was learned.
        moves: how far its controller moved it in all, in coordinate units, up positive.
        overall: t of the whole run's evidence; negative where larger values did better.
        late: the same of the last quarter of the windows: whether it was still pulled when the run ended.
    """

    knob: str
    start: float
    end: float
    moves: float
    overall: float
    late: float

    @property
    def words(self) -> str:
        """How sure, in words.

        >>> Verdict("learning_rate", 3e-4, 2e-3, 1.9, overall=-6.0, late=-0.3).words
        'up was better (t = -6.0), settled'
        """
        if abs(self.overall) < SURE:
            return f"no clear sign (t = {self.overall:+.1f})"
        better = "down" if self.overall > 0 else "up"
        if abs(self.late) < SURE:
            tail = "settled"
        else:
            tail = f"still pulled {'down' if self.late > 0 else 'up'} (t = {self.late:+.1f})"
        return f"{better} was better (t = {self.overall:+.1f}), {tail}"


def verdicts(history: Sequence[WindowRecord], courses: Mapping[str, tuple[float, float]]) -> list[Verdict]:
    """One verdict a knob.

    Evidence adds up over windows as Stouffer's Z = sum_w t_w / sqrt(W), which has unit variance for a knob
    without effect; no window counts for more than |t| = 10, since an error of almost nothing proves little.

    Args:
        history: the run's windows, in order.
        courses: by knob, where it started and where it ended.
    """
    found = []
    for knob, (start, end) in courses.items():
        windows = [record for record in history if knob in record.bases]
        recent = windows[-max(1, len(windows) // 4) :]
        found.append(
            Verdict(
                knob=knob,
                start=start,
                end=end,
                moves=math.fsum(record.moves[knob] for record in windows),
                overall=_stouffer(windows, knob),
                late=_stouffer(recent, knob),
            )
        )
    return found


def t_statistic(record: WindowRecord, knob: str) -> float | None:
    """A window's slope over its standard error, or `None` where the window taught nothing of the knob."""
    estimate = record.estimates.get(knob)
    if estimate is None or estimate.get("slope") is None or estimate.get("stderr") is None:
        return None
    slope, stderr = float(estimate["slope"]), float(estimate["stderr"])
    if not (math.isfinite(slope) and math.isfinite(stderr)):
        return None
    return slope / stderr if stderr > 0 else math.copysign(math.inf, slope) if slope else 0.0


def _stouffer(windows: Sequence[WindowRecord], knob: str) -> float:
    evidence = [t for record in windows if (t := t_statistic(record, knob)) is not None]
    if not evidence:
        return 0.0
    return math.fsum(min(max(t, -BELIEVABLE), BELIEVABLE) for t in evidence) / math.sqrt(len(evidence))
