"""The tail of a run that is stopped, goes back or trains other parameters; and where there is none."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import schedulefree
import torch
from tail_parts import (
    PART,
    RESTLESS,
    TOTAL,
    WILD,
    WINDOW,
    close,
    engine_of,
    held_out,
    mixed,
    noisy,
    walked,
    weights_of,
)
from torch import Tensor, nn

import hdet
from hdet import Engine, TailAverage
from hdet.controllers import Hold
from hdet.engine.tail import Tail
from hdet.errors import CheckpointError, ConfigError
from hdet.record import WindowRecord
from hdet.spreads import TwoLevel

# -- a run that is stopped, goes back, or trains other parameters ---------------------------------


@pytest.mark.parametrize("stop", [6, 8, 14, 17, 19])
def test_stopped_at_any_step_and_resumed_it_ends_the_same(
    stop: int, problem: Any, train: Any, assert_same: Any, tmp_path: Any
) -> None:
    norm = nn.BatchNorm1d(6)
    whole = engine_of(problem, WILD, copy.deepcopy(norm))
    train(whole, batch=noisy)
    assert whole.history.windows[-1].tail
    begun = engine_of(problem, WILD, copy.deepcopy(norm))
    train(begun, stop, batch=noisy)
    torch.save(begun.state_dict(), tmp_path / "state.pt")
    resumed = engine_of(problem, WILD, copy.deepcopy(norm))
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    train(resumed, batch=noisy)
    assert resumed.history.windows[-1].tail == whole.history.windows[-1].tail
    assert_same(resumed.hosts[0][0].state_dict(), whole.hosts[0][0].state_dict())


def test_a_state_of_a_run_that_is_over_has_no_tail(problem: Any, train: Any, assert_same: Any) -> None:
    engine = engine_of(problem)
    train(engine, batch=noisy)
    state = copy.deepcopy(engine.state_dict())
    assert state["tail"] == {"layers": [], "parts": []}
    other = engine_of(problem)
    other.load_state_dict(state)
    assert_same(other.hosts[0][0].state_dict(), engine.hosts[0][0].state_dict())


def test_a_state_without_a_tail_begins_it_anew(problem: Any, train: Any) -> None:
    """As of a sharded checkpoint, or of an engine that had none; and an engine without one takes no notice of it."""
    engine = engine_of(problem, tail=TailAverage(starts=(0.4,), significance=0.0))
    path = walked(engine, train, until=12)
    state = copy.deepcopy(engine.state_dict())
    alone = engine_of(problem, tail=None)
    alone.load_state_dict(copy.deepcopy(state))
    assert all(map(torch.equal, weights_of(alone), path[-1]))
    del state["tail"]
    engine.load_state_dict(state)
    path += walked(engine, train)
    told = engine.history.windows[-1].tail
    assert [part["start"] for part in told["parts"]] == [12]
    assert close(weights_of(engine), mixed(told, path))


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part["values"].pop(),
        lambda part: part.update(values=[value[:1] for value in part["values"]]),
        lambda part: part.update(flags=[not flag for flag in part["flags"]]),
    ],
)
def test_a_tail_of_other_parameters_is_begun_anew(change: Any, problem: Any, train: Any) -> None:
    engine = engine_of(problem, tail=TailAverage(starts=(0.4,), significance=0.0))
    train(engine, 12, batch=noisy)
    state = copy.deepcopy(engine.state_dict())
    change(state["tail"]["parts"][0])
    engine.load_state_dict(state)
    train(engine, batch=noisy)
    assert [part["start"] for part in engine.history.windows[-1].tail["parts"]] == [12]


@pytest.mark.parametrize("lacking", ["layers", "parts", *(f"parts.0.{name}" for name in PART)])
def test_a_state_whose_tail_lacks_something_is_refused(lacking: str, problem: Any, train: Any) -> None:
    engine = engine_of(problem)
    train(engine, 13, batch=noisy)
    state = copy.deepcopy(engine.state_dict())
    of_part, _, name = lacking.rpartition(".")
    del (state["tail"]["parts"][0] if of_part else state["tail"])[name]
    with pytest.raises(CheckpointError, match=f"tail.{lacking}"):
        engine.load_state_dict(state)
    assert engine.step_count == 13


def test_a_window_in_which_all_failed_is_left_out(problem: Any, train: Any) -> None:
    """The run goes on from the weights that the means lead to."""
    engine = engine_of(problem, tail=TailAverage(starts=(0.0,)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own: Tensor = problem.loss(model, batch)
        return own * float("nan") if 8 <= engine.step_count < 12 else own

    path = walked(engine, train, loss=loss)
    assert engine.history.windows[2].faults[-1]["kind"] == "restored"
    told = engine.history.windows[-1].tail
    assert [part["start"] for part in told["parts"]] == [0]
    assert close(weights_of(engine), mixed(told, [*path[:8], *path[12:]]))


def test_where_a_guard_goes_back_it_begins_anew(problem: Any, train: Any) -> None:
    class Once(hdet.engine.guard.Rewind):
        kind = "once"

        def watch(self, scene: Any) -> Any:
            watch = super().watch(scene)
            look = watch.look
            watch.look = lambda harvest, *told: "rewound" if harvest.window.index == 2 else look(harvest, *told)
            return watch

    engine = engine_of(problem, tail=TailAverage(starts=(0.0,), significance=0.0), guard=Once(overshoot=None))
    path = walked(engine, train)
    assert engine.history.windows[2].faults[-1]["kind"] == "rewound"
    told = engine.history.windows[-1].tail
    assert [part["start"] for part in told["parts"]] == [12]
    assert close(weights_of(engine), mixed(told, path))


def test_where_all_failed_in_the_last_window_the_restored_weights_are_mixed(problem: Any, train: Any) -> None:
    engine = engine_of(problem)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own: Tensor = problem.loss(model, batch)
        return own * float("nan") if engine.step_count >= 16 else own

    path = walked(engine, train, loss=loss)
    told = engine.history.windows[-1].tail
    assert [(part["start"], part["stop"]) for part in told["parts"]] == [(8, 16)]
    assert close(weights_of(engine), mixed(told, [*path[:16], *[path[15]] * 4]))
    assert engine.state_dict()["tail"]["parts"] == []


def test_a_resume_that_trains_what_was_trained_keeps_the_tail(problem: Any, train: Any) -> None:
    """A layer that was thawed on the way is thawed before the state is loaded, as a user would."""

    def begun() -> tuple[nn.Module, Engine]:
        model = problem.model()
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        knob = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())
        home = hdet.micro_batches(model, torch.optim.SGD(model[2].parameters(), lr=RESTLESS), n=1)
        tail = TailAverage(starts=(0.0,))
        return model, Engine(home, [knob], window=WINDOW, signal=problem.probe(), total_steps=TOTAL, tail=tail)

    model, engine = begun()
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)
    walked(engine, train, until=2 * WINDOW)
    other, resumed = begun()
    for parameter in other[0].parameters():
        parameter.requires_grad_(True)
    resumed.load_state_dict(engine.state_dict())
    here, there = (one.state_dict()["tail"]["parts"] for one in (engine, resumed))
    assert here
    assert [part["steps"] for part in there] == [part["steps"] for part in here]


def test_where_other_parameters_can_change_it_begins_anew(problem: Any, train: Any) -> None:
    """A parameter thawed within a window counts from the next one on."""
    model = problem.model()
    first, last = model[0], model[2]
    optimizer = torch.optim.SGD(last.parameters(), lr=RESTLESS)
    for parameter in first.parameters():
        parameter.requires_grad_(False)
    knob = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())
    home = hdet.micro_batches(model, optimizer, n=1)
    tail = TailAverage(starts=(0.0,), significance=0.0)
    engine = Engine(home, [knob], window=WINDOW, signal=problem.probe(), total_steps=TOTAL, tail=tail)
    walked(engine, train, until=8)
    for parameter in first.parameters():
        parameter.requires_grad_(True)
    walked(engine, train, until=TOTAL - 1)
    (part,) = engine.state_dict()["tail"]["parts"]
    assert (part["start"], part["steps"]) == (12, 4)


def test_of_buffers_that_grow_there_is_no_mean(problem: Any, train: Any) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.running_mean = torch.cat([self.running_mean, torch.ones(1)])
            return x

    engine = engine_of(problem, RESTLESS, Growing())
    path = walked(engine, train)
    assert close(weights_of(engine), mixed(engine.history.windows[-1].tail, path))
    assert torch.equal(engine.hosts[0][0][2].running_mean, torch.ones(TOTAL))  # type: ignore[index]


# -- where there is none, and what is refused -----------------------------------------------------


def test_a_run_of_unknown_length_has_none(problem: Any, train: Any) -> None:
    knob = hdet.LearningRate(evidence=hdet.evidence.Line(preview=0.0), controller=Hold())
    engine = engine_of(problem, knobs=[knob], total_steps=None)
    path = walked(engine, train, until=WINDOW * 4 + 2)
    assert engine.state_dict()["tail"] is None
    engine.finish()
    assert all(map(torch.equal, weights_of(engine), path[-1]))


@pytest.mark.parametrize("stop", [7, 8, 10, 12, 14, 16])
def test_a_run_that_ends_before_its_time_ends_with_as_much_as_there_is(stop: int, problem: Any, train: Any) -> None:
    """None before its first start; between two windows it is told in the record of the one that has closed."""
    engine = engine_of(problem, tail=TailAverage(starts=(0.4,), significance=0.0))
    path = walked(engine, train, until=stop)
    engine.finish()
    told = engine.history.windows[-1].tail
    last = held_out(problem, engine, path[-1]).mean()
    # Of one part and the last weights the quadratic is a parabola.
    half, whole = (
        (
            held_out(
                problem, engine, mixed({"last": 1 - s, "parts": [{"start": 8, "stop": stop, "share": s}]}, path)
            ).mean()
            for s in (0.5, 1.0)
        )
        if stop > 8
        else (last, last)
    )
    better = bool(min(half, whole) < last or 4 * half - whole - 3 * last < 0.0)
    assert bool(told) == better
    assert [part["start"] for part in told.get("parts", [])] == [8] * better
    assert close(weights_of(engine), mixed(told, path) if better else path[-1])
    assert [record.window for record in engine.history.windows] == list(range(-(-stop // WINDOW)))


def test_a_state_that_is_finished_at_once_ends_as_the_run_would(problem: Any, train: Any, assert_same: Any) -> None:
    """The record of the window before is in another history."""
    engine = engine_of(problem, tail=TailAverage(starts=(0.4,), significance=0.0))
    train(engine, 16, batch=noisy)
    state = copy.deepcopy(engine.state_dict())
    engine.finish()
    assert engine.history.windows[-1].tail
    other = engine_of(problem, tail=TailAverage(starts=(0.4,), significance=0.0))
    other.load_state_dict(state)
    other.finish()
    assert other.finished
    assert other.history.windows == []
    assert_same(other.hosts[0][0].state_dict(), engine.hosts[0][0].state_dict())


def test_where_its_record_cannot_be_written_the_run_has_ended_all_the_same(
    problem: Any, train: Any, tmp_path: Any
) -> None:
    history = hdet.History(tmp_path / "folder" / "history.jsonl")
    engine = engine_of(problem, tail=TailAverage(starts=(0.4,), significance=0.0), history=history)
    train(engine, 16, batch=noisy)
    (tmp_path / "folder").rename(tmp_path / "elsewhere")
    (tmp_path / "folder").write_text("")
    with pytest.warns(UserWarning, match="could not be written: .*File exists"):
        engine.finish()
    assert engine.finished
    assert history.latest[-1].tail["parts"]


def test_after_a_loss_that_failed_it_can_be_asked_again(problem: Any, train: Any, assert_same: Any) -> None:
    whole = engine_of(problem)
    train(whole, 16, batch=noisy)
    whole.finish()
    left = math.inf  # passes until memory is full

    def loss(model: nn.Module, batch: Any) -> Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise MemoryError("no more")
        own: Tensor = problem.loss(model, batch)
        return own

    engine = engine_of(problem, signal=hdet.Probe(loss, problem.probe().batches))
    path = walked(engine, train, until=16)
    left = 20
    with pytest.raises(MemoryError, match="no more"):
        engine.finish()
    assert not engine.finished
    assert all(map(torch.equal, weights_of(engine), path[-1]))
    left = math.inf
    engine.finish()
    assert_same(engine.hosts[0][0].state_dict(), whole.hosts[0][0].state_dict())
    assert engine.history.windows[-1].tail == whole.history.windows[-1].tail != {}


def test_a_schedule_free_optimizer_has_none(problem: Any, train: Any) -> None:
    model = problem.model()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer.train()
    knob = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())
    home = hdet.micro_batches(model, optimizer, n=1)
    engine = Engine(home, [knob], window=WINDOW, signal=problem.probe(), total_steps=TOTAL, tail=TailAverage())
    path = walked(engine, train)
    assert all(map(torch.equal, weights_of(engine), path[-1]))


def test_without_evidence_that_averages_it_keeps_its_own_mean(problem: Any, train: Any) -> None:
    knob = hdet.Momentum(evidence=hdet.evidence.Recursion(), controller=Hold())
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    home = hdet.micro_batches(model, optimizer, n=1)
    engine = Engine(home, [knob], window=WINDOW, signal=problem.probe(), total_steps=TOTAL, tail=TailAverage())
    path = walked(engine, train)
    assert close(weights_of(engine), mixed(engine.history.windows[-1].tail, path))


@pytest.mark.parametrize("starts", [(), (0.7, 0.4), (0.4, 0.4), (-0.1,), (1.0,), (float("nan"),)])
def test_starts_are_shares_of_the_run_that_rise(starts: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="starts"):
        TailAverage(starts=starts)


def test_a_tail_needs_a_probe_and_one_model(problem: Any) -> None:
    with pytest.raises(ConfigError, match=r"tail=TailAverage\(\) compares the held-out loss"):
        engine_of(problem, knobs=[hdet.LearningRate(spread=TwoLevel(0.1))], n=2, copies=True, signal=None)
    with pytest.raises(ConfigError, match="tail must be of type Tail"):
        engine_of(problem, tail=0.4)
    members = [hdet.LearningRate(evidence=hdet.evidence.Population())]
    with pytest.raises(ConfigError, match="give tail=None"):
        engine_of(problem, knobs=members, n=4, copies=True, merge=hdet.merges.Exploit(), gradients="local")


def test_a_record_tells_of_it_in_json(problem: Any, train: Any) -> None:
    engine = engine_of(problem)
    train(engine, batch=noisy)
    record = engine.history.windows[-1]
    assert sorted(record.tail) == ["difference", "last", "parts", "stderr"]
    assert WindowRecord.from_json(record.to_json()).tail == record.tail
    assert json.loads(record.to_json())["tail"]["parts"][0]["start"] in (4, 8, 16)


def test_it_is_declared_by_its_kind() -> None:
    assert TailAverage.kind == "tail_average"
    assert Tail.from_dict({"kind": "tail_average", "starts": [0.5]}) == TailAverage(starts=(0.5,))
