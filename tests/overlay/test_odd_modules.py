"""Modules that are not all that torch's are: they are searched, saved and resumed as others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attach_parts import STEPS, batch, loss_of, network, probe
from torch import Tensor, nn

import hdet


class OldSignature(nn.Module):
    """Leaves out the target by a method that does not know `remove_duplicate` (torchrl's loss modules)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()
        self.target = nn.Linear(4, 3).requires_grad_(False)

    def named_parameters(  # type: ignore[override]
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(prefix=prefix, recurse=recurse):
            if "target" not in name:
                yield name, parameter

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]


class Compared(nn.Module):
    """`==` goes value by value, and `bool` is refused (tensordict's parameters)."""

    __hash__ = nn.Module.__hash__

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))
        self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)

    def __eq__(self, other: object) -> Any:
        return torch.ones(3) == 1

    def forward(self, inputs: Tensor) -> Tensor:
        self.scale.mul_(1.0)
        self.bias.mul_(1.0)
        return inputs * self.scale + self.bias


@pytest.mark.parametrize("make", [OldSignature, lambda: nn.Sequential(network(), Compared())], ids=["named", "equal"])
def test_it_is_searched_and_resumed(make: Any, assert_same: Any) -> None:
    ends = []
    saved: Any = None
    for first in (0, 17):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=5, quiet=True)
        if saved is not None:
            for part, state in zip((model, optimizer, search), saved, strict=True):
                part.load_state_dict(state)
        for step in range(first, STEPS):
            if step == 17 and saved is None:
                saved = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, search)]
            torch.manual_seed(step)
            search.loss(loss_of(model, batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert search.finished
        assert len([name for name in search.shifts if "learning_rate" in name]) == 3
        ends.append([weight.detach() for weight in model.parameters()])
    assert_same(*ends)


class Halved(nn.Module):
    """Halves a weight by the first forward in eval mode, and doubles it by the first one that trains (RWKV)."""

    def __init__(self, *, flagged: bool = True) -> None:
        super().__init__()
        self.layers = network()
        self.halved, self.flagged = False, flagged

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.layers[3].weight.detach()
        if not self.flagged:
            weight.clamp_(-3.0, 3.0)
        elif self.halved == self.training:
            weight.mul_(2.0 if self.training else 0.5)
            self.halved = not self.training
        return self.layers(inputs) * (2.0 if self.halved else 1.0)  # type: ignore[no-any-return]


def trained(model: nn.Module, *, told: bool) -> hdet.Search:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=5, quiet=True)
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        (search.loss(loss) if told else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return search


@pytest.mark.filterwarnings("ignore:at step .* put the model and the optimizer back:UserWarning")
@pytest.mark.filterwarnings("ignore:hdet was told no training loss:UserWarning")
@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_weights_that_evaluation_rewrites_for_its_own_mode_are_told(told: bool) -> None:
    """What hdet writes over them in between would be doubled by the next pass that trains."""
    with pytest.warns(
        UserWarning, match=r"writes over the trained weight layers\.3\.weight and notes it in halved"
    ) as all:
        trained(Halved(), told=told)
    assert sum("notes it in" in str(one.message) for one in all) == 1


def test_weights_that_every_pass_projects_are_let_be() -> None:
    assert trained(Halved(flagged=False), told=True).finished
