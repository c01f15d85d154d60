"""The laws of estimators."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdet.controllers import Estimate
from hdet.controllers.estimators import Comparison, Estimator
from hdet.controllers.state import from_plain, to_plain
from hdet.errors import ConfigError
from hdet.hparams import Hadamard, Permutation, TwoLevel
from hdet.testing.law import BreachError, broken, require

Array = NDArray[np.float64]

REPLICAS, KNOBS, WINDOWS = 12, 3, 4
PLACEBO_WINDOWS = 200
PLACEBO_T, PLACEBO_SHARE = 4.0, 0.05
"""A knob without effect may have |t| above PLACEBO_T in PLACEBO_SHARE of all windows (Student's t with 8 degrees of
freedom: 0.4 %)."""
CLOSE = 1e-6


def _comparison(window: int, batches: int | None, *, effect: float = 1.0, noise: float = 0.05) -> Comparison:
    """Knob 0 costs `effect` a coordinate, knob 1 pays it, knob 2 does nothing; J sub-batches, or one loss."""
    generator = np.random.Generator(np.random.Philox(key=[window, 17]))
    levels = Hadamard().assign(
        [TwoLevel(0.5).levels(REPLICAS)] * KNOBS, seed=1, window=window, names=["a", "b", "c"], two_level=[True] * KNOBS
    )
    losses = 3.0 + effect * (levels[:, :1] - levels[:, 1:2])
    losses = losses + noise * generator.standard_normal((REPLICAS, batches or 1))
    if batches is not None:
        losses = losses + generator.standard_normal(batches)  # what the sub-batches have in common
    shifts = np.array([0.1, -0.2, 0.0]) * window
    return Comparison(levels, losses if batches else losses[:, 0], shifts, np.ones(REPLICAS, dtype=np.bool_))


def _of_size(replicas: int, knobs: int, batches: int | None, window: int) -> Comparison:
    """Knob 0 costs 1 a coordinate, the others do nothing."""
    generator = np.random.Generator(np.random.Philox(key=[window, 17]))
    names = [str(k) for k in range(knobs)]
    columns = [TwoLevel(0.5).levels(replicas)] * knobs
    levels = Permutation().assign(columns, seed=1, window=window, names=names, two_level=[True] * knobs)
    losses = 3.0 + levels[:, :1] + 0.05 * generator.standard_normal((replicas, batches or 1))
    return Comparison(levels, losses if batches else losses[:, 0], np.zeros(knobs), np.ones(replicas, dtype=np.bool_))


def _run(estimator: Estimator, comparisons: Sequence[Comparison]) -> list[list[Estimate]]:
    """The estimates of windows on end."""
    state = estimator.start(comparisons[0].knobs)
    found = []
    for comparison in comparisons:
        estimates, state = estimator.estimate(state, comparison)
        require(len(estimates) == comparison.knobs, f"{len(estimates)} estimates for {comparison.knobs} knobs")
        found.append(list(estimates))
    return found


def _both() -> list[list[Comparison]]:
    return [[_comparison(window, batches) for window in range(WINDOWS)] for batches in (None, 6)]


def _changed(comparison: Comparison, **fields: Any) -> Comparison:
    own = {name: getattr(comparison, name).copy() for name in ("levels", "losses", "shifts", "valid")}
    return Comparison(**{**own, **fields})


def _require_same(one: list[list[Estimate]], other: list[list[Estimate]], when: str, tolerance: float = CLOSE) -> None:
    for window, (row, again) in enumerate(zip(one, other, strict=True)):
        for k, (a, b) in enumerate(zip(row, again, strict=True)):
            for name in ("slope", "stderr", "curvature", "curvature_stderr"):
                x, y = getattr(a, name), getattr(b, name)
                same = x == y if x is None or y is None else _near(x, y, max(1.0, abs(a.slope)), tolerance)
                require(same, f"window {window}, knob {k}: {name} is {x!r}, and {y!r} {when}")


def _near(x: float, y: float, scale: float, tolerance: float) -> bool:
    return x == y or (math.isnan(x) and math.isnan(y)) or abs(x - y) <= tolerance * (scale + abs(x))


def slopes_have_the_sign_of_the_effect(estimator: Estimator) -> None:
    """A knob that costs has a positive slope, one that pays a negative one."""
    for comparisons in _both():
        last = _run(estimator, comparisons)[-1]
        require(last[0].slope > 0, f"a knob that costs 1 a coordinate has the estimate {last[0]}")
        require(last[1].slope < 0, f"a knob that pays 1 a coordinate has the estimate {last[1]}")


def any_number_is_taken(estimator: Estimator) -> None:
    """One knob, one sub-batch, two replicas, fewer replicas than knobs: each gives estimates or a ConfigError."""
    for replicas, knobs, batches in product((2, 4, REPLICAS), (1, 5), (None, 1, 6)):
        what = f"{replicas} replicas, {knobs} knobs and {'one loss' if batches is None else f'{batches} sub-batches'}"
        try:
            last = _run(estimator, [_of_size(replicas, knobs, batches, window) for window in range(WINDOWS)])[-1]
        except ConfigError:
            continue
        except BreachError:
            raise
        except Exception as error:
            broken(f"of {what} it raised {type(error).__name__} ({error})")
        if (replicas, knobs) == (REPLICAS, 1) and batches != 1:
            require(last[0].slope > 0, f"of {what}, one that costs 1 a coordinate, it gave the estimate {last[0]}")


def what_all_losses_share_does_not_matter(estimator: Estimator) -> None:
    """Adding a number to all losses of a window changes no estimate."""
    for comparisons in _both():
        lifted = [_changed(c, losses=c.losses + 10.0 * (window + 1)) for window, c in enumerate(comparisons)]
        _require_same(_run(estimator, comparisons), _run(estimator, lifted), "with 10 more loss for all")


def the_order_of_replicas_does_not_matter(estimator: Estimator) -> None:
    """Replicas in another order, and sub-batches in another, give the same estimates."""
    order = np.argsort(np.sin(np.arange(REPLICAS) * 7.0))
    for comparisons in _both():
        shuffled = []
        for c in comparisons:
            losses = c.losses[order] if c.losses.ndim == 1 else c.losses[order, ::-1]
            shuffled.append(_changed(c, levels=c.levels[order], losses=losses))
        _require_same(_run(estimator, comparisons), _run(estimator, shuffled), f"for replicas in the order {order}")


def the_order_of_knobs_does_not_matter(estimator: Estimator) -> None:
    """Knobs in another order give the same estimates in that order."""
    order = [2, 0, 1]
    for comparisons in _both():
        shuffled = [_changed(c, levels=c.levels[:, order], shifts=c.shifts[order]) for c in comparisons]
        expected = [[row[k] for k in order] for row in _run(estimator, comparisons)]
        _require_same(expected, _run(estimator, shuffled), f"for knobs in the order {order}")


def a_failed_replica_is_not_heard(estimator: Estimator) -> None:
    """A NaN, an infinite or an invalid replica changes estimates no more than its absence does."""
    for comparisons in _both():
        absent = [Comparison(c.levels[1:], c.losses[1:], c.shifts, c.valid[1:]) for c in comparisons]
        expected = _run(estimator, absent)
        for loss, valid in ((math.nan, True), (math.inf, True), (-math.inf, False), (1e30, False), (3.0, False)):
            given = []
            for c in comparisons:
                losses, flags = c.losses.copy(), c.valid.copy()
                losses[0], flags[0] = loss, valid
                given.append(_changed(c, losses=losses, valid=flags))
            found = _run(estimator, given)
            _require_same(expected, found, f"with a replica of loss {loss} and valid={valid}", 1e-9)


def too_few_replicas_teach_nothing(estimator: Estimator) -> None:
    """With no replica heard, or one, no knob moves: every t is 0, and nothing raises."""
    for batches in (None, 6):
        full = _comparison(0, batches)
        for heard in (0, 1):
            found = _run(estimator, [_changed(full, valid=np.arange(REPLICAS) < heard)])[0]
            for k, estimate in enumerate(found):
                require(estimate.t == 0.0, f"with {heard} replicas heard, knob {k} has the estimate {estimate}")


def equal_losses_teach_nothing(estimator: Estimator) -> None:
    """Where all replicas have lost exactly the same, no knob has an effect that is surer than chance."""
    for batches in (None, 6):
        generator = np.random.Generator(np.random.Philox(key=[3, 17]))
        for window in range(40):
            c = _comparison(window, batches)
            losses = np.broadcast_to(generator.standard_normal(c.losses.shape[1:]) + 3.0, c.losses.shape)
            for k, estimate in enumerate(_run(estimator, [_changed(c, losses=losses)])[0]):
                surer = abs(estimate.t) > PLACEBO_T
                require(not surer, f"all lost {losses[0].tolist()}, and knob {k} has the estimate {estimate}")


def an_unexplored_knob_is_not_judged(estimator: Estimator) -> None:
    """A knob whose levels are all the same has t = 0, whatever the others do."""
    for comparisons in _both():
        given = []
        for c in comparisons:
            levels = c.levels.copy()
            levels[:, 2] = 0.0
            given.append(_changed(c, levels=levels))
        for row in _run(estimator, given):
            require(row[2].t == 0.0, f"a knob whose levels are all 0 has the estimate {row[2]}")


def a_placebo_is_told_apart(estimator: Estimator) -> None:
    """Knobs without effect are rarely judged to have one with great certainty."""
    for batches in (None, 9):
        comparisons = [_comparison(window, batches, effect=0.0) for window in range(PLACEBO_WINDOWS)]
        ts = np.array([[abs(e.t) for e in row] for row in _run(estimator, comparisons)])
        share = float((ts > PLACEBO_T).mean())
        require(
            share <= PLACEBO_SHARE,
            f"of {ts.size} estimates of knobs without effect {share:.0%} had |t| above {PLACEBO_T} "
            f"({'one loss' if batches is None else f'{batches} sub-batches'} a replica)",
        )


def estimates_depend_on_arguments_alone(estimator: Estimator) -> None:
    """The same state and comparison give the same estimates, and are left as they were."""
    for comparisons in _both():
        state = estimator.start(KNOBS)
        for c in comparisons:
            before, kept = json.dumps(to_plain(state)), copy.deepcopy(c)
            one, following = estimator.estimate(state, c)
            two, _ = estimator.estimate(state, c)
            _require_same([list(one)], [list(two)], "when asked again", 0.0)
            require(json.dumps(to_plain(state)) == before, f"the state it was given, {before}, became {state}")
            for name in ("levels", "losses", "shifts", "valid"):
                same = np.array_equal(getattr(c, name), getattr(kept, name))
                require(same, f"it wrote into the comparison's {name}")
            state = following


def state_is_plain_numbers(estimator: Estimator) -> None:
    """A state written as plain numbers and read back goes on as the state itself would."""
    for comparisons in _both():
        state = estimator.start(KNOBS)
        for c in comparisons:
            again = from_plain(state, json.loads(json.dumps(to_plain(state))))
            one, state = estimator.estimate(state, c)
            two, again = estimator.estimate(again, c)
            _require_same([list(one)], [list(two)], "from a state that was written and read", 0.0)
            require(
                to_plain(state) == to_plain(again), f"the next state is {state}, and {again} from a state read back"
            )
