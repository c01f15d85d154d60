"""The drop-in under DistributedDataParallel: the user's loop, with `scheduler.step(loss)` its only change."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.errors import CheckpointError, StepError

TOTAL, WINDOW, STOP = 17, 4, 10
OPTIONS: dict[str, Any] = {"total_steps": TOTAL, "spread": 0.2, "window": WINDOW, "auto_lr_warmup": 8, "sigma": 0.05}


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


Built = tuple[nn.Module, torch.optim.Optimizer, hdet.OneCycleHDET]


def build(given_model: bool = False, wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel) -> Built:
    model = wrap(perceptron())
    made = optimizer(model)
    more = {"model": model} if given_model else {}
    return model, made, hdet.OneCycleHDET(made, [0.1, 0.05], **OPTIONS, **more)


def train(
    built: Built, first: int, until: int = TOTAL, share: Callable[[], None] = lambda: None
) -> tuple[list[list[float]], dict[int, Any]]:
    """The user's loop on one rank; the rates in force and, as it goes, the scheduler's state before each step."""
    model, made, scheduler = built
    rates: list[list[float]] = []
    states = {}
    hook = made.register_step_pre_hook(lambda *_: rates.append([group["lr"] for group in made.param_groups]))
    for step in range(first, until):
        states[step] = copy.deepcopy(scheduler.state_dict())
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        share()
        made.step()
        made.zero_grad()
        scheduler.step(loss)
    hook.remove()
    return rates, states


def weights(built: Built) -> list[Tensor]:
    return [p.detach().clone() for p in built[0].parameters()]


def rank(given_model: bool) -> dict[str, Any]:
    """One rank of the user's script; then again from a state taken in mid-window."""
    first = build(given_model)
    rates, states = train(first, 0)
    again = build(given_model)
    again[2].load_state_dict(states[STOP])
    later, _ = train(again, STOP)
    return {
        "rates": rates,
        "bases": first[2].bases,
        "weights": weights(first),
        "same": later == rates[STOP:]
        and all(torch.equal(a, b) for a, b in zip(weights(first), weights(again), strict=True)),
    }


def one_for_all(value: Any) -> Any:
    """Rank 0's."""
    box = [value if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    return box[0]


def resumed(state: dict[str, Any]) -> dict[str, Any]:
    """A new script that loads a state, is driven from `last_epoch`, and ends."""
    built = build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built[2].load_state_dict(state)
    start, point = built[2].last_epoch, weights(built)
    rates, _ = train(built, start)
    return {
        "start": start,
        "point": point,
        "warned": [(str(w.message), w.filename) for w in caught if "the run goes on" in str(w.message)],
        "rates": rates,
        "finished": built[2].engine.finished,
        "weights": weights(built),
    }


def other_states() -> dict[str, Any]:
    """Resumes from what is not this rank's own state of the same step as the others'."""
    whole = build()
    rates, states = train(whole, 0)
    found = {
        "whole": {"rates": rates, "weights": weights(whole)},
        "rank 0's": resumed(one_for_all(states[STOP])),
        "of two steps": resumed(states[STOP + dist.get_rank()]),
    }
    scheduler = build()[2]
    with pytest.raises(CheckpointError, match=r"converged points are those of the steps \[8, 12\]"):
        scheduler.load_state_dict(states[STOP + 3 * dist.get_rank()])
    with pytest.raises(CheckpointError, match=r"different runs or moments.*points.* \[8, 12\] and their windows are"):
        scheduler.engine.load_state_dict(states[STOP + 3 * dist.get_rank()]["hdet"]["engine"])
    scaled = copy.deepcopy(states[STOP]["hdet"]["engine"])
    for value in scaled["converged"]["model"].values():
        value.mul_(1 + dist.get_rank())
    with pytest.raises(CheckpointError, match="moments: their weights have the lengths"):
        scheduler.engine.load_state_dict(scaled)
    assert scheduler.last_epoch == scheduler.engine.step_count == 0
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(scheduler)
    return found


def unshared() -> None:
    """DistributedDataParallel was forgotten; then the engine shares gradients instead."""
    with pytest.raises(StepError, match=r"differ in step 0.*DistributedDataParallel"):
        train(build(wrap=lambda model: model), 0)
    for given_model in (False, True):
        built = build(given_model, wrap=lambda model: model)
        train(built, 0, share=built[2].engine.share_gradients)
        assert built[2].engine.finished


def in_process(n: int) -> dict[str, Any]:
    """The same with the replicas in one process."""
    model = perceptron()
    made = optimizer(model)
    home = hdet.replicate(model, made, n=n)
    scheduler = hdet.OneCycleHDET(made, [0.1, 0.05], replicas=home, **OPTIONS)
    rates: list[list[float]] = []
    for _, other in home.hosts:
        other.register_step_pre_hook(lambda other, *_: rates.append([group["lr"] for group in other.param_groups]))
    for step in range(TOTAL):
        losses = [loss_of(replica.model, step, replica.index) for replica in home.local]
        for loss in losses:
            loss.backward()
        home.share_gradients()
        for _, other in home.hosts:
            other.step()
            other.zero_grad()
        scheduler.step(losses)
    by_step = [rates[row : row + n] for row in range(0, TOTAL * n, n)]
    return {"rates": by_step, "weights": list(model.parameters()), "bases": scheduler.bases}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ranks_are_the_replicas_and_resume_in_mid_window(n: int) -> None:
    expected = in_process(n)
    ranks = launch(rank, n, False)
    for index, found in enumerate(ranks):
        torch.testing.assert_close(
            torch.tensor(found["rates"]), torch.tensor(expected["rates"])[:, index], rtol=1e-4, atol=0.0
        )
        assert found["rates"][:WINDOW] == [step[index] for step in expected["rates"][:WINDOW]]
        assert found["same"]
        for own, theirs in zip(found["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(own, theirs.detach(), rtol=1e-4, atol=1e-6)
        assert found["bases"] == ranks[0]["bases"]
        assert all(torch.equal(a, b) for a, b in zip(found["weights"], ranks[0]["weights"], strict=True))


def test_the_model_may_be_given() -> None:
    ranks = launch(rank, 2, True)
    assert all(found["same"] for found in ranks)
    assert ranks[0]["bases"] == ranks[1]["bases"]


def test_from_states_that_do_not_fit_together_all_ranks_go_on_from_one_converged_point() -> None:
    """Rank 0's state everywhere, the usual way to save; and states of two steps of one window."""
    ranks = launch(other_states, 2)
    for found in ranks:
        for how in ("rank 0's", "of two steps"):
            resume, first = found[how], ranks[0][how]
            assert resume["start"] == 8
            assert all(torch.equal(a, b) for a, b in zip(resume["point"], first["point"], strict=True))
            ((message, filename),) = resume["warned"]
            assert "goes on from step 8, its last converged point, and not from step 1" in message
            assert filename == __file__
            assert resume["rates"][:WINDOW] == found["whole"]["rates"][8 : 8 + WINDOW]
            assert resume["finished"]
            assert all(torch.equal(a, b) for a, b in zip(resume["weights"], first["weights"], strict=True))
            for own, whole in zip(resume["weights"], found["whole"]["weights"], strict=True):
                torch.testing.assert_close(own, whole, rtol=1e-5, atol=1e-7)


def test_a_process_group_whose_gradients_nobody_shares_is_refused() -> None:
    launch(unshared, 2)
