"""The drop-in under DistributedDataParallel: the user's loop, with `scheduler.step(loss)` its only change."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet

RANKS, TOTAL, WINDOW, STOP = 2, 17, 4, 10
OPTIONS: dict[str, Any] = {
    "total_steps": TOTAL,
    "spread": 0.2,
    "window": WINDOW,
    "auto_lr_warmup": 8,
    "sigma": 0.05,
}


def perceptron() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, step: int, replica: int) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * step + replica))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def rank(given_model: bool) -> dict[str, Any]:
    """One rank of the user's script; then again from a state taken in mid-window."""

    def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer, Any]:
        model = DistributedDataParallel(perceptron())
        made = optimizer(model)
        more = {"model": model} if given_model else {}
        return model, made, hdet.OneCycleHDET(made, [0.1, 0.05], **OPTIONS, **more)

    def train(built: Any, first: int) -> tuple[list[list[float]], Any]:
        model, made, scheduler = built
        rates, state = [], None
        for step in range(first, TOTAL):
            if step == STOP and first == 0:
                state = copy.deepcopy(scheduler.state_dict())
            rates.append([group["lr"] for group in made.param_groups])
            loss = loss_of(model, step, dist.get_rank())
            loss.backward()
            made.step()
            made.zero_grad()
            scheduler.step(loss)
        return rates, state

    first = build()
    rates, state = train(first, 0)
    again = build()
    again[2].load_state_dict(state)
    later, _ = train(again, STOP)
    return {
        "rates": rates,
        "bases": first[2].bases,
        "weights": [p.detach().clone() for p in first[0].parameters()],
        "same": later == rates[STOP:]
        and all(torch.equal(a, b) for a, b in zip(first[0].parameters(), again[0].parameters(), strict=True)),
    }


def in_process() -> dict[str, Any]:
    """The same with two replicas in one process."""
    model = perceptron()
    made = optimizer(model)
    home = hdet.replicate(model, made, n=RANKS)
    scheduler = hdet.OneCycleHDET(made, [0.1, 0.05], replicas=home, **OPTIONS)
    rates = []
    for step in range(TOTAL):
        rates.append([[group["lr"] for group in other.param_groups] for _, other in home.hosts])
        losses = [loss_of(replica.model, step, replica.index) for replica in home.local]
        for loss in losses:
            loss.backward()
        home.share_gradients()
        for _, other in home.hosts:
            other.step()
            other.zero_grad()
        scheduler.step(losses)
    return {"rates": rates, "weights": list(model.parameters()), "bases": scheduler.bases}


def test_ranks_are_the_replicas_and_resume_in_mid_window() -> None:
    expected = in_process()
    ranks = launch(rank, RANKS, False)
    for index, found in enumerate(ranks):
        torch.testing.assert_close(
            torch.tensor(found["rates"]), torch.tensor(expected["rates"])[:, index], rtol=1e-4, atol=0.0
        )
        assert found["rates"][:WINDOW] == [step[index] for step in expected["rates"][:WINDOW]]
        assert found["same"]
        for own, theirs in zip(found["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(own, theirs.detach(), rtol=1e-4, atol=1e-6)
    assert ranks[0]["bases"] == ranks[1]["bases"]
    assert all(torch.equal(a, b) for a, b in zip(ranks[0]["weights"], ranks[1]["weights"], strict=True))


def test_the_model_may_be_given() -> None:
    ranks = launch(rank, RANKS, True)
    assert all(found["same"] for found in ranks)
    assert ranks[0]["bases"] == ranks[1]["bases"]
