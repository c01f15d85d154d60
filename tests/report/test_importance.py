"""Importance and interaction of knobs: made up histories in which both are known."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from hdet.record import WindowRecord
from hdet.report import importances, interactions

KNOBS = ("a", "b", "c")


def history(
    windows: int = 200, replicas: int = 16, together: float = 0.0, noise: float = 0.1, seed: int = 0
) -> list[WindowRecord]:
    """Losses 2 z_a - z_b + together z_a z_b + noise, for replicas at random levels z of a, b and c."""
    rng = np.random.default_rng(seed)
    made = []
    for w in range(windows):
        z = rng.standard_normal((3, replicas))
        z = (z - z.mean(axis=1, keepdims=True)) / z.std(axis=1, keepdims=True)
        losses = 5 + 2 * z[0] - z[1] + together * z[0] * z[1] + noise * rng.standard_normal(replicas)
        values = {knob: (10.0 + row).tolist() for knob, row in zip(KNOBS, z, strict=True)}
        bases = dict.fromkeys(KNOBS, 10.0)
        made.append(WindowRecord(w, w, w + 1, bases, values, losses.tolist(), {}, {}, False))
    return made


def test_an_interaction_is_found_and_its_uncertainty_holds() -> None:
    found = {one.knobs: one for one in interactions(history(together=0.05))}
    both = found["a", "b"]
    assert next(iter(found)) == ("a", "b"), "the clearest first"
    assert both.clear
    assert abs(both.effect - 0.05) < 3 * both.stderr
    assert both.windows == 200


def test_where_there_is_none_few_are_called_clear() -> None:
    """Of 120 made up pairs without interaction, about one in twenty lies two standard errors from 0."""
    found = [one for seed in range(40) for one in interactions(history(windows=30, seed=seed))]
    assert len(found) == 120
    assert sum(one.clear for one in found) <= 15


@pytest.mark.parametrize("replicas", [1, 4])
def test_too_few_replicas_tell_none(replicas: int) -> None:
    made = history(windows=5, replicas=16)
    for record in made:
        record.losses[replicas:] = []
        for values in record.values.values():
            values[replicas:] = []
    assert interactions(made) == []


def test_replicas_that_never_differ_or_levels_that_go_together_tell_none() -> None:
    made = history(windows=5)
    for record in made:
        record.values["b"] = [10.0] * 16
        record.values["c"] = [10.0 + math.copysign(1.0, value - 10.0) for value in record.values["a"]]
        record.values["a"] = list(record.values["c"])
    assert interactions(made) == []


def test_knobs_that_replicas_share_take_no_memory() -> None:
    """A hundred matrices' rates are 4950 pairs, of which none tells anything: two knobs beside them do."""
    alone = history(windows=20, together=0.05)
    rates = {f"rate[{k}]": [0.1] * 16 for k in range(100)}
    beside = [replace(one, values=rates | one.values, bases=dict.fromkeys(rates, 0.1) | one.bases) for one in alone]
    tracemalloc.start()
    found = interactions(beside)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == interactions(alone)
    assert most < 2**23


def test_a_product_that_a_design_cannot_tell_from_a_slope_is_left_out() -> None:
    """Half a factorial design: the levels of c are the product of those of a and b, and c has a slope."""
    signs = np.array([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]] * 2).T
    made = history(windows=5, replicas=8)
    for record in made:
        record.values.update(
            a=(10 + signs[0]).tolist(), b=(10 + signs[1]).tolist(), c=(10 + signs[0] * signs[1]).tolist()
        )
    assert interactions(made) == []


def test_windows_with_a_lost_replica_do_not_count() -> None:
    made = history(windows=9)
    for record in made[:4]:
        record.losses[3] = None
    assert interactions(made)[0].windows == 5


def measured(slopes: dict[str, list[float]], stderr: float) -> list[WindowRecord]:
    return [
        WindowRecord(
            w, w, w + 1, dict.fromkeys(slopes, 1.0), {}, [1.0],
            {knob: {"slope": told[w], "stderr": stderr} for knob, told in slopes.items()}, {}, False,
        )
        for w in range(len(next(iter(slopes.values()))))
    ]  # fmt: skip


def test_importance_is_the_slope_without_the_noise_that_squaring_adds() -> None:
    """Over 60 made up runs the interval of two standard errors holds the truth as often as such intervals do."""
    held = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        noisy = {"steep": (0.5 + rng.normal(0, 0.2, 100)).tolist(), "flat": rng.normal(0, 0.2, 100).tolist()}
        steep, flat = importances(measured(noisy, 0.2))
        assert (steep.knob, flat.knob) == ("steep", "flat")
        assert abs(steep.slope - 0.5) < 0.1
        held += steep.low <= 0.5 <= steep.high and flat.low == 0.0
    assert held >= 50


def test_a_knob_that_few_windows_measured_has_no_importance() -> None:
    assert importances(measured({"rate": [1.0, 2.0]}, 0.1)) == []
    assert importances(measured({"rate": [math.nan] * 9}, 0.1)) == []


@pytest.mark.parametrize("stderr", [0.0, 1e190])
def test_of_slopes_too_large_to_square_nothing_is_told(stderr: float) -> None:
    told = {"slope": 1e200, "stderr": stderr}
    windows = [WindowRecord(w, w, w + 1, {"rate": 1.0}, {}, [], {"rate": told}, {}, False) for w in range(5)]
    assert importances(windows) == []


@pytest.mark.filterwarnings("error")
def test_of_levels_and_losses_that_overflow_nothing_is_told() -> None:
    levels = {"rate": [1.0, 2.0, 1.0, 1e308, 2.0, 1.0], "decay": [1.0, 1.0, 2.0, 1.0, 2.0, 3.0]}
    losses = [1e308, -1e308, 1e308, 1.0, 2.0, 3.0]
    bases = dict.fromkeys(levels, 1.0)
    assert interactions([WindowRecord(w, w, w + 1, bases, levels, losses, {}, {}, False) for w in range(5)]) == []
