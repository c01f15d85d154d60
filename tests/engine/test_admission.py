"""What is refused before a run starts, and that each refusal names the thing and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hdet
import hdet.nn
from hdet import Engine
from hdet.controllers import Calibrate, Controller, Gated, Hold
from hdet.designs import Hadamard, Permutation
from hdet.errors import ConfigError, HdetError, IdentifiabilityError, MatchError, StepError
from hdet.estimators import LeastSquares
from hdet.evidence import Divergent
from hdet.hparams.binding import Attribute, ModelBinding
from hdet.merges import Mean
from hdet.schedules import Constant, Cosine, OneCycle
from hdet.spaces import Linear, Space
from hdet.spreads import Spread, Symmetric, TwoLevel


def make(problem: Any, knobs: Any, n: int = 4, **options: Any) -> Engine:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Dropout(0.1), hdet.nn.Dropout(0.2), hdet.nn.Temperature(), nn.Linear(6, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(hdet.replicate(model, optimizer, n=n), knobs, **options)


DECLARATIONS: dict[str, tuple[Callable[[], Any], type[HdetError], str]] = {
    "a misspelt key": (
        lambda: hdet.LearningRate(spraed=TwoLevel(0.1)),
        ConfigError,
        r"learning_rate: spraed: no such field; there are \[.*'spread'",
    ),
    "a misspelt kind": (
        lambda: hdet.Knob.from_dict({"kind": "learning_rat"}),
        ConfigError,
        r"no knob is called 'learning_rat'; there are \[.*'learning_rate'",
    ),
    "a misspelt kind inside": (
        lambda: hdet.Knob.from_dict({"kind": "learning_rate", "spread": {"kind": "too_level", "width": 1}}),
        ConfigError,
        r"no spread is called 'too_level'; there are \[.*'two_level'",
    ),
    "bounds reversed": (
        lambda: hdet.LearningRate(bounds=(1.0, 0.1)),
        ConfigError,
        r"learning_rate: .*bounds must be \(low, high\) with low < high; got \(1.0, 0.1\)",
    ),
    "bounds outside the space": (
        lambda: hdet.Dropout(bounds=(0.0, 1.5)),
        ConfigError,
        r"dropout: .*\(0.0, 1.5\).*Arcsine.*narrow the bounds or choose another space",
    ),
    "bounds that are not numbers": (lambda: hdet.LearningRate(bounds=(0.0, float("inf"))), ConfigError, "bounds.1"),
    "a negative authority": (lambda: hdet.LearningRate(authority=-1), ConfigError, "authority.*given: -1"),
    "a negative width": (lambda: TwoLevel(-0.1), ConfigError, "two_level: width.*given: -0.1"),
    "too many positions": (lambda: TwoLevel(0.1, 0.2), ConfigError, "TwoLevel takes at most 1"),
    "a scalar without a way": (lambda: hdet.Scalar("x", bounds=(0, 1)), ConfigError, "give either path=, or both"),
}


@pytest.mark.parametrize("case", DECLARATIONS)
def test_bad_declarations(case: str) -> None:
    build, error, message = DECLARATIONS[case]
    with pytest.raises(error, match=message):
        build()


ENGINES: dict[str, tuple[Callable[[Any], Any], type[HdetError], str]] = {
    "a level out of bounds": (
        lambda p: make(p, [hdet.LearningRate(bounds=(0.2, 1.0))]),
        ConfigError,
        r"learning_rate: its schedule reaches 0.1, outside the bounds \(0.2, 1.0\); give bounds=\(0.1, 1\)",
    ),
    "a schedule out of bounds": (
        lambda p: make(p, [hdet.LearningRate(schedule=OneCycle(5.0, total_steps=50), bounds=(0.0, 1.0))]),
        ConfigError,
        r"reaches 5, outside the bounds .* give bounds=\(0, 5\) or another base",
    ),
    "a base its space cannot move": (
        lambda p: make(p, [hdet.WeightDecay()]),
        ConfigError,
        "weight_decay: its base is 0, which Log cannot move; give it a schedule with another value, or anoth",
    ),
    "no such group index": (
        lambda p: make(p, [hdet.LearningRate(groups=3)]),
        MatchError,
        r"learning_rate\[3\]: no parameter group 3; there are indices 0..0 and none is named",
    ),
    "no such group name": (
        lambda p: make(p, [hdet.LearningRate(groups="decay")]),
        MatchError,
        r"no parameter group 'decay'; there are indices 0..0 and none is named",
    ),
    "no such entry": (
        lambda p: make(p, [hdet.Beta1()]),
        MatchError,
        r"beta1: no parameter group of SGD has 'betas\[0\]'; the groups hold \[.*'momentum'",
    ),
    "no such module": (
        lambda p: make(p, [hdet.Dropout(pattern="blocks.*")], gradients="local", signal=p.probe()),
        MatchError,
        r"dropout\[blocks.\*\]: no module that matches 'blocks.\*' holds a dropout; there are \['1.p', '2",
    ),
    "no such role": (
        lambda p: make(p, [hdet.LabelSmoothing()], gradients="local", signal=p.probe()),
        MatchError,
        "label_smoothing: no module that matches '.' holds a label_smoothing; none does: .*hdet.nn.swap",
    ),
    "no such attribute": (
        lambda p: make(p, [hdet.Scalar("x", path="4.margin", bounds=(0, 1))]),
        MatchError,
        "x: Linear '4' has no attribute 'margin'",
    ),
    "no such submodule": (
        lambda p: make(p, [hdet.Scalar("x", path="head.margin", bounds=(0, 1))]),
        MatchError,
        "x: the model has no module 'head'",
    ),
    "two knobs of one name": (
        lambda p: make(p, [hdet.LearningRate(), hdet.LearningRate()]),
        ConfigError,
        "two knobs are called 'learning_rate'; give one of them name=",
    ),
    "two knobs on one group": (
        lambda p: make(p, [hdet.LearningRate(), hdet.LearningRate(groups=0)]),
        ConfigError,
        r"knobs 'learning_rate' and 'learning_rate\[0\]' write the same scalar; narrow one of them by gr",
    ),
    "two knobs on one module": (
        lambda p: make(
            p, [hdet.Dropout(), hdet.Dropout(pattern="2", schedule=0.2)], gradients="local", signal=p.probe()
        ),
        ConfigError,
        "different values",
    ),
    "two knobs on one scheduled module": (
        lambda p: make(p, [hdet.Dropout(schedule=0.1), hdet.Dropout(pattern="2")], gradients="local", signal=p.probe()),
        ConfigError,
        r"'dropout' and 'dropout\[2\]' write the same scalar",
    ),
    "a scalar on a knob's module": (
        lambda p: make(
            p,
            [hdet.Dropout(pattern="2"), hdet.Scalar("p", path="2.p", bounds=(0.01, 0.9))],
            gradients="local",
            signal=p.probe(),
        ),
        ConfigError,
        r"'dropout\[2\]' and 'p' write the same scalar",
    ),
    "a scalar on a plain module": (
        lambda p: make(
            p,
            [hdet.Dropout(pattern="1"), hdet.Scalar("p", path="1.p", bounds=(0.01, 0.9))],
            gradients="local",
            signal=p.probe(),
        ),
        ConfigError,
        r"'dropout\[1\]' and 'p' write the same scalar",
    ),
    "one replica": (
        lambda p: make(p, [hdet.LearningRate()], n=1),
        ConfigError,
        "learning_rate: a spread of 0.1 needs at least 2 replicas to compare, there is 1; replicate with "
        "n >= 2, set its spread to width 0",
    ),
    "half a replica": (
        lambda p: make(p, [], n=2.5),
        ConfigError,
        "n, the number of replicas, is a whole number, got 2.5",
    ),
    "a replica that is a switch": (lambda p: make(p, [], n=True), ConfigError, "is a whole number, got True"),
    "no replica": (lambda p: make(p, [], n=0), ConfigError, "n must be at least 1, got 0"),
    "forward knob, shared gradients": (
        lambda p: make(p, [hdet.AttentionTemperature()], signal=p.probe()),
        IdentifiabilityError,
        "attention_temperature acts in the forward pass, and under shared gradients .* gradients='local', or "
        "counterfactual evidence",
    ),
    "a biased loss": (
        lambda p: make(p, [hdet.Dropout(pattern="2")], gradients="local"),
        IdentifiabilityError,
        r"dropout\[2\] changes the training loss it would be judged by; give the engine signal="
        r"hdet.Probe\(...\) .*, or accept_bias=True",
    ),
    "a tilt without a probe": (
        lambda p: make(p, [hdet.LearningRate()], evidence=hdet.evidence.Divergent(tilt=1.0)),
        ConfigError,
        "learning_rate: a tilt evaluates merged weights; give signal=hdet.Probe",
    ),
    "a controller that needs more": (
        lambda p: make(p, [hdet.LearningRate(controller=Calibrate())], signal=p.probe()),
        ConfigError,
        "learning_rate: the controller calibrate needs a judgement at window-averaged weights, which diverg",
    ),
    "evidence blind to forward knobs": (
        lambda p: make(p, [hdet.Dropout(pattern="2")], evidence=hdet.evidence.Line(), signal=p.probe()),
        IdentifiabilityError,
        r"dropout\[2\] acts in the forward pass, of which line evidence sees nothing; give the knob other evidence: "
        r"hdet.evidence.Contrast \(contrast\) or MixedDifference \(mixed_difference\), or Divergent",
    ),
    "evidence blind to update knobs": (
        lambda p: make(p, [hdet.LearningRate()], evidence=hdet.evidence.Contrast(), signal=p.probe()),
        IdentifiabilityError,
        r"learning_rate acts on the update, of which contrast evidence sees nothing; give the knob other evidence: "
        r"hdet.evidence.Line \(line\) for a learning rate",
    ),
    "evidence that needs a probe": (
        lambda p: make(p, [hdet.LearningRate()], evidence=hdet.evidence.Line()),
        ConfigError,
        r"learning_rate: line evidence measures a held-out loss; give signal=hdet.Probe\(...\) \(in a run file",
    ),
    "graded spreads under signs": (
        lambda p: make(p, [hdet.LearningRate(spread=Symmetric())], evidence=hdet.evidence.Divergent(design=Hadamard())),
        ConfigError,
        "learning_rate",
    ),
    "lengths that differ": (
        lambda p: make(
            p,
            [
                hdet.LearningRate(schedule=OneCycle(0.1, total_steps=10)),
                hdet.WeightDecay(schedule=Cosine(0.1, total_steps=20)),
            ],
        ),
        ConfigError,
        "the schedules end at different steps .*'learning_rate': 10, 'weight_decay': 20.*give the engine",
    ),
    "no steps": (lambda p: make(p, [], total_steps=0), ConfigError, "total_steps must be at least 1, got 0"),
    "a window of 0": (lambda p: make(p, [], window=0), ConfigError, "window must be at least 1, got 0"),
    "a window of another type": (lambda p: make(p, [], window="50"), ConfigError, "window must be .* got '50'"),
    "a window that is a switch": (lambda p: make(p, [], window=True), ConfigError, "window must be .* got True"),
    "a misspelt gradients": (
        lambda p: make(p, [], gradients="mean"),
        ConfigError,
        "gradients must be 'shared' or 'local', got 'mean'",
    ),
    "a misspelt anchor": (lambda p: make(p, [], anchor="cpu"), ConfigError, "anchor must be 'device' or 'host'"),
    "a signal that is a function": (
        lambda p: make(p, [], signal=p.loss),
        ConfigError,
        "signal must be of type TrainingLoss or Probe",
    ),
    "a knob class": (lambda p: make(p, [hdet.LearningRate]), ConfigError, "a knob must be of type Knob"),
    "a merge by name": (lambda p: make(p, [], merge="mean"), ConfigError, "merge must be of type Merge"),
    "a bare model": (lambda p: Engine(p.model(), []), ConfigError, "replicas must be of type Replicas"),
    "micro-batches that should diverge": (
        lambda p: Engine(
            hdet.micro_batches(m := p.model(), torch.optim.SGD(m.parameters(), lr=0.1), n=4),
            [hdet.LearningRate(evidence=hdet.evidence.Divergent())],
        ),
        ConfigError,
        "learning_rate: micro-batches of one model cannot diverge; use hdet.replicate, or evidence",
    ),
    "another model's optimizer": (
        lambda p: hdet.replicate(p.model(), torch.optim.SGD(p.model().parameters(), lr=0.1), n=2),
        ConfigError,
        r"the optimizer holds 4 parameters that are not the model's \(shapes \[\(6, 4\)",
    ),
}


@pytest.mark.parametrize("case", ENGINES)
def test_engines_that_cannot_be(case: str, problem: Any) -> None:
    build, error, message = ENGINES[case]
    with pytest.raises(error, match=message):
        build(problem)


def test_a_refusal_leaves_model_and_optimizer_as_they_were(problem: Any, tmp_path: Any) -> None:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    for knobs in ([hdet.LearningRate(), hdet.LearningRate(groups=0)], [hdet.LearningRate(), hdet.Beta1()]):
        with pytest.raises(ConfigError):
            Engine(hdet.replicate(model, optimizer, n=2), knobs, history=tmp_path / "history.jsonl")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not (tmp_path / "history.jsonl").exists()


def test_a_researcher_may_insist(problem: Any) -> None:
    engine = make(problem, [hdet.Dropout(pattern="2", accept_bias=True)], gradients="local")
    assert engine.bases == {"dropout[2]": 0.2}


def test_what_is_not_explored_needs_no_evidence(problem: Any) -> None:
    """With spread 0 a forward knob may share gradients, and one replica will do."""
    make(problem, [hdet.Dropout(pattern="2", spread=TwoLevel(0))])
    make(problem, [hdet.LearningRate(spread=TwoLevel(0))], n=1)


# -- what a loop can do wrong ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([torch.zeros(8)] * 4, r"the loss of replica 0 has shape \(8,\); a loss is a scalar: take its mean"),
        ([torch.zeros(())] * 3, r"one loss for each replica this process hosts \(4\), got 3"),
        (torch.zeros(4, 2), r"engine\.step was given a tensor of shape \(4, 2\).*a tensor of shape \(4,\) or a list"),
        (torch.zeros(3), r"a tensor of shape \(3,\)"),
        (torch.zeros(()), r"got 1"),
        (["low"] * 4, "the loss of replica 0 is a str; give a 0-dim tensor"),
        ([torch.tensor(1j)] * 4, "the loss of replica 0 is complex, and losses are compared by one real number"),
        (torch.ones(4) * 1j, "the loss of replicas is complex, and losses"),
    ],
)
def test_losses_that_are_none(losses: Any, message: str, problem: Any, train: Any) -> None:
    """Nothing of the step is counted, so the loop can be put right."""
    engine = make(problem, [hdet.LearningRate()], window=2)
    for _ in range(2):
        with pytest.raises(StepError, match=message):
            engine.step(losses)
    assert engine.step_count == 0
    assert engine.step([0.0] * 4) is None
    record = engine.step([1.0] * 4)
    assert record is not None
    assert record.losses == [0.5] * 4


def test_a_step_too_many(problem: Any, train: Any) -> None:
    """Refused before it has touched the model, where the loop enters a replica first."""
    engine = make(problem, [hdet.LearningRate()], total_steps=5)
    train(engine)
    weights = engine.replicas[0].model[0].weight.clone()
    message = r"over after 5 steps \(total_steps=5\); give the engine and its schedules more total_steps, or stop"
    with pytest.raises(StepError, match=message):
        train(engine, 6)
    assert torch.equal(weights, engine.replicas[0].model[0].weight)
    with pytest.raises(StepError, match=message):
        engine.step([0.0] * 4)


@pytest.mark.parametrize("seats", [False, True])
def test_gradients_that_were_not_shared(problem: Any, seats: bool) -> None:
    model = problem.model()
    home = (hdet.micro_batches if seats else hdet.replicate)(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    still = hdet.LearningRate(spread=TwoLevel(0.0))
    engine = Engine(home, [still], window=4, total_steps=8)

    def enter_all() -> None:
        for replica in engine.replicas:
            with replica:
                pass

    enter_all()
    with pytest.raises(StepError, match=r"share_gradients\(\) was not called in step 0.*or declare gradients='local'"):
        engine.step([1.0, 1.0])
    for share in (engine.share_gradients, engine.gradients_are_shared):
        enter_all()
        share()
        assert engine.step([1.0, 1.0]) is None
    enter_all()
    with pytest.raises(StepError, match="not called in step 2"):
        engine.step([1.0, 1.0])


def test_local_gradients_need_no_sharing(problem: Any) -> None:
    engine = make(problem, [hdet.LearningRate()], gradients="local")
    for replica in engine.replicas:
        with replica:
            pass
    assert engine.step([1.0] * 4) is None


def test_a_replica_inside_itself(problem: Any) -> None:
    engine = make(problem, [hdet.LearningRate()])
    with engine.replicas[1], pytest.raises(StepError, match="replica 1 is already active; leave its `with` block"):
        engine.replicas[1].__enter__()
    with engine.replicas[1]:
        pass


def test_an_error_inside_a_replica_leaves_it(problem: Any) -> None:
    engine = make(problem, [hdet.LearningRate()])
    with pytest.raises(ZeroDivisionError), engine.replicas[0]:
        raise ZeroDivisionError
    with engine.replicas[0]:
        pass


def test_a_history_of_another_run(problem: Any, train: Any, tmp_path: Any) -> None:
    path = tmp_path / "history.jsonl"
    first = make(problem, [hdet.LearningRate()], window=2, total_steps=6, history=path)
    with pytest.raises(ConfigError, match="history must be of type History, got 'other"):
        first.history = "other.jsonl"
    train(first)
    with pytest.raises(StepError, match="another history before its first step only, and 6 are done"):
        first.history = hdet.History()
    engine = make(problem, [hdet.LearningRate()], window=2, total_steps=6, history=hdet.History(path))
    with pytest.raises(HdetError, match=r"history.jsonl already holds windows up to 2, and window 0 is to be run"):
        engine.step([0.0] * 4)
    assert len(hdet.History(path)) == 3
    engine.history.truncate(0)
    train(engine)
    assert [record.window for record in hdet.History(path)] == [0, 1, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "up", "0.1", True, None, [0.1]])
def test_a_controller_that_moves_nowhere(bad: Any, problem: Any) -> None:
    @hdet.spec.register
    class Lost(Controller):
        kind = "lost"

        def start(self) -> Any:
            return Hold().start()

        def step(self, state: Any, estimate: Any, context: Any) -> Any:
            return bad, state

    try:
        engine = make(problem, [hdet.LearningRate(controller=Lost())], window=1)
        with pytest.raises(ConfigError, match="learning_rate: Lost moved by"):
            engine.step([0.0] * 4)
    finally:
        del Controller._members["lost"]


@pytest.mark.parametrize("bad", [None, "held", 3.0, {"last": 0.0}])
def test_a_controller_whose_state_is_none(bad: Any, problem: Any) -> None:
    """In the window that gave it, and not as the first checkpoint is written."""

    class Undone(Hold):
        def step(self, state: Any, estimate: Any, context: Any) -> Any:
            return 0.0, bad

    engine = make(problem, [hdet.LearningRate(controller=Undone())], window=1)
    with pytest.raises(ConfigError, match=r"learning_rate: Undone gave the state .*, where its start\(\) gave a"):
        engine.step([0.0] * 4)


class MovesOnly(Hold):
    """A controller that forgets its state."""

    def step(self, state: Any, estimate: Any, context: Any) -> Any:
        return 0.1


class Forgetful(Divergent):
    """Evidence that tells of some knobs only."""

    def collect(self, scene: Any, knobs: Any) -> Any:
        collector = super().collect(scene, knobs)
        collector.close = lambda harvest: {}
        return collector


class Unreturned(LeastSquares):
    """An estimator that forgets its state."""

    def estimate(self, state: Any, comparison: Any) -> Any:
        return super().estimate(state, comparison)[0]


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        (
            hdet.LearningRate(evidence=Divergent(estimator=Unreturned())),
            r"Unreturned.estimate returned \[Estimate.*it returns a list of 1 Estimates, one for each knob in order",
        ),
        (
            hdet.LearningRate(controller=MovesOnly()),
            r"MovesOnly.step returned 0.1; it returns a move and a state, as a pair",
        ),
        (
            hdet.LearningRate(evidence=Forgetful()),
            r"DivergentCollector.close returned {}; it returns an Estimate for each of the knobs \['learning_rate'\]",
        ),
    ],
)
def test_members_that_answer_something_else_are_named(knob: Any, message: str, problem: Any) -> None:
    engine = make(problem, [knob], window=1)
    with pytest.raises(ConfigError, match=message):
        engine.step([0.0] * 4)


class Bare(hdet.Knob):
    """A knob whose parts are given to it."""

    space: Space = Linear()
    bounds: tuple[float, float] = (0.0, 1.0)
    spread: Spread = TwoLevel(0.0)
    acts: Any = "forward"
    answer: Any = None

    @property
    def acts_on(self) -> Any:
        return self.acts

    def bind(self, model: Any, optimizer: Any) -> Any:
        return self.answer(model) if self.answer else None


class Nowhere(Divergent):
    """Evidence that forgets to return its collector."""

    def collect(self, scene: Any, knobs: Any) -> Any:
        super().collect(scene, knobs)


class Transposed(Permutation):
    """A design with a row for each knob."""

    def _assign(self, *args: Any) -> Any:
        return super()._assign(*args).T


class Unmerged(Mean):
    """A merge that forgets to return its merger."""

    def at_work(self, scene: Any) -> Any:
        super().at_work(scene)


class Tensors(Constant):
    """A schedule of tensors."""

    def __call__(self, t: int) -> Any:
        return torch.tensor(self.value)


def first_module(model: nn.Module) -> ModelBinding:
    return ModelBinding([Attribute(model[1], "p")], (0.0, 1.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"knobs": [Bare(name="own")]}, r"own: Bare\.bind returned None; it returns a binding, such as"),
        ({"knobs": [Bare(answer=lambda model: ModelBinding([], (0.0, 1.0)))]}, "a ModelBinding was given no scalars"),
        ({"knobs": [Bare(acts="both", answer=first_module)]}, r"acts_on is 'both'; a knob acts on one of \['forw"),
        ({"knobs": [hdet.LearningRate(evidence=Nowhere())]}, r"Nowhere\.collect returned None; it returns a hdet\.ev"),
        (
            {"knobs": [hdet.LearningRate(evidence=Divergent(design=Transposed()))]},
            r"Transposed\._assign gave an array of shape \(1, 4\); \(4, 1\) is wanted",
        ),
        (
            {"knobs": [hdet.LearningRate(schedule=Tensors(0.1))]},
            r"Tensors gave tensor\(.*\) at step 0; a schedule gives a float",
        ),
        ({"knobs": [], "merge": Unmerged()}, r"Unmerged\.at_work returned None; it returns a hdet\.merges\.Merger"),
    ],
)
def test_members_that_return_nothing_of_use_are_named(given: Any, message: str, problem: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        make(problem, **given)


class Noted(Gated):
    """Keeps its state in a dictionary."""

    def start(self) -> Any:
        return {"sum": 0.0}


def test_a_controller_whose_state_no_checkpoint_can_hold_is_refused(problem: Any) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate: Noted\.start\(\) gave a dict, and a state is a frozen"):
        make(problem, [hdet.LearningRate(controller=Noted())], window=2, total_steps=6)
