"""What is written down of a window: how it was trained, read before anything moves, and what its end did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from hdet.controllers import Estimate
from hdet.engine.noise_scale import NoiseScale
from hdet.engine.tally import WindowLosses
from hdet.errors import HdetError
from hdet.evidence import Collector, Window
from hdet.history import History, WindowRecord
from hdet.hparams.bound_knob import BoundKnob
from hdet.record import MOST_REPLICAS
from hdet.replicas import Replicas
from hdet.replicas.distributed.ranks import Ranks


@dataclass(frozen=True)
class Account:
    """A window that is about to be judged: the values that it was trained at.

    Attributes:
        bases: each knob's base at the window's last step.
        opened: each knob's learned value in this window.
        The others are those of `WindowRecord`.
    """

    window: Window
    knobs: Sequence[BoundKnob]
    size: int
    bases: dict[str, float]
    values: dict[str, list[float]]
    ranges: dict[str, list[float]]
    course: dict[str, list[float]]
    opened: dict[str, float]

    @classmethod
    def of(cls, window: Window, knobs: Sequence[BoundKnob], collectors: Sequence[Collector], size: int) -> Account:
        """Read off the knobs while they are as the window had them."""
        last = window.stop - 1
        shown = range(min(size, MOST_REPLICAS))
        by_member = {knob.name for collector in collectors if collector.by_member for knob in collector.knobs}
        return cls(
            window,
            knobs,
            size,
            bases={knob.name: knob.base(last) for knob in knobs},
            values={knob.name: knob.values(last, shown) for knob in knobs},
            ranges={knob.name: list(knob.range(last)) for knob in knobs} if size > MOST_REPLICAS else {},
            course={k.name: k.course(window.start, window.stop) for k in knobs if k.name not in by_member},
            opened={knob.name: knob.learned.value for knob in knobs},
        )

    def record(
        self,
        closed: WindowLosses,
        estimates: dict[str, Estimate],
        moves: dict[str, float],
        *,
        reasons: dict[str, dict[str, str]],
        merged: bool,
        faults: list[dict[str, Any]],
        seconds: float,
        closing: float,
        noise: NoiseScale | None,
        best_schedule: dict[str, list[float]],
    ) -> WindowRecord:
        """The window's record, once every base has moved."""
        return WindowRecord(
            window=self.window.index,
            start=self.window.start,
            stop=self.window.stop,
            bases=self.bases,
            values=self.values,
            losses=[loss if math.isfinite(loss) else None for loss in closed.losses[:MOST_REPLICAS].tolist()],
            estimates={name: estimate.to_dict() for name, estimate in estimates.items()},
            moves=moves,
            merged=merged,
            faults=faults,
            seconds=seconds,
            closing=closing,
            learned={
                knob.name: {
                    "start": knob.learned.start,
                    "opened": self.opened[knob.name],
                    "closed": knob.learned.value,
                }
                for knob in self.knobs
            },
            course=self.course,
            reasons=reasons,
            replicas=self.size,
            ranges=self.ranges,
            mean_loss=_mean(closed) if self.size > MOST_REPLICAS else None,
            noise_scale=asdict(noise) if noise is not None else {},
            best_schedule=best_schedule,
        )


def append(history: History, record: WindowRecord, home: Replicas, device: torch.device) -> None:
    """Append to the history. Where one rank cannot write it, none goes on to wait for that one.

    Raises:
        HdetError: a history could not be written, here or in another process.
    """
    failure: Exception | None = None
    try:
        history.append(record)
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
