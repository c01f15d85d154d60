"""Evidence on the outer rate and momentum: what outer steps at other settings, really made, come to."""

from __future__ import annotations

import copy
import io
import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet.contrib import Weighted
from hdet.controllers import Gated, Hold
from hdet.errors import ConfigError, IdentifiabilityError
from hdet.evidence import OuterLine
from hdet.merges import Exploit, Mean, Merge, Outer, OuterLearningRate, OuterMomentum
from hdet.schedules import Replay
from hdet.spaces import Linear, Logit

WINDOW = 4
J = 5
MERGES: dict[str, Merge] = {
    "nesterov": Outer(),
    "plain momentum": Outer(0.5, options=(("momentum", 0.6),)),
    "over a weighted mean": Outer(merge=Weighted(0.5)),
}
KNOBS = [OuterLearningRate(controller=Hold()), OuterMomentum(controller=Hold())]


def probe_of(problem: Any) -> hdet.Probe:
    return hdet.Probe(problem.loss, [problem.batch(10_000, j) for j in range(J)])


class OfTheMerge(hdet.Scalar):
    """A knob of the merge's that is no entry of its optimizer's group."""

    @property
    def acts_on(self) -> Literal["merge"]:
        return "merge"


def engine_of(problem: Any, merge: Merge, knobs: Any = KNOBS, **options: Any) -> hdet.Engine:
    model = problem.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    declared = {"window": WINDOW, "total_steps": 20, "gradients": "local", "signal": probe_of(problem), **options}
    return hdet.Engine(hdet.replicate(model, optimizer, n=4), knobs, merge=merge, **declared)


def measured(engine: hdet.Engine) -> Any:
    """[J] probe losses at the weights that the engine has come to."""
    probe = engine.cycle.plan.signal
    assert isinstance(probe, hdet.Probe)
    return probe.measure(engine.replicas[0].model, 0).numpy()


@pytest.mark.parametrize("stop", [WINDOW, 3 * WINDOW])
@pytest.mark.parametrize("name", MERGES)
def test_the_slopes_are_those_of_outer_steps_really_made(name: str, stop: int, problem: Any, train: Any) -> None:
    """The same run up to there, and its last outer step alone made at another rate, or another momentum."""
    engine = engine_of(problem, MERGES[name])
    train(engine, stop)
    told = engine.history.latest[-1].estimates
    for knob in KNOBS:
        base = engine.bases[knob.label]
        ends = []
        for x in (-0.3, 0.3):
            other = engine_of(problem, MERGES[name], knobs=[])
            train(other, stop - WINDOW)
            other.cycle.merger.settings.param_groups[0][knob.key] = knob.space.apply(base, x)  # type: ignore[attr-defined]
            train(other, stop)
            ends.append(measured(other))
        slopes = (ends[1] - ends[0]) / 0.6
        assert told[knob.label]["slope"] == pytest.approx(slopes.mean(), rel=1e-4, abs=1e-6)
        assert told[knob.label]["stderr"] == pytest.approx(slopes.std(ddof=1) / math.sqrt(J), rel=1e-4, abs=1e-6)


def test_what_it_tells_by_hand_of_a_rate_that_is_scheduled(problem: Any, train: Any) -> None:
    """SGD's outer step goes from the opening along one line; it is made at the rate of the step that follows."""
    rates = [0.9] * WINDOW + [0.4] * (20 - WINDOW)
    rate = OuterLearningRate(
        schedule=Replay(tuple(rates)), evidence=OuterLine(width=0.2, points=(-1.0, 0.0, 1.0)), controller=Hold()
    )
    deaf = OuterMomentum(bounds=(0.0, 0.99), space=Linear(), controller=Gated(until=0.1))
    engine = engine_of(problem, Outer(options=()), [deaf, rate])
    opening = [parameter.detach().clone() for parameter in engine.replicas[0].model.parameters()]
    merged = engine_of(problem, Outer(1.0, options=()), [])  # the inner merge alone
    for run in (engine, merged):
        train(run, WINDOW)
    model, probe = merged.replicas[0].model, merged.cycle.plan.signal
    ends = [parameter.detach().clone() for parameter in model.parameters()]
    assert isinstance(probe, hdet.Probe)

    def at(value: float) -> Any:
        for parameter, start, end in zip(model.parameters(), opening, ends, strict=True):
            parameter.data.copy_(start + value * (end - start))
        return probe.measure(model, 0).numpy()

    low, middle, high = (at(0.4 * math.exp(x)) for x in (-0.2, 0.0, 0.2))
    told = engine.history.latest[-1].estimates
    assert told[deaf.label]["slope"] == 0.0
    assert told[deaf.label]["stderr"] == math.inf
    found = told[rate.label]
    assert found["slope"] == pytest.approx((high - low).mean() / 0.4, rel=1e-4)
    assert found["curvature"] == pytest.approx((high - 2 * middle + low).mean() / 0.2**2, rel=1e-2)
    assert found["level"] == pytest.approx(np.mean([low, middle, high]), rel=1e-5)
    assert found["span"] == pytest.approx(0.2)


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_looking_changes_nothing(gradients: str, problem: Any, train: Any) -> None:
    """Neither the weights nor the outer state, to the last bit."""
    looked, plain = (engine_of(problem, Outer(), knobs, gradients=gradients) for knobs in (KNOBS, []))
    for engine in (looked, plain):
        train(engine)
    for one, other in zip(looked.replicas[0].model.parameters(), plain.replicas[0].model.parameters(), strict=True):
        assert torch.equal(one, other)
    states = [engine.cycle.merger.state_dict()["optimizer"]["state"] for engine in (looked, plain)]
    for own, others in zip(states[0].values(), states[1].values(), strict=True):
        assert all(torch.equal(own[key], others[key]) for key in own)


@pytest.mark.parametrize("rate", [0.02, 8.0])
def test_a_rate_that_is_far_off_is_led_back(rate: float, problem: Any, train: Any) -> None:
    """The outer step is made at the rate that was found, and the run ends lower than at the rate it began with."""
    ends = []
    for controller in (Hold(), Gated(0.5)):
        knobs = [OuterLearningRate(controller=controller)]
        engine = engine_of(problem, Outer(rate, options=()), knobs, total_steps=60)
        train(engine)
        ends.append((float(measured(engine).mean()), engine.bases["outer_learning_rate"]))
    (held, _), (led, found) = ends
    assert led < held
    assert abs(math.log(found)) < abs(math.log(rate)) - 0.5
    settings = engine.cycle.merger.state_dict()["optimizer"]["param_groups"][0]
    assert settings["lr"] == pytest.approx(found)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(50))


@pytest.mark.filterwarnings("ignore:the probe is too small")
def test_a_rate_without_effect_is_told_apart() -> None:
    """Each sub-batch reads the weights along a random direction: its slope is noise, of mean zero."""
    generator = torch.Generator().manual_seed(0)

    def batches(window: int) -> list[Tensor]:
        return [torch.randn(50, generator=generator) for _ in range(8)]

    model = Weights()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    engine = hdet.Engine(
        replicas,
        [OuterLearningRate(controller=Hold())],
        window=1,
        merge=Outer(),
        gradients="local",
        total_steps=300,
        signal=hdet.Probe(lambda model, batch: model.w @ batch, batches),
    )
    for step in range(300):
        losses = []
        for replica in engine.replicas:
            with replica:
                noise = torch.randn(50, generator=torch.Generator().manual_seed(7 * step + replica.index))
                loss = replica.model.w @ noise  # type: ignore[operator]
                loss.backward()
            losses.append(loss.detach())
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        engine.step(losses)
    ts = np.array([record.estimates["outer_learning_rate"]["t"] for record in engine.history.latest])
    # Student's t with 7 degrees of freedom is beyond 2 in 8.6 % of cases; of 300, 3.8 to 13.4 % within 3 sigma.
    assert 0.038 < float((np.abs(ts) > 2).mean()) < 0.134


def test_points_stay_within_bounds(problem: Any, train: Any) -> None:
    knob = OuterLearningRate(bounds=(0.1, 0.75), controller=Hold())
    engine = engine_of(problem, Outer(), [knob])
    train(engine, WINDOW)
    assert engine.history.latest[-1].estimates[knob.label]["span"] == pytest.approx(0.3)
    other = engine_of(problem, Outer(), [knob.replace(bounds=(0.65, 0.75))])
    train(other, WINDOW)
    assert other.history.latest[-1].estimates[knob.label]["span"] == pytest.approx(math.log(0.7 / 0.65))


@pytest.mark.parametrize(
    ("points", "bounds", "offsets"),
    [
        ((-1.0, 1.0), (0.65, 0.75), [math.log(0.65 / 0.7), math.log(0.75 / 0.7)]),
        ((-2 / 3, 1.0), (0.1, 0.7 * math.exp(0.2)), [-0.2, 0.2]),
        ((0.0, 1.0), (0.1, 0.7 * math.exp(0.02)), [0.0, 0.02]),
        ((0.0, 1.0), (0.7, 2.0), [0.0, 0.3]),
        ((-1.0, 0.0), (0.1, 0.7), [-0.3, 0.0]),
        ((0.0, 1.0), (0.1, 0.7), [0.0]),
    ],
)
def test_where_the_points_lie_beside_bounds(points: Any, bounds: Any, offsets: Any, problem: Any, train: Any) -> None:
    knob = OuterLearningRate(bounds=bounds, evidence=OuterLine(points=points), controller=Hold())
    engine = engine_of(problem, Outer(options=()), [knob])
    assert engine.cycle.collectors[0]._offsets(engine.knobs[0], 0) == pytest.approx(offsets)  # type: ignore[attr-defined]
    train(engine, WINDOW)
    told = engine.history.latest[-1].estimates[knob.label]
    assert (told["stderr"] < math.inf) == (len(offsets) > 1)  # of one point there is no slope


@pytest.mark.parametrize("step", [0, 2, 4, 9, 19, 20])
def test_a_run_that_is_taken_up_is_the_same_run(step: int, problem: Any, train: Any) -> None:
    knobs = [OuterLearningRate(), OuterMomentum(), hdet.LearningRate(evidence=hdet.evidence.Line())]
    whole, first, second = (engine_of(problem, Outer(), knobs) for _ in range(3))
    train(whole)
    train(first, step)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    train(second)
    assert whole.bases == second.bases != engine_of(problem, Outer(), knobs).bases
    for one, other in zip(whole.replicas[0].model.parameters(), second.replicas[0].model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("near", [0.0, 1e-9])
def test_beside_a_bound_the_slope_is_no_rounding(near: float, problem: Any, train: Any) -> None:
    """The base and the point that the bound brings next to it are one, so that two points are left."""
    knob = OuterLearningRate(controller=Hold(), evidence=OuterLine(points=(-1, 0, 1)), bounds=(0.7 * (1 - near), 2.0))
    two = engine_of(problem, Outer(), [knob.replace(evidence=OuterLine(), bounds=(0.7, 2.0))])
    three = engine_of(problem, Outer(), [knob])
    for engine in (two, three):
        train(engine, WINDOW)
    found, expected = (engine.history.latest[-1].estimates[knob.label] for engine in (three, two))
    assert found["curvature"] is None
    assert found["slope"] == pytest.approx(expected["slope"], rel=1e-3)


def test_points_that_are_given_close_together_are_all_tried(problem: Any, train: Any) -> None:
    knob = OuterLearningRate(controller=Hold(), evidence=OuterLine(points=(-0.005, 0.0, 0.004)))
    engine = engine_of(problem, Outer(), [knob])
    train(engine, WINDOW)
    assert engine.history.latest[-1].estimates[knob.label]["curvature"] is not None


def test_an_engine_is_copied_with_it(problem: Any, train: Any) -> None:
    engine = engine_of(problem, Outer(), [OuterLearningRate()])
    train(engine, 9)
    other = copy.deepcopy(engine)
    train(engine)
    assert other.cycle.merger.settings is other.knobs[0].bindings[0].optimizer  # type: ignore[attr-defined]
    train(other)
    assert engine.bases == other.bases


def test_after_a_window_in_which_all_failed_the_rate_found_stays(problem: Any, train: Any) -> None:
    engine = engine_of(problem, Outer(2.0), [OuterLearningRate()], total_steps=40)
    train(engine, 12)
    found = engine.bases["outer_learning_rate"]
    assert found != 2.0
    train(engine, 16, loss=lambda model, batch: problem.loss(model, batch) * float("nan"))
    assert engine.history.latest[-1].faults[-1]["kind"] == "restored"
    assert engine.bases["outer_learning_rate"] == found
    assert engine.cycle.merger.settings.param_groups[0]["lr"] == found  # type: ignore[attr-defined]
    train(engine)


def test_in_yaml() -> None:
    for knob in (
        OuterLearningRate(evidence=OuterLine(width=0.2, points=(-1, 0, 1)), bounds=(0.1, 2.0)),
        OuterMomentum(space=Logit()),
    ):
        assert hdet.Knob.from_dict(knob.to_dict()) == knob
    assert hdet.Knob.from_dict({"kind": "outer_learning_rate", "evidence": {"kind": "outer_line"}}) == (
        OuterLearningRate(evidence=OuterLine())
    )


@pytest.mark.parametrize(
    ("merge", "knob", "error", "told"),
    [
        (Mean(), OuterLearningRate(), ConfigError, r"the merge mean has none; give the engine merge=hdet.merges.Outer"),
        (Exploit(), OuterLearningRate(), ConfigError, "the merge exploit has none"),
        (
            Outer(0.1, optimizer="Adam", options=()),
            OuterMomentum(),
            ConfigError,
            "outer optimizer Adam has no 'momentum'.* its settings are",
        ),
        (Outer(options=()), OuterMomentum(), ConfigError, "reaches 0, outside the bounds"),
        (
            Outer(),
            OuterLearningRate(evidence=hdet.evidence.Divergent()),
            IdentifiabilityError,
            "all replicas make together",
        ),
        (
            Outer(),
            OuterLearningRate(evidence=hdet.evidence.Line()),
            IdentifiabilityError,
            "acts on the merge's step, of which",
        ),
        (
            Outer(),
            hdet.LearningRate(evidence=OuterLine()),
            IdentifiabilityError,
            "of which outer_line evidence",
        ),
        (
            Outer(),
            OfTheMerge("margin", get=lambda m: 0.5, set=lambda m, value: None, bounds=(0.0, 1.0), evidence=OuterLine()),
            ConfigError,
            "margin: OuterLine tries settings of the merge's optimizer",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(merge: Merge, knob: Any, error: Any, told: str, problem: Any) -> None:
    with pytest.raises(error, match=told):
        engine_of(problem, merge, [knob])


def test_it_needs_a_probe(problem: Any) -> None:
    with pytest.raises(ConfigError, match="outer_line evidence measures a held-out loss"):
        engine_of(problem, Outer(), [OuterLearningRate()], signal=None)
