"""What is written down of a window: how it was trained, read before anything moves, and what its end did."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hdet.engine.tally import WindowLosses
from hdet.errors import HdetError
from hdet.evidence import Collector, Window
from hdet.history import History, WindowRecord
from hdet.hparams.bound_knob import BoundKnob
from hdet.record import MOST_REPLICAS
from hdet.replicas import Replicas
from hdet.replicas.distributed.ranks import Ranks


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


def append(history: History, record: WindowRecord, home: Replicas, device: torch.device) -> None:
    """Append to the history. Where one rank cannot write it, none goes on to wait for that one.

    Raises:
        HdetError: a history could not be written, here or in another process.
    """
    _together(partial(history.append, record), home, device)


def amend(history: History, window: int, told: dict[str, Any], home: Replicas, device: torch.device) -> None:
    """Fields of the record of a window that has closed. A history that is another's, or empty, goes without.

    Raises:
        HdetError: a history could not be written, here or in another process.
    """

    def write() -> None:
        if history.latest and history.latest[-1].window == window:
            history.latest[-1] = replace(history.latest[-1], **told)
            history.take_over(history.windows)

    _together(write, home, device)


def _together(write: Callable[[], None], home: Replicas, device: torch.device) -> None:
    """Every process writes its history; where one cannot, all raise."""
    failure: Exception | None = None
    try:
        write()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    if isinstance(home, Ranks):
        row = torch.full((len(home.local), 1), float(failure is not None), device=device)
        if (home.gather(row) == 1.0).any() and failure is None:
            failure = HdetError(
                "another process of this run could not write its history, and says why; the window is kept in "
                "memory there, and is written with the next"
            )
    if failure is not None:
        raise failure


def _mean(closed: WindowLosses) -> float | None:
    """Over the replicas that have a loss; None where none has."""
    finite = closed.losses[np.isfinite(closed.losses)]
    return float(finite.mean()) if len(finite) else None
