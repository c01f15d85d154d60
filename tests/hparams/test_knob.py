"""Declarations: what every knob shares, in Python and in YAML, built in or the user's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.optim import Optimizer

import hdet
from hdet import Engine, Knob
from hdet.contrib import Geometric, Kalman
from hdet.controllers import Newton, Paper
from hdet.designs import Fixed
from hdet.errors import ConfigError
from hdet.estimators import Softmax
from hdet.hparams.binding import Binding, GroupBinding
from hdet.hparams.knob import ActsOn
from hdet.schedules import Constant, OneCycle, Replay
from hdet.spaces import Linear, Relative
from hdet.spec import members
from hdet.spreads import OneSided, Symmetric, TwoLevel

BUILT_IN = [
    "attention_temperature",
    "beta1",
    "beta2",
    "dropout",
    "label_smoothing",
    "learning_rate",
    "momentum",
    "scalar",
    "weight_decay",
]

RICH = [
    hdet.LearningRate(),
    hdet.LearningRate(
        name="rate",
        groups=("decay", 1),
        space=Relative(),
        bounds=(1e-6, 1.0),
        spread=Symmetric(1 / 9),
        schedule=OneCycle(3e-4, total_steps=2000, three_phase=True),
        controller=Paper(floor=1e-9),
        evidence=hdet.evidence.Divergent(estimator=Softmax(0.1), design=Fixed(), tilt=0.5),
        authority=1.5,
    ),
    hdet.WeightDecay(schedule=0.1, spread=Geometric(0.5, ratio=3.0)),
    hdet.Momentum(groups=0),
    hdet.Beta1(),
    hdet.Beta2(controller=Newton()),
    hdet.Dropout(pattern=("blocks.*", "head"), spread=OneSided(0.1, "down"), accept_bias=True),
    hdet.AttentionTemperature(schedule=Replay((1.0, 2.0))),
    hdet.LabelSmoothing(evidence=hdet.evidence.Divergent(estimator=Kalman())),
    hdet.Scalar("margin", path="head.margin", space=Linear(0.5), bounds=(0, 1), effect="update", biased=False),
]


def test_every_built_in_is_registered() -> None:
    assert set(BUILT_IN) <= set(members(Knob))


@pytest.mark.parametrize("knob", RICH, ids=lambda knob: knob.label)
def test_yaml_and_back_is_equal(knob: Knob) -> None:
    text = yaml.safe_dump(knob.to_dict())
    again = Knob.from_dict(yaml.safe_load(text))
    assert again == knob
    assert type(again) is type(knob)
    assert again.to_dict() == knob.to_dict()
    assert hash(again) == hash(knob)


def test_all_kinds_are_among_them() -> None:
    assert {knob.kind for knob in RICH} == set(BUILT_IN)


def test_names() -> None:
    assert hdet.WeightDecay().label == "weight_decay"
    assert hdet.WeightDecay(name="decay").label == "decay"
    assert hdet.LearningRate(groups=0).label == "learning_rate[0]"
    assert hdet.LearningRate(groups=("a", 1)).label == "learning_rate[a,1]"
    assert hdet.Dropout(pattern="head").label == "dropout[head]"


def test_a_number_is_a_constant_schedule() -> None:
    assert hdet.WeightDecay(schedule=0.1) == hdet.WeightDecay(schedule=Constant(0.1))
    assert hdet.WeightDecay(schedule=1).schedule == Constant(1.0)
    with pytest.raises(ConfigError, match="weight_decay: schedule"):
        hdet.WeightDecay(schedule=True)


def test_declarations_are_frozen() -> None:
    knob = hdet.LearningRate()
    with pytest.raises(Exception, match="frozen"):
        knob.authority = 2.0
    assert knob.replace(authority=2.0).authority == 2.0
    assert knob.authority == 7.0
    with pytest.raises(ConfigError, match="authority"):
        knob.replace(authority=-2.0)


@pytest.fixture
def epsilon() -> Iterator[type[Knob]]:
    """A knob as a user would write it."""

    @hdet.spec.register
    class Epsilon(Knob):
        """The epsilon of Adam."""

        bounds: tuple[float, float] = (1e-12, 1.0)

        @property
        def acts_on(self) -> ActsOn:
            return "update"

        def bind(self, model: nn.Module, optimizer: Optimizer) -> Binding:
            return GroupBinding(optimizer, (0,), (1.0,), "eps", None, self.bounds)

    yield Epsilon
    del Knob._members["epsilon"]


def test_a_knob_of_ones_own(epsilon: Any, problem: Any, train: Any) -> None:
    assert epsilon.kind == "epsilon"
    knob = Knob.from_dict({"kind": "epsilon", "spread": {"kind": "two_level", "width": 0.5}})
    assert knob == epsilon(spread=TwoLevel(0.5))
    model = problem.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
    engine = Engine(hdet.replicate(model, optimizer, n=4), [knob], window=3, total_steps=6)
    assert len({own.param_groups[0]["eps"] for own in engine.optimizers}) == 2
    records = train(engine)
    assert records[0].bases == {"epsilon": 1e-4}


def test_two_of_one_kind_are_refused(epsilon: Any) -> None:
    with pytest.raises(ConfigError, match=r"knob 'epsilon' is already .*Epsilon; set another `kind` on .*Other"):

        @hdet.spec.register
        class Other(Knob):
            kind = "epsilon"
