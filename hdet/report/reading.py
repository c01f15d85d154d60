"""What a window's evidence said of a knob, and which of its judgements decided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

from hdet.record import BALANCE, TURNS, WindowRecord
from hdet.sub_batches import normal_equivalent

CLEAR_T = 2.0
"""|t| from which a judgement counts as clear."""

CHANCE = 0.05
"""Of a run that one of its windows proves a move to a knob that does nothing."""

FEWEST = 4
"""Windows from which a history tells whether training got anywhere."""
WRECKED = 2.0
"""From which the first window's steps wrecked the model: its held-out loss over its training loss, as against the last
windows, or its training loss over that of the first step."""
TINY = 1e-12
LEAST_FALL = 0.05
"""Of the loss, after such a beginning: a model that predicts a constant still settles a little."""

AHEAD = "looking ahead"
AVERAGED = "averaged weights"
LAST = "last weights"
STEPS = "steps beside the weights"
ONLY = "its evidence"
EARLIER = "earlier windows"
GUARD = "the guard"


class Reading(NamedTuple):
    """One judgement of a knob in one window.

    Attributes:
        source: what it was read from, such as `AVERAGED`.
        slope: change of the signal for one unit of the knob's coordinate; negative where more is better.
        stderr: its standard error.
    """

    source: str
    slope: float
    stderr: float

    @property
    def t(self) -> float:
        """slope / stderr; infinite where the error vanishes."""
        if self.stderr > 0:
            return self.slope / self.stderr
        return math.copysign(math.inf, self.slope) if self.slope else 0.0


def readings(record: WindowRecord, knob: str) -> list[Reading]:
    """What a window measured of a knob, the judgement that decides first; empty where it taught nothing.

    Averaged weights decide where they were read. The last weights favour small steps, because these quiet
    gradient noise now and cost progress later (Wu et al. 2018, arXiv:1803.02021).
    """
    estimate = record.estimates.get(knob)
    if not isinstance(estimate, dict):
        return []
    averaged = estimate.get("averaged")
    own = LAST if isinstance(averaged, dict) else ONLY
    if "offset" in estimate and looks_ahead(record, knob):
        own = AHEAD
    return [one for one in (_reading(averaged, AVERAGED), _reading(estimate, own)) if one is not None]


def looks_ahead(record: WindowRecord, knob: str) -> bool:
    """Whether a window judged the peak of the knob's schedule before the schedule was there."""
    offset = number(record.estimates.get(knob, {}).get("offset"))
    learned = record.learned.get(knob, {}).get("opened")
    base = record.bases.get(knob)
    return offset is not None and offset > 0 and learned is not None and base is not None and base < learned


def turn_that_moved(record: WindowRecord, knob: str) -> str | None:
    """At which turn of the run the guard moved the knob; of all that moved, in a record that does not tell of any."""
    told = {name: reasons["guard"] for name, reasons in record.reasons.items() if "guard" in reasons}
    if told:
        return told.get(knob)
    return next((fault["kind"] for fault in record.faults if fault.get("kind") in TURNS), None)


def decided(record: WindowRecord, knob: str) -> tuple[str, float | None]:
    """What a window's move rests on: the source, and its t where this window has one that calls for the move."""
    if turn_that_moved(record, knob) is not None:
        return GUARD, None
    move = record.moves.get(knob, 0.0)
    if record.reasons.get(knob, {}).get("rule") == BALANCE:
        return STEPS, None
    agreeing = []
    for one in readings(record, knob):
        t = one.t
        if t * move < 0 and abs(t) >= 1.0:
            if abs(t) >= CLEAR_T:
                return one.source, t
            agreeing.append((one.source, t))
    return max(agreeing, key=lambda one: abs(one[1]), default=(EARLIER, None))


def held_out_loss(record: WindowRecord) -> float:
    """Where the window's evidence tells the level of its signal; else NaN."""
    levels = (number(estimate.get("level")) for estimate in record.estimates.values())
    return next((level for level in levels if level is not None), math.nan)


def made_progress(windows: Sequence[WindowRecord]) -> bool:
    """Whether training got anywhere: in the last quarter of the windows a loss lies below that of the first window.

    The training or the held-out loss will do. A first window whose steps wrecked the model says nothing of where the
    run began. Where its training loss is far above that of the first step and that of the last windows, one of the two
    losses has to lie 5 % below that of the first step; else, where held-out loss is far above training loss in it, both
    5 % below the lowest of the first third. Few windows cannot tell, and are taken to have made progress.
    """
    trained = [record.loss for record in windows if math.isfinite(record.loss)]
    held_out = [level for level in map(held_out_loss, windows) if math.isfinite(level)]
    if len(trained) < FEWEST:
        return True
    first = windows[0].first_loss or 0.0
    if 0.0 < WRECKED * max(first, _latest(trained)) < trained[0] and first > 0.0:
        return any(_latest(losses) < (1.0 - LEAST_FALL) * first for losses in (trained, held_out) if losses)
    # A probe on another scale, or one that is overfitted, is as far above the training loss at the end.
    usual = abs(_latest(held_out)) / max(abs(_latest(trained)), TINY) if held_out else 1.0
    wrecked = bool(held_out) and held_out[0] > WRECKED * abs(trained[0]) * max(1.0, usual)
    fell = [_fell(losses, wrecked) for losses in (trained, held_out) if losses]
    return all(fell) if wrecked else any(fell)


def _latest(losses: Sequence[float]) -> float:
    last = losses[-max(1, len(losses) // 4) :]
    return math.fsum(last) / len(last)


def _fell(losses: Sequence[float], wrecked: bool) -> bool:
    first = min(losses[: max(1, len(losses) // 3)]) if wrecked else losses[0]
    return _latest(losses) < first - (LEAST_FALL * abs(first) if wrecked else 0.0)


def surprise(record: WindowRecord, knob: str, source: str, t: float) -> float:
    """|t| of a judgement as the normal deviate that is as unlikely, by how many numbers its error comes from."""
    estimate = record.estimates.get(knob, {})
    judged = estimate["averaged"] if source == AVERAGED else estimate
    freedom = judged.get("freedom") or len(judged.get("slopes") or ()) - 1
    return abs(normal_equivalent(t, freedom)) if freedom > 0 else abs(t)


def proof(judgements: int) -> float:
    """The normal deviate that none of so many judgements exceeds by chance in 95 % of runs (Bonferroni).

    >>> round(proof(1), 2), round(proof(20), 2)
    (1.96, 3.02)
    """
    return NormalDist().inv_cdf(1.0 - CHANCE / 2 / max(1, judgements))


def supported(source: str, t: float | None) -> bool:
    """Whether what a move rests on is clear by itself: |t| of 2 or more in its own window, or no slope at all."""
    return source in (GUARD, STEPS) or (t is not None and abs(t) >= CLEAR_T)


def _reading(estimate: Any, source: str) -> Reading | None:
    if not isinstance(estimate, dict):
        return None
    slope, stderr = number(estimate.get("slope")), number(estimate.get("stderr"))
    return Reading(source, slope, stderr) if slope is not None and stderr is not None else None


def number(value: Any) -> float | None:
    """A finite number, or None: histories hold null for those that are not finite."""
    if type(value) is float:  # nearly always, and asked of every estimate several times
        return value if math.isfinite(value) else None
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None
