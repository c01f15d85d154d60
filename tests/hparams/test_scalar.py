"""Scalars of the user's own, by path or by getter and setter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from torch import nn

import hdet
import hdet.nn
from hdet import Engine, Knob, Scalar
from hdet.controllers import Hold
from hdet.errors import ConfigError, MatchError


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.margin = 0.5
        self.count = 2
        self.drop = hdet.nn.Dropout(0.1)
        self.knob = hdet.nn.KnobTensor(0.25, role="own")
        self.register_buffer("scale", torch.tensor(2.0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)
        self.head = Head()
        self.top = 1.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) * self.head.scale
        return out


def bind(path: str, model: nn.Module, **fields: Any) -> Any:
    knob = Scalar("x", path=path, **{"bounds": (0.01, 10.0), **fields})
    return knob.bind(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("path", "value"),
    [("head.margin", 0.5), ("head.count", 2.0), ("head.scale", 2.0), ("head.knob", 0.25), ("top", 1.5)],
)
def test_by_path(path: str, value: float) -> None:
    model = Net()
    binding = bind(path, model)
    assert binding.read() == value
    binding.write(0.75)
    assert binding.read() == 0.75


def test_a_buffer_stays_the_same_tensor() -> None:
    model = Net()
    held = model.head.scale
    bind("head.scale", model).write(0.75)
    assert model.head.scale is held
    assert held.item() == 0.75


def test_a_modules_float_and_the_tensor_behind_it_are_one_target() -> None:
    model = Net()
    assert bind("head.drop.p", model).targets == bind("head.drop.p_knob", model).targets


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tail.margin", "x: the model has no module 'tail'"),
        ("head.width", "x: Head 'head' has no attribute 'width'"),
        ("width", "x: Net '' has no attribute 'width'"),
    ],
)
def test_paths_that_lead_nowhere(path: str, message: str) -> None:
    with pytest.raises(MatchError, match=message):
        bind(path, Net())


def test_what_is_no_scalar_is_refused_before_anything_is_written() -> None:
    model = Net()
    model.register_buffer("whole", torch.tensor(3))
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    found = {"head.training": "bool", "inner.weight": r"a tensor of shape \(1, 4\)", "whole": "a tensor .* torch.int64"}
    for path, what in found.items():
        for schedule in (None, 0.5):
            with pytest.raises(ConfigError, match=f"a knob is one scalar.*holds {what}"):
                Engine(
                    replicas,
                    [Scalar("x", path=path, schedule=schedule, bounds=(0.01, 10.0), effect="update", biased=False)],
                )
    assert model.head.training is True
    assert model.inner.weight.shape == (1, 4)


def test_what_the_optimizer_trains_is_no_knob() -> None:
    model = Net()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="x: 'temperature' is a parameter that the optimizer trains, so no knob can"):
        bind("temperature", model)
    model.temperature.requires_grad_(False)
    assert bind("temperature", model).read() == 1.0, "frozen, though the optimizer holds it"


def test_by_getter_and_setter(problem: Any, train: Any) -> None:
    written: list[tuple[int, float]] = []

    def put(model: Any, value: float) -> None:
        written.append((id(model), value))
        model.head.margin = value

    knob = Scalar("margin", get=lambda m: m.head.margin, set=put, bounds=(0.1, 1.0), effect="update", biased=False)
    model = Net()
    engine = Engine(hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01), n=4), [knob], window=3)
    assert engine.bases == {"margin": 0.5}
    assert [replica.model.head.margin for replica in engine.replicas] == engine.knobs[0].values(0, range(4))
    assert len({key for key, _ in written}) == 4
    train(engine, 6)
    state = engine.state_dict()
    engine.load_state_dict(state)
    with pytest.raises(ConfigError, match="margin: a getter and a setter cannot be written down; use path="):
        knob.to_dict()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"path": "a", "get": lambda m: 0.0, "set": lambda m, v: None},
        {"get": lambda m: 0.0},
        {"set": lambda m, v: None},
        {"path": "a", "set": lambda m, v: None},
    ],
)
def test_one_way_and_one_way_only(fields: Any) -> None:
    with pytest.raises(ConfigError, match="give either path=, or both get= and set="):
        Scalar("x", bounds=(0, 1), **fields)


@pytest.mark.parametrize(
    ("found", "match"),
    [
        (None, r"^x: its get= has to return one number, and gave None"),
        ([1.0], r"^x: its get= has to return one number, and gave \[1.0\]"),
        (torch.ones(2), "^x: its get= has to return one number"),
        (float("nan"), "^x: .*finite number"),
    ],
)
def test_a_base_that_is_no_number_is_told_with_its_knob(found: Any, match: str) -> None:
    model = Net()
    replicas = hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=0.01), n=2)
    knob = Scalar("x", get=lambda m: found, set=lambda m, v: None, bounds=(0.1, 1), effect="update")
    with pytest.raises(ConfigError, match=match):
        Engine(replicas, [knob], window=2, total_steps=4)


def test_bounds_and_name_are_required() -> None:
    with pytest.raises(ConfigError, match="scalar: bounds"):
        Scalar("x", path="a")
    with pytest.raises(ConfigError, match="scalar: name"):
        Scalar(path="a", bounds=(0, 1))


def test_yaml(tmp_path: Any) -> None:
    knob = Scalar("margin", path="head.margin", bounds=(0.1, 1.0), effect="update", biased=False)
    assert Knob.from_dict(yaml.safe_load(yaml.safe_dump(knob.to_dict()))) == knob


def test_a_buffer_that_is_a_knob_is_explored_and_comes_home_to_its_base(problem: Any, train: Any) -> None:
    model = Net()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01), n=4)
    knob = Scalar("scale", path="head.scale", bounds=(0.1, 10.0), controller=Hold())
    engine = Engine(replicas, [knob], window=3, gradients="local", signal=problem.probe(), total_steps=6)
    assert len({float(replica.model.head.scale) for replica in engine.replicas}) == 2
    train(engine, 4)
    assert float(engine.state_dict()["converged"]["model"]["head.scale"]) == 2.0
    train(engine)
    assert {float(replica.model.head.scale) for replica in engine.replicas} == {2.0}
