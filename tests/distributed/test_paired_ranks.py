"""Pairs of replicas on ranks: each pair's data and dropout masks are those of one process. Real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import WIDTH, batch, difference, loss_of, told, weights

import hdet
from hdet.controllers import Gated

STEPS, WINDOW = 16, 8
Found = dict[str, Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Dropout(0.3), nn.Linear(16, 1)
    )


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def trained(replicas: hdet.replicas.Replicas) -> Found:
    """A run in which the global generators of the ranks differ, and do not matter."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 99)
    engine = hdet.Engine(
        replicas,
        [hdet.Dropout(evidence=hdet.evidence.Contrast(paired=True, refresh=4), controller=Gated(0.1, gate=0.0))],
        window=WINDOW,
        total_steps=4 * STEPS,
        signal=hdet.Probe(loss_of, [batch(-1 - j, 99) for j in range(4)]),
    )
    numbers = []
    for step in range(STEPS):
        losses = []
        for replica in engine.replicas:
            with replica:
                numbers.append((step, replica.index, float(torch.rand(()))))
                loss = loss_of(replica.model, batch(step, replica.data_index))
                loss.backward()
            losses.append(loss.detach())
        engine.share_gradients()
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        engine.step(losses)
    return {"history": told(engine), "weights": weights(engine)[0], "numbers": numbers}


def everything() -> Found:
    found: Found = {}
    for name, wrap in (("plain", lambda model: model), ("ddp", DistributedDataParallel)):
        model = wrap(network())
        found[f"{name} exact"] = trained(hdet.distribute(model, descent(model), exact=True))
        model = wrap(network())
        found[name] = trained(hdet.distribute(model, descent(model)))
        for each in (2, 3):
            model = wrap(network())
            found[f"{name} {each}"] = trained(hdet.distribute(model, descent(model), micro_batches=each))
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return launch(everything, 2)


def reference(n: int) -> Found:
    torch.set_num_threads(1)
    model = network()
    return trained(hdet.replicate(model, descent(model), n=n))


def measured(found: Found) -> list[list[float]]:
    estimates = [record["estimates"]["dropout"] for record in found["history"]]
    return [[estimate["slope"], estimate["stderr"]] for estimate in estimates]


def close(found: Found, expected: Found) -> None:
    """As far as the order in which floats are added allows."""
    assert difference(found["weights"], expected["weights"]) < 2e-5
    for ours, theirs in zip(measured(found), measured(expected), strict=True):
        assert ours[0] != 0.0
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("home", ["plain", "ddp"])
def test_a_pair_on_two_ranks_is_one_in_one_process(ranks: list[Found], home: str) -> None:
    """Dropout masks included; bit for bit where gradients are added in the same order."""
    expected = reference(2)
    for found in ranks:
        assert found[f"{home} exact"]["history"] == expected["history"]
        assert difference(found[f"{home} exact"]["weights"], expected["weights"]) == 0.0
        close(found[home], expected)


@pytest.mark.parametrize("each", [2, 3])
@pytest.mark.parametrize("home", ["plain", "ddp"])
def test_micro_batches_of_two_ranks_are_pairs_of_one_run(ranks: list[Found], home: str, each: int) -> None:
    """With three on each rank the pair in the middle lies on both."""
    expected = reference(2 * each)
    drawn = sorted(number for found in ranks for number in found[f"{home} {each}"]["numbers"])
    assert drawn == expected["numbers"]
    for start in range(0, len(drawn), 2 * each):
        numbers = [number for _, _, number in drawn[start : start + 2 * each]]
        assert numbers[0::2] == numbers[1::2]
        assert len(set(numbers)) == each
    for found in ranks:
        close(found[f"{home} {each}"], expected)
