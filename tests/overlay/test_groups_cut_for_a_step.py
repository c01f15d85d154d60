"""Groups that rates= cuts are cut while the optimizer steps; the loop, schedulers and checkpoints find them whole."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from grouped_runs import PATTERNS, PROBE, STEPS, attach, build, groups_in_a_step, names_by_group, train
from torch import nn

import hdet
from hdet.errors import CheckpointError, ConfigError, StepError
from hdet.hparams.binding import GroupBinding
from hdet.overlay.split_groups import SplitGroups


def test_groups_are_cut_by_name_for_a_step_and_whole_for_the_loop() -> None:
    """The first name that matches has a parameter; settings are those of the group that is cut."""
    model, optimizer = build(weight_decay=0.3)
    (group,) = groups = optimizer.param_groups
    parameters = list(group["params"])
    search = attach(model, optimizer)
    assert sorted(search.shifts) == ["learning_rate[biases]", "learning_rate[head]", "learning_rate[others]"]
    for start in range(0, 20, 5):
        assert optimizer.param_groups is groups
        assert [id(own) for own in groups] == [id(group)]
        assert group["lr"] == 3e-3
        found = groups_in_a_step(lambda start=start: train(model, optimizer, search, start, start + 1))  # type: ignore[misc]
        assert sorted(map(sorted, names_by_group(model, found))) == [["0.bias"], ["0.weight"], ["2.bias", "2.weight"]]
        assert [own["weight_decay"] for own in found] == [0.3] * 3
        group["weight_decay"] = 0.3
        train(model, optimizer, search, start=start + 1, stop=start + 5)
    search.detach()
    assert [id(own) for own in optimizer.param_groups] == [id(group)]
    assert all(one is other for one, other in zip(group["params"], parameters, strict=True))
    train(model, optimizer, None, start=20)


def test_settings_that_the_loop_writes_are_those_of_all_parts() -> None:
    model, optimizer = build(weight_decay=0.3)
    search = attach(model, optimizer)
    for step, settings in enumerate([{}, {"weight_decay": 0.1}, {"eps": 1e-6, "note": "mine"}]):
        optimizer.param_groups[0].update(settings)
        found = groups_in_a_step(lambda step=step: train(model, optimizer, search, step, step + 1))  # type: ignore[misc]
        assert all(own[key] == value for own in found for key, value in settings.items())
    del optimizer.param_groups[0]["note"]
    found = groups_in_a_step(lambda: train(model, optimizer, search, 3, 4))
    assert not any("note" in own for own in found)
    assert [own["weight_decay"] for own in found] == [0.1] * 3
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("restored", [False, True])
def test_a_group_that_somebody_added_since_stays(restored: bool) -> None:
    """A restored optimizer holds its groups in new dictionaries."""
    model, optimizer = build()
    search = attach(model, optimizer)
    extra = torch.nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [extra]})
    if restored:
        optimizer.load_state_dict(optimizer.state_dict())
    search.detach()
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 1]
    assert optimizer.param_groups[1]["params"][0] is extra


def test_a_group_that_is_added_within_a_step_is_told_of_after_it() -> None:
    model, optimizer = build()
    search = attach(model, optimizer)
    extra = nn.Parameter(torch.zeros(3))
    hook = optimizer.register_step_pre_hook(lambda own, *_: own.add_param_group({"params": [extra]}))
    with pytest.raises(StepError, match="parameter groups"):
        train(model, optimizer, search, stop=2)
    hook.remove()
    search.detach()
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 1]


def test_a_search_that_cannot_be_leaves_the_groups_whole() -> None:
    model, optimizer = build()
    with pytest.raises(ConfigError, match="exclude names 'nothing'"):
        hdet.attach(model, optimizer, probe=PROBE, total_steps=STEPS, rates=PATTERNS, exclude=["nothing"], quiet=True)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("rates", ["matrices", PATTERNS])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_scheduler_drives_the_groups_that_it_knows(rates: Any, as_tensor: bool) -> None:
    """Each part goes where it takes its group, by a factor of its own; the scheduler sees what it wrote."""
    model, _ = build(width=64)
    with torch.no_grad():
        model[2].weight.mul_(0.2)
    groups = [
        {"params": [model[0].bias, model[2].bias], "lr": 1e-3},
        {"params": [model[0].weight, model[2].weight], "lr": 3e-3},
    ]
    if as_tensor:
        groups = [{**group, "lr": torch.tensor(group["lr"], dtype=torch.float64)} for group in groups]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-3, 3e-3], total_steps=STEPS + 1)
    plain = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (1e-3, 3e-3)])
    alone = torch.optim.lr_scheduler.OneCycleLR(plain, [1e-3, 3e-3], total_steps=STEPS + 1)
    search = attach(model, optimizer, rates=rates, scheduler=scheduler, warmup_steps=0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for step in range(STEPS):
        shifts = {knob.name[14:-1]: knob.shift for knob in search.engine.knobs}
        held = [float(group["lr"]) for group in optimizer.param_groups]
        assert held == pytest.approx([group["lr"] for group in plain.param_groups], rel=1e-12)
        assert len(scheduler.get_last_lr()) == 2
        stepped: dict[str, float] = {}
        hook = optimizer.register_step_pre_hook(
            lambda own, *_, stepped=stepped: stepped.update(  # type: ignore[misc]
                {names[id(p)]: float(group["lr"]) for group in own.param_groups for p in group["params"]}
            )
        )
        train(model, optimizer, search, start=step, stop=step + 1)
        hook.remove()
        for name, rate in stepped.items():
            part = name if name in shifts else "head" if name.startswith("2.") else "biases" if "bias" in name else ""
            part = part if part in shifts else "others"
            assert rate == pytest.approx(held["weight" in name] * math.exp(shifts[part]), rel=1e-5)
        plain.step()
        scheduler.step()
        alone.step()
    assert len({round(knob.shift, 6) for knob in search.engine.knobs}) >= 2, "the second layer's weights are smaller"


@pytest.mark.parametrize("as_tensor", [False, True])
def test_numbers_that_an_optimizer_keeps_in_its_groups_are_each_parts_own(as_tensor: bool) -> None:
    """And go into the search's state: a stopped run goes on, in whatever order its parts are loaded."""

    class Counting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                before = group.get("traveled", torch.zeros((), dtype=torch.float64) if as_tensor else 0.0)
                group["traveled"] = before + group["lr"]
            return super().step(closure)

    def begin() -> tuple[nn.Sequential, Any, hdet.Search]:
        model, optimizer = build(Counting, width=64)
        return model, optimizer, attach(model, optimizer, schedule=hdet.schedules.Constant(3e-3), guard=None)

    def traveled(model: nn.Sequential, optimizer: Any, search: hdet.Search) -> list[float]:
        """Of the parts, as the next step finds them. (torch runs the hooks of AdamW itself in it, too.)"""
        found = groups_in_a_step(lambda: train(model, optimizer, search, 40, 41))
        return [float(group["traveled"]) for group in found[:3]]

    model, optimizer, search = begin()
    train(model, optimizer, search, stop=40)
    whole = traveled(model, optimizer, search)
    assert len(set(whole)) == 3
    for optimizer_first in (True, False):
        first, other, begun = begin()
        train(first, other, begun, stop=33)
        saved = copy.deepcopy({"model": first.state_dict(), "of": other.state_dict(), "search": begun.state_dict()})
        assert len(saved["of"]["param_groups"]) == 1
        first, other, begun = begin()
        loads = [lambda: other.load_state_dict(saved["of"]), lambda: begun.load_state_dict(saved["search"])]  # noqa: B023
        first.load_state_dict(saved["model"])
        for load in loads if optimizer_first else reversed(loads):
            load()
        train(first, other, begun, start=33, stop=40)
        assert traveled(first, other, begun) == whole


def test_a_number_that_is_gone_from_the_parts_is_gone_from_their_group() -> None:
    """As a step count that the optimizer keeps in its groups, where a run begins anew."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    split = SplitGroups(optimizer, {id(parameters[0]): "first"})
    for counted in (True, False):
        split.put_in()
        for part in optimizer.param_groups:
            part.update({"step": 3}) if counted else part.pop("step")
        split.take_out()
        assert ("step" in optimizer.param_groups[0]) == counted


def test_a_state_of_parts_with_other_parameters_is_refused() -> None:
    """Though their names and shapes are the same; the search goes on as it was."""

    def begin(rates: dict[str, Any]) -> tuple[nn.Sequential, Any, hdet.Search]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, attach(model, optimizer, rates=rates)

    model, optimizer, search = begin({"a": ["0.*", "2.*"], "b": ["1.*", "3.*"]})
    train(model, optimizer, search, stop=8)
    saved = copy.deepcopy(search.state_dict())
    other, again, resumed = begin({"a": ["0.*", "1.*"], "b": ["2.*", "3.*"]})
    with pytest.raises(CheckpointError, match="whose rates= put other parameters together"):
        resumed.load_state_dict(saved)
    train(other, again, resumed)


def test_a_setting_that_is_written_while_groups_are_cut_reaches_all_parts() -> None:
    model, optimizer = build(weight_decay=0.1)
    search = attach(model, optimizer)
    hook = optimizer.register_step_pre_hook(lambda own, *_: own.param_groups[0].update(weight_decay=0.5))
    train(model, optimizer, search, stop=1)
    hook.remove()
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    found = groups_in_a_step(lambda: train(model, optimizer, search, 1, 2))
    assert [group["weight_decay"] for group in found] == [0.5] * 3


def test_whoever_goes_through_the_parts_goes_on_while_the_optimizer_is_saved() -> None:
    model, optimizer = build(width=64)  # large enough to tell that nothing has trained it
    search = attach(model, optimizer, schedule=hdet.schedules.Constant(3e-3), guard=None)
    train(model, optimizer, search, stop=40)
    seen: list[int] = []

    def look(own: Any, *_: Any) -> None:
        for group in own.param_groups:
            seen.append(len(group["params"]))
            own.state_dict()

    optimizer.register_step_pre_hook(look)
    train(model, optimizer, search, start=40, stop=41)
    assert sorted(seen) == [1, 1, 2]
    assert len(optimizer.param_groups) == 1


def test_a_run_goes_back_to_a_checkpoint_after_a_step_that_raised() -> None:
    model, optimizer = build()
    search = attach(model, optimizer)
    train(model, optimizer, search, stop=7)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), search.state_dict()))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(model, optimizer, search, start=7, stop=8)
    hook.remove()
    optimizer.zero_grad()
    optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    search.load_state_dict(saved[2])
    train(model, optimizer, search, start=7)
    whole, plain = build()
    train(whole, plain, attach(whole, plain))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))


def test_parameters_that_join_a_group_that_was_cut_are_refused() -> None:
    model, _ = build()
    late = list(model[2].parameters())
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=3e-3)
    search = attach(model, optimizer, rates="matrices")
    train(model, optimizer, search, stop=3)
    optimizer.param_groups[0]["params"] += late
    with pytest.raises(
        StepError, match=r"group 0 has other parameters at step 3 \(4 now, 2 before\), and rates= had cut"
    ):
        train(model, optimizer, search, start=3, stop=4)


@pytest.mark.parametrize("ended", [False, True])
def test_schedulers_of_the_optimizers_of_a_chain_find_their_groups_whole(ended: bool) -> None:
    model, _ = build()
    first = torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1, momentum=0.9)
    second = torch.optim.AdamW([model[0].bias, model[2].bias], lr=1e-3)
    chain = hdet.ChainedOptimizer(first, second)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(first, lambda step: 0.9**step),
        torch.optim.lr_scheduler.ExponentialLR(second, 0.9),
    ]
    search = attach(model, chain, rates="matrices", schedule=None)
    for step in range(7):
        rates: list[float] = []
        hook = first.register_step_pre_hook(
            lambda own, *_, rates=rates: rates.extend(g["lr"] for g in own.param_groups for _ in g["params"])
        )  # type: ignore[misc]
        train(model, chain, search, start=step, stop=step + 1)
        hook.remove()
        assert len(rates) == 2
        assert step >= 5 or rates == pytest.approx([0.1 * 0.9**step] * 2), (
            "nothing is learned before a window has ended"
        )
        for scheduler in schedulers:
            scheduler.step()
        assert first.param_groups[0] is chain.param_groups[0]
        assert first.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9 ** (step + 1))
        assert second.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.9 ** (step + 1))
    if ended:
        search.detach()
    assert [len(part.param_groups) for part in chain.optimizers] == [1, 1]


def test_clipped_and_held_it_is_training_in_one_group() -> None:
    """The norm of all gradients is added up in the order that the optimizer had."""
    plain = None
    for rates in (None, "matrices"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        hdet.clip_gradients(optimizer, 0.2)
        search = None
        if rates:
            names = ("0.weight", "others", "2.weight", "4.weight")
            held = [
                hdet.LearningRate(name=f"learning_rate[{name}]", groups=index, controller=hdet.controllers.Hold())
                for index, name in enumerate(names)
            ]
            search = attach(model, optimizer, rates=rates, schedule=None, knobs=held, guard=None, tail=None)
        train(model, optimizer, search)
        ends = [parameter.tolist() for parameter in model.parameters()]
        assert plain in (None, ends)
        plain = ends


def test_a_step_that_raises_leaves_the_groups_whole_for_the_next_pass_and_for_saving() -> None:
    model, optimizer = build()
    search = attach(model, optimizer)
    train(model, optimizer, search, stop=7)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    for look in (optimizer.state_dict, search.state_dict, lambda: train(model, optimizer, search, 7, 8)):
        hook = optimizer.register_step_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            train(model, optimizer, search, start=7, stop=8)
        hook.remove()
        optimizer.zero_grad()
        look()
        assert len(optimizer.param_groups) == len(optimizer.state_dict()["param_groups"]) == 1


@pytest.mark.parametrize("groups", [0, "all"])
def test_what_was_declared_for_a_group_holds_for_all_that_it_is_cut_into(groups: int | str) -> None:
    model, optimizer = build(weight_decay=0.3)
    optimizer.param_groups[0]["name"] = "all"
    decay = hdet.WeightDecay(groups=groups, evidence=hdet.evidence.Analytic())
    search = attach(model, optimizer, knobs=[decay])
    binding = next(knob for knob in search.engine.knobs if knob.name == f"weight_decay[{groups}]").bindings[0]
    assert isinstance(binding, GroupBinding)
    assert len(binding.indices) == 3
    found = groups_in_a_step(lambda: train(model, optimizer, search, stop=1))
    assert set(binding.indices) == set(range(len(found)))


def test_names_of_parameters_are_cut_with_them() -> None:
    model, _ = build()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=3e-3)
    whole = list(optimizer.param_groups[0]["param_names"])
    search = attach(model, optimizer)
    found = groups_in_a_step(lambda: train(model, optimizer, search, stop=1))
    assert len(found) == 3
    assert sorted(own["param_names"] for own in found) == sorted(names_by_group(model, found))
    assert [own["param_names"] for own in optimizer.param_groups] == [whole]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("traceless", [False, True])
def test_a_rate_that_the_loop_writes_reaches_all_parts(as_tensor: bool, traceless: bool) -> None:
    """Also by `.data`, which leaves the tensor's version as it is."""
    model, optimizer = build(lr=torch.tensor(3e-3) if as_tensor else 3e-3)
    search = attach(model, optimizer, schedule=None)
    for step in range(4):
        rate = 1e-3 * (4 - step)
        if as_tensor:
            held = optimizer.param_groups[0]["lr"]
            (held.data if traceless else held).fill_(rate)
        else:
            optimizer.param_groups[0]["lr"] = rate
        found: list[float] = []
        hook = optimizer.register_step_pre_hook(
            lambda own, *_, found=found: found.extend(float(g["lr"]) for g in own.param_groups for _ in g["params"])  # type: ignore[misc]
        )
        train(model, optimizer, search, start=step, stop=step + 1)
        hook.remove()
        assert found == pytest.approx([rate] * 4)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(rate)


@pytest.mark.parametrize(("dropout", "ends_of_passes"), [(0.0, 0), (0.3, 1)])
def test_groups_are_cut_in_a_pass_only_where_its_gradient_is_looked_at(dropout: float, ends_of_passes: int) -> None:
    """A dropout of 0 is not explored so early in a run."""
    model, optimizer = build()
    model.insert(2, nn.Dropout(dropout))
    search = hdet.attach(
        model, optimizer, probe=PROBE, total_steps=1000, rates={"head": "3.*"}, window=50, micro_batches=1, quiet=True
    )
    train(model, optimizer, search, stop=1)
    put_in = SplitGroups.put_in
    cuts = []

    def count(split: SplitGroups) -> None:
        cuts.append(split.in_force)
        put_in(split)

    with patch.object(SplitGroups, "put_in", count):
        train(model, optimizer, search, start=1, stop=21)
    assert cuts.count(False) == 20 * (1 + ends_of_passes)
