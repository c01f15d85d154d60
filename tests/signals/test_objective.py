"""Training batches apart from the loop: what they draw leaves training's random numbers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from hdet import Objective
from hdet.errors import ConfigError

LOADER = DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)


def loss(model: Any, batch: Any) -> Any:
    return model(batch)


@pytest.mark.parametrize(
    "batches", [LOADER, lambda window: [torch.randn(2) for _ in range(3)]], ids=["loader", "drawn"]
)
def test_what_it_draws_is_the_windows_and_the_trainings_numbers_are_left(batches: Any) -> None:
    objective, before = Objective(loss, batches), torch.get_rng_state()
    first = torch.stack(objective.draw(0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(torch.stack(objective.draw(0)), first)
    assert not torch.equal(torch.stack(objective.draw(1)), first)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(8.0))


def test_a_loader_of_a_stream_is_gone_through() -> None:
    drawn = Objective(loss, DataLoader(Stream(), batch_size=4)).draw(0)
    assert [batch.tolist() for batch in drawn] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ((torch.ones(2) for _ in range(3)), "an objective's batches are gone through in every window"),
        (3, "batches is a list, a DataLoader or a function"),
        (None, "batches is a list, a DataLoader or a function"),
        ("abc", "batches is a list, a DataLoader or a function"),
        ([torch.ones(2)], "an objective needs at least 2 training batches"),
    ],
)
def test_batches_that_cannot_be(batches: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Objective(loss, batches)
