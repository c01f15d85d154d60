"""A search's state is small where little is trained, and still the same run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attach_parts import STEPS, batch, loss_of, probe
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hdet
from hdet.errors import CheckpointError


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it, and a teacher of the trained one that follows it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.frozen = nn.Linear(4, 3000).requires_grad_(False)
            self.head = nn.Linear(3000, 3).requires_grad_(False)
            self.adapter = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.2), nn.Linear(2, 3))
            self.teacher = nn.Linear(2, 3).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.frozen(inputs)) + self.adapter(inputs)  # type: ignore[no-any-return]

    @torch.no_grad()
    def follow(self) -> None:
        for own, trained in zip(self.teacher.parameters(), self.adapter[2].parameters(), strict=True):
            own.lerp_(trained, 0.1)


class Run:
    def __init__(self) -> None:
        self.model = Adapted()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=3e-3)
        self.search = hdet.attach(
            self.model, self.optimizer, probe=probe(), total_steps=STEPS, window=5, micro_batches=1, quiet=True
        )

    def train(self, start: int, stop: int, *, late: bool = False) -> None:
        """The teacher follows before the optimizer's step, or `late`, after it."""
        for step in range(start, stop):
            torch.manual_seed(step)
            self.search.loss(loss_of(self.model, batch(step))).backward()
            if not late:
                self.model.follow()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if late:
                self.model.follow()

    def states(self) -> dict[str, Any]:
        parts = {"search": self.search, "model": self.model, "optimizer": self.optimizer}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def load(self, states: dict[str, Any], order: tuple[str, ...]) -> None:
        parts = {"search": self.search, "model": self.model, "optimizer": self.optimizer}
        for name in order:
            parts[name].load_state_dict(copy.deepcopy(states[name]))


def numbers(state: Any) -> int:
    """In all tensors of a state."""
    if isinstance(state, Tensor):
        return state.numel()
    entries = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(numbers(entry) for entry in entries)


@pytest.mark.parametrize("order", [("search", "model", "optimizer"), ("model", "optimizer", "search")])
@pytest.mark.parametrize("at", [10, 13])
@pytest.mark.parametrize("late", [False, True])
def test_without_frozen_weights_it_is_the_same_run(
    at: int, late: bool, order: tuple[str, ...], assert_same: Any
) -> None:
    straight = Run()
    straight.train(0, at, late=late)
    states = straight.states()
    straight.train(at, STEPS, late=late)
    resumed = Run()
    resumed.train(0, 2, late=late)
    resumed.load(states, order)
    resumed.train(at, STEPS, late=late)
    assert_same(straight.model.state_dict(), resumed.model.state_dict())
    assert straight.search.shifts == resumed.search.shifts


class Made(TorchDispatchMode):
    """The sizes of all tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not any(out is given for given in args):
            own = [given for given in args if isinstance(given, Tensor)]
            if all(out.untyped_storage().data_ptr() != given.untyped_storage().data_ptr() for given in own):
                self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("at", [10, 13])
def test_frozen_weights_are_not_even_copied(at: int) -> None:
    run = Run()
    run.train(0, at)
    with Made() as made:
        run.search.state_dict()
    assert 0 < max(made.sizes) < run.model.frozen.bias.numel()


@pytest.mark.parametrize("at", [10, 13])
def test_a_state_holds_no_frozen_weights(at: int) -> None:
    run = Run()
    run.train(0, at)
    state = run.search.state_dict()["engine"]
    points = [
        state["converged"],
        state["watch"]["held"],
        *(state["open"]["replicas"].values() if state["open"] else ()),
    ]
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    for point in points:
        assert numbers(point) < 5 * trained < numbers(run.model.state_dict()) / 100
        assert ("teacher.weight" in point["model"]) == (at == 13)  # it has changed since the window opened


@pytest.mark.parametrize("late", [False, True])
def test_the_state_of_a_finished_run_has_the_teacher_that_moved(late: bool) -> None:
    run, again = Run(), Run()
    run.train(0, STEPS, late=late)
    assert run.search.finished
    state = run.search.state_dict()
    assert "frozen.weight" not in state["engine"]["converged"]["model"]
    again.search.load_state_dict(state)
    assert torch.equal(again.model.teacher.weight, run.model.teacher.weight)


def test_a_state_of_another_model_is_still_refused() -> None:
    run, other = Run(), Run()
    state = run.search.state_dict()
    del state["engine"]["converged"]["model"]["adapter.0.weight"]
    with pytest.raises(CheckpointError, match=r"adapter\.0\.weight"):
        other.search.load_state_dict(state)


def _without(part: str) -> Any:
    def change(state: dict[str, Any]) -> None:
        del state[part]

    return change


def _older(state: dict[str, Any]) -> None:
    state["format"] = 1
    del state["written"]


def _misshapen(state: dict[str, Any]) -> None:
    state["written"] = {"teacher.weight": torch.zeros(5, 5)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_older, "format 1"),
        (_without("written"), "lacks written"),
        (_without("losses"), "lacks losses"),
        (lambda state: state["losses"].pop("known"), "lacks known"),
        (_misshapen, r"teacher\.weight"),
    ],
)
def test_a_state_that_lacks_a_part_is_refused_before_anything_changes(change: Any, said: str, assert_same: Any) -> None:
    run, other = Run(), Run()
    run.train(0, 13)
    state = copy.deepcopy(run.search.state_dict())
    change(state)
    other.train(0, 2)
    before = other.states()
    with pytest.raises(CheckpointError, match=said):
        other.search.load_state_dict(state)
    assert other.search.engine.step_count == 2
    assert_same(before, other.states())
