"""A temperature for modules that call `F.scaled_dot_product_attention` in their own forward."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from hdet.errors import ConfigError, MatchError
from hdet.nn.attention import divide_logits
from hdet.nn.knob_tensor import SMALLEST, KnobAttribute, KnobModule, KnobTensor

CALL = "scaled_dot_product_attention"


class Tempered(KnobModule):
    """The mixin that `temper` puts in front of a module's class."""

    temperature_knob: KnobTensor
    temperature = KnobAttribute("temperature", default=1.0, low=SMALLEST)

    own_class: ClassVar[type[nn.Module]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with the logits of each attention it computes divided by the temperature.

        Raises:
            MatchError: it called no `F.scaled_dot_product_attention`, so the temperature would do nothing, or called it
                inside `torch.utils.checkpoint`, which runs it again without the temperature.
        """
        if not torch.compiler.is_compiling() and self.temperature == 1.0:
            return super().forward(*args, **kwargs)
        mode = _DivideLogits(self.temperature_knob)
        with mode:
            output = super().forward(*args, **kwargs)
        if mode.checkpointed:
            raise MatchError(
                f"{type(self).__name__} was given a temperature, and its forward calls F.{CALL} inside "
                f"torch.utils.checkpoint, which in backward would run it without the temperature: checkpoint the whole "
                f"module instead, or apply hdet.nn.Temperature to its queries inside"
            )
        if not mode.called:
            raise MatchError(
                f"{type(self).__name__} was given a temperature, but its forward called no F.{CALL}; "
                f"apply hdet.nn.Temperature to its queries or logits instead"
            )
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time: pickle and deepcopy are told to make it again from the module's own.
        _, (_, *arguments), *rest = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return (_rebuild, (self.own_class, *arguments), *rest)


def temper(module: nn.Module) -> None:
    """Give a module that calls `F.scaled_dot_product_attention` a temperature, in place.

    The object stays the same, parameters, hooks and `state_dict` included; it gains `temperature` (a float)
    and `temperature_knob` (the `KnobTensor` behind it). Attention kernels that are called in another way
    (flash-attn, flex_attention) are out of reach, and so is activation checkpointing *inside* the module: its
    recomputation runs outside the module's forward, so that the first such pass ends in an error. A module that
    has a temperature is left as it is.

    Raises:
        ConfigError: a module inside has a temperature of its own; both would divide.

    >>> class Attention(nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x)
    >>> module = Attention()
    >>> temper(module)
    >>> module.temperature = 0.5
    >>> module(torch.ones(1, 2, 2)).shape
    torch.Size([1, 2, 2])
    """
    if "temperature_knob" in vars(module):
        return
    for name, inner in module.named_modules():
        if "temperature_knob" in vars(inner) or isinstance(inner, nn.MultiheadAttention):
            raise ConfigError(
                f"{type(module).__name__} cannot be given a temperature: "
                f"{f'{name!r} in it' if name else 'it'} is an attention with a temperature of its own"
            )
    device = next((tensor.device for tensor in module.parameters()), None)
    module.__class__ = _tempered_class(type(module))
    Tempered.temperature.create(module, Tempered.temperature.default, device)


def calls_attention(cls: type[nn.Module]) -> bool:
    """Whether a class's own methods, or functions they name, mention `scaled_dot_product_attention`."""
    seen: set[CodeType] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        members = (getattr(member, "__func__", member) for member in vars(base).values())
        if any(isinstance(member, FunctionType) and _mentions(member, seen) for member in members):
            return True
    return False


def _mentions(function: Callable[..., Any], seen: set[CodeType]) -> bool:
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function.__code__ in seen:
        return False
    seen.add(function.__code__)
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    if CALL in names:
        return True
    named = (function.__globals__.get(name) for name in names)
    return any(_mentions(other, seen) for other in named if isinstance(other, FunctionType))


class _DivideLogits(TorchFunctionMode):
    def __init__(self, temperature: KnobTensor) -> None:
        super().__init__()
        self.temperature = temperature
        self.called = self.checkpointed = False
        self._trains = torch.is_grad_enabled()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            self.called = True
            self.checkpointed |= self._trains and not torch.compiler.is_compiling() and _is_checkpointed()
            given.update(zip(_ARGUMENTS, args, strict=False))
            given["query"], given["scale"] = divide_logits(given["query"], given.get("scale"), self.temperature)
            args = ()
        return func(*args, **given)


def _is_checkpointed() -> bool:
    """Whether the tempered forward that is under way makes the call inside `torch.utils.checkpoint`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != __file__:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""What `scaled_dot_product_attention` takes by position; `scale` and `enable_gqa` go by keyword only."""


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""The tempered class of each class, made once so that equal modules have equal types."""


def _tempered_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _CLASSES:
        members = {"own_class": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
        _CLASSES[cls] = type(f"Tempered{cls.__name__}", (Tempered, cls), members)
    return _CLASSES[cls]


def _rebuild(cls: type[nn.Module], *arguments: Any) -> nn.Module:
    tempered = _tempered_class(cls)
    return tempered.__new__(tempered, *arguments)
