"""What a notebook shows of hdet's objects: one line that says what it is, however large what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hdet
from hdet.schedules import Replay
from hdet.signals import Objective, Probe
from hdet.spreads import TwoLevel
from hdet.windows import FixedWindow


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(8.0))


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def fresh(window: int) -> list[torch.Tensor]:
    return [torch.ones(4, 2)] * 8


@pytest.mark.parametrize(
    ("signal", "told"),
    [
        (Probe(loss, [torch.ones(4, 2)] * 8), "<Probe of loss over 8 batches>"),
        (Probe(loss, fresh, at="average"), "<Probe of loss over fresh, at the average weights>"),
        (Probe(nn.MSELoss(), DataLoader(torch.ones(8, 2), batch_size=2)), "<Probe of MSELoss over 4 batches>"),
        (Objective(loss, DataLoader(Stream())), "<Objective of loss over DataLoader>"),
    ],
    ids=["list", "function", "loader", "stream"],
)
def test_a_signal_shows_where_its_batches_are_from_and_none_of_them(signal: object, told: str) -> None:
    assert repr(signal) == told


def test_an_engine_shows_where_it_stands() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    groups = [{"params": layer.parameters(), "name": f"layer{number}"} for number, layer in enumerate(model)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    probe = Probe(loss, [torch.ones(4, 2)] * 2)
    search = hdet.attach(model, optimizer, probe=probe, total_steps=10, rates="groups", window=5, quiet=True)
    rates = "learning_rate[layer0] and 2 more"
    assert repr(search) == f"<Search at step 0 of 10: {rates}>"
    for _ in range(5):
        search.loss(loss(model, torch.ones(4, 2))).backward()
        optimizer.step()
    assert repr(search.shifts) == str(search.shifts)
    assert repr(search.history) == f"<History of 1 window to step 5: {rates}>"
    assert repr(search.engine) == f"<Engine at step 5 of 10, 1 replica: {rates}>"
    assert repr(search.engine.replicas[0]) == "<Replica 0: Sequential, SGD>"
    knob = search.engine.knobs[0]
    assert repr(knob) == f"<BoundKnob learning_rate[layer0]: {knob.learned}>"
    search.detach()


def test_a_record_shows_its_loss_what_went_wrong_and_what_moved() -> None:
    moves = {"rate[a]": 0.1, "rate[b]": -0.1, "decay": 0.0}
    record = hdet.history.WindowRecord(3, 30, 40, {}, {}, [1.23456], {}, moves, False, faults=[{"kind": "rewound"}])
    assert repr(record) == "<WindowRecord 3, steps 30 to 39: loss 1.235, rewound; moved rate[a] and 1 more>"
    still = hdet.history.WindowRecord(0, 0, 5, {}, {}, [], {}, {}, False)
    assert repr(still) == "<WindowRecord 0, steps 0 to 4: loss nan; moved nothing>"


def test_a_declaration_is_printed_with_what_it_is() -> None:
    assert str(TwoLevel(0.2)) == repr(TwoLevel(0.2)) == "TwoLevel(width=0.2)"
    assert f"{FixedWindow(10)}" == "FixedWindow(steps=10)"
    replayed = Replay((0.1,) * 100_000)
    assert str(replayed) == "<Replay of 100000 steps, 0.1 to 0.1>"
    assert f"schedule={replayed}" in str(hdet.LearningRate(schedule=replayed))
