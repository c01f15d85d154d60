"""Knobs that act on the update: learning rate, weight decay, momentum and the betas of a torch optimizer."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.controllers import Controller, Gated
from hdet.errors import ConfigError, MatchError
from hdet.hparams.binding import GroupBinding, given
from hdet.hparams.knob import ActsOn, Knob
from hdet.hparams.space import Logit, Space
from hdet.hparams.spread import Spread, TwoLevel
from hdet.spec import register

Groups = int | str | tuple[int | str, ...] | None


class GroupKnob(Knob):
    """A knob that lives in an optimizer's parameter groups.

    Args:
        groups: a group's `"name"` or index, or several; `None` takes every group that has the entry. Groups
            that hold different values keep their ratio where `keeps_ratio`, else they are refused.
    """

    key: ClassVar[str]
    item: ClassVar[int | None] = None
    keeps_ratio: ClassVar[bool] = False

    groups: Groups = None

    @property
    def acts_on(self) -> ActsOn:
        return "update"

    @property
    def label(self) -> str:
        if self.name or self.groups is None:
            return super().label
        chosen = self.groups if isinstance(self.groups, tuple) else (self.groups,)
        return f"{self.kind}[{','.join(str(group) for group in chosen)}]"

    def bind(self, model: nn.Module, optimizer: Optimizer) -> GroupBinding:
        asked = self._indices(optimizer)
        chosen = [index for index in asked if self.key in optimizer.param_groups[index]]
        entry = self.key if self.item is None else f"{self.key}[{self.item}]"
        if not chosen:
            raise MatchError(
                f"{self.label}: no parameter group of {type(optimizer).__name__} has {entry!r}; "
                f"the groups hold {sorted(set(optimizer.param_groups[0]) - {'params'})}"
            )
        if self.groups is not None and len(chosen) < len(asked):
            lacking = sorted(set(asked) - set(chosen))
            raise MatchError(f"{self.label}: parameter groups {lacking} were selected and have no {entry!r}")
        _unshare(optimizer, chosen, self.key, self.item)
        values = [self._value(optimizer, index) for index in chosen]
        reference = next((value for value in values if value != 0.0), 0.0)
        if any(value != reference for value in values) and not self.keeps_ratio:
            raise ConfigError(
                f"{self.label}: the groups hold different values {values}; declare one knob for each group"
            )
        ratios = tuple(value / reference if reference else 1.0 for value in values)
        # The base is what the first group with a value holds, so that one must come first.
        order = sorted(range(len(chosen)), key=lambda position: ratios[position] == 0.0)
        return GroupBinding(
            optimizer,
            tuple(chosen[position] for position in order),
            tuple(ratios[position] for position in order),
            self.key,
            self.item,
            self.bounds,
        )

    def _value(self, optimizer: Optimizer, index: int) -> float:
        group = optimizer.param_groups[index]
        # A scheduler's warm-up may start all groups at 0, and their ratio is that of the rates it was given.
        starts_at_0 = self.key == "lr" and "initial_lr" in group and group["lr"] == 0.0
        return float(group["initial_lr"]) if starts_at_0 else given(optimizer, index, self.key, self.item)

    def _indices(self, optimizer: Optimizer) -> list[int]:
        count = len(optimizer.param_groups)
        if self.groups is None:
            return list(range(count))
        names: dict[str, list[int]] = {}
        for index, group in enumerate(optimizer.param_groups):
            if "name" in group:
                names.setdefault(group["name"], []).append(index)
        found: list[int] = []
        for wanted in self.groups if isinstance(self.groups, tuple) else (self.groups,):
            own = names.get(wanted, []) if isinstance(wanted, str) else [wanted]
            if not own or not all(0 <= index < count for index in own):
                raise MatchError(
                    f"{self.label}: no parameter group {wanted!r}; there are indices 0..{count - 1}"
                    + (f" and names {sorted(names)}" if names else " and none is named")
                )
            found += own
        return list(dict.fromkeys(found))

    @model_validator(mode="after")
    def _some_group(self) -> GroupKnob:
        if self.groups == ():
            raise ValueError("groups=() selects none; give a group's name or index, or None for every group")
        return self


def _unshare(optimizer: Optimizer, chosen: list[int], key: str, item: int | None) -> None:
    """Give groups a tensor of their own: by default torch puts one and the same into every group."""

    def entry(group: dict[str, Any]) -> Any:
        return group.get(key) if item is None or key not in group else group[key][item]

    others = [group for index, group in enumerate(optimizer.param_groups) if index not in chosen]
    for group in (optimizer.param_groups[index] for index in chosen):
        held = entry(group)
        if isinstance(held, Tensor) and any(entry(other) is held for other in others):
            own = held.clone()
            group[key] = own if item is None else (*group[key][:item], own, *group[key][item + 1 :])


@register
class LearningRate(GroupKnob):
    """The learning rate of all parameter groups, or of some; groups with different rates keep their ratio.

    >>> from hdet import LearningRate
    >>> from hdet.schedules import OneCycle
    >>> LearningRate(schedule=OneCycle(3e-4, total_steps=2000), groups="decay").label
    'learning_rate[decay]'
    """

    key: ClassVar[str] = "lr"
    keeps_ratio: ClassVar[bool] = True

    bounds: tuple[float, float] = (0.0, 100.0)
    spread: Spread = TwoLevel(0.1)
    authority: float = Field(default=7.0, ge=0)


@register
class WeightDecay(GroupKnob):
    """Weight decay. Groups that do not decay stay at 0."""

    key: ClassVar[str] = "weight_decay"
    keeps_ratio: ClassVar[bool] = True

    bounds: tuple[float, float] = (0.0, 100.0)
    spread: Spread = TwoLevel(0.7)
    authority: float = Field(default=7.0, ge=0)

    @property
    def default_controller(self) -> Controller:
        return Gated(0.4, gate=1.0, memory=0.6, window_steps=30, max_scale=4.0, until=0.85)


@register
class Momentum(GroupKnob):
    """SGD's `momentum`. (Adam's first beta is `Beta1`.)"""

    key: ClassVar[str] = "momentum"

    space: Space = Logit()
    bounds: tuple[float, float] = (0.1, 0.999)
    spread: Spread = TwoLevel(0.3)


@register
class Beta1(GroupKnob):
    """The first of Adam's `betas`: the decay of the gradient's running mean."""

    key: ClassVar[str] = "betas"
    item: ClassVar[int | None] = 0

    space: Space = Logit()
    bounds: tuple[float, float] = (0.1, 0.999)
    spread: Spread = TwoLevel(0.3)


@register
class Beta2(GroupKnob):
    """The second of Adam's `betas`: the decay of the squared gradient's running mean."""

    key: ClassVar[str] = "betas"
    item: ClassVar[int | None] = 1

    space: Space = Logit()
    bounds: tuple[float, float] = (0.5, 0.99999)
    spread: Spread = TwoLevel(0.3)
