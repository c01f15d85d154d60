"""A run that controllers are tried on, window by window."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

from hdet.controllers import Context, Controller, Estimate
from hdet.testing.law import require

WINDOWS = 12


def estimate(slope: float, stderr: float, curvature: float | None = None) -> Estimate:
    """One that has a judgement at averaged weights too."""
    bare = Estimate(slope, curvature, stderr, None if curvature is None else stderr)
    return replace(bare, averaged=replace(bare, slope=0.5 * slope))


_EVERY = [
    estimate(*given)
    for given in product((-3.0, -0.2, -1e-3, 0.0, 1e-3, 0.2, 3.0), (1e-3, 0.1, 10.0), (None, -1.0, 0.0, 0.5))
]
LESSONS = [_EVERY[(5 * number) % len(_EVERY)] for number in range(3 * WINDOWS)]
"""Estimates that say something, sure and unsure."""


def contexts() -> list[Context]:
    """Twelve windows: a warm-up, a plateau, a decline to zero."""
    values = [min(1.0, (window + 1) / 4, (WINDOWS - window) / 4) for window in range(WINDOWS + 1)]
    return [
        Context(
            base=values[window],
            schedule_now=values[window],
            schedule_next=values[window + 1],
            step=10 * (window + 1),
            total_steps=10 * WINDOWS,
            window=window,
            windows_left=WINDOWS - 1 - window,
            authority=2.0,
            spread=0.3,
            warming=values[window + 1] > values[window],
        )
        for window in range(WINDOWS)
    ]


def course(controller: Controller) -> list[tuple[Any, Estimate, Context]]:
    """The state before each window, its estimate and its context, as the controller's own moves have it."""
    state, shift, found = controller.start(), 0.0, []
    for context, lesson in zip(contexts(), LESSONS, strict=False):
        context = replace(context, shift=shift, base=context.schedule_now * math.exp(shift))
        found.append((state, lesson, context))
        move, state = step(controller, state, lesson, context)
        shift = min(max(shift + move, -context.authority), context.authority)
    return found


def step(controller: Controller, state: Any, estimate: Estimate, context: Context) -> tuple[float, Any]:
    """The controller's step: a finite move, and a state."""
    answer = controller.step(state, estimate, context)
    require(isinstance(answer, tuple) and len(answer) == 2, f"step returned {answer!r}, not (move, state)")
    move, following = answer
    require(math.isfinite(move), f"it moves by {move} after {estimate} in {context}")
    return float(move), following
