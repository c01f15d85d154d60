"""A state that does not fit is refused by name, and the engine is as it was, whatever part of it is wrong."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.errors import CheckpointError, HdetError
from hdet.replicas.held_optimizer import WRAPPED

Make = Callable[..., hdet.Engine]


class Flagged(torch.optim.SGD):
    """It keeps a switch in the state of each parameter, as timm's Muon does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            self.state[parameter]["flag"] = parameter.dim() == 2
        super().step()


class Counting(torch.optim.SGD):
    """It keeps a number in a state of no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload]
        super().step()


class Wrapping(torch.optim.SGD):
    """Its `state_dict` has some of the state in a mapping of its own, as that of bitsandbytes does."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "state": {number: {WRAPPED: dict(own)} for number, own in state["state"].items()}}

    def load_state_dict(self, state_dict: Any) -> None:
        states = {number: own.get(WRAPPED, own) for number, own in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": states})


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "nesterov-less": lambda p: torch.optim.SGD(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "flagged": lambda p: Flagged(p, lr=0.01, momentum=0.9),
    "counting": lambda p: Counting(p, lr=0.01, momentum=0.9),
    "wrapping": lambda p: Wrapping(p, lr=0.01, momentum=0.9),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "chained": lambda p: hdet.ChainedOptimizer(
        torch.optim.SGD(itertools.islice(p, 2), lr=0.01, momentum=0.9), torch.optim.Adagrad(p, lr=0.01)
    ),
}


@pytest.fixture
def start(problem: Any) -> Make:
    def make(optimizer: str = "fused", **options: Any) -> hdet.Engine:
        model = problem.model(nn.BatchNorm1d(6))
        home = hdet.replicate(model, MAKERS[optimizer](model.parameters()), n=2)
        settings: dict[str, Any] = {
            "window": 4,
            "gradients": "local",
            "total_steps": 12,
            "signal": problem.probe(at="average"),
            "guard": hdet.Rewind(),
            **options,
        }
        return hdet.Engine(home, [hdet.LearningRate()], **settings)

    return make


def placed(state: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with `value` at a path of keys; a function is given what is there, and `...` removes it."""
    changed = copy.deepcopy(state)
    here: Any = changed
    *way, key = path.split()
    for step in way:
        here = here[step] if isinstance(here, dict) and step in here else here[int(step)]
    if value is ...:
        del here[key]
    else:
        here[key] = value(here[key]) if callable(value) else value
    return changed


HARM: dict[str, tuple[str, Any, str]] = {
    "moments of another shape": (
        "converged optimizer state 0 exp_avg",
        lambda t: t[:2],
        r"exp_avg is torch.float32\[2, 4\], and the parameter is \[6, 4\]",
    ),
    "transposed moments": ("converged optimizer state 0 exp_avg_sq", lambda t: t.T, r"parameter is \[6, 4\]"),
    "moments of integers": ("converged optimizer state 1 exp_avg", lambda t: t.long(), "exp_avg is torch.int64"),
    "moments gone": (
        "converged optimizer state 1 exp_avg_sq",
        ...,
        r"the checkpoint's optimizer state lacks \['exp_avg_sq'\]",
    ),
    "a moment in words": ("converged optimizer state 1 exp_avg", "much", "exp_avg is 'much'"),
    "many steps": ("converged optimizer state 0 step", lambda t: torch.ones(3), "step is torch.float32"),
    "a replica's moments": ("open replicas 1 optimizer state 0 exp_avg", lambda t: t[:1], "replica 1, parameter group"),
    "a guard's moments": ("watch held optimizer state", {0: {"exp_avg": 3}}, "lacks|exp_avg"),
    "one beta": ("converged optimizer param_groups 0 betas", (0.9,), "betas"),
    "a rate in words": ("converged optimizer param_groups 0 lr", "fast", "lr is 'fast'"),
    "no rate": ("converged optimizer param_groups 0 lr", ..., "lr is None"),
    "no groups": ("converged optimizer param_groups", [], "parameter groups of"),
    "a weight of another type": ("converged model 0.weight", lambda t: t.double(), r"float64\[6, 4\] there"),
    "a weight too small": (
        "converged model 0.weight",
        lambda t: t[1:],
        r"the checkpoint's model does not fit.* float32\[5, 4\] there",
    ),
    "a weight gone": ("converged model 0.weight", ..., "is missing there"),
    "a weight that is a number": ("converged model 0.bias", 1.0, "is no tensor there"),
    "a replica's weight": ("open replicas 1 model 0.weight", lambda t: t[1:], "replica 1"),
    "averages": ("open averages 0/auto values", lambda values: [t[:1] for t in values], "averaged weights"),
    "no averages": ("open averages 0/auto values", ..., "averaged weights"),
    "a window in words": ("window", "two", "window: Input should be a valid integer, got 'two'"),
    "a window below 0": ("window", -1, "window: "),
    "a step that is no number": ("converged step", None, "converged.step"),
    "no knobs": ("knobs", ..., "knobs: Field required"),
    "an empty knob": ("knobs learning_rate", {}, "knobs.learning_rate.shift"),
    "a shift of NaN": ("knobs learning_rate shift", float("nan"), "shift"),
    "a controller's state": ("knobs learning_rate controller", lambda s: {**s, "odd": 1}, "has the fields"),
    "a tally": ("open tally", {}, "cannot be loaded"),
    "evidence": ("collectors", [], "cannot be loaded"),
    "the state": ("config", None, "does not say what engine wrote it"),
}


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "trained"])
def test_what_does_not_fit_is_refused_and_changes_nothing(
    fresh: bool, start: Make, train: Any, assert_same: Any, subtests: pytest.Subtests
) -> None:
    whole = start()
    train(whole, 6)
    state = whole.state_dict()
    engine = start()
    if not fresh:
        train(engine, 5)
    before, history = engine.state_dict(), list(engine.history)
    for harm, (path, value, message) in HARM.items():
        with subtests.test(harm):
            with pytest.raises(CheckpointError, match=message):
                engine.load_state_dict(placed(state, path, value))
            assert_same(engine.state_dict(), before)
            assert list(engine.history) == history
    engine.load_state_dict(state)
    train(engine)
    train(whole)
    assert_same(engine.state_dict()["converged"], whole.state_dict()["converged"])


def test_of_chained_optimizers_each_is_asked_what_it_keeps_before_its_first_step(start: Make, train: Any) -> None:
    whole = start("chained")
    train(whole, 6)
    harmed = placed(whole.state_dict(), "converged optimizer state 2 sum", lambda held: held.reshape(-1)[:1])
    with pytest.raises(CheckpointError, match=r"sum is torch.float32\[1\], and the parameter is"):
        start("chained").load_state_dict(harmed)


@pytest.mark.parametrize("optimizer", MAKERS)
def test_what_an_optimizer_of_torch_wrote_fits_it(optimizer: str, start: Make, train: Any, assert_same: Any) -> None:
    """Into a fresh one, one that trained and, where a run is taken up at its first step, one with more state."""
    whole = start(optimizer)
    first = whole.state_dict()
    train(whole, 6)
    state = whole.state_dict()
    for stop in (0, 7):
        engine = start(optimizer)
        train(engine, stop)
        engine.load_state_dict(state)
        assert_same(engine.state_dict()["converged"], state["converged"])
    whole.load_state_dict(first)
    assert_same(whole.state_dict()["converged"]["model"], first["converged"]["model"])


def test_the_engine_goes_on_as_if_a_refused_state_had_not_been_offered(
    start: Make, train: Any, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-window, where the failure comes after models and optimizers were loaded."""
    whole = start()
    train(whole, 6)
    other = start()
    train(other, 10)
    state = other.state_dict()
    state["open"]["tally"] = {}
    whole_too = start()
    train(whole_too, 6)
    with pytest.raises(CheckpointError, match="the engine is as it was"):
        whole.load_state_dict(state)
    train(whole)
    train(whole_too)
    assert_same(whole.state_dict(), whole_too.state_dict())


# -- the history beside the checkpoint --------------------------------------------------------------


@pytest.fixture
def stopped(start: Make, train: Any, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """A run stopped in its third window, and its history."""
    path = tmp_path / "history.jsonl"
    engine = start(history=path)
    train(engine, 10)
    return engine.state_dict(), path


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda lines: lines[:1], "windows 0 to 0 of the 2 before the checkpoint, so lines of it are missing"),
        (lambda lines: [lines[0], lines[0], lines[1]], "line 2 is not a window record: .* doubled or out of order"),
        (lambda lines: lines[::-1], "line 2 is not a window record: .* out of order"),
        (lambda lines: [lines[0], lines[1].replace('"stop": 8', '"stop": 9')], "is of another run: .* ends at step 9"),
    ],
    ids=["missing", "doubled", "unordered", "of another run"],
)
def test_a_history_that_is_not_the_checkpoints_is_refused(
    harm: Callable[[list[str]], list[str]], message: str, stopped: tuple[dict[str, Any], Path], start: Make
) -> None:
    state, path = stopped
    path.write_text("\n".join(harm(path.read_text().splitlines())) + "\n")
    harmed = path.read_bytes()
    with pytest.raises(HdetError, match=message):
        start(history=hdet.History(path)).load_state_dict(state)
    assert path.read_bytes() == harmed


def test_a_resumed_run_may_write_to_another_file(
    stopped: tuple[dict[str, Any], Path], start: Make, train: Any, tmp_path: Path
) -> None:
    state, _ = stopped
    engine = start(history=tmp_path / "second.jsonl")
    engine.load_state_dict(state)
    train(engine)
    assert [record.window for record in hdet.History(tmp_path / "second.jsonl")] == [2]
    again = start(history=hdet.History(tmp_path / "second.jsonl"))  # and from the same checkpoint once more
    again.load_state_dict(state)
    train(again)
    assert [record.window for record in hdet.History(tmp_path / "second.jsonl")] == [2]
