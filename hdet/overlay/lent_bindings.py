"""Bindings whose values are in force for a moment only; the rest of the time the user's own are there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import StepError
from hdet.hparams.binding import Binding, GroupBinding, Holding, fit
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import Knob
from hdet.hparams.space import Space
from hdet.overlay.split_groups import SplitGroups, taken_out
from hdet.overlay.told_schedule import Told


@dataclass
class Hand:
    """What is put in, whether it is, and what was there.

    Attributes:
        waits: what is written is for the next step, and put in with it.
        put: what the groups held once it was put in.
        knob: tells how far it has been moved, for where the value cannot.
    """

    value: float | None = None
    in_force: bool = False
    waits: bool = False
    theirs: list[Any] = field(default_factory=list)
    put: list[Any] = field(default_factory=list)
    knob: BoundKnob | None = None


@dataclass(frozen=True)
class LentGroups(GroupBinding):
    """Entries of parameter groups: `write` says what is to be there, `put_in` puts it there, `take_out` takes it back.

    Where it is `told` what the user or a scheduler writes, the value is relative to that: each group's own is moved
    as far as that of the group told of; where that one stands at 0, which nothing moves, as far as the knob was. Else
    the value is written as it is, and groups keep their first ratios.

    Attributes:
        owners: by index, the places of the groups that the user holds, by which is told; None for the same.
    """

    told: Told | None
    space: Space
    step: Callable[[], int] | None
    owners: Sequence[int] | None = None
    hand: Hand = field(default_factory=Hand, compare=False)

    def read(self) -> float:
        return self.hand.value if self.hand.value is not None else super().read()

    def write(self, value: float) -> None:
        self.hand.value = value
        if self.hand.in_force and not self.hand.waits:
            self._put(value, self._groups())

    def overwritten(self, value: float) -> None:
        """Nothing is: between steps the user's own value is there, and theirs to write."""

    def holdings(self) -> list[Holding]:
        return []

    def put_in(self) -> None:
        """Put the value last written in force."""
        if self.hand.in_force:
            return
        key, item, groups = self.key, self.item, self._groups()
        theirs = [kept(group[key] if item is None else group[key][item]) for group in groups]
        self.hand.theirs = self.hand.put = theirs
        self.hand.in_force = True
        if self.hand.value is not None:
            self._put(self.hand.value, groups)

    def _groups(self) -> list[dict[str, Any]]:
        groups = self.optimizer.param_groups
        if max(self.indices) >= len(groups):
            raise taken_out(len(groups))
        return [groups[index] for index in self.indices]

    @cached_property
    def _of_theirs(self) -> Sequence[int]:
        """By index, the places of the groups that are told of."""
        return self.indices if self.owners is None else [self.owners[index] for index in self.indices]

    def refuse_written(self) -> None:
        """Go on where nothing has written the entry while its value was in force.

        Raises:
            StepError: the optimizer has, and what it wrote would be taken out.
        """
        key, item = self.key, self.item
        for index, group, put in zip(self.indices, self._groups(), self.hand.put, strict=True):
            now = group[key] if item is None else group[key][item]
            if now is put or isinstance(now, Tensor) or isinstance(put, Tensor):  # a tensor is not read
                continue
            if not (now == put or put != put):
                knob = {"lr": "learning_rate", "betas": "beta1 or beta2"}.get(key, key)
                raise StepError(
                    f"{key} of group {index} was written within a step of the {type(self.optimizer).__name__} "
                    f"({now:g} in place of {put:g}), by it or by a hook, and hdet would take that out; leave that "
                    f"value to who writes it: exclude=[{knob!r}], or a knob that you gave by leaving it out of knobs="
                )

    def take_out(self) -> None:
        """Put back what was there."""
        if not self.hand.in_force:
            return
        for group, theirs in zip(self._groups(), self.hand.theirs, strict=True):
            if self.item is None and not isinstance(theirs, Tensor):
                group[self.key] = theirs
            else:
                put_back(group, self.key, theirs, self.item)
        self.hand.in_force = False  # not before: where that was interrupted, it is still to be taken out

    def _put(self, value: float, groups: Sequence[dict[str, Any]]) -> None:
        key, item = self.key, self.item
        if self.told is None:
            super().write(value)
            self.hand.put = [group[key] if item is None else group[key][item] for group in groups]
            return
        assert self.step is not None
        row = self.told.course.at(self.step())
        reference = row[self.told.group]
        stays = value == reference == 0.0  # which only a shift moves
        put: list[Any] = []
        for group, place, theirs in zip(groups, self._of_theirs, self.hand.theirs, strict=True):
            if isinstance(theirs, Tensor) and item is None:
                # As a factor, so that a rate that lies on a device is not read.
                with torch.no_grad():
                    group[key].copy_(theirs)
                    if value != reference:
                        group[key].mul_(value / reference)
                    elif reference == 0.0 and self._shift != 0.0:
                        group[key].mul_(self.space.apply(1.0, self._shift))
                put.append(group[key])
                continue
            own = row[place]
            moved = value if own == reference and not stays else self._moved(own, value, reference)
            if item is None:
                group[key] = moved
                put.append(moved)
                continue
            is_tensor = isinstance(theirs, Tensor)
            held = torch.full_like(theirs, fit(moved, self.bounds, theirs.dtype)) if is_tensor else moved
            put_back(group, key, held, item)
            put.append(held)
        self.hand.put = put

    def _moved(self, theirs: float, value: float, reference: float) -> float:
        """Another group's own value, moved as the reference group's was from `reference` to `value`."""
        if value == reference:
            return self.space.apply(theirs, self._shift) if reference == 0.0 else theirs
        return self.space.apply(theirs, self.space.difference(value, reference))

    @property
    def _shift(self) -> float:
        return self.hand.knob.shift if self.hand.knob is not None else 0.0


class LentScalar:
    """A scalar inside the model, lent for the time of a pass.

    Args:
        inner: where it is.
        name: the knob's.
        stays: the model's output depends on it in evaluation too, so that between passes its base is there.
    """

    def __init__(self, inner: Binding, name: str, stays: bool) -> None:
        self.inner = inner
        self.name = name
        self.stays = stays
        self.theirs = inner.read()
        self.hand = Hand()
        self.rest: Callable[[], float] | None = None
        self._left = self.theirs

    @property
    def targets(self) -> frozenset[Hashable]:
        return self.inner.targets

    def read(self) -> float:
        return self.hand.value if self.hand.value is not None else self.theirs

    def write(self, value: float) -> None:
        self.hand.value = value
        if self.hand.in_force:
            self.inner.write(value)

    def overwritten(self, value: float) -> None:
        """Not asked here: `put_in` does, since between passes the user's own value is there."""

    def holdings(self) -> list[Holding]:
        return []

    def put_in(self) -> None:
        """Put the value last written in force.

        Raises:
            StepError: something else has written the scalar since it was last left.
        """
        if self.hand.in_force:
            return
        self.refuse_written()
        self.hand.in_force = True
        if self.hand.value is not None:
            self.inner.write(self.hand.value)

    def refuse_written(self) -> None:
        """Go on where nothing has written the scalar between passes.

        Raises:
            StepError: something else has.
        """
        found = self.inner.read()
        if found != self._left:
            raise StepError(
                f"{self.name} was {self._left:g} when hdet left it and is {found:g} now: something else writes what "
                f"hdet explores; leave one of the two out, hdet's by exclude=({self.name!r},), or a knob that you gave "
                f"by leaving it out of knobs="
            )

    def take_out(self) -> None:
        """Put back what was there; the base, where evaluation depends on it."""
        if not self.hand.in_force:
            return
        self.let_rest()
        self.hand.in_force = False

    def let_rest(self) -> None:
        """Between passes what was there is there; the base, where evaluation depends on it."""
        self.inner.write(self.rest() if self.stays and self.rest is not None else self.theirs)
        self._left = self.inner.read()


class Lending:
    """All that hdet lends a model and its optimizer: update knobs for a step, forward knobs for a pass.

    Args:
        step: the coming step. With it a knob that follows what the optimizer holds is relative to that, and one that
            acts in evaluation too rests at its base; else values are written as they are.
        split: groups that are cut wherever update knobs are in force, and bound.
    """

    _update_is_out = False  # nobody knows yet, as of one that an earlier version has pickled

    def __init__(self, step: Callable[[], int] | None = None, split: SplitGroups | None = None) -> None:
        self._step = step
        self._split = split
        self.groups: list[LentGroups] = []
        self.scalars: list[LentScalar] = []

    def bind(self, knob: Knob, model: nn.Module, optimizer: Optimizer) -> Binding:
        """The knob's own binding, lent."""
        inner = knob.bind(model, optimizer)
        if isinstance(inner, GroupBinding):
            told = knob.schedule if self._step is not None and isinstance(knob.schedule, Told) else None
            owners = self._split.owners if self._split is not None else None
            lent = LentGroups(**vars(inner), told=told, space=knob.space, step=self._step, owners=owners)
            self.groups.append(lent)
            return lent
        scalar = LentScalar(inner, knob.label, knob.acts_in_eval)
        self.scalars.append(scalar)
        return scalar

    def know(self, knobs: Sequence[BoundKnob]) -> None:
        """Let scalars that evaluation depends on rest at their knobs' bases, and groups know how far these moved."""
        step = self._step
        assert step is not None
        for knob in knobs:
            binding = knob.bindings[0]
            if isinstance(binding, LentScalar):
                binding.rest = lambda own=knob: own.base(step())
            elif isinstance(binding, LentGroups):
                binding.hand.knob = knob

    def put_in_forward(self, *, at_base: bool = False) -> None:
        """Forward knobs are in force: a pass begins, of a seat or, beyond them, at the bases."""
        for scalar in self.scalars:
            scalar.put_in()
            if at_base and scalar.rest is not None:
                scalar.inner.write(scalar.rest())

    def take_out_forward(self) -> None:
        """A pass is over."""
        for scalar in self.scalars:
            scalar.take_out()

    def let_rest(self) -> None:
        """Knobs have other bases than they had: no pass is under way."""
        for scalar in self.scalars:
            if not scalar.hand.in_force:
                scalar.let_rest()

    def put_in_update(self, stepped: Optimizer | None = None) -> None:
        """Update knobs are in force: the optimizer steps; of several the given one."""
        self._update_is_out = False
        if self._split is not None:
            self._split.put_in()
        for group in self.groups:
            if stepped is None or group.optimizer is stepped:
                group.put_in()

    def take_out_update(self, stepped: Optimizer | None = None) -> None:
        """The optimizer has stepped; of several the given one."""
        if self._update_is_out and (self._split is None or not self._split.in_force):
            return
        if self._split is not None:
            self._split.part()
        for group in self.groups:
            if stepped is None or group.optimizer is stepped:
                group.take_out()
        if self._split is not None:
            self._split.take_out()
        self._update_is_out = stepped is None

    def refuse_written(self) -> None:
        """What is in force for a step is what was put in."""
        if self._split is not None:
            self._split.part()
        for group in self.groups:
            if group.hand.in_force:
                group.refuse_written()

    def join_groups(self) -> None:
        """The optimizer is to step: what is in force stays so, by as few groups as there are different ones."""
        if self._split is not None:
            self._split.join()

    @contextmanager
    def groups_cut(self) -> Iterator[None]:
        """The optimizer holds the groups that knobs go by inside the block; afterwards what it held before."""
        if self._split is None:
            yield
            return
        self._split.part()
        if self._split.in_force:
            yield
            return
        self._split.put_in()
        try:
            yield
        finally:
            self._split.take_out()

    @contextmanager
    def until_next_step(self) -> Iterator[None]:
        """What is written inside the block is for the next step: what is in force stays so until it is taken out.

        A scalar that evaluation depends on rests at its base there.
        """
        stay = [scalar for scalar in self.scalars if scalar.stays and not scalar.hand.in_force]
        for scalar in stay:
            scalar.refuse_written()
        try:
            for group in self.groups:
                group.hand.waits = True
            yield
        finally:
            for group in self.groups:
                group.hand.waits = False
            for scalar in stay:
                scalar.let_rest()

    @contextmanager
    def all_in_force(self) -> Iterator[None]:
        """Everything as hdet has it inside the block; afterwards as it was before."""
        lent: list[LentGroups | LentScalar] = [*self.groups, *self.scalars]
        mine = [one for one in lent if not one.hand.in_force]
        with self.groups_cut():
            for one in mine:
                one.put_in()
            try:
                yield
            finally:
                for one in mine:
                    one.take_out()


def kept(entry: Any) -> Any:
    """What a group holds, to be put back; a tensor's value."""
    return entry.detach().clone() if isinstance(entry, Tensor) else entry


def put_back(group: dict[str, Any], key: str, entry: Any, item: int | None = None) -> None:
    """What `kept` gave is there again; a tensor in place. Other elements stay as they are."""
    held = group.get(key) if item is None else group[key][item]
    if isinstance(entry, Tensor) and isinstance(held, Tensor):
        with torch.no_grad():
            held.copy_(entry)
    elif item is None:
        group[key] = entry
    else:
        group[key] = type(group[key])(entry if at == item else other for at, other in enumerate(group[key]))
