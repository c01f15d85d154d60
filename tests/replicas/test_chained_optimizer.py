"""Several optimizers of one model as one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as by_name
from torch.nn import functional as F

import hdet
from hdet.checkpoints.named_state import optimizer_by_name
from hdet.controllers import Hold
from hdet.errors import ConfigError
from hdet.evidence import MixedDifference
from hdet.evidence.parts.preconditioner import preconditioner
from hdet.recipes.footprint import footprint
from hdet.replicas.chained_optimizer import steps_by
from hdet.replicas.distributed.distribute import _described as described
from hdet.replicas.made_state import made_state
from hdet.replicas.optimizer_numbers import kept_in_groups

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

    with torch.no_grad():
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
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        hdet.ChainedOptimizer(first, second, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="one an argument, got list"):
        hdet.ChainedOptimizer([first, second])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="two optimizers or more, got 1"):
        hdet.ChainedOptimizer(first)
    with pytest.raises(ConfigError, match="AdamWScheduleFree evaluates other weights than it trains"):
        hdet.ChainedOptimizer(first, schedulefree.AdamWScheduleFree(second.param_groups[0]["params"]))
    hdet.clip_gradients(second, norm=1.0)
    with pytest.raises(
        ConfigError, match="clips the gradients of AdamW alone; remove that, and call it with the chain"
    ):
        hdet.ChainedOptimizer(first, second)


def test_a_chain_in_a_chain_is_taken_one_by_one() -> None:
    _, optimizer = build()
    more = nn.Parameter(torch.ones(3))
    longer = hdet.ChainedOptimizer(optimizer, torch.optim.SGD([more], lr=0.1))
    assert [type(part).__name__ for part in longer.optimizers] == ["SGD", "AdamW", "SGD"]
    assert [type(steps_by(longer, group)).__name__ for group in longer.param_groups] == ["SGD", "AdamW", "SGD"]


def test_optimizers_may_be_chained_anew_in_another_order() -> None:
    first, second = build()[1].optimizers
    optimizer = hdet.ChainedOptimizer(second, first)
    assert [steps_by(optimizer, group) for group in optimizer.param_groups] == [second, first]


@pytest.mark.parametrize("what", ["group added", "group known already", "loaded"])
def test_what_is_done_to_a_part_alone_is_told_and_not_passed_over(what: str) -> None:
    model, optimizer = build()
    train(model, optimizer)
    first, second = optimizer.optimizers
    if what == "loaded":
        second.load_state_dict(copy.deepcopy(second.state_dict()))
    else:
        known = first.param_groups[0]["params"][0]
        second.add_param_group({"params": [known if "known" in what else nn.Parameter(torch.ones(3))]})
    with pytest.raises(ConfigError, match="AdamW was loaded or given other parameter groups after it was chained"):
        train(model, optimizer)


def test_a_group_of_no_part_is_refused() -> None:
    _, optimizer = build()
    with pytest.raises(ConfigError, match="nothing tells which optimizer of the chain is to step these parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 2


class Counting(torch.optim.SGD):
    """Keeps a number beside the parameters' state."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index]


def test_a_state_of_no_parameter_is_told_before_it_is_lost() -> None:
    model = network()
    first, second = parts(model)
    optimizer = hdet.ChainedOptimizer(Counting(first.param_groups[0]["params"], lr=0.1), second)
    with pytest.raises(ConfigError, match="Counting keeps a state of no parameter \\('steps'\\), which a chain"):
        train(model, optimizer)


def test_parameters_that_a_framework_puts_in_their_place_are_stepped() -> None:
    """As Accelerate does under fully_shard; a group may also have none."""
    model, optimizer = build()
    optimizer.optimizers[1].add_param_group({"params": [], "lr": 0.5})
    optimizer = hdet.ChainedOptimizer(*optimizer.optimizers)
    other = network()
    twins = dict(zip(model.parameters(), other.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [twins[parameter] for parameter in group["params"]]
    before = [parameter.detach().clone() for parameter in other.parameters()]
    train(other, optimizer)
    assert not any(torch.equal(*pair) for pair in zip(before, other.parameters(), strict=True))
    assert [len(part.param_groups) for part in optimizer.optimizers] == [1, 2]
    assert [type(steps_by(optimizer, group)).__name__ for group in optimizer.param_groups] == ["SGD", "AdamW", "AdamW"]


def test_each_part_loads_its_own_as_it_does_alone() -> None:
    """torch's fill in what an older version did not save; others have a way of their own, and hooks."""
    model, optimizer = build()
    train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    del state["param_groups"][1]["decoupled_weight_decay"]
    other, fresh = build()
    called: list[str] = []
    fresh.optimizers[1].register_load_state_dict_post_hook(lambda part: called.append(type(part).__name__))

    def before(chain: Any, given: dict[str, Any]) -> dict[str, Any]:
        called.append("before")
        groups = [{**group, "lr": 0.5} for group in given["param_groups"]]
        return {**given, "param_groups": groups}

    fresh.register_load_state_dict_pre_hook(before)
    fresh.register_load_state_dict_post_hook(lambda chain: called.append("after"))
    fresh.load_state_dict(state)
    assert called == ["before", "AdamW", "after"]
    assert fresh.param_groups[1]["decoupled_weight_decay"]
    assert [group["lr"] for group in fresh.param_groups] == [0.5, 0.5]
    train(other, fresh)
    assert set(fresh.optimizers[1].state_dict()["state"]) == {0, 1}, "a part's own parameters alone"


def test_a_state_from_before_the_first_step_leaves_nothing_of_a_later_one() -> None:
    model, optimizer = build()
    first = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer)
    optimizer.load_state_dict(first)
    assert not optimizer.state
    assert not any(part.state for part in optimizer.optimizers)


def test_evidence_reads_the_state_that_was_put_back() -> None:
    model, optimizer = build()
    train(model, optimizer)
    group = optimizer.param_groups[1]
    (bias, *_) = group["params"]
    before = preconditioner(optimizer, group, bias)
    squares = optimizer.state[bias]["exp_avg_sq"] * 16.0
    optimizer.state[bias] = {**optimizer.state[bias], "exp_avg_sq": squares}  # as a rewind does before the next step
    assert isinstance(before, Tensor)
    assert torch.allclose(preconditioner(optimizer, group, bias) * 4.0, before, rtol=1e-3)
    del optimizer.state[bias]
    assert preconditioner(optimizer, group, bias) is None


@pytest.mark.parametrize("of", ["groups in another order", "no chain"])
def test_a_state_of_other_optimizers_is_refused(of: str) -> None:
    _, optimizer = build()
    model = network()
    alone = torch.optim.AdamW(model.parameters())
    state = hdet.ChainedOptimizer(*parts(model)[::-1]).state_dict() if of != "no chain" else alone.state_dict()
    if of != "no chain":
        state["param_groups"] = state["param_groups"][::-1]
    with pytest.raises(ConfigError, match="not of these optimizers chained in this order"):
        optimizer.load_state_dict(state)


def test_a_state_of_other_parameters_is_refused_before_any_of_it_is_loaded() -> None:
    _, optimizer = build()
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    state["param_groups"][0]["lr"] = 9.0
    state["param_groups"][-1]["params"].pop()
    with pytest.raises(ConfigError, match=r"the state's parameter groups have .* parameters, this chain's"):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict() == before
    optimizer.step()


def test_one_cycle_moves_what_all_parts_have() -> None:
    model = network()
    split = [[p for p in model.parameters() if p.ndim == ndim] for ndim in (1, 2)]
    optimizer = hdet.ChainedOptimizer(*(torch.optim.AdamW(own, lr=0.01) for own in split))
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10, max_momentum=0.95)
    assert [group["betas"][0] for group in optimizer.param_groups] == [0.95, 0.95]
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        torch.optim.lr_scheduler.OneCycleLR(build()[1], 0.1, total_steps=10)


@pytest.mark.parametrize("between", ["forward and backward", "micro-batches"])
@pytest.mark.parametrize("chain", [True, False])
def test_a_save_where_an_optimizer_has_no_state_is_no_step(chain: bool, between: str, assert_same: Any) -> None:
    """SGD without momentum has none ever, in a chain or alone: what it would have is found on a stand-in."""
    ends = []
    for saved in (False, True):
        model = network()
        matrices, rest = ([p for p in model.parameters() if p.ndim == ndim] for ndim in (2, 1))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if chain:
            optimizer = hdet.ChainedOptimizer(torch.optim.SGD(matrices, lr=0.05), torch.optim.AdamW(rest, lr=0.01))
        steps: list[int] = []
        optimizer.register_step_post_hook(lambda *given: steps.append(1))  # noqa: B023
        knobs = [hdet.LearningRate(controller=Hold())]
        search = searched(model, optimizer, schedule=None, knobs=knobs, exclude=["weight_decay"], micro_batches=2)
        for step in range(6):
            for part in range(2):
                loss = search.loss(loss_of(model, batch(2 * step + part)))
                if saved and step == 4 and part == 1 and between != "micro-batches":
                    optimizer_by_name(model, optimizer, optimizer.state_dict())
                loss.backward()
                if saved and step == 4 and part == 0 and between == "micro-batches":
                    optimizer_by_name(model, optimizer, optimizer.state_dict())
            optimizer.step()
            optimizer.zero_grad()
        assert search.engine.step_count == len(steps) == 6
        assert len([state for state in optimizer.state.values() if "exp_avg" in state]) == (2 if chain else 0)
        ends.append([parameter.detach() for parameter in model.parameters()])
    assert_same(*ends)


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


class Wrapping(torch.optim.SGD):
    """As sharpness-aware optimizers are made."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """By its name."""


def test_what_hdet_refuses_is_refused_in_a_chain_too() -> None:
    model = network()
    first, second = parts(model)
    chain = hdet.ChainedOptimizer(first, Wrapping(second.param_groups[0]["params"]))
    with pytest.raises(ConfigError, match="Wrapping steps another optimizer"):
        hdet.attach(model, chain, probe=probe(), total_steps=STEPS)
    chain = hdet.ChainedOptimizer(first, ZeroRedundancyOptimizer(second.param_groups[0]["params"], lr=0.1))
    with pytest.raises(ConfigError, match=r"ZeroRedundancyOptimizer partitions .* act on a slice of the model and not"):
        hdet.attach(model, chain, probe=probe(), total_steps=STEPS)


def test_ranks_are_told_apart_by_the_parts_of_their_chains() -> None:
    model, optimizer = build()
    other = hdet.ChainedOptimizer(*(torch.optim.Adagrad(group["params"]) for group in optimizer.param_groups))
    told = [described(model, chain, 1, "")["optimizer"] for chain in (optimizer, other)]
    matrices, rest = [["0.weight", "2.weight"]], [["0.bias", "2.bias"]]
    assert told == [f"SGD of {matrices} and AdamW of {rest}", f"Adagrad of {matrices} and Adagrad of {rest}"]


def test_a_state_that_cannot_be_known_is_not_guessed() -> None:
    """One wants sparse gradients, the other a closure, the third is not torch's."""
    zeros = [nn.Parameter(torch.zeros(2))]
    for odd in (torch.optim.SparseAdam(zeros), torch.optim.LBFGS(zeros), Counting(zeros, lr=0.1)):
        assert made_state(odd, odd.param_groups[0], torch.zeros(2)) is None
    assert made_state(torch.optim.SGD(zeros, lr=0.1), {"lr": 0.1}, torch.zeros(2)) == {}


def test_of_each_group_what_its_optimizer_keeps_there_is_state() -> None:
    model = network()
    first, second = parts(model)
    assert kept_in_groups(hdet.ChainedOptimizer(first, second)) == []
    found = kept_in_groups(hdet.ChainedOptimizer(first, prodigyopt.Prodigy(second.param_groups[0]["params"])))
    assert (1, "k") in found
    assert all(index == 1 for index, _ in found)


def test_chained_optimizers_without_a_state_are_read_in_the_first_window() -> None:
    model = nn.Sequential(nn.Linear(8, 16), hdet.nn.Dropout(0.2), nn.Linear(16, 4))
    split = [[p for p in model.parameters() if p.ndim == ndim] for ndim in (1, 2)]
    pair = model, hdet.ChainedOptimizer(*(torch.optim.SGD(own, lr=0.05) for own in split))
    knob = hdet.Dropout(controller=Hold(), evidence=MixedDifference())
    objective = hdet.Objective(loss_of, [batch(step) for step in range(8)])
    search = searched(*pair, schedule=None, knobs=[knob], exclude=["learning_rate"], objective=objective)
    go_on(pair, search, range(4))
    assert search.history.windows[0].estimates["dropout"]["slopes"]


def searched(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> hdet.Search:
    return hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=4, quiet=True, **options)


def go_on(pair: Pair, search: hdet.Search, steps: Any) -> None:
    for step in steps:
        search.loss(loss_of(pair[0], batch(step))).backward()
        pair[1].step()
        pair[1].zero_grad()


def test_it_is_searched_as_one_optimizer_and_a_pattern_cuts_its_groups() -> None:
    """Each part's group is cut in two for the step; the loop finds it whole."""
    pair = build()
    search = searched(*pair, rates={"first": "0.*", "last": "2.*"})
    seen: list[list[int]] = []
    hooks = [
        part.register_step_pre_hook(lambda part, *_: seen.append([len(own["params"]) for own in part.param_groups]))
        for part in pair[1].optimizers
    ]
    go_on(pair, search, range(STEPS))
    assert seen == [[1, 1]] * 2 * STEPS
    with search._riding.lending.groups_cut():
        assert [len(group["params"]) for group in pair[1].param_groups] == [1, 1, 1, 1]
    for hook in hooks:
        hook.remove()
    assert [len(group["params"]) for group in pair[1].param_groups] == [2, 2]
    assert sorted(search.shifts) == ["learning_rate[first]", "learning_rate[last]", "weight_decay"]
    assert any(learned.factor != 1.0 for learned in search.shifts.values())
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


def test_a_scheduler_of_one_part_is_told_where_it_belongs() -> None:
    pair = build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(pair[1].optimizers[0], 0.9)
    with pytest.raises(ConfigError, match="make the scheduler of the optimizer given, which has all groups"):
        searched(*pair, scheduler=scheduler)


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
    assert "the optimizer's state a window opened with" not in [part.what for part in found.held]
    train(model, optimizer)
    assert footprint(model, optimizer, [hdet.LearningRate()]).bytes("host") == found.bytes("host")
    odd = hdet.ChainedOptimizer(
        optimizer.optimizers[0], Counting(optimizer.optimizers[1].param_groups[0]["params"], lr=0.1)
    )
    held = footprint(model, odd, [hdet.LearningRate()]).held
    assert "the optimizer's state a window opened with" in [part.what for part in held]
