"""Groups that rates= cut, and whose rates are equal, are one group while the optimizer steps."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from grouped_runs import STEPS, attach, build, train
from torch import nn

import hdet
from hdet.overlay.split_groups import SplitGroups, by_matrix

HELD = {"schedule": hdet.schedules.Constant(3e-3), "guard": None}


def stepped_groups(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """Filled by each step: of every group that the optimizer steps, how many parameters it has."""
    seen: list[list[int]] = []
    optimizer.register_step_pre_hook(lambda own, *_: seen.append([len(group["params"]) for group in own.param_groups]))
    return seen


def test_the_optimizer_steps_as_many_groups_as_there_are_rates() -> None:
    model, optimizer = build(width=64, foreach=True)  # large enough to tell that nothing has trained it
    search = attach(model, optimizer, **HELD)
    seen = stepped_groups(optimizer)
    for step in range(STEPS):
        rates = {round(knob.shift, 9) for knob in search.engine.knobs}
        train(model, optimizer, search, start=step, stop=step + 1)
        assert len(seen[-1]) == len(rates)
        assert sum(seen[-1]) == 4
        assert len(optimizer.param_groups) == 1
    assert seen[0] == [4]
    assert len(seen[-1]) == 3


def test_groups_own_rates_lie_on_a_grid() -> None:
    """So that many groups have few rates; what they have in common may be anything."""
    model, optimizer = build(width=64)
    search = attach(model, optimizer, rates="matrices", **HELD)
    train(model, optimizer, search)
    places = [knob.state.relative for knob in search.engine.knobs]
    assert any(places)
    assert [4 * place % 1 for place in places] == [0] * 3


@pytest.mark.parametrize(
    ("kind", "options", "knobs"),
    [
        (torch.optim.AdamW, {"foreach": True}, []),
        (torch.optim.AdamW, {"fused": True}, []),
        (torch.optim.SGD, {"foreach": True}, []),
        (torch.optim.Adafactor, {"foreach": True}, []),
        (torch.optim.AdamW, {"foreach": True}, [hdet.ClipNorm()]),
        (torch.optim.AdamW, {"fused": True}, [hdet.ClipNorm()]),
        (torch.optim.SGD, {"foreach": True}, [hdet.ClipNorm()]),
    ],
)
def test_a_run_is_the_same_whether_or_not_they_are_joined(kind: Any, options: dict[str, Any], knobs: list[Any]) -> None:
    ends = []
    for joined in (True, False):
        model, optimizer = build(kind, width=64, **options)
        if knobs:
            hdet.clip_gradients(optimizer, 0.3)
        search = attach(model, optimizer, rates="matrices", knobs=knobs, **HELD)
        seen = stepped_groups(optimizer)
        if joined:
            train(model, optimizer, search)
            assert min(map(len, seen)) < 3
        else:
            with patch.object(SplitGroups, "join", lambda _: None):
                train(model, optimizer, search)
            assert set(map(len, seen)) == {3}
        if knobs:
            assert search.shifts["clip_norm"].factor != 1.0
        ends.append([parameter.tolist() for parameter in model.parameters()])
    assert ends[0] == ends[1]


class ByGroup(torch.optim.AdamW):
    """Any optimizer that may look at its groups: it keeps a list of what each was stepped by."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group.setdefault("rates", []).append(group["lr"])
        return super().step(closure)


@pytest.mark.parametrize(("kind", "foreach"), [(torch.optim.AdamW, False), (torch.optim.AdamW, None), (ByGroup, True)])
def test_they_are_joined_only_where_that_saves_something_and_changes_nothing(kind: Any, foreach: bool | None) -> None:
    """A loop over tensors gains nothing, and an optimizer not of torch's own may keep something of a group."""
    model, optimizer = build(kind, width=64, foreach=foreach)
    search = attach(model, optimizer, rates="matrices", **HELD)
    seen = stepped_groups(optimizer)
    train(model, optimizer, search, stop=3)
    assert set(map(len, seen)) == {3}
    if kind is ByGroup:
        with search._riding.lending.groups_cut():
            assert [len(group["rates"]) for group in optimizer.param_groups] == [3, 3, 3]


def test_groups_of_the_loops_own_are_not_joined_and_keep_their_places() -> None:
    """Of equal settings, too: a hook may go by their order."""
    model, _ = build()
    matrices, vectors = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    optimizer = torch.optim.AdamW([{"params": vectors}, {"params": matrices}], lr=3e-3, foreach=True)
    search = attach(model, optimizer, rates="matrices", **HELD)
    seen: list[list[list[int]]] = []
    optimizer.register_step_pre_hook(
        lambda own, *_: seen.append([list(map(id, group["params"])) for group in own.param_groups])
    )
    train(model, optimizer, search, stop=1)
    assert seen == [[list(map(id, vectors)), list(map(id, matrices))]]


def test_what_a_step_writes_into_a_joined_group_all_its_parts_have() -> None:
    """As a hook of the loop's own may: equal counts stay equal, and parts that were stepped apart have their own."""
    model, optimizer = build(torch.optim.SGD, width=64, lr=1e-2, foreach=True)
    search = attach(model, optimizer, rates="matrices", schedule=hdet.schedules.Constant(1e-2), guard=None)

    def count(own: torch.optim.Optimizer, *_: Any) -> None:
        for group in own.param_groups:
            group["travelled"] = group.get("travelled", 0.0) + group["lr"]
            if "passing" in group:
                del group["passing"]
            else:
                group["passing"] = None

    optimizer.register_step_pre_hook(count)
    expected: dict[str, float] = {}
    seen = stepped_groups(optimizer)
    for step in range(STEPS):
        for knob in search.engine.knobs:
            expected[knob.name] = expected.get(knob.name, 0.0) + knob.base(step)
        train(model, optimizer, search, start=step, stop=step + 1)
        with search._riding.lending.groups_cut():
            assert ["passing" in group for group in optimizer.param_groups] == [step % 2 == 0] * 3
    assert (seen[0], len(seen[-1])) == ([4], 3)
    with search._riding.lending.groups_cut():
        found = {
            knob.name: optimizer.param_groups[knob.bindings[0].indices[0]]["travelled"]  # type: ignore[attr-defined]
            for knob in search.engine.knobs
        }
    assert found == pytest.approx(expected)
    assert len(set(found.values())) == 3


def test_rates_that_are_tensors_keep_groups_apart() -> None:
    """Reading them would wait for a device, and a compiled step is of so many groups."""
    model, _ = build()
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "lr": torch.tensor(3e-3)}], fused=True)
    search = attach(model, optimizer, rates="matrices", schedule=None)
    seen = stepped_groups(optimizer)
    train(model, optimizer, search, stop=2)
    assert list(map(sorted, seen)) == [[1, 1, 2]] * 2


def test_a_chain_joins_the_groups_of_one_optimizer_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    first = torch.optim.SGD(matrices[:2], lr=1e-3, foreach=True)
    second = torch.optim.SGD([matrices[2], *(p for p in model.parameters() if p.dim() == 1)], lr=1e-3, foreach=True)
    chain = hdet.ChainedOptimizer(first, second)
    search = attach(model, chain, rates="matrices")
    of_first, of_second = stepped_groups(first), stepped_groups(second)
    train(model, chain, search, stop=2)
    assert (of_first, of_second) == ([[2]] * 2, [[4]] * 2)
    assert [len(part.param_groups) for part in chain.optimizers] == [1, 1]


def test_rates_that_differ_in_their_last_bits_count_as_one() -> None:
    """Moves of one sum, added up in another order, differ by these. Names go along with parameters."""
    model, _ = build()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=3e-3, foreach=True)
    split = SplitGroups(optimizer, by_matrix(model, optimizer))
    split.put_in()
    rates, betas = [3e-3, math.nextafter(3e-3, 1.0), 4e-3], [0.9, 0.99]
    for part, rate in zip(optimizer.param_groups, rates, strict=True):
        part["lr"] = rate
        part["betas"] = tuple(betas)  # each has its own, as where a knob writes them
    names = [part["param_names"] for part in optimizer.param_groups]
    split.join()
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 4e-3]
    assert [group["param_names"] for group in optimizer.param_groups] == [names[0] + names[1], names[2]]
    split.part()
    assert [part["lr"] for part in optimizer.param_groups] == rates
    assert [part["param_names"] for part in optimizer.param_groups] == names


def test_parts_whose_settings_differ_stay_apart() -> None:
    """As a hook may have written them."""
    model, _ = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    split = SplitGroups(optimizer, by_matrix(model, optimizer))
    split.put_in()
    optimizer.param_groups[1]["weight_decay"] = 0.0
    split.join()
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [(0.01, 2), (0.0, 2)]


def test_a_group_that_is_stepped_in_a_loop_keeps_its_parts_beside_one_that_is_not() -> None:
    model, _ = build()
    optimizer = torch.optim.AdamW(
        [
            {"params": [model[0].weight, model[2].weight], "foreach": True},
            {"params": [model[0].bias, model[2].bias], "foreach": False},
        ],
        lr=3e-3,
    )
    search = attach(model, optimizer, rates={"first": "0.*", "second": "2.*"}, **HELD)
    seen = stepped_groups(optimizer)
    train(model, optimizer, search, stop=1)
    assert seen == [[2, 1, 1]]
