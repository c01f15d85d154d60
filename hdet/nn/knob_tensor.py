"""A scalar that can change at every step without a recompilation and without a device synchronisation.

`torch.compile` guards on Python floats: a module whose `forward` reads a float is compiled again for each
new value. A 0-dim tensor is a graph input instead, so one graph serves all values. Eager code, on the other
hand, wants a float: reading a tensor on an accelerator waits for it. `KnobTensor` keeps both and writes both.

It is deliberately neither a parameter nor a buffer: DistributedDataParallel overwrites buffers with those of
rank 0, fully sharded training refuses 0-dim parameters, and neither belongs in a `state_dict`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from hdet.errors import ConfigError
from hdet.nn.names import named_modules

M = TypeVar("M", bound="KnobModule")

SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest positive normal number of float32: the lower bound of scalars that are divided by."""


class KnobTensor:
    """A float on the host and a 0-dim float32 tensor on the device, always equal up to float32 rounding.

    Nobody else writes the tensor: a value that the float has already is not written again.

    Write it with `fill_` between a backward and the next forward: a compiled backward may still need the
    value its forward has used, and then raises PyTorch's error about a tensor modified in place.

    Args:
        value: the value to start from.
        role: what the scalar is to the model (`"dropout"`, `"temperature"`, ...), for `knob_tensors`.
        low: the smallest value allowed.
        high: the largest value allowed.
        device: where the tensor lives; the default device if None.

    Raises:
        ConfigError: the value is not finite or not within [low, high].

    >>> rate = KnobTensor(0.1, role="dropout", low=0.0, high=1.0)
    >>> rate.fill_(0.25).value, rate.tensor
    (0.25, tensor(0.2500))
    """

    tensor: Tensor
    """0-dim, float32; the same object until the module moves to another device."""

    always_zero: bool
    """Whether every value so far was 0. It turns False once and stays so: a compiled graph may leave out the
    random numbers of a dropout that is never used, at the price of one recompilation if it ever is."""

    def __init__(
        self,
        value: float,
        *,
        role: str = "",
        low: float = -math.inf,
        high: float = math.inf,
        device: torch.device | None = None,
    ) -> None:
        self.role = role
        self.low = low
        self.high = high
        self._value = self._checked(value)
        self.always_zero = self._value == 0.0
        self._place(device)

    @property
    def value(self) -> float:
        """The float on the host. Reading it never waits for the device."""
        return self._value

    def fill_(self, value: float) -> KnobTensor:
        """Write the host's float and the device's tensor, and return self. A value that is there costs no kernel.

        Raises:
            ConfigError: the value is not finite or not within [low, high]; nothing is written.
        """
        checked = self._checked(value)
        if checked == self._value:
            return self
        self._value = checked
        self.always_zero = self.always_zero and self._value == 0.0
        self.tensor.fill_(self._value)
        return self

    def on(self, device: torch.device) -> Tensor:
        """The 0-dim tensor on `device`: the tensor itself if it lives there, else a copy."""
        return self.tensor if self.tensor.device == device else self.tensor.to(device)

    def follow(self, convert: Callable[[Tensor], Tensor]) -> None:
        """Move to where `convert`, the function `nn.Module._apply` is given, moves tensors; stay float32."""
        device = convert(torch.empty(0, device=self.tensor.device)).device
        if device != self.tensor.device:
            self._place(device)

    def _place(self, device: torch.device | None) -> None:
        # Never on "meta": the value is known, and a tensor without data could not be moved off it again.
        tensor = torch.tensor(self._value, dtype=torch.float32, device=device)
        self.tensor = torch.tensor(self._value, dtype=torch.float32, device="cpu") if tensor.is_meta else tensor

    def _checked(self, value: float) -> float:
        value = float(value)
        if not (math.isfinite(value) and self.low <= value <= self.high):
            raise ConfigError(
                f"a {self.role or 'knob'} tensor was given {value!r}; it takes a finite number "
                f"in [{self.low:g}, {self.high:g}]"
            )
        return value

    def __repr__(self) -> str:
        return f"KnobTensor({self._value!r}, role={self.role!r}, device={str(self.tensor.device)!r})"


class KnobAttribute:
    """A module's float attribute whose storage is a `KnobTensor`.

    Reading the attribute gives the host's float, so code written for the plain module keeps working;
    assigning to it writes through `fill_`. The `KnobTensor` itself is the instance attribute `<name>_knob`.

    >>> class Scale(KnobModule):
    ...     factor = KnobAttribute("factor", default=1.0)
    >>> scale = Scale()
    >>> scale.factor = 2.0
    >>> scale.factor, scale.factor_knob.tensor
    (2.0, tensor(2.))
    """

    def __init__(self, role: str, *, default: float, low: float = -math.inf, high: float = math.inf) -> None:
        self.role = role
        self.default = default
        self.low = low
        self.high = high

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.slot = f"{name}_knob"

    @overload
    def __get__(self, module: None, owner: type) -> KnobAttribute: ...
    @overload
    def __get__(self, module: nn.Module, owner: type) -> float: ...
    def __get__(self, module: nn.Module | None, owner: type) -> KnobAttribute | float:
        if module is None:
            return self
        knob: KnobTensor = getattr(module, self.slot)
        return knob.value

    def __set__(self, module: nn.Module, value: float) -> None:
        if self.slot in module.__dict__:
            module.__dict__[self.slot].fill_(value)
        else:
            self.create(module, value)

    def create(self, module: nn.Module, value: float, device: torch.device | None = None) -> None:
        """Give `module` its `KnobTensor`, replacing one it may have."""
        knob = KnobTensor(value, role=self.role, low=self.low, high=self.high, device=device)
        setattr(module, self.slot, knob)


class KnobModule(nn.Module):
    """A module whose `KnobTensor`s follow it from device to device. Put it first among the base classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for attribute in knob_attributes(type(self)):
            if attribute.slot not in self.__dict__:
                attribute.create(self, attribute.default)

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for held in self.__dict__.values():
            if isinstance(held, KnobTensor):
                held.follow(fn)
        return self


def knob_attributes(cls: type) -> list[KnobAttribute]:
    """The `KnobAttribute`s that a class declares or inherits, in the order of their declaration."""
    members = {name: member for base in reversed(cls.__mro__) for name, member in vars(base).items()}
    return [member for member in members.values() if isinstance(member, KnobAttribute)]


def knob_tensors(model: nn.Module, role: str, pattern: str = "*") -> dict[str, KnobTensor]:
    """The knob tensors of a model that play a role, by name.

    Args:
        model: any module; knob tensors are found on it and on all its submodules, as plain attributes.
        role: `"dropout"`, `"temperature"`, `"label_smoothing"`, or whatever role your own modules use.
        pattern: a shell-style pattern (`fnmatch`; `*` also matches dots) for the *module's* name, without
            the segments of wrappers such as DistributedDataParallel and torch.compile.

    Returns:
        The module's name, a dot and the attribute's name without its `_knob`, mapped to the tensor. A tensor
        that several modules share is listed once. Empty if there is none.

    >>> from hdet.nn import Dropout
    >>> knob_tensors(nn.Sequential(nn.Linear(2, 2), Dropout(0.1)), "dropout")
    {'1.p': KnobTensor(0.1, role='dropout', device='cpu')}
    """
    found: dict[str, KnobTensor] = {}
    seen: set[int] = set()
    for name, module in named_modules(model):
        if not fnmatchcase(name, pattern):
            continue
        for attribute, held in vars(module).items():
            if isinstance(held, KnobTensor) and held.role == role and id(held) not in seen:
                seen.add(id(held))
                scalar = attribute.removesuffix("_knob")
                found[f"{name}.{scalar}" if name else scalar] = held
    return found
