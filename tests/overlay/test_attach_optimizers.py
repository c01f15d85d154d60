"""hdet.attach with a learning rate for each kind of optimizer in a chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouped_runs import PROBE, STEPS, train
from torch import nn

import hdet
from hdet.hparams.binding import GroupBinding

EACH = ["learning_rate[AdamW]", "learning_rate[Muon]"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def chain(model: nn.Sequential, muon: float = 3e-3, adam: float = 3e-3) -> hdet.ChainedOptimizer:
    """Muon for the matrix in the middle, AdamW for the others and for the biases, whose rate is half as high."""
    first, middle, last = model[0], model[2], model[4]
    matrices = {"params": [first.weight, last.weight], "lr": adam}
    biases = {"params": [first.bias, middle.bias, last.bias], "lr": adam / 2}
    return hdet.ChainedOptimizer(
        torch.optim.Muon([middle.weight], lr=muon, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([matrices, biases]),
    )


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> hdet.Search:
    options = {"probe": PROBE, "total_steps": STEPS, "window": 5, "exclude": "weight_decay", "quiet": True, **options}
    return hdet.attach(model, optimizer, **options)


def rates_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> list[str]:
    search = attach(model, optimizer, **options)
    search.detach()
    return sorted(search.shifts)


def test_each_kind_of_optimizer_has_a_rate_where_nobody_says(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    assert rates_of(model, chain(model), quiet=False) == EACH
    assert (
        'each kind of optimizer has a learning rate of its own; rates="together" keeps one' in capsys.readouterr().out
    )
    assert rates_of(model, chain(model), rates="together") == ["learning_rate"]
    assert rates_of(model, chain(model), knobs=[hdet.LearningRate()]) == ["learning_rate"]
    assert rates_of(model, chain(model), exclude=["weight_decay", "learning_rate"]) == []
    assert rates_of(model, chain(model), schedule=None) == ["learning_rate"], "no peak, nothing to compare"
    assert rates_of(model, chain(model), schedule=None, rates="optimizers") == EACH
    optimizer = chain(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    assert rates_of(model, optimizer, scheduler=scheduler) == EACH


def test_kinds_of_one_name_are_told_apart() -> None:
    own = type("AdamW", (torch.optim.RMSprop,), {"__module__": "mine"})
    model = network()
    parts = [kind(model[index].parameters(), lr=1e-3) for kind, index in ((own, 0), (torch.optim.AdamW, 2))]
    optimizer = hdet.ChainedOptimizer(*parts, torch.optim.SGD(model[4].parameters(), lr=1e-3))
    assert rates_of(model, optimizer) == [
        "learning_rate[SGD]",
        "learning_rate[mine.AdamW]",
        "learning_rate[torch.optim.adamw.AdamW]",
    ]


def test_where_one_kind_has_vectors_alone_the_ratio_stays() -> None:
    """Nothing tells how far a vector's steps go."""
    model = network()
    matrices = [own for own in model.parameters() if own.ndim == 2]
    vectors = [own for own in model.parameters() if own.ndim == 1]
    optimizer = hdet.ChainedOptimizer(torch.optim.Muon(matrices, lr=3e-2), torch.optim.AdamW(vectors, lr=3e-3))
    search = attach(model, optimizer)
    train(model, optimizer, search, stop=30)
    factors = [shift.factor for shift in search.shifts.values()]
    assert factors[0] == pytest.approx(factors[1])
    assert factors[0] != 1.0


def test_of_one_kind_there_is_one_rate() -> None:
    model = network()
    alike = hdet.ChainedOptimizer(*(torch.optim.AdamW(model[index].parameters(), lr=1e-3) for index in (0, 2, 4)))
    assert rates_of(model, alike) == ["learning_rate"]
    assert rates_of(model, alike, rates="optimizers") == ["learning_rate"]
    alone = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert rates_of(model, alone, rates="optimizers") == ["learning_rate"]


@pytest.mark.parametrize(("muon", "adam"), [(3e-2, 3e-3), (3e-3, 3e-2)])
def test_a_wrong_ratio_comes_nearer(muon: float, adam: float) -> None:
    model = network()
    optimizer = chain(model, muon, adam)
    search = attach(model, optimizer)
    train(model, optimizer, search, stop=30)
    changed = search.shifts[EACH[1]].factor / search.shifts[EACH[0]].factor
    assert (changed < 0.5) if muon > adam else (changed > 2.0)


def test_groups_of_one_optimizer_keep_their_ratio() -> None:
    model = network()
    optimizer = chain(model)
    search = attach(model, optimizer)
    held: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: held.append([group["lr"] for group in optimizer.param_groups]))
    train(model, optimizer, search, stop=30)
    assert {round(matrices / biases, 9) for _, matrices, biases in held} == {2.0}
    assert len({round(muon / matrices, 3) for muon, matrices, _ in held}) > 1


def test_a_run_goes_on_from_its_state() -> None:
    ends = []
    for stops in ((40,), (17, 40)):
        model, saved = network(), None
        start = 0
        for stop in stops:
            model = network()
            optimizer = chain(model)
            search = attach(model, optimizer)
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                search.load_state_dict(saved[2])
            train(model, optimizer, search, start=start, stop=stop)
            saved, start = (model.state_dict(), optimizer.state_dict(), search.state_dict()), stop
            search.detach()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    for whole, resumed in zip(*ends, strict=True):
        assert torch.equal(whole, resumed)


def test_knobs_are_of_the_groups_that_each_steps() -> None:
    model = network()
    search = attach(model, chain(model))
    places = {bound.name: bound.bindings[0] for bound in search.engine.knobs}
    assert all(isinstance(binding, GroupBinding) for binding in places.values())
    assert {name: list(binding.indices) for name, binding in places.items()} == {EACH[1]: [0], EACH[0]: [1, 2]}
