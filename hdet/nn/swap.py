"""One call that makes an existing model's dropouts, attentions and losses explorable."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn

from hdet.errors import MatchError
from hdet.nn.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from hdet.nn.knob_tensor import KnobModule, knob_attributes
from hdet.nn.loss import CrossEntropyLoss
from hdet.nn.multihead_attention import MultiheadAttention
from hdet.nn.names import named_modules
from hdet.nn.tempered import CALL, calls_attention, temper

_BY_KIND: dict[str, tuple[type[KnobModule], ...]] = {
    "dropout": (Dropout, Dropout1d, Dropout2d, Dropout3d),
    "attention": (MultiheadAttention,),
    "loss": (CrossEntropyLoss,),
}


def swap(
    model: nn.Module, *, dropout: bool = True, attention: bool = True, loss: bool = True, pattern: str = "*"
) -> list[str]:
    """Turn a model's PyTorch modules into those of `hdet.nn`, in place.

    Each module stays the same object and only changes its class, so parameters, optimizers, hooks, the
    training flag, `state_dict` keys and references held elsewhere all stay valid. A model that is compiled
    already is compiled once more. What it computes does not change until a knob is written.

    A module that calls `F.scaled_dot_product_attention` in its own forward is given a temperature (see
    `temper`) only if `pattern` names it: the default pattern leaves such modules alone. Where several nested
    modules do, the outermost is taken.

    Args:
        model: any module; wrappers such as DistributedDataParallel and torch.compile are seen through. Swap
            before `fully_shard`, which gives each module a class of its own.
        dropout: swap `nn.Dropout`, `nn.Dropout1d`, `nn.Dropout2d` and `nn.Dropout3d`.
        attention: swap `nn.MultiheadAttention`, and temper the modules that `pattern` names.
        loss: swap `nn.CrossEntropyLoss`.
        pattern: a shell-style pattern (`fnmatch`; `*` also matches dots) for the names of modules to swap.

    Returns:
        The names of the modules that were swapped. Subclasses with a forward of their own are not, nor are
        modules that were swapped before.

    Raises:
        MatchError: there is nothing to swap, and nothing that was swapped before.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    >>> swap(model)
    ['1']
    >>> model[1].p_knob
    KnobTensor(0.1, role='dropout', device='cpu')
    """
    chosen = {"dropout": dropout, "attention": attention, "loss": loss}
    own = [cls for kind, classes in _BY_KIND.items() if chosen[kind] for cls in classes]
    table: dict[type[nn.Module], type[KnobModule]] = {getattr(nn, cls.__name__): cls for cls in own}
    named = [(name, module) for name, module in named_modules(model) if fnmatchcase(name, pattern)]
    plain = [(name, module) for name, module in named if type(module) in table]
    tempered = _outermost([(name, module) for name, module in named if attention and _to_temper(module, pattern)])
    present = [module for _, module in named if isinstance(module, KnobModule)]
    if not (plain or tempered or present):
        kinds = sorted({type(module).__name__ for _, module in named})
        raise MatchError(
            f"no module that {pattern!r} names can be swapped: "
            + (f"it names modules of the types {kinds}" if kinds else "it names none")
            + f"; swappable are {sorted(cls.__name__ for cls in table)}"
            + (f" and, if named by a pattern, modules that call F.{CALL}" if attention else "")
            + "; for other attention modules call hdet.nn.temper(module)"
        )
    device = next((tensor.device for tensor in model.parameters()), None)
    for _, module in tempered:
        temper(module)
    for _, module in plain:
        _change_class(module, table[type(module)], device)
    swapped = {id(module) for _, module in (*plain, *tempered)}
    return [name for name, module in named if id(module) in swapped]


def _to_temper(module: nn.Module, pattern: str) -> bool:
    return pattern != "*" and not isinstance(module, KnobModule) and calls_attention(type(module))


def _outermost(named: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    inner = {id(inside) for _, module in named for inside in module.modules() if inside is not module}
    return [(name, module) for name, module in named if id(module) not in inner]


def _change_class(module: nn.Module, cls: type[KnobModule], device: torch.device | None) -> None:
    attributes = knob_attributes(cls)
    values = {attribute.name: vars(module).pop(attribute.name, attribute.default) for attribute in attributes}
    module.__class__ = cls
    for attribute in attributes:
        attribute.create(module, values[attribute.name], device)
