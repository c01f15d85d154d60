"""Knobs of the update: which groups they take, and what they find there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.errors import ConfigError, MatchError
from hdet.hparams.binding import GroupBinding


def adamw(*groups: dict[str, Any], lr: Any = 0.1, **options: Any) -> torch.optim.Optimizer:
    own = [{"params": [nn.Parameter(torch.zeros(1))], **group} for group in groups or ({},)]
    return torch.optim.AdamW(own, lr=lr, **options)


def bind(knob: Any, optimizer: torch.optim.Optimizer) -> GroupBinding:
    binding = knob.bind(nn.Linear(1, 1), optimizer)
    assert isinstance(binding, GroupBinding)
    return binding


@pytest.mark.parametrize(
    ("knob", "value"),
    [(hdet.LearningRate(), 0.1), (hdet.WeightDecay(), 0.3), (hdet.Beta1(), 0.8), (hdet.Beta2(), 0.95)],
    ids=lambda item: getattr(item, "kind", ""),
)
def test_they_read_and_write_what_they_are_called(knob: Any, value: float) -> None:
    optimizer = adamw(weight_decay=0.3, betas=(0.8, 0.95))
    before = {key: entry for key, entry in optimizer.param_groups[0].items() if key != "params"}
    binding = bind(knob, optimizer)
    assert binding.read() == value
    binding.write(0.7)
    after = {key: entry for key, entry in optimizer.param_groups[0].items() if key != "params"}
    changed = {key for key in after if after[key] != before[key]}
    assert changed == {knob.key}
    assert binding.read() == 0.7
    assert knob.acts_on == "update"
    assert not knob.biases_loss


def test_momentum_is_sgds() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    assert bind(hdet.Momentum(), optimizer).read() == 0.9
    with pytest.raises(MatchError, match="momentum: no parameter group of AdamW has 'momentum'; the groups hold"):
        bind(hdet.Momentum(), adamw())


@pytest.mark.parametrize(
    ("groups", "indices"),
    [(None, (0, 1, 2)), (1, (1,)), ("b", (1,)), (("c", 0), (2, 0)), (("b",), (1,)), ((1, 0, 1, "b"), (1, 0))],
)
def test_groups_by_name_or_index(groups: Any, indices: Any) -> None:
    optimizer = adamw({"name": "a"}, {"name": "b"}, {"name": "c"})
    assert bind(hdet.LearningRate(groups=groups), optimizer).indices == indices


@pytest.mark.parametrize("groups", [3, -1, "d", ("a", "d")])
def test_groups_that_are_not_there(groups: Any) -> None:
    optimizer = adamw({"name": "a"}, {"name": "b"}, {"name": "c"})
    with pytest.raises(MatchError, match=r"no parameter group .*; there are indices 0..2 and names \['a', 'b', 'c'\]"):
        bind(hdet.LearningRate(groups=groups), optimizer)


def test_no_group_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"groups=\(\) selects none; give a group's name or index, or None for every"):
        hdet.LearningRate(groups=())


def test_different_rates_keep_their_ratio() -> None:
    optimizer = adamw({"lr": 0.1}, {"lr": 0.01})
    binding = bind(hdet.LearningRate(), optimizer)
    assert binding.read() == 0.1
    binding.write(1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, pytest.approx(0.1)]


def test_groups_that_do_not_decay_stay_so() -> None:
    """Also where such a group comes first."""
    optimizer = adamw({"weight_decay": 0.0}, {"weight_decay": 0.2})
    binding = bind(hdet.WeightDecay(), optimizer)
    assert binding.read() == 0.2
    binding.write(0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.5]


def test_all_at_zero_are_alike() -> None:
    optimizer = adamw({"lr": 0.0}, {"lr": 0.0})
    bind(hdet.LearningRate(schedule=0.1), optimizer).write(0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


def test_different_betas_have_no_common_base() -> None:
    optimizer = adamw({"betas": (0.9, 0.99)}, {"betas": (0.8, 0.99)})
    with pytest.raises(
        ConfigError, match=r"beta1: the groups hold different values \[0.9, 0.8\]; declare one knob for"
    ):
        bind(hdet.Beta1(), optimizer)
    assert bind(hdet.Beta2(), optimizer).read() == 0.99


def test_groups_without_the_entry_are_passed_over() -> None:
    optimizer = adamw({}, {})
    del optimizer.param_groups[0]["weight_decay"]
    assert bind(hdet.WeightDecay(), optimizer).indices == (1,)
    with pytest.raises(MatchError, match=r"parameter groups \[0\] were selected and have no 'weight_decay'"):
        bind(hdet.WeightDecay(groups=(0, 1)), optimizer)


def test_one_tensor_in_several_groups_is_given_to_each() -> None:
    """Torch puts the very same tensor into all; two knobs would write over each other."""
    optimizer = adamw({}, {}, lr=torch.tensor(0.1))
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    first, second = bind(hdet.LearningRate(groups=0), optimizer), bind(hdet.LearningRate(groups=1), optimizer)
    first.write(0.2)
    second.write(0.3)
    assert first.read() == pytest.approx(0.2)
    assert second.read() == pytest.approx(0.3)


def test_betas_that_are_one_tensor_in_several_groups_are_given_to_each() -> None:
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = adamw({}, {}, betas=betas)
    bind(hdet.Beta2(groups=1), optimizer).write(0.5)
    first, second = (group["betas"] for group in optimizer.param_groups)
    assert (first[1].item(), second[1].item()) == (pytest.approx(0.99), 0.5)
    assert first[0] is second[0]


def test_one_knob_for_all_leaves_the_tensor_shared() -> None:
    optimizer = adamw({}, {}, lr=torch.tensor(0.1))
    bind(hdet.LearningRate(), optimizer).write(0.2)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    assert optimizer.param_groups[1]["lr"].item() == pytest.approx(0.2)
