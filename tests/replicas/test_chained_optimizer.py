"""Several optimizers of one model as one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as by_name
from torch.nn import functional as F

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError
from hdet.recipes.footprint import footprint

Pair = tuple[nn.Module, hdet.ChainedOptimizer]
STEPS = 24


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def parts(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Of the matrices and of the rest; their states have other entries."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    return (
        torch.optim.SGD(matrices, lr=0.05, momentum=0.9, weight_decay=1e-3),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1),
    )


def build() -> Pair:
    model = network()
    return model, hdet.ChainedOptimizer(*parts(model))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, inputs[:, :4].argmax(dim=1)


def loss_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def probe() -> hdet.Probe:
    return hdet.Probe(loss_of, [batch(-1 - part) for part in range(8)])


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: Any = range(5)) -> list[Tensor]:
    for step in steps:
        loss_of(model, batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_a_step_is_a_step_of_each_bit_for_bit(assert_same: Any) -> None:
    apart = network()
    assert_same(train(*build()), train(apart, *parts(apart)))


def test_a_closure_is_evaluated_once(assert_same: Any) -> None:
    model, optimizer = build()
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(len(losses)))
        losses.append(loss.item())
        loss.backward()
        return loss

    told = [optimizer.step(closure).item() for _ in range(5)]
    assert told == losses
    assert_same([parameter.detach() for parameter in model.parameters()], train(*build()))


def loaded(model: nn.Module, optimizer: hdet.ChainedOptimizer) -> Pair:
    other, fresh = build()
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other, fresh


def loaded_by_name(model: nn.Module, optimizer: hdet.ChainedOptimizer) -> Pair:
    other, fresh = build()
    other.load_state_dict(model.state_dict())
    by_name.set_optimizer_state_dict(other, fresh, copy.deepcopy(by_name.get_optimizer_state_dict(model, optimizer)))
    return other, fresh


def chained_again(model: nn.Module, optimizer: hdet.ChainedOptimizer) -> Pair:
    other, given = copy.deepcopy((model, optimizer.optimizers))
    return other, hdet.ChainedOptimizer(*given)


COPIES: dict[str, Callable[[nn.Module, hdet.ChainedOptimizer], Pair]] = {
    "deep copy": lambda *pair: copy.deepcopy(pair),
    "pickle": lambda *pair: pickle.loads(pickle.dumps(pair)),
    "state dict": loaded,
    "by name": loaded_by_name,
    "optimizers that have stepped": chained_again,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_goes_on_as_the_original_and_apart_from_it(name: str, assert_same: Any) -> None:
    model, optimizer = build()
    train(model, optimizer)
    other, own = COPIES[name](model, optimizer)
    own.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] = 0.02
    later = range(5, 10)
    assert_same(train(model, optimizer, steps=later), train(other, own, steps=later))
    assert own.optimizers[1].param_groups[0]["lr"] == 0.02
    assert own.optimizers[0].state[other[0].weight] is not optimizer.state[model[0].weight]  # type: ignore[index]


def test_what_it_cannot_chain_is_refused() -> None:
    model = network()
    first, second = parts(model)
    with pytest.raises(ConfigError, match=r"SGD and SGD hold the same parameter, of shape \[16, 8\]"):
        hdet.ChainedOptimizer(first, second, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="one an argument, got list"):
        hdet.ChainedOptimizer([first, second])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="AdamWScheduleFree evaluates other weights than it trains"):
        hdet.ChainedOptimizer(first, schedulefree.AdamWScheduleFree(second.param_groups[0]["params"]))


@pytest.mark.parametrize("of", ["the chain", "one of them"])
def test_parameters_added_later_are_told_and_not_passed_over(of: str) -> None:
    model, optimizer = build()
    new = nn.Parameter(torch.ones(3))
    (optimizer if of == "the chain" else optimizer.optimizers[1]).add_param_group({"params": [new]})
    with pytest.raises(ConfigError, match="chain the optimizers anew, with all their groups"):
        train(model, optimizer)


def test_a_list_of_optimizers_is_told_of_it() -> None:
    model = network()
    with pytest.raises(ConfigError, match=r"hdet.ChainedOptimizer\(first, second\), and step that"):
        hdet.attach(model, list(parts(model)), probe=probe(), total_steps=STEPS)  # type: ignore[arg-type]


def test_one_that_looks_at_the_loss_many_times_is_refused_in_a_chain_too() -> None:
    model = network()
    first, second = parts(model)
    optimizer = hdet.ChainedOptimizer(first, torch.optim.LBFGS(second.param_groups[0]["params"]))
    with pytest.raises(ConfigError, match="L-BFGS looks at the loss many times"):
        hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS)


def searched(model: nn.Module, optimizer: hdet.ChainedOptimizer, **options: Any) -> hdet.Search:
    return hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=4, quiet=True, **options)


def go_on(pair: Pair, search: hdet.Search, steps: Any) -> None:
    for step in steps:
        search.loss(loss_of(pair[0], batch(step))).backward()
        pair[1].step()
        pair[1].zero_grad()


def test_it_is_searched_as_one_optimizer_and_a_pattern_cuts_its_groups() -> None:
    """Each part's group is cut in two, and stepped by that part still; detached they are whole again."""
    pair = build()
    search = searched(*pair, rates={"first": "0.*", "last": "2.*"})
    assert [len(group["params"]) for group in pair[1].param_groups] == [1, 1, 1, 1]
    go_on(pair, search, range(STEPS))
    assert sorted(search.shifts) == ["learning_rate[first]", "learning_rate[last]", "weight_decay"]
    assert any(search.shifts.values())
    weight, bias = pair[0][0].weight, pair[0][0].bias  # type: ignore[index]
    assert set(pair[1].state[weight]) == {"momentum_buffer"}
    assert set(pair[1].state[bias]) == {"step", "exp_avg", "exp_avg_sq"}
    search.detach()
    assert [len(group["params"]) for group in pair[1].param_groups] == [2, 2]
    train(*pair)
    assert [len(part.param_groups) for part in pair[1].optimizers] == [1, 1]


def test_schedulers_of_the_parts_are_followed() -> None:
    pair = build()
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(part, 0.9) for part in pair[1].optimizers]
    search = searched(*pair, schedule=None)
    for step in range(STEPS):
        go_on(pair, search, [step])
        for scheduler in schedulers:
            scheduler.step()
    assert search.finished
    assert [group["lr"] for group in pair[1].param_groups] == pytest.approx([0.05 * 0.9**STEPS, 0.01 * 0.9**STEPS])


def test_each_groups_decay_acts_as_its_optimizer_has_it() -> None:
    """SGD's through the gradient, AdamW's on the weights: the one needs P of its own optimizer, the other none."""
    ends = []
    for left_out in (None, 0, 1):
        pair = build()
        if left_out is not None:
            pair[1].param_groups[left_out]["weight_decay"] = 0.0
        knobs = [hdet.WeightDecay(controller=Hold()), hdet.LearningRate(controller=Hold())]
        search = searched(*pair, schedule=None, knobs=knobs)
        go_on(pair, search, range(8))
        ends.append(search.history.windows[1].estimates["weight_decay"]["slope"])
    both, of_adamw, of_sgd = ends
    assert both == pytest.approx(of_adamw + of_sgd, rel=0.05)
    assert of_adamw != 0.0 != of_sgd


@pytest.mark.parametrize("stop", [0, 2, 10])
def test_a_folder_brings_it_back(stop: int, tmp_path: Path, assert_same: Any) -> None:
    """Before the first step too, where the entries of a state are found by a step of nothing."""
    ends = []
    for saved in (False, True):
        pair = build()
        engine = engine_of(pair)
        explicit(engine, pair, range(stop))
        folder = hdet.checkpoints.CheckpointFolder(tmp_path / str(saved))
        folder.save(engine)
        if saved:
            pair = build()
            engine = engine_of(pair)
            assert folder.resume(engine) is not None
            assert engine.step_count in (stop, stop // 4 * 4)
        explicit(engine, pair, range(engine.step_count, STEPS))
        ends.append([parameter.detach() for parameter in pair[0].parameters()])
    assert_same(*ends)


def engine_of(pair: Pair) -> hdet.Engine:
    return hdet.recommended(*pair, total_steps=STEPS, probe=probe(), window=4, quiet=True)


def explicit(engine: hdet.Engine, pair: Pair, steps: Any) -> None:
    for step in steps:
        with engine.replicas[0] as replica:
            loss = loss_of(replica.model, batch(step))
            loss.backward()
        pair[1].step()
        pair[1].zero_grad()
        engine.step(loss.detach())


def test_find_tries_rates_of_all_on_copies(assert_same: Any) -> None:
    pair = build()
    before = [parameter.detach().clone() for parameter in pair[0].parameters()]
    estimate = hdet.find(
        *pair, loss=loss_of, batches=[batch(step) for step in range(20)], probe=probe(), total_steps=200
    )
    assert estimate.learning_rate > 0.0
    assert_same(before, [parameter.detach() for parameter in pair[0].parameters()])
    assert not pair[1].state


def test_its_footprint_is_known_before_its_first_step() -> None:
    """The best point, on the host: weights and the state that each part will have, AdamW's two step counts too."""
    model, optimizer = build()
    found = footprint(model, optimizer, [hdet.LearningRate()])
    matrices, rest = (sum(p.numel() for p in part.param_groups[0]["params"]) for part in optimizer.optimizers)
    assert found.bytes("host") == 4 * (2 * matrices + 3 * rest + 2)
    train(model, optimizer)
    assert footprint(model, optimizer, [hdet.LearningRate()]).bytes("host") == found.bytes("host")
