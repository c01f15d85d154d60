"""Knobs of the forward pass: which modules they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hdet
import hdet.nn
from hdet.errors import ConfigError, MatchError
from hdet.hparams.binding import ModelBinding
from hdet.spreads import TwoLevel


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.attention = hdet.nn.MultiheadAttention(4, 2, dropout=p)
        self.drop = nn.Dropout(p)
        self.channels = nn.Dropout1d(p)


class Net(nn.Module):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(p), Block(p)])
        self.head = hdet.nn.Dropout(p)
        self.loss = hdet.nn.CrossEntropyLoss(label_smoothing=0.05)


def bind(knob: Any, model: nn.Module) -> ModelBinding:
    binding = knob.bind(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(binding, ModelBinding)
    return binding


def test_dropout_takes_every_dropout_there_is() -> None:
    """hdet's own, those inside attention, and torch's."""
    model = Net()
    binding = bind(hdet.Dropout(), model)
    assert binding.read() == 0.1
    binding.write(0.3)
    for block in model.blocks:
        assert block.drop.p == block.channels.p == 0.3
        assert block.attention.dropout == pytest.approx(0.3)
    assert model.head.p == pytest.approx(0.3)
    assert len(binding.cells) == 7


def test_patterns_select() -> None:
    model = Net()
    bind(hdet.Dropout(pattern="blocks.1.*"), model).write(0.3)
    assert [block.drop.p for block in model.blocks] == [0.1, 0.3]
    assert model.head.p == pytest.approx(0.1)
    bind(hdet.Dropout(pattern=("head", "blocks.0.drop")), model).write(0.4)
    assert (model.blocks[0].drop.p, model.blocks[0].channels.p) == (0.4, 0.1)
    assert model.head.p == pytest.approx(0.4)


def test_overlapping_patterns_take_each_scalar_once() -> None:
    assert len(bind(hdet.Dropout(pattern=("*", "head")), Net()).cells) == 7


@pytest.mark.parametrize(
    ("knob", "value"),
    [(hdet.AttentionTemperature(), 1.0), (hdet.LabelSmoothing(), 0.05)],
    ids=["temperature", "smoothing"],
)
def test_the_others_take_theirs(knob: Any, value: float) -> None:
    model = Net()
    binding = bind(knob, model)
    assert binding.read() == value
    binding.write(0.5)
    assert binding.read() == 0.5
    assert knob.acts_on == "forward"
    assert knob.biases_loss


def test_different_values_need_a_schedule() -> None:
    model = Net()
    model.head.p = 0.2
    knob = hdet.Dropout()
    with pytest.raises(ConfigError, match="the selected modules hold different values"):
        bind(knob, model).read()
    engine = hdet.Engine(
        hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2),
        [hdet.Dropout(schedule=0.25, spread=TwoLevel(0))],
    )
    assert engine.bases == {"dropout": 0.25}
    assert model.blocks[0].drop.p == 0.25


def test_nothing_selected() -> None:
    with pytest.raises(MatchError, match=r"no module that matches 'tail' holds a dropout; there are \['blocks.0.att"):
        bind(hdet.Dropout(pattern="tail"), Net())
    with pytest.raises(MatchError, match=r"none does: build the model from hdet.nn, or hdet.nn.swap it"):
        bind(hdet.AttentionTemperature(), nn.Linear(1, 1))
    with pytest.raises(MatchError, match="'tail'"):
        bind(hdet.Dropout(pattern=("head", "tail")), Net())


def test_plain_dropout_in_a_compiled_model_is_refused() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1)))
    with pytest.raises(ConfigError, match=r"\['1.p'\] are plain nn.Dropout, .* call hdet.nn.swap\(model\) before"):
        bind(hdet.Dropout(), model)
    own = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))
    hdet.nn.swap(own)
    assert bind(hdet.Dropout(), torch.compile(own)).read() == pytest.approx(0.1)
    in_place = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))
    in_place.compile()
    with pytest.raises(ConfigError, match="would recompile"):
        bind(hdet.Dropout(), in_place)


def test_each_replica_has_scalars_of_its_own(problem: Any) -> None:
    model = problem.model(hdet.nn.Dropout(0.3))
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=4)
    knob = hdet.Dropout(spread=TwoLevel(0.1))
    engine = hdet.Engine(replicas, [knob], gradients="local", signal=problem.probe())
    rates = [replica.model[2].p for replica in engine.replicas]
    assert sorted(rates) == rates or len(set(rates)) == 2
    assert rates == pytest.approx(engine.knobs[0].values(0, range(4)))
