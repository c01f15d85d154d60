"""Stop anywhere, resume: the same run. What a checkpoint is, and what it refuses."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import hdet
from hdet import Engine
from hdet.contrib import Kalman, Marginal
from hdet.controllers import Calibrate, Estimate, Gated, Hold, Newton
from hdet.errors import CheckpointError, DivergedError, StepError
from hdet.estimators import Comparison, LeastSquares, Softmax
from hdet.merges import Mean
from hdet.schedules import OneCycle
from hdet.spreads import Spread, Symmetric, TwoLevel

TOTAL = 25
WINDOW = 10  # two windows and a half


def build(
    problem: Any,
    n: int = 4,
    path: Path | hdet.History | None = None,
    decay_spread: Spread = Symmetric(0.5),  # noqa: B008 (frozen)
    **options: Any,
) -> Engine:
    """Everything a state can hold: two knobs judged together, Kalman's memory, averaged weights, buffers."""
    model = problem.model(nn.BatchNorm1d(6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    knobs = [
        hdet.LearningRate(schedule=OneCycle(0.02, total_steps=TOTAL), controller=Gated(gate=0.0, memory=0.5)),
        hdet.WeightDecay(spread=decay_spread, controller=Newton()),
    ]
    settings: dict[str, Any] = {
        "window": WINDOW,
        "signal": problem.probe(at="average"),
        "evidence": hdet.evidence.Divergent(estimator=Kalman()),
        "gradients": "local",
        **options,
    }
    return Engine(hdet.replicate(model, optimizer, n=n), knobs, history=path, **settings)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """As `torch.save` writes it and the safe loader reads it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def outcome(engine: Engine) -> dict[str, Any]:
    """All that a run comes to, but the clock."""
    return {
        "models": [replica.model.state_dict() for replica in engine.replicas],
        "optimizers": [optimizer.state_dict() for optimizer in engine.optimizers],
        "bases": engine.bases,
        "knobs": [knob.state_dict() for knob in engine.knobs],
    }


def lines(path: Path) -> list[dict[str, Any]]:
    records = [vars(record).copy() for record in hdet.History(path)]
    for record in records:
        del record["seconds"], record["closing"]
    return records


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, problem: Any, train: Any) -> Any:
    """The run that nothing interrupts, and its states at every step."""
    path = tmp_path_factory.mktemp("straight") / "history.jsonl"
    engine = build(problem, path=path)
    states = [through_a_file(engine.state_dict())]
    for step in range(TOTAL):
        train(engine, step + 1)
        states.append(through_a_file(engine.state_dict()))
    return engine, states, path


@pytest.mark.parametrize("step", range(TOTAL + 1))
def test_stop_at_any_step_and_resume_is_the_same_run(
    step: int, straight: Any, problem: Any, train: Any, assert_same: Any, tmp_path: Path
) -> None:
    whole, states, whole_path = straight
    path = tmp_path / "history.jsonl"
    # The history as a kill leaves it: the windows done, and a torn line.
    done = [line for line in whole_path.read_text().splitlines() if line][: states[step]["window"]]
    path.write_text("".join(line + "\n" for line in done) + '{"window": 9, "sta')
    if states[step]["finished"]:
        path.write_text(whole_path.read_text())
    engine = build(problem, path=hdet.History(path))
    engine.load_state_dict(states[step])
    assert engine.step_count == step
    train(engine, TOTAL)
    assert engine.finished
    assert_same(outcome(engine), outcome(whole))
    assert_same(lines(path), lines(whole_path))


def test_saving_changes_nothing(straight: Any, problem: Any, train: Any, assert_same: Any) -> None:
    """`straight` saved after every step."""
    engine = build(problem)
    train(engine)
    assert_same(outcome(engine), outcome(straight[0]))


def test_resuming_over_another_state_leaves_nothing_of_it(
    straight: Any, problem: Any, train: Any, assert_same: Any
) -> None:
    """An engine at another step, in another window, finished early or at the end, takes up the run."""
    whole, states, _ = straight
    for before in (3, 14, TOTAL):
        engine = build(problem)
        train(engine, before)
        if before == 14:
            engine.finish()
        engine.load_state_dict(states[12])
        train(engine, TOTAL)
        assert engine.finished
        assert_same(outcome(engine), outcome(whole))


def test_a_state_is_a_copy(straight: Any, problem: Any, train: Any, assert_same: Any) -> None:
    engine = build(problem)
    train(engine, 5)
    state = engine.state_dict()
    kept = copy.deepcopy(state)
    train(engine, 12)
    assert_same(state, kept)
    engine.load_state_dict(state)
    train(engine, TOTAL)
    assert_same(state, kept)
    assert_same(outcome(engine), outcome(straight[0]))


def plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def test_a_checkpoint_is_plain_numbers_and_tensors(straight: Any) -> None:
    for state in straight[1]:
        assert plain(state)


def test_converged_is_never_a_replica_in_mid_window(straight: Any, assert_same: Any) -> None:
    """It is the point the window opened at, whatever step the state was taken at."""
    _, states, _ = straight
    for step, state in enumerate(states):
        opening = step if step == TOTAL else step // WINDOW * WINDOW
        assert state["converged"]["step"] == opening
        assert_same(state["converged"], states[opening]["converged"])
        assert (state["open"] is None) == (step == opening)


def test_converged_holds_the_bases_not_a_replicas_levels(straight: Any, problem: Any) -> None:
    """It can be gone on from by plain training."""
    _, states, _ = straight
    for step in (0, 10, 13, 20, TOTAL):
        engine = build(problem)
        engine.load_state_dict(states[step])
        point = states[step]["converged"]
        (group,) = point["optimizer"]["param_groups"]
        for knob, key in zip(engine.knobs, ("lr", "weight_decay"), strict=True):
            assert group[key] == knob.base(point["step"])
    model = problem.model(nn.BatchNorm1d(6))
    model.load_state_dict(states[13]["converged"]["model"])


@pytest.mark.parametrize("step", [0, 7, 10, 16, TOTAL])
@pytest.mark.parametrize("n", [2, 3])
def test_resume_with_another_number_of_replicas(
    n: int, step: int, straight: Any, problem: Any, train: Any, assert_same: Any, assert_alike: Any
) -> None:
    """The converged model, the bases and the controllers carry over; the window opens anew."""
    _, states, _ = straight
    engine = build(problem, n=n)
    engine.load_state_dict(states[step])
    opening = states[step]["converged"]["step"]
    assert engine.step_count == opening
    assert_alike(engine)
    assert_same(engine.replicas[0].model.state_dict(), states[step]["converged"]["model"])
    same = build(problem)
    same.load_state_dict(states[opening])
    assert engine.bases == same.bases
    assert [knob.state_dict() for knob in engine.knobs] == [knob.state_dict() for knob in same.knobs]
    train(engine, TOTAL)
    assert engine.finished
    assert all(math.isfinite(base) for base in engine.bases.values())


def test_another_spread_or_window_opens_the_window_anew(straight: Any, problem: Any, train: Any) -> None:
    """Half a window at other levels could not be told from evidence."""
    _, states, _ = straight
    engine = build(problem, window=hdet.windows.FixedWindow(3))
    engine.load_state_dict(states[14])
    assert engine.step_count == 10
    assert (engine.cycle.window.start, engine.cycle.window.stop) == (10, 13)
    train(engine)
    engine = build(problem, decay_spread=Symmetric(0.2))
    engine.load_state_dict(states[14])
    assert engine.step_count == 10
    train(engine)


def test_finishing_early_is_kept(problem: Any, train: Any) -> None:
    engine = build(problem)
    train(engine, 13)
    engine.finish()
    state = through_a_file(engine.state_dict())
    again = build(problem)
    again.load_state_dict(state)
    assert again.finished
    assert again.step_count == 13
    assert again.bases == engine.bases
    assert len({optimizer.param_groups[0]["lr"] for optimizer in again.optimizers}) == 1
    with pytest.raises(StepError, match="over after 13 steps"):
        train(again, TOTAL)


def test_a_run_that_is_over_is_saved_as_it_was_loaded(
    straight: Any, problem: Any, tmp_path: Path, assert_same: Any
) -> None:
    """And its history is left whole, however often that is done."""
    _, states, path = straight
    state, copied = states[-1], tmp_path / "history.jsonl"
    copied.write_text(path.read_text())
    for _ in range(2):
        engine = build(problem, path=hdet.History(copied))
        engine.load_state_dict(state)
        again = through_a_file(engine.state_dict())
        assert again["window"] == state["window"]
        assert_same(again["collectors"], state["collectors"])
        state = again
    assert copied.read_text() == path.read_text()


def test_restores_are_counted_across_a_resume(problem: Any, train: Any) -> None:
    def fail(step: int, losses: Any) -> Any:
        return [torch.tensor(math.nan)] * 4

    engine = build(problem, window=2)
    train(engine, 6, report=fail)
    again = build(problem, window=2)
    again.load_state_dict(through_a_file(engine.state_dict()))
    with pytest.raises(DivergedError):
        train(again, 8, report=fail)


@pytest.mark.parametrize("estimator", [Marginal(), LeastSquares(), Kalman(), Softmax(0.1)], ids=lambda e: str(e.kind))
@pytest.mark.parametrize(
    "controller", [Hold(), Gated(gate=0.0), Newton(), hdet.controllers.HeavyBall()], ids=lambda c: str(c.kind)
)
def test_every_controller_and_estimator_has_plain_state(
    estimator: Any, controller: Any, problem: Any, train: Any, assert_same: Any
) -> None:
    def engine() -> Engine:
        model = problem.model()
        replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01), n=3)
        knob = hdet.LearningRate(spread=TwoLevel(0.2), controller=controller)
        return Engine(replicas, [knob], window=3, evidence=hdet.evidence.Divergent(estimator=estimator), total_steps=9)

    whole = engine()
    train(whole, 7)
    state = through_a_file(whole.state_dict())
    assert plain(state)
    train(whole)
    resumed = engine()
    resumed.load_state_dict(state)
    train(resumed)
    assert_same(outcome(resumed), outcome(whole))


@hdet.spec.register
class OfNumPy(LeastSquares):
    """An estimator of somebody's own, whose numbers are NumPy's."""

    kind: ClassVar[str] = "of_numpy"

    def estimate(self, state: Any, comparison: Comparison) -> tuple[list[Estimate], Any]:
        found, state = super().estimate(state, comparison)
        return [replace(each, slope=np.float32(each.slope), stderr=np.float64(each.stderr)) for each in found], state


@pytest.mark.parametrize("controller", [Gated(gate=0.0), hdet.controllers.HeavyBall()], ids=lambda c: str(c.kind))
def test_numpys_numbers_in_an_estimate_are_saved_as_pythons(
    controller: Any, problem: Any, train: Any, tmp_path: Path
) -> None:
    model = problem.model()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01), n=3)
    knob = hdet.LearningRate(spread=TwoLevel(0.2), controller=controller)
    evidence = hdet.evidence.Divergent(estimator=OfNumPy())
    engine = Engine(replicas, [knob], window=3, evidence=evidence, total_steps=9, history=tmp_path / "history.jsonl")
    train(engine, 7)
    assert plain(through_a_file(engine.state_dict()))


@pytest.mark.parametrize("home", [hdet.replicate, hdet.micro_batches], ids=lambda f: str(f.__name__))
@pytest.mark.parametrize("step", [3, 7, 8, 10, 13, 17])
def test_counterfactual_evidence_resumes(step: int, home: Any, problem: Any, train: Any, assert_same: Any) -> None:
    """Its directions, contrasts, sums and averages in mid-window; dropout draws from torch's generator."""

    def build() -> Engine:
        model = problem.model(hdet.nn.Dropout(0.2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        knobs = [
            hdet.LearningRate(
                schedule=OneCycle(0.02, total_steps=20), evidence=hdet.evidence.Line(), controller=Calibrate()
            ),
            hdet.WeightDecay(evidence=hdet.evidence.Analytic()),
            hdet.Dropout(evidence=hdet.evidence.Contrast(refresh=3), controller=Gated(0.06, gate=0.0, memory=0.7)),
        ]
        return Engine(home(model, optimizer, n=4), knobs, window=8, signal=problem.probe())

    torch.manual_seed(3)
    whole = build()
    train(whole, step)
    state, generator = through_a_file(whole.state_dict()), torch.get_rng_state()
    assert plain(state)
    train(whole)
    resumed = build()
    resumed.load_state_dict(state)
    assert resumed.step_count == step
    torch.set_rng_state(generator)
    train(resumed)
    assert_same(outcome(resumed), outcome(whole))
    assert resumed.history.windows[-1].estimates == whole.history.windows[-1].estimates
    assert any(knob.shift != 0.0 for knob in whole.knobs)


def test_tensor_learning_rates_resume(problem: Any, train: Any, assert_same: Any) -> None:
    def engine() -> Engine:
        model = problem.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
        return Engine(hdet.replicate(model, optimizer, n=2), [hdet.LearningRate()], window=4, total_steps=10)

    whole = engine()
    train(whole, 6)
    state = through_a_file(whole.state_dict())
    train(whole)
    resumed = engine()
    resumed.load_state_dict(state)
    train(resumed)
    assert_same(outcome(resumed), outcome(whole))


def test_micro_batches_resume(problem: Any, train: Any, assert_same: Any) -> None:
    def engine(n: int) -> Engine:
        model = problem.model()
        seats = hdet.micro_batches(model, torch.optim.AdamW(model.parameters(), lr=0.01), n=n)
        return Engine(seats, [hdet.LearningRate(spread=TwoLevel(0))], window=4, total_steps=10)

    whole = engine(3)
    train(whole, 6)
    state = through_a_file(whole.state_dict())
    train(whole)
    resumed = engine(3)
    resumed.load_state_dict(state)
    assert resumed.step_count == 6
    train(resumed)
    assert_same(outcome(resumed), outcome(whole))
    other = engine(2)
    other.load_state_dict(state)
    assert other.step_count == 4


@pytest.mark.parametrize("step", [0, 3, 10, 13, 20])
def test_replicas_that_differ_at_an_opening_resume_each_from_its_own(
    step: int, problem: Any, train: Any, assert_same: Any
) -> None:
    """Noise before the first merge, and moments that no merge makes alike."""

    def start() -> Engine:
        engine = build(problem, merge=Mean("keep"))
        hdet.perturb(engine.home, noise=0.1)
        return engine

    whole = start()
    train(whole, step)
    state = through_a_file(whole.state_dict())
    assert (state["opening"] is not None) == (step % WINDOW == 0)
    train(whole)
    engine = build(problem, merge=Mean("keep"))
    engine.load_state_dict(state)
    train(engine)
    assert_same(outcome(engine), outcome(whole))
    other = build(problem, n=2, merge=Mean("keep"))
    other.load_state_dict(state)
    assert_same(other.optimizers[1].state_dict()["state"], state["converged"]["optimizer"]["state"])


@pytest.mark.parametrize("step", [0, 4, 9, 13, 16])
def test_a_guard_resumes_with_the_point_it_holds(step: int, problem: Any, train: Any, assert_same: Any) -> None:
    """The run is wrecked after step 8, and the guard goes back later to what it kept before."""

    def wreck(at: int, losses: Any) -> Any:
        return [loss + at for loss in losses] if at >= 8 else losses

    def start(**options: Any) -> Engine:
        settings = {"window": 4, "guard": hdet.Rewind(patience=1.5, significance=0.01), **options}
        return build(problem, **settings)

    def spoil(engine: Engine) -> None:
        if engine.step_count == 8:
            for replica in engine.replicas:
                torch.nn.init.constant_(replica.model[0].weight, 3.0)

    def go(engine: Engine, until: int) -> None:
        for stop in range(engine.step_count + 1, until + 1):
            spoil(engine)
            train(engine, stop, report=wreck)

    whole = start()
    go(whole, step)
    state = through_a_file(whole.state_dict())
    go(whole, 24)
    assert any(fault["kind"] == "rewound" for record in whole.history for fault in record.faults)
    engine = start()
    go(engine, 2)
    engine.load_state_dict(state)
    go(engine, 24)
    assert_same(outcome(engine), outcome(whole))
    assert engine.cycle.watch is not None
    assert whole.cycle.watch is not None
    assert_same(engine.cycle.watch.state_dict(), whole.cycle.watch.state_dict())
    with pytest.raises(CheckpointError, match="guard="):
        start(guard=None).load_state_dict(state)


# -- what is refused ------------------------------------------------------------------------------


@pytest.fixture
def refused(assert_same: Any) -> Callable[[Engine, Any, str], None]:
    """The error names what differs, and the engine is as it was."""

    def check(engine: Engine, state: Any, match: str) -> None:
        before = copy.deepcopy(outcome(engine))
        with pytest.raises(CheckpointError, match=match):
            engine.load_state_dict(state)
        assert_same(outcome(engine), before)

    return check


def test_foreign_states_are_refused(straight: Any, problem: Any, refused: Any) -> None:
    state = straight[1][12]
    engine = build(problem)
    refused(engine, {}, "format None; this version reads format 3")
    refused(engine, {**state, "format": 99}, "format 99")
    refused(build(problem, seed=1), state, "seed=0, this engine has 1; declare the same")
    refused(build(problem, gradients="shared"), state, "gradients='local', this engine has 'shared'")
    refused(build(problem, total_steps=30), state, "total_steps=25, this engine has 30; .*is another search")
    refused(build(problem, evidence=hdet.evidence.Divergent()), state, "evidence=")


def test_of_long_lists_a_refusal_shows_the_beginning() -> None:
    def engine(rate: float, *, split: bool = False) -> Engine:
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20)))
        parameters: Any = [{"params": [p]} for p in model.parameters()] if split else model.parameters()
        knob = hdet.LearningRate(schedule=hdet.schedules.Replay([rate] * 300))
        home = hdet.replicate(model, torch.optim.SGD(parameters, lr=1.0), n=2)
        return Engine(home, [knob], window=5, total_steps=300)

    state = engine(0.5).state_dict()
    with pytest.raises(
        CheckpointError, match=r"'values': \[0.5,.* 292 more\]} of .*\[0.25,.* 292 more\]}; declare"
    ) as told:
        engine(0.25).load_state_dict(state)
    assert len(str(told.value)) < 700
    later = nn.Linear(1, 1)
    knob = hdet.LearningRate(schedule=hdet.schedules.Replay([0.5] * 299 + [0.25]))
    home = hdet.replicate(later, torch.optim.SGD(later.parameters(), lr=1.0), n=2)
    with pytest.raises(CheckpointError, match=r"\[299 alike, 0.5\]} of .*\[299 alike, 0.25\]}; declare"):
        Engine(home, [knob], window=5, total_steps=300).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"groups of \[40\] parameters, this one of \[(1, ){7}1 and 32 more\] \("):
        engine(0.5, split=True).load_state_dict(state)


def test_other_knobs_are_refused(straight: Any, problem: Any, refused: Any) -> None:
    model = problem.model(nn.BatchNorm1d(6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    evidence = hdet.evidence.Divergent(estimator=Kalman())
    # The same knobs in another order would take each other's memory.
    knobs = [hdet.WeightDecay(), hdet.LearningRate(schedule=OneCycle(0.02, total_steps=TOTAL))]
    engine = Engine(hdet.replicate(model, optimizer, n=4), knobs, evidence=evidence, gradients="local")
    refused(engine, straight[1][12], "knobs=.'learning_rate', 'weight_decay'., this engine has .'weight_decay'")


def test_another_controllers_state_is_refused(straight: Any, problem: Any, refused: Any) -> None:
    model = problem.model(nn.BatchNorm1d(6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = OneCycle(0.02, total_steps=TOTAL)
    knobs = [hdet.LearningRate(schedule=schedule), hdet.WeightDecay(controller=Gated())]
    evidence = hdet.evidence.Divergent(estimator=Kalman())
    engine = Engine(
        hdet.replicate(model, optimizer, n=4), knobs, evidence=evidence, gradients="local", signal=problem.probe()
    )
    refused(engine, straight[1][12], "fields")


def test_another_model_or_optimizer_is_refused(straight: Any, problem: Any, refused: Any) -> None:
    state = straight[1][12]

    def engine(model: nn.Module, split: bool) -> Engine:
        groups: Any = model.parameters()
        if split:
            parameters = list(model.parameters())
            groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        knobs = [hdet.LearningRate(schedule=OneCycle(0.02, total_steps=TOTAL)), hdet.WeightDecay()]
        return Engine(
            hdet.replicate(model, optimizer, n=4),
            knobs,
            evidence=hdet.evidence.Divergent(estimator=Kalman()),
            gradients="local",
        )

    wider = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 2))
    refused(engine(wider, split=False), state, r"'3.bias' is float32\[1\] there and float32\[2\] here")
    bare = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    refused(engine(bare, split=False), state, "does not fit")
    refused(
        engine(problem.model(nn.BatchNorm1d(6)), split=True), state, r"groups of \[6\] parameters, this one of \[2, 4\]"
    )
