"""hdet.attach with a learning rate for each group: by the optimizer's groups, and by patterns on names."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hdet
from hdet.errors import CheckpointError, ConfigError, MatchError, StepError
from hdet.hparams.binding import GroupBinding
from hdet.recipes.recommended import ALONG_A_LINE

STEPS = 60
PATTERNS = {"head": "2.*", "biases": "*bias"}


def build(
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, width: int = 8, **options: Any
) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
    return model, optimizer(model.parameters(), **{"lr": 3e-3, **options})


def examples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(32, 4, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


PROBE = hdet.Probe(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), [examples(-j) for j in range(1, 9)])


def attach(model: nn.Module, optimizer: Any, **options: Any) -> hdet.Search:
    options = {"probe": PROBE, "total_steps": STEPS, "rates": PATTERNS, "window": 5, "quiet": True, **options}
    return hdet.attach(model, optimizer, exclude=["weight_decay"], **options)


def train(model: nn.Module, optimizer: Any, search: hdet.Search | None, start: int = 0, stop: int = STEPS) -> None:
    for step in range(start, stop):
        inputs, labels = examples(step)
        loss = F.cross_entropy(model(inputs), labels)
        (loss if search is None else search.loss(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()


def groups_in_a_step(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> list[dict[str, Any]]:
    """What the optimizer steps by."""
    seen: list[dict[str, Any]] = []
    hook = optimizer.register_step_pre_hook(lambda *_: seen.extend(map(dict, optimizer.param_groups)))
    step()
    hook.remove()
    return seen


def names_by_group(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


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
        found = groups_in_a_step(optimizer, lambda start=start: train(model, optimizer, search, start, start + 1))  # type: ignore[misc]
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
        found = groups_in_a_step(optimizer, lambda step=step: train(model, optimizer, search, step, step + 1))  # type: ignore[misc]
        assert all(own[key] == value for own in found for key, value in settings.items())
    del optimizer.param_groups[0]["note"]
    found = groups_in_a_step(optimizer, lambda: train(model, optimizer, search, 3, 4))
    assert not any("note" in own for own in found)
    assert [own["weight_decay"] for own in found] == [0.1] * 3
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_each_matrix_is_a_group_by_its_own_name() -> None:
    """What is a vector, in more dimensions too, and what is frozen is the rest; a tied matrix has one name."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"table[in]": nn.Embedding(6, 4), "mix": nn.Conv1d(4, 4, 1), "out": nn.Linear(4, 6)})
    model["out"].weight = model["table[in]"].weight
    model["frozen"] = nn.Linear(4, 4).requires_grad_(False)
    model["single"] = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not model["frozen"].bias], lr=1e-3)
    search = attach(model, optimizer, rates="matrices")
    names = ["mix.weight", "others", "table[in].weight"]
    assert sorted(search.shifts) == [f"learning_rate[{name}]" for name in names]
    groups = groups_in_a_step(optimizer, optimizer.step)
    assert sorted(map(sorted, names_by_group(model, groups))) == [
        ["frozen.weight", "mix.bias", "out.bias", "single.weight"],
        ["mix.weight"],
        ["table[in].weight"],
    ]
    search.detach()
    assert len(optimizer.param_groups) == 1


def test_without_a_matrix_there_is_no_group() -> None:
    model = nn.LayerNorm(4)
    with pytest.raises(ConfigError, match="finds no matrix that this optimizer trains"):
        attach(model, torch.optim.AdamW(model.parameters()), rates="matrices")


def test_a_matrix_that_is_called_as_the_rest_is_refused() -> None:
    model = nn.ParameterDict({"others": nn.Parameter(torch.randn(4, 4)), "bias": nn.Parameter(torch.zeros(4))})
    with pytest.raises(ConfigError, match="and so hdet calls the parameters that no pattern matches"):
        attach(model, torch.optim.AdamW(model.parameters()), rates="matrices")


def test_rates_by_matrix_learn_what_the_same_patterns_do() -> None:
    learned = []
    for rates in ("matrices", {"0.weight": "0.weight", "2.weight": "2.weight"}):
        model, optimizer = build(width=64)
        with torch.no_grad():
            model[2].weight.mul_(0.2)
        search = attach(model, optimizer, rates=rates)
        train(model, optimizer, search)
        learned.append((search.shifts, [parameter.tolist() for parameter in model.parameters()]))
    assert learned[0] == learned[1]
    factors = {name: own.factor for name, own in learned[0][0].items()}
    assert factors["learning_rate[2.weight]"] < 0.7 * factors["learning_rate[0.weight]"], "its weights are smaller"


def test_what_is_said_of_many_groups_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    attach(model, torch.optim.AdamW(model.parameters(), lr=1e-3), rates="matrices", quiet=False)
    printed = capsys.readouterr().out
    assert "+ learning rates of 13 groups, 0.weight to others: heads" in printed
    assert "learning rate of group" not in printed


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


def test_a_second_search_ends_the_first_one_and_its_groups() -> None:
    """Whether or not somebody keeps the first, as a notebook's cell may not."""
    model, optimizer = build()
    attach(model, optimizer)
    gc.collect()
    search = attach(model, optimizer, rates={"head": "2.*"})
    assert len(groups_in_a_step(optimizer, lambda: train(model, optimizer, search, stop=1))) == 2
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_search_that_cannot_be_leaves_the_groups_whole() -> None:
    model, optimizer = build()
    with pytest.raises(ConfigError, match="exclude names 'nothing'"):
        hdet.attach(model, optimizer, probe=PROBE, total_steps=STEPS, rates=PATTERNS, exclude=["nothing"], quiet=True)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "kind"), [({}, torch.optim.AdamW), ({"lr": 0.1, "momentum": 0.9}, torch.optim.SGD)], ids=str
)
def test_held_it_is_training_in_one_group(options: dict[str, Any], kind: Any) -> None:
    """Cut and factor 1: the same weights, bit for bit."""
    one, plain = build(kind, **options)
    train(one, plain, None)
    other, cut = build(kind, **options)
    held = [
        hdet.LearningRate(name=f"learning_rate[{name}]", groups=index, controller=hdet.controllers.Hold())
        for index, name in enumerate(("others", "biases", "head"))
    ]
    train(other, cut, attach(other, cut, schedule=None, knobs=held))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_each_groups_rate_is_in_force_while_the_optimizer_steps() -> None:
    model, optimizer = build(width=64)  # large enough to tell that nothing has trained it
    search = attach(model, optimizer, schedule=hdet.schedules.Constant(3e-3), guard=None)
    seen: list[list[float]] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([group["lr"] for group in optimizer.param_groups]))
    for step in range(STEPS):
        shifts = {knob.name: knob.shift for knob in search.engine.knobs}
        train(model, optimizer, search, start=step, stop=step + 1)
        names = ["others", "biases", "head"] if len(seen[-1]) == 3 else []
        assert seen[-1] == pytest.approx([3e-3 * math.exp(shifts[f"learning_rate[{name}]"]) for name in names])
    assert len({round(knob.shift, 6) for knob in search.engine.knobs}) == 3


@pytest.mark.parametrize(("second", "alike"), [(3e-3, True), (3e-3 * (1 + 1e-7), True), (0.0, True), (1e-2, False)])
@pytest.mark.parametrize("scheduled", [False, True])
def test_rates_that_were_given_alike_are_not_parted_by_first_steps_alone(
    second: float, alike: bool, scheduled: bool
) -> None:
    """One that stands at 0 is nobody's: no factor moves it."""
    model, _ = build()
    model.append(nn.Linear(3, 3))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW([*groups, {"params": model[3].parameters(), "lr": second}], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, STEPS) if scheduled else None
    search = attach(model, optimizer, rates="matrices", scheduler=scheduler)
    for knob in search.engine.knobs:
        assert isinstance(knob.evidence, hdet.evidence.GroupLines)
        assert (knob.evidence.first, knob.evidence.again) == ((0.5, (0.2,)) if alike else (1.0, (0.1, 0.2)))


def test_named_groups_go_by_their_names_and_others_by_their_number() -> None:
    model, _ = build()
    for named, expected in ((True, ["body", "head"]), (False, ["0", "1"])):
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        if named:
            groups = [{**group, "name": name} for group, name in zip(groups, expected, strict=True)]
        search = attach(model, torch.optim.SGD(groups, lr=0.1), rates="groups")
        assert list(search.shifts) == [f"learning_rate[{name}]" for name in expected]
        assert all(knob.controller.common == ALONG_A_LINE for knob in search.engine.knobs)
        search.detach()


def test_a_stopped_run_goes_on_as_if_it_had_not_been() -> None:
    whole, optimizer = build()
    search = attach(whole, optimizer)
    train(whole, optimizer, search)

    first, other = build()
    begun = attach(first, other)
    train(first, other, begun, stop=33)
    saved = copy.deepcopy({"model": first.state_dict(), "optimizer": other.state_dict(), "search": begun.state_dict()})
    second, again = build()
    resumed = attach(second, again)
    second.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["search"])
    train(second, again, resumed, start=33)
    assert resumed.shifts == search.shifts
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    assert [record.estimates for record in resumed.history] == [record.estimates for record in search.history][-6:]
    resumed.detach()
    assert len(again.param_groups) == 1


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
        found = groups_in_a_step(optimizer, lambda: train(model, optimizer, search, 40, 41))
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
    found = groups_in_a_step(optimizer, lambda: train(model, optimizer, search, 1, 2))
    assert [group["weight_decay"] for group in found] == [0.5] * 3


def test_whoever_goes_through_the_parts_goes_on_while_the_optimizer_is_saved() -> None:
    model, optimizer = build()
    search = attach(model, optimizer)
    seen: list[int] = []

    def look(own: Any, *_: Any) -> None:
        for group in own.param_groups:
            seen.append(len(group["params"]))
            own.state_dict()

    optimizer.register_step_pre_hook(look)
    train(model, optimizer, search, stop=1)
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
            lambda own, *_, rates=rates: rates.extend(g["lr"] for g in own.param_groups)
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


def test_what_cannot_be_is_refused() -> None:
    model, optimizer = build()
    with pytest.raises(
        MatchError, match=r"no parameter that the optimizer holds matches 'body\.\*'; there are 0\.weight"
    ):
        attach(model, optimizer, rates={"body": "body.*"})
    with pytest.raises(ConfigError, match="names each group by a printable string, got 3"):
        attach(model, optimizer, rates={3: "2.*"})
    with pytest.raises(ConfigError, match='rates is "together", "groups", "matrices" or a mapping'):
        attach(model, optimizer, rates="group")
    with pytest.raises(ConfigError, match="rates must be of type str or Mapping"):
        attach(model, optimizer, rates=["matrices"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rates": {}}, r"rates=\{\} names no group"),
        ({"rates": {"head": 3}}, r"'head': \.\.\.\} takes a pattern on parameter names or a list of them, got 3"),
        ({"rates": {"head": ["2.*", 3]}}, "takes a pattern on parameter names or a list of them"),
        ({"rates": {"all": "*", "head": "2.*"}}, r"'head': \.\.\.\} is left with no parameter, since names before it"),
        ({"rates": {"others": "2.*"}}, "and so hdet calls the parameters that no pattern matches"),
        ({"knobs": [hdet.LearningRate()]}, "the knob 'learning_rate' would take the place of all of them"),
        ({"knobs": [hdet.LearningRate(groups=0)]}, r"the knob 'learning_rate\[0\]' would take the place"),
        (
            {"knobs": [hdet.LearningRate()], "rates": "groups"},
            r"rates= asks for the learning rates \['learning_rate\[0\]",
        ),
    ],
)
def test_no_rate_that_was_asked_for_is_dropped_in_silence(given: dict[str, Any], message: str) -> None:
    model, optimizer = build()
    with pytest.raises(ConfigError, match=message):
        attach(model, optimizer, **given)
    assert len(optimizer.param_groups) == 1


def test_the_name_of_the_rest_can_be_given_where_there_is_no_rest() -> None:
    search = attach(*build(), rates={"head": "2.*", "others": "*"})
    assert list(search.shifts) == ["learning_rate[head]", "learning_rate[others]"]


def test_names_are_those_of_the_model_under_its_wrappers() -> None:
    model, optimizer = build()
    search = attach(torch.compile(model, backend="eager"), optimizer)
    assert len(search.shifts) == 3


def test_tied_parameters_go_by_any_of_their_names() -> None:
    model, _ = build()
    model.append(nn.Linear(8, 3, bias=False))
    model[3].weight = model[2].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    search = attach(model, optimizer, rates={"tied": "3.weight"})
    (tied,) = search.engine.knobs[1].bindings
    assert isinstance(tied, GroupBinding)
    groups = groups_in_a_step(optimizer, optimizer.step)
    assert [parameter is model[2].weight for parameter in groups[1]["params"]] == [True]


@pytest.mark.parametrize("groups", [0, "all"])
def test_what_was_declared_for_a_group_holds_for_all_that_it_is_cut_into(groups: int | str) -> None:
    model, optimizer = build(weight_decay=0.3)
    optimizer.param_groups[0]["name"] = "all"
    decay = hdet.WeightDecay(groups=groups, evidence=hdet.evidence.Analytic())
    search = attach(model, optimizer, knobs=[decay])
    binding = next(knob for knob in search.engine.knobs if knob.name == f"weight_decay[{groups}]").bindings[0]
    assert isinstance(binding, GroupBinding)
    assert len(binding.indices) == 3
    found = groups_in_a_step(optimizer, lambda: train(model, optimizer, search, stop=1))
    assert set(binding.indices) == set(range(len(found)))


def test_names_of_parameters_are_cut_with_them() -> None:
    model, _ = build()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=3e-3)
    whole = list(optimizer.param_groups[0]["param_names"])
    search = attach(model, optimizer)
    found = groups_in_a_step(optimizer, lambda: train(model, optimizer, search, stop=1))
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
            lambda own, *_, found=found: found.extend(float(group["lr"]) for group in own.param_groups)  # type: ignore[misc]
        )
        train(model, optimizer, search, start=step, stop=step + 1)
        hook.remove()
        assert found == pytest.approx([rate] * 3)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(rate)
