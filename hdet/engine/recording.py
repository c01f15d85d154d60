"""What is written down of a window: how it was trained, read before anything moves, and what its end did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hdet.engine.tally import WindowLosses
from hdet.errors import HdetError
from hdet.evidence import Collector, Window
from hdet.history import History, WindowRecord
from hdet.hparams.bound_knob import BoundKnob
from hdet.record import MOST_REPLICAS
from hdet.user_warning import warn


def trained(
    window: Window, knobs: Sequence[BoundKnob], collectors: Sequence[Collector], closed: WindowLosses
) -> WindowRecord:
    """The record of a window that is about to be judged: what it was trained at, and its losses."""
    last, size = window.stop - 1, len(closed.losses)
    shown = range(min(size, MOST_REPLICAS))
    by_member = {knob.name for collector in collectors if collector.by_member for knob in collector.knobs}
    return WindowRecord(
        window=window.index,
        start=window.start,
        stop=window.stop,
        bases={knob.name: knob.base(last) for knob in knobs},
        values={knob.name: knob.values(last, shown) for knob in knobs},
        losses=[loss if math.isfinite(loss) else None for loss in closed.losses[:MOST_REPLICAS].tolist()],
        estimates={},
        moves={},
        merged=False,
        learned={knob.name: {"start": knob.learned.start, "opened": knob.learned.value} for knob in knobs},
        course={k.name: k.course(window.start, window.stop) for k in knobs if k.name not in by_member},
        replicas=size,
        ranges={knob.name: list(knob.range(last)) for knob in knobs} if size > MOST_REPLICAS else {},
        mean_loss=_mean(closed) if size > MOST_REPLICAS else None,
        first_loss=closed.first if window.index == 0 and math.isfinite(closed.first) else None,
    )


def append(history: History, record: WindowRecord) -> None:
    """Append to the history. A full disk ends no run: what could not be written is told of."""
    try:
        history.append(record)
    except HdetError as error:
        warn(str(error))


def amend(history: History, window: int, told: dict[str, Any]) -> None:
    """Fields of the record of a window that has closed. A history that is another's, or empty, goes without."""
    if not history.latest or history.latest[-1].window != window:
        return
    history.latest[-1] = replace(history.latest[-1], **told)
    try:
        history.take_over(history.windows)
    except HdetError as error:
        warn(str(error))


def _mean(closed: WindowLosses) -> float | None:
    """Over the replicas that have a loss; None where none has."""
    finite = closed.losses[np.isfinite(closed.losses)]
    return float(finite.mean()) if len(finite) else None
