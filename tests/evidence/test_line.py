"""Line evidence against an update that is known by hand.

Under loss c . w plain SGD at rate r makes U = theta_T - theta_0 = -T r c, and averaged over the window
Ubar = -(T + 1) / 2 r c: every slope along the line is exact.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import explicit_loop
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet import Engine, Probe
from hdet.contrib import Fade
from hdet.controllers import Calibrate, Hold, Newton
from hdet.errors import ConfigError
from hdet.evidence import Line
from hdet.evidence.parts.line_fit import along, bottom_in_value
from hdet.schedules import Replay, Schedule
from hdet.spaces import Linear
from hdet.spreads import TwoLevel

T, RATE, WIDTH = 6, 0.1, 0.3
SLOPE = torch.tensor([1.0, -2.0, 0.5])
START = torch.tensor([3.0, 1.0, -2.0])
SQUARE = float(SLOPE @ SLOPE)


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(START.clone())
        self.other = nn.Parameter(START.clone())


def slanted(model: Any) -> Tensor:
    loss: Tensor = SLOPE @ (model.w + model.other)
    return loss


def linear(model: Any, batch: float) -> Tensor:
    loss: Tensor = batch * (SLOPE @ model.w)
    return loss


def bowl(model: Any, batch: float) -> Tensor:
    loss: Tensor = 0.5 * (model.w @ model.w) + batch
    return loss


def secant(width: float = WIDTH) -> float:
    """What +-width on e^x measures of a function that is linear in e^x."""
    return math.sinh(width) / width


def lr_knob(evidence: Line | None = None, **options: Any) -> hdet.LearningRate:
    """With both lines read in every window, unless the evidence says otherwise."""
    return hdet.LearningRate(evidence=evidence or Line(read_average_above=None), controller=Hold(), **options)


def read_at_average(estimate: dict[str, Any]) -> bool:
    return math.isfinite(estimate["averaged"]["stderr"])


def run(
    knobs: list[hdet.Knob],
    *,
    n: int = 1,
    copies: bool = False,
    steps: int = T,
    window: int = T,
    probe: Any = linear,
    batches: tuple[float, ...] = (1.0, 1.0),
    rates: tuple[float, float] = (RATE, RATE),
    weight_decay: float = 0.0,
    before_close: Callable[[Engine], object] = lambda engine: None,
    **options: Any,
) -> tuple[Engine, list[hdet.history.WindowRecord]]:
    """Windows of T steps, or as many."""
    model = Vector()
    optimizer = torch.optim.SGD(
        [
            {"params": [model.w], "name": "first", "lr": rates[0]},
            {"params": [model.other], "name": "second", "lr": rates[1]},
        ],
        weight_decay=weight_decay,
    )
    engine = Engine(
        (hdet.replicate if copies else hdet.micro_batches)(model, optimizer, n=n),
        knobs,
        window=window,
        signal=Probe(probe, batches),
        total_steps=steps,
        **options,
    )
    return engine, explicit_loop.train(
        engine,
        loss=lambda model, step, index: slanted(model),
        stepped=lambda step: before_close(engine) if step == steps - 1 else None,
    )


@pytest.mark.parametrize(("copies", "n"), [(False, 1), (False, 3), (True, 1), (True, 4)])
def test_the_slope_along_the_update_and_along_averaged_weights(copies: bool, n: int) -> None:
    _, (record,) = run([lr_knob()], n=n, copies=copies)
    estimate = record.estimates["learning_rate"]
    assert estimate["offset"] == 0.0
    assert estimate["slope"] == pytest.approx(-T * RATE * SQUARE * secant(), rel=1e-5)
    averaged = estimate["averaged"]
    assert averaged["slope"] == pytest.approx(-(T + 1) / 2 * RATE * SQUARE * secant(), rel=1e-5)


def test_sub_batches_give_the_standard_error() -> None:
    scales = (1.0, 1.3, 0.7, 1.2)
    _, (record,) = run([lr_knob()], batches=scales)
    estimate = record.estimates["learning_rate"]
    each = -T * RATE * SQUARE * secant() * np.array(scales)
    assert estimate["slope"] == pytest.approx(each.mean(), rel=1e-5)
    assert estimate["stderr"] == pytest.approx(each.std(ddof=1) / 2, rel=1e-4)


def test_what_sub_batches_have_in_common_is_no_noise() -> None:
    """A constant that differs by sub-batch is in all points alike, and cancels."""
    _, (record,) = run([lr_knob()], probe=bowl, batches=(0.0, 1.0, -0.5))
    estimate = record.estimates["learning_rate"]
    assert estimate["stderr"] < 1e-4 * abs(estimate["slope"])


def test_slope_and_curvature_of_a_quadratic() -> None:
    """Of |theta_0 + e^x U|^2 / 2 at three points, by hand."""
    _, (record,) = run([lr_knob(Line(width=0.01))], probe=bowl, batches=(0.0, 0.0))
    update = -T * RATE * SLOPE.double()
    start = START.double()
    estimate = record.estimates["learning_rate"]
    # f(x) = s.U e^x + U.U e^2x / 2 + const: f' = s.U + U.U, f'' = s.U + 2 U.U at 0
    across, along = float(start @ update), float(update @ update)
    assert estimate["slope"] == pytest.approx(across + along, rel=2e-3)
    assert estimate["curvature"] == pytest.approx(across + 2 * along, abs=0.1)


def test_newton_moves_as_far_as_the_line_reached() -> None:
    """No replica diverges, so that there is no level to go by."""
    _, (record, _) = run([hdet.LearningRate(evidence=Line(width=0.2), controller=Newton())], steps=2 * T)
    assert record.moves["learning_rate"] == pytest.approx(0.2)


@pytest.mark.parametrize("width", [0.1, 0.3, 1.0])
def test_what_is_quadratic_in_the_rate_has_its_bottom_where_that_says_whatever_the_width(width: float) -> None:
    """Of the distance to theta_0 + 7 U, where U is the window's update."""
    target = START - 7.0 * T * RATE * SLOPE

    def distance(model: Any, batch: float) -> Tensor:
        loss: Tensor = batch * (model.w - target).square().sum()
        return loss

    _, (record,) = run([lr_knob(Line(width=width))], probe=distance, batches=(1.0, 1.01))
    assert record.estimates["learning_rate"]["bottom"] == pytest.approx(math.log(7.0), abs=1e-3)


@pytest.mark.parametrize("width", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("bottom", [0.5, 3.0, 50.0, 300.0])
def test_a_bottom_far_from_the_points_is_where_it_is(width: float, bottom: float) -> None:
    points = [-width, width, 0.0]
    losses = np.square(np.exp(points) - bottom)[:, None] * np.array([1.0, 1.2, 0.7, 1.1, 0.9, 1.0, 0.8, 1.3])
    assert bottom_in_value(points, losses) == pytest.approx(math.log(bottom), abs=1e-6)


def test_no_bottom_is_told_of_without_three_points_or_where_there_is_none() -> None:
    points = np.array([-0.3, 0.3, 0.0])
    values, scales = np.exp(points)[:, None], np.array([1.0, 1.2, 0.7, 1.1, 0.9, 1.0, 0.8, 1.3])
    assert bottom_in_value(points[:2].tolist(), (values[:2] - 3.0) ** 2 * scales) is None
    assert bottom_in_value(points.tolist(), -((values - 3.0) ** 2) * scales) is None
    assert bottom_in_value(points.tolist(), (values + 1.0) ** 2 * scales) is None, "at a negative rate"


def test_of_what_is_linear_in_the_rate_noise_hardly_ever_proves_a_bottom() -> None:
    generator, points = np.random.default_rng(0), np.array([-0.3, 0.3, 0.0])
    slanted = -np.exp(points)[:, None]
    noisy = [slanted * generator.normal(1.0, 0.3, 8) + generator.normal(0.0, 0.01, (3, 8)) for _ in range(1000)]
    assert sum(bottom_in_value(points.tolist(), losses) is not None for losses in noisy) <= 20


def test_points_and_width_are_where_the_probe_is_read() -> None:
    """Every point of the line is one evaluation, the ends first; more cost more, and the weights are put back."""
    seen: list[float] = []

    def watched(model: Any, batch: float) -> Tensor:
        seen.append(float(model.w[0]))
        return linear(model, batch)

    engine, _ = run([lr_knob(Line(width=0.5, points=(-1.0, -0.4, 0.4, 1.0), read_average_above=None))], probe=watched)
    moved = -RATE * float(SLOPE[0])
    want = [
        float(START[0]) + math.exp(0.5 * point) * moved * steps
        for steps in (T, (T + 1) / 2)
        for point in (-1.0, 1.0, -0.4, 0.4)
        for _ in range(2)
    ]
    assert seen == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(engine.replicas[0].model.w.detach(), START - T * RATE * SLOPE)


@pytest.mark.parametrize(
    ("batches", "evaluations"),
    [
        ((1.0, 1.2), 3),  # t = -11: to be raised, and how far is a matter of curvature
        ((1.0, 0.2), 2),  # t = -1.5
        ((-1.0, -0.2), 2),
        ((-1.0, -1.02), 5),  # t = 101 at both: the ends of either line, and the centre of the second
    ],
)
@pytest.mark.parametrize("n", [1, 4, 8])
def test_only_points_that_matter_are_evaluated(batches: tuple[float, float], evaluations: int, n: int) -> None:
    """Whatever the number of micro-batches."""
    seen: list[float] = []

    def counted(model: Any, batch: float) -> Tensor:
        seen.append(batch)
        return linear(model, batch)

    knob = hdet.LearningRate(evidence=Line(), controller=Calibrate(until=1.0))
    _, (record, _) = run([knob], n=n, steps=2 * T, probe=counted, batches=batches)  # the last window is not heard
    assert len(seen) == evaluations * len(batches)
    estimate = record.estimates["learning_rate"]
    assert (estimate["curvature"] is not None) == (evaluations == 3)
    assert (estimate["averaged"]["curvature"] is not None) == (evaluations == 5)


def test_fewer_than_three_distinct_points_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 distinct points"):
        Line(points=(-1.0, 1.0, 1.0))


@pytest.mark.parametrize("points", [(-1.0, 0.0, 2.0), (0.0, 1.0, 2.0)])
def test_ends_that_are_not_opposite_are_refused(points: tuple[float, ...]) -> None:
    """Of a curved line they would tell the slope somewhere else."""
    with pytest.raises(ConfigError, match="two ends, which must lie at -x and x"):
        Line(points=points)


def test_a_stride_takes_some_steps_only() -> None:
    """Every third of T = 6 steps: the mean of 3 and 6 steps' weights."""
    _, (record,) = run([lr_knob(Line(stride=3, read_average_above=None))])
    averaged = record.estimates["learning_rate"]["averaged"]
    assert averaged["slope"] == pytest.approx(-4.5 * RATE * SQUARE * secant(), rel=1e-5)


def test_each_window_has_a_line_of_its_own() -> None:
    _, records = run([lr_knob()], steps=3 * T)
    slopes = [record.estimates["learning_rate"]["slope"] for record in records]
    assert slopes == pytest.approx([-T * RATE * SQUARE * secant()] * 3, rel=1e-4)


@pytest.mark.parametrize(
    ("batches", "above", "read"),
    [
        ((-1.0, -1.2), 2.0, True),  # t = 11: less, by the last weights
        ((-1.0, -0.2), 2.0, False),  # t = 1.5
        ((-1.0, -0.2), 0.5, True),  # which is 0.9 of eight sub-batches
        ((1.0, 1.2), 2.0, False),  # more
        ((1.0, 1.2), None, True),
    ],
)
def test_averaged_weights_are_read_only_where_the_last_call_for_less(
    batches: tuple[float, float], above: float | None, read: bool
) -> None:
    """Three probes of two batches then, and six where both lines are read."""
    seen = []

    def counted(model: Any, batch: float) -> Tensor:
        seen.append(batch)
        return linear(model, batch)

    _, (record,) = run([lr_knob(Line(read_average_above=above))], probe=counted, batches=batches)
    estimate = record.estimates["learning_rate"]
    assert len(seen) == (12 if read else 6)
    each = -np.array(batches) * RATE * SQUARE * secant()
    assert estimate["slope"] == pytest.approx(T * each.mean(), rel=1e-4)
    averaged = estimate["averaged"]
    assert averaged["slope"] == pytest.approx((T + 1) / 2 * each.mean() if read else 0.0, rel=1e-4)
    assert (averaged["t"] != 0.0) == read == read_at_average(estimate)


def test_by_default_averaged_weights_are_read_above_two_standard_errors() -> None:
    assert Line().read_average_above == 2.0


def test_of_two_groups_only_the_doubted_one_is_read_twice() -> None:
    """The first group's line calls for less and the second's for more."""
    seen: list[tuple[float, float]] = []

    def both(model: Any, batch: float) -> Tensor:
        seen.append((float(model.w[0]), float(model.other[0])))
        return batch * (SLOPE @ (model.other - model.w))

    knobs: list[hdet.Knob] = [lr_knob(Line(), groups="first"), lr_knob(Line(), groups="second")]
    _, (record,) = run(knobs, probe=both, batches=(1.0, 1.1))
    first, second = (record.estimates[f"learning_rate[{name}]"] for name in ("first", "second"))
    assert first["t"] > 2.0
    assert second["t"] < -2.0
    assert (read_at_average(first), read_at_average(second)) == (True, False)
    assert first["averaged"]["slope"] == pytest.approx((T + 1) / 2 * 1.05 * RATE * SQUARE * secant(), rel=1e-4)
    assert len(seen) == 2 * (3 + 3 + 3)


# -- looking ahead --------------------------------------------------------------------------------


def warm_up(t: int) -> float:
    return 0.01 * (t + 1)


WARM = Replay([warm_up(t) for t in range(100)])  # to a peak of 1 in 100 steps


@pytest.mark.parametrize("curved", [True, False])
def test_early_in_the_warm_up_the_line_is_read_ahead(curved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the share s of the window's middle, the offset is log(preview / s), and no second line is read."""
    monkeypatch.setattr(Hold, "wants_curvature", lambda *slope, averaged: curved)
    _, (record,) = run([lr_knob(schedule=WARM)], steps=T)
    share = (warm_up(0) + warm_up(T - 1)) / 2
    estimate = record.estimates["learning_rate"]
    offset = math.log(0.25 / share)
    assert offset > 1.9
    assert estimate["offset"] == pytest.approx(offset)
    assert not read_at_average(estimate)
    moved = sum(warm_up(t) for t in range(T)) * SQUARE
    assert estimate["slope"] == pytest.approx(-moved * math.exp(offset) * secant(), rel=1e-4)
    assert estimate["level"] == pytest.approx(
        float(SLOPE @ START) - moved * math.exp(offset) * math.cosh(WIDTH), rel=1e-4
    )
    assert (estimate["curvature"] is not None) == curved


@pytest.mark.parametrize(
    ("power", "schedule", "opening"), [(4, WARM, 2.5), (2, WARM, None), (4, Replay([0.02] * 100), None)]
)
def test_the_openings_loss_is_told_where_a_line_of_the_warm_up_is_steeper_than_a_cube(
    power: int, schedule: Schedule, opening: float | None
) -> None:
    def blown_up(model: Any, batch: float) -> Tensor:
        evaluations.append(batch)
        loss: Tensor = batch + 1e6 * torch.linalg.vector_norm(model.w - START) ** power
        return loss

    evaluations: list[float] = []
    _, (record,) = run([lr_knob(Line(), schedule=schedule)], probe=blown_up, batches=(2.0, 3.0))
    estimate = record.estimates["learning_rate"]
    assert estimate["opening"] == opening
    if schedule is WARM:
        assert len(evaluations) == 2 * (3 + (opening is not None))
        assert estimate["level"] > 1e3


def test_past_the_preview_two_lines_are_read_at_the_base() -> None:
    _, records = run([lr_knob(schedule=WARM)], steps=6 * T)
    told = [record.estimates["learning_rate"] for record in records]
    shares = [(warm_up(r.start) + warm_up(r.stop - 1)) / 2 for r in records]
    assert shares[3] < 0.25 < shares[4]
    for share, estimate in zip(shares, told, strict=True):
        ahead = share < 0.25
        assert estimate["offset"] == pytest.approx(math.log(0.25 / share) if ahead else 0.0)
        assert read_at_average(estimate) == (not ahead)


@pytest.mark.parametrize(
    ("schedule", "preview"),
    [
        (WARM, 0.0),
        (Replay([0.02] * 50 + [0.01] * 50), 0.25),  # at its peak
        (Replay([1.0 - 0.009 * t for t in range(100)][::1]), 0.25),  # falling
    ],
)
def test_elsewhere_it_never_looks_ahead(schedule: Schedule, preview: float) -> None:
    _, (record,) = run([lr_knob(Line(preview=preview, read_average_above=None), schedule=schedule)], steps=T)
    estimate = record.estimates["learning_rate"]
    assert estimate["offset"] == 0.0
    assert read_at_average(estimate)


@pytest.mark.parametrize("window", [T, 1])
def test_on_a_stair_of_a_warm_up_it_looks_ahead(window: int) -> None:
    """As by a scheduler that is stepped once an epoch, which may have many windows; and in windows of one step."""
    schedule = WARM if window == 1 else Replay([0.02] * 50 + [1.0] * 50)
    _, records = run([lr_knob(schedule=schedule)], steps=3 * T, window=window)
    assert len(records) == 3 * T // window
    for record in records:
        estimate, share = record.estimates["learning_rate"], schedule(record.start)
        assert estimate["offset"] == pytest.approx(math.log(0.25 / share) if share < 0.25 else 0.0)


def test_a_learned_shift_does_not_change_how_far_it_looks() -> None:
    """The share is of the schedule; base and peak shift together."""
    _, (record,) = run([lr_knob(schedule=WARM, initial_shift=-1.0)], steps=T)
    share = (warm_up(0) + warm_up(T - 1)) / 2
    assert record.estimates["learning_rate"]["offset"] == pytest.approx(math.log(0.25 / share))


# -- parameter groups -----------------------------------------------------------------------------


def test_a_group_is_moved_and_the_others_stay_where_they_ended() -> None:
    seen: list[tuple[float, float]] = []

    def watched(model: Any, batch: float) -> Tensor:
        seen.append((float(model.w[0]), float(model.other[0])))
        return linear(model, batch)

    _, (record,) = run([lr_knob(groups="first")], probe=watched, rates=(RATE, 0.02))
    last = float(START[0]) - T * 0.02 * float(SLOPE[0])
    averaged = float(START[0]) - (T + 1) / 2 * 0.02 * float(SLOPE[0])
    assert [other for _, other in seen] == pytest.approx([last] * 6 + [averaged] * 6, rel=1e-5)
    assert len({w for w, _ in seen}) == 6
    want = -T * RATE * SQUARE * secant()
    assert record.estimates["learning_rate[first]"]["slope"] == pytest.approx(want, rel=1e-5)


def test_each_group_has_its_own_slope() -> None:
    """The probe sees the first group only, so the second has none."""
    _, (record,) = run([lr_knob(groups="first"), lr_knob(groups="second")])
    assert record.estimates["learning_rate[second]"]["slope"] == 0.0
    assert record.estimates["learning_rate[first]"]["slope"] < -1.0


def test_groups_of_one_knob_move_together() -> None:
    def both(model: Any, batch: float) -> Tensor:
        return linear(model, batch) + SLOPE @ model.other

    _, (record,) = run([lr_knob()], probe=both, rates=(RATE, 0.02))
    want = -T * (RATE + 0.02) * SQUARE * secant()
    assert record.estimates["learning_rate"]["slope"] == pytest.approx(want, rel=1e-5)


# -- what is refused ------------------------------------------------------------------------------


def test_other_knobs_are_refused() -> None:
    knob = hdet.WeightDecay(schedule=0.1, evidence=Line(), controller=Hold())
    with pytest.raises(ConfigError, match="Analytic"):
        run([knob])


def test_spaces_that_are_not_factors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"space=hdet\.spaces\.Log"):
        run([lr_knob(space=Linear(0.1))])


# -- next to evidence that diverges ---------------------------------------------------------------


def mixed() -> list[hdet.Knob]:
    """Decay so strong that replicas at other levels of it end elsewhere."""
    decay = hdet.WeightDecay(evidence=hdet.evidence.Divergent(), controller=Hold(), spread=TwoLevel(0.7))
    return [lr_knob(), decay]


def decayed(valid: list[int], levels: list[float], count: int | None = None) -> Tensor:
    """The mean of replicas after T steps of decay 0.5 e^level; averaged over the steps if `count`."""
    total = torch.zeros(3, dtype=torch.float64)
    for index in valid:
        w, steps = START.double(), []
        for _ in range(T):
            w = w - RATE * (SLOPE.double() + levels[index] * w)
            steps.append(w)
        total += torch.stack(steps).mean(dim=0) if count else w
    return total / len(valid)


@pytest.mark.parametrize("failed", [None, 0, 2])
def test_the_line_is_read_off_the_mean_of_replicas_that_come_apart(failed: int | None) -> None:
    """A failed replica is left out, and mutes nobody."""

    def spoil(engine: Engine) -> None:
        if failed is not None:
            with torch.no_grad():
                engine.replicas[failed].model.w.fill_(math.nan)

    _, (record,) = run(mixed(), n=4, copies=True, weight_decay=0.5, before_close=spoil)
    valid = [index for index in range(4) if index != failed]
    assert [fault["replica"] for fault in record.faults] == ([] if failed is None else [failed])
    estimate = record.estimates["learning_rate"]
    decays = record.values["weight_decay"]
    assert max(decays) > 2 * min(decays)
    for told, averaged in ((estimate, False), (estimate["averaged"], True)):
        end = decayed(valid, decays, T if averaged else None)
        want = float(SLOPE.double() @ (end - START.double())) * secant()
        if averaged and failed is not None:
            assert math.isfinite(told["slope"])
        assert told["slope"] == pytest.approx(want, rel=1e-4)
    assert abs(record.estimates["weight_decay"]["slope"]) > 0.1
    _, (alone,) = run(mixed()[1:], n=4, copies=True, weight_decay=0.5, before_close=spoil)
    assert record.estimates["weight_decay"] == alone.estimates["weight_decay"], "each replica has its weights back"


def test_one_replicas_failure_early_in_the_window_mutes_nothing() -> None:
    """Its weights were NaN in every step that was averaged."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=0.5)
    engine = Engine(
        hdet.replicate(model, optimizer, n=4),
        mixed(),
        window=T,
        signal=Probe(linear, (1.0, 1.1)),
        gradients="local",
        total_steps=T,
    )
    (record,) = explicit_loop.train(
        engine,
        loss=lambda model, step, index: slanted(model) * (math.nan if index == 1 and step == 0 else 1.0),
    )
    estimate = record.estimates["learning_rate"]
    for told, averaged in ((estimate, False), (estimate["averaged"], True)):
        end = decayed([0, 2, 3], record.values["weight_decay"], T if averaged else None)
        want = float(SLOPE.double() @ (end - START.double())) * secant() * 1.05
        assert told["slope"] == pytest.approx(want, rel=1e-4)


def test_the_record_says_which_rule_moved_the_rate_and_which_veto_held_it_back() -> None:
    """And a history's line has it."""
    knob = hdet.LearningRate(evidence=Line(), controller=Calibrate(until=1.0))
    _, records = run([knob], probe=linear, batches=(1.0, 1.2), steps=2 * T)
    assert records[0].reasons == {"learning_rate": {"rule": "raise"}}
    assert hdet.history.WindowRecord.from_json(records[0].to_json()).reasons == records[0].reasons
    fading = knob.replace(controller=Calibrate(vetoes=[Fade(1.0)], until=1.0))
    _, records = run([fading], batches=(1.0, 1.2), steps=2 * T)
    assert records[0].reasons == {"learning_rate": {"rule": "raise", "veto": "fade"}}
    _, records = run([knob.replace(controller=Hold())], batches=(1.0, 1.2))
    assert records[0].reasons == {}


def test_losses_that_are_infinite_at_all_points_teach_nothing_and_bring_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not along((-1.0, 0.0, 1.0), np.full((3, 4), np.inf)).known
