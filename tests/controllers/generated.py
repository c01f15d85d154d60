"""Runs of a controller on generated estimates: a warm-up, a decline, noise, stalls, rewinds and new starts."""

from __future__ import annotations

import math
import random

from hdet.controllers import Context, Controller, Estimate

WINDOWS = 40
SUB_BATCHES = 8


def moves_of_a_run(controller: Controller, seed: int, *, looks_ahead: bool) -> list[float]:
    """Its move at each window's end of one generated run; the shift that they add up to is what it sees next."""
    draw = random.Random(seed)
    looks = draw.choice((0, 0, 4, 8)) if looks_ahead else 0  # windows whose estimates are taken ahead of the base
    warm = draw.choice((0, 5, 12, 25))
    total = draw.choice((None, 1000, 400))
    authority = draw.choice((math.inf, 3.0, 0.7))
    tendency, averaged_tendency = draw.gauss(0.0, 2.5), draw.gauss(0.0, 3.0)
    loss, level, error = 4.0, 4.2, draw.choice((0.3, 0.02))
    foreign = draw.random() < 0.1
    with_sub_batches = draw.random() < 0.6
    state, shift, step, moves = controller.start(), draw.choice((0.0, -1.4)), 0, []
    worked = 0.1
    for window in range(WINDOWS):
        length = max(1, int((total or 1000) / WINDOWS * draw.uniform(0.4, 1.5)))
        step += length

        def schedule(number: int) -> float:
            rising = min(1.0, (number + 1) / warm) if warm else 1.0
            return 0.1 * rising * min(1.0, max(0.0, (WINDOWS + 1 - number) / WINDOWS))

        now, following = schedule(window), schedule(window + 1)
        loss *= draw.choice((0.93, 0.97, 0.97, 1.0, 1.04))
        level = loss * draw.uniform(0.98, 1.4)
        context = Context(
            base=now * math.exp(shift),
            schedule_now=now,
            schedule_next=following,
            peak=0.1,
            step=step,
            total_steps=total,
            window=window,
            length=length,
            windows_left=WINDOWS - 1 - window,
            shift=shift,
            authority=authority,
            spread=0.3,
            warming=following > now,
            loss=None if draw.random() < 0.05 else (loss / 4 if foreign else loss),
        )
        if draw.random() < 0.03:
            if draw.random() < 0.7:
                move, state = controller.retreat(state, context, worked)
            else:
                move, state = controller.restart(state, context)
        else:
            if draw.random() < 0.15:
                tendency, averaged_tendency = draw.gauss(0.0, 2.5), draw.gauss(0.0, 3.0)
            offset = 0.7 if window < looks else 0.0
            estimate = _estimate(draw, tendency, averaged_tendency, error, level, offset, with_sub_batches)
            move, state = controller.step(state, estimate, context)
            if draw.random() < 0.1:
                worked = context.base
        moves.append(move)
        shift = min(max(shift + move, -authority), authority)
    return moves


def _estimate(
    draw: random.Random,
    tendency: float,
    averaged_tendency: float,
    error: float,
    level: float,
    offset: float,
    with_sub_batches: bool,
) -> Estimate:
    slope = error * draw.gauss(tendency, 1.5)
    curvature = draw.choice((None, abs(slope) * draw.uniform(0.5, 9.0), -1.0))
    sub = tuple(slope + error * draw.gauss(0.0, math.sqrt(SUB_BATCHES)) for _ in range(SUB_BATCHES))
    if with_sub_batches:
        slope = sum(sub) / SUB_BATCHES
    averaged = Estimate.nothing()
    if draw.random() < 0.8:
        averaged = Estimate(error * draw.gauss(averaged_tendency, 1.5), draw.choice((None, 1.0)), stderr=error)
    return Estimate(
        slope=slope if draw.random() > 0.02 else math.nan,
        curvature=curvature,
        stderr=error * draw.uniform(0.5, 1.5),
        averaged=averaged,
        level=None if draw.random() < 0.05 else level,
        span=None if draw.random() < 0.05 else draw.choice((0.05, 0.4, 3.0)),
        offset=offset,
        slopes=sub if with_sub_batches else (),
    )
