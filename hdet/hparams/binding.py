"""Bindings: where a knob's value lives in one model and optimizer, and how it is read and written there."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.nn import KnobTensor

Bounds = tuple[float, float]


class Overwritten(NamedTuple):
    """An entry that does not hold what was written there."""

    entry: str
    found: float
    expected: float


class Holding(NamedTuple):
    """An object that a mapping or list holds. As long as it is that very object, nobody has put another there."""

    owner: Any
    key: Hashable
    value: object


@runtime_checkable
class Binding(Protocol):
    """One knob's place in one replica. `targets` names the scalars it writes, to refuse two knobs on one.

    `overwritten` tells, after `write(value)`, where something else has written since; `None` if nowhere, or if it would
    take a wait for a device to tell.
    """

    @property
    def targets(self) -> frozenset[Hashable]: ...

    def read(self) -> float: ...

    def write(self, value: float) -> None: ...

    def overwritten(self, value: float) -> Overwritten | None: ...


@runtime_checkable
class Watchable(Protocol):
    """A binding for which it is enough to look whether objects are still where it put them.

    `holdings` tells which, after `write`; `None` where that does not tell whether something was overwritten. That the
    optimizer still has the same groups is looked after by the engine (`hdet.engine.loop_checks`). A subclass that looks
    at more in `overwritten` gives `holdings` of its own too.
    """

    def holdings(self) -> list[Holding] | None: ...


def fit(value: float, bounds: Bounds, dtype: torch.dtype) -> float:
    """`value` as `dtype` holds it, stepped back inside when rounding carried it over a bound.

    >>> fit(0.1, (0.0, 0.1), torch.float32) <= 0.1
    True
    """
    if dtype == torch.float64:
        return value
    low, high = bounds
    if dtype == torch.float32 and low <= (single := float(np.float32(value))) <= high:
        return single  # the way it mostly goes, at every step
    held = torch.tensor(value, dtype=dtype, device="cpu")
    if held.item() > high:
        held = torch.nextafter(held, torch.full_like(held, -math.inf))
    elif held.item() < low:
        held = torch.nextafter(held, torch.full_like(held, math.inf))
    return float(held.item())


@dataclass
class Given:
    """What the user gave an entry of a parameter group, and what hdet wrote over it last."""

    value: float
    written: float | None = None
    held: float | Tensor | None = None
    version: int | None = None

    def note(self, value: float, entry: float | Tensor) -> None:
        """This was written, and is held like that."""
        self.written = value
        self.held = entry
        self.version = entry._version if isinstance(entry, Tensor) else None


_given: WeakKeyDictionary[Optimizer, dict[Hashable, Given]] = WeakKeyDictionary()
"""What hdet has found in optimizers that it drives, for the next engine on one of them."""

SCHEDULED = {"lr": "initial_lr", "momentum": "max_momentum", "betas": "max_momentum"}
"""By entry, what a torch scheduler that drives it leaves in the group."""


def given(optimizer: Optimizer, index: int, key: str, item: int | None = None) -> float:
    """What the user gave an entry of a parameter group: not what an earlier engine has left there."""
    return _found(optimizer, index, key, item).value


def _found(optimizer: Optimizer, index: int, key: str, item: int | None) -> Given:
    entry = optimizer.param_groups[index][key]
    entry = entry if item is None else entry[item]
    if isinstance(entry, Tensor) and (entry.numel() != 1 or not entry.is_floating_point()):
        raise ConfigError(
            f"parameter group {index} holds {key} as a tensor of {entry.numel()} elements and type {entry.dtype}; only "
            f"one floating-point number can be moved, so make it a float, or torch.tensor(0.1), say"
        )
    held = float(entry)
    known = _given.setdefault(optimizer, {})
    before = known.get((index, key, item))
    if before is None or held != (before.value if before.written is None else _as_held(entry, before.written)):
        before = known[index, key, item] = Given(held)
    return before


def _as_held(entry: float | Tensor, value: float) -> float:
    """A value as it comes back from an entry that it was written to."""
    return float(torch.tensor(value, dtype=entry.dtype, device="cpu")) if isinstance(entry, Tensor) else value


@dataclass(frozen=True)
class GroupBinding:
    """An entry of optimizer parameter groups, addressed by optimizer and index (group dicts get replaced).

    Several groups keep their ratios: writing `v` sets group g to `v * ratios[g]`; `bounds` are those of `v`.
    With `item`, the entry is a tuple (Adam's `betas`) of which one element is the knob. A tensor entry is
    written in place.
    """

    optimizer: Optimizer
    indices: tuple[int, ...]
    ratios: tuple[float, ...]
    key: str
    item: int | None
    bounds: Bounds

    @cached_property
    def _entries(self) -> list[Given]:
        return [_found(self.optimizer, index, self.key, self.item) for index in self.indices]

    @property
    def targets(self) -> frozenset[Hashable]:
        return frozenset((id(self.optimizer), index, self.key, self.item) for index in self.indices)

    def base(self) -> float:
        """What the user gave the first group.

        Raises:
            ConfigError: a scheduler drives the entry, so that what it holds now is no base.
        """
        group = self.optimizer.param_groups[self.indices[0]]
        mark = SCHEDULED.get(self.key)
        if mark in group:
            raise ConfigError(
                f"{self.key} is driven by a torch scheduler (the optimizer's group {self.indices[0]} holds {mark!r}), "
                f"and what it holds now, {self.read():g}, is a point of that schedule and no base; drop the scheduler "
                f"and give the knob its course (schedule=hdet.schedules.OneCycle(...), another, or a number), or keep "
                f"it and use hdet.attach(..., scheduler=scheduler)"
            )
        return given(self.optimizer, self.indices[0], self.key, self.item) / self.ratios[0]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the groups."""
        return [p for index in self.indices for p in self.optimizer.param_groups[index]["params"]]

    def read(self) -> float:
        entry = self.optimizer.param_groups[self.indices[0]][self.key]
        return float(entry if self.item is None else entry[self.item]) / self.ratios[0]

    def write(self, value: float) -> None:
        groups, key, bounds = self.optimizer.param_groups, self.key, self.bounds
        in_place: list[tuple[Given, float, Tensor]] = []
        for index, ratio, noted in zip(self.indices, self.ratios, self._entries, strict=True):
            group = groups[index]
            own = value if ratio == 1.0 else value * ratio
            held: float | Tensor = own
            if self.item is not None:
                items = list(group[key])
                held = items[self.item] = _written(items[self.item], own, bounds)
                group[key] = tuple(items)
            elif isinstance(group[key], Tensor):
                held = _written(group[key], own, (bounds[0] * ratio, bounds[1] * ratio))
            else:
                group[key] = own
            noted.note(own, held)
            if isinstance(held, Tensor):
                in_place.append((noted, own, held))
        for noted, own, tensor in in_place:  # again at the end: groups may share one tensor
            noted.note(own, tensor)

    def overwritten(self, value: float) -> Overwritten | None:
        groups, key, item = self.optimizer.param_groups, self.key, self.item
        for index, ratio, noted in zip(self.indices, self.ratios, self._entries, strict=True):
            own = value if ratio == 1.0 else value * ratio
            entry: Any = groups[index][key] if item is None else groups[index][key][item]
            # The very object that was put there, a tensor as often changed in place as then: nothing is read.
            untouched = entry is noted.held and own == noted.written
            if untouched and (not isinstance(entry, Tensor) or entry._version == noted.version):
                continue
            name = f"param_groups[{index}][{key!r}]" + ("" if item is None else f"[{item}]")
            found = _differs(entry, own, (self.bounds[0] * ratio, self.bounds[1] * ratio), name)
            if found is not None:
                return found
        return None

    def holdings(self) -> list[Holding] | None:
        found = []
        for index in self.indices:
            group = self.optimizer.param_groups[index]
            entry = group[self.key] if self.item is None else group[self.key][self.item]
            in_place = isinstance(entry, Tensor) or (self.item is not None and not isinstance(group[self.key], tuple))
            if in_place:  # the same object may hold another value
                return None
            found.append(Holding(group, self.key, group[self.key]))
        return found


def _written(entry: float | Tensor, value: float, bounds: Bounds) -> float | Tensor:
    if isinstance(entry, Tensor):
        with torch.no_grad():
            entry.fill_(fit(value, bounds, entry.dtype))
        return entry
    return value


def _differs(entry: float | Tensor, value: float, bounds: Bounds, name: str) -> Overwritten | None:
    """Whether an entry holds another value than was written there."""
    if isinstance(entry, Tensor):
        value, entry = fit(value, bounds, entry.dtype), float(entry.detach())
    return Overwritten(name, entry, value) if entry != value else None


@dataclass(frozen=True)
class Attribute:
    """A module's attribute that holds a float or a 0-dim tensor."""

    module: nn.Module
    name: str


@dataclass(frozen=True)
class ModelBinding:
    """Scalars inside the model that move together: KnobTensors, and plain attributes of modules.

    Raises:
        ConfigError: there are none, or an attribute holds something else.
    """

    cells: Sequence[KnobTensor | Attribute]
    bounds: Bounds

    def __post_init__(self) -> None:
        if not self.cells:
            raise ConfigError(
                "a ModelBinding was given no scalars; a knob's bind finds them, or raises hdet.errors.MatchError"
            )
        for cell in self.cells:
            _held(cell)

    @property
    def targets(self) -> frozenset[Hashable]:
        return frozenset(
            (id(cell),) if isinstance(cell, KnobTensor) else (id(cell.module), cell.name) for cell in self.cells
        )

    def read(self) -> float:
        values = {_held(cell) for cell in self.cells}
        if len(values) > 1:
            raise ConfigError(
                f"the selected modules hold different values: {sorted(values)}; declare one knob for each by its "
                f"pattern, or give the knob a schedule, which sets them all alike"
            )
        return values.pop()

    def write(self, value: float) -> None:
        value = self._as_all_hold(value)
        for cell in self.cells:
            if isinstance(cell, KnobTensor):
                cell.fill_(value)
            else:
                setattr(cell.module, cell.name, _written(getattr(cell.module, cell.name), value, self.bounds))

    def _as_all_hold(self, value: float) -> float:
        """The value itself, unless the float32 of a KnobTensor would round it over a bound."""
        low, high = self.bounds
        if low <= float(np.float32(value)) <= high or not any(isinstance(cell, KnobTensor) for cell in self.cells):
            return value
        return fit(value, self.bounds, torch.float32)

    def overwritten(self, value: float) -> Overwritten | None:
        value = self._as_all_hold(value)
        for cell in self.cells:
            if isinstance(cell, KnobTensor):
                found = _differs(cell.value, value, self.bounds, f"a {cell.role or 'knob'} tensor")
            elif isinstance(entry := getattr(cell.module, cell.name), Tensor):
                continue
            else:
                found = _differs(entry, value, self.bounds, f"{type(cell.module).__name__}.{cell.name}")
            if found is not None:
                return found
        return None

    def holdings(self) -> list[Holding] | None:
        found = []
        for cell in self.cells:
            if isinstance(cell, KnobTensor):
                found.append(Holding(vars(cell), "_value", cell.value))
            elif not isinstance(getattr(cell.module, cell.name), Tensor):
                own = vars(cell.module)
                if cell.name not in own:
                    return None
                found.append(Holding(own, cell.name, own[cell.name]))
        return found


def _held(cell: KnobTensor | Attribute) -> float:
    if isinstance(cell, KnobTensor):
        return cell.value
    entry = getattr(cell.module, cell.name)
    if isinstance(entry, (int, float)) and not isinstance(entry, bool):
        return float(entry)
    if isinstance(entry, Tensor) and entry.numel() == 1 and entry.is_floating_point():
        return float(entry.detach())
    found = type(entry).__name__
    if isinstance(entry, Tensor):
        found = f"a tensor of shape {tuple(entry.shape)} and {entry.dtype}"
    raise ConfigError(f"a knob is one scalar, a float, 0-dim float tensor or KnobTensor; {cell.name!r} holds {found}")


@dataclass(frozen=True)
class FunctionBinding:
    """A scalar reached through the user's own getter and setter."""

    model: nn.Module
    name: str
    get: Callable[[nn.Module], float]
    set: Callable[[nn.Module, float], None]

    @property
    def targets(self) -> frozenset[Hashable]:
        return frozenset({(id(self.model), self.name)})

    def read(self) -> float:
        found = self.get(self.model)
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"its get= has to return one number, and gave {found!r:.60} ({error})") from error

    def write(self, value: float) -> None:
        self.set(self.model, value)

    def overwritten(self, value: float) -> None:
        """Not asked: a getter of the user's own may cost anything."""

    def holdings(self) -> list[Holding]:
        return []
