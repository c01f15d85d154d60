"""Whether a state is one of this engine's model and optimizer: names, shapes and types, before anything is loaded.

torch checks a model's names and shapes, and of an optimizer the number of parameters alone: moments of another shape
are loaded, and a fused kernel then reads past their end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine.cycle import Cycle
from hdet.errors import CheckpointError
from hdet.replicas import tensors
from hdet.replicas.chained_optimizer import steps_by
from hdet.replicas.made_state import made_state
from hdet.spec import briefly

STAND_IN_SIZES = (2, 3, 4, 5, 6, 7, 8)
"""Of a parameter that stands in for another in its number of dimensions: different, to tell them apart."""

AS_THEY_ARE = "build the model and the optimizer as they were"


class Strict(BaseModel):
    """A part of the layout in `hdet.engine.snapshot`; fields that are not named are ignored."""

    model_config = ConfigDict(strict=True, protected_namespaces=())


class OptimizerPart(Strict):
    state: dict[Any, Any]
    param_groups: list[dict[str, Any]]


class ReplicaPart(Strict):
    model: dict[str, Any]
    optimizer: OptimizerPart


class PointPart(ReplicaPart):
    step: int = Field(ge=0)


class OpenPart(Strict):
    step: int = Field(ge=0)
    exploring: dict[str, Any]
    tally: dict[str, Any]
    averages: dict[str, Any]
    noise: dict[str, Any] | None = None
    replicas: dict[str, ReplicaPart]


class KnobPart(Strict):
    """A knob's learned shift and its controller's state; of the shift what moves have counted, where that differs."""

    shift: float = Field(allow_inf_nan=False)
    peak: float = Field(allow_inf_nan=False)
    controller: dict[str, Any]
    counted: float | None = Field(default=None, allow_inf_nan=False)


class TailMeanPart(Strict):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)

    start: int = Field(ge=0)
    stop: int = Field(ge=1)
    steps: int = Field(ge=1)
    flags: list[bool]
    values: list[Tensor]


class TailPart(Strict):
    layers: list[str]
    parts: list[TailMeanPart]


class MergePart(Strict):
    declared: dict[str, Any]
    state: dict[str, Any]


class StatePart(Strict):
    size: int = Field(ge=1)
    window: int = Field(ge=0)
    met: bool | None = None
    finished: bool
    restores: int = Field(ge=0)
    converged: PointPart
    opening: dict[str, ReplicaPart] | None
    watch: dict[str, Any] | None
    tail: TailPart | None = None
    merge: MergePart | None = None
    noise_scale: dict[str, float | None] | None = None
    knobs: dict[str, KnobPart]
    collectors: list[dict[str, Any]]
    open: OpenPart | None


def require_fit(cycle: Cycle, state: Mapping[str, Any]) -> None:
    """Check all parts of a state that are loaded, and change nothing.

    Raises:
        CheckpointError: a part is missing or of another type, or a tensor is of another shape or kind than the
            engine's own.
    """
    require_layout(StatePart, dict(state))
    model, optimizer = cycle.hosts[0]
    for place, part in _parts(state):
        _require_model(place, model, part["model"])
        _require_optimizer(place, optimizer, part["optimizer"])
    if state["open"] is not None:
        _require_averages(cycle, state["open"]["averages"])


def require_layout(part: type[Strict], given: object, *place: str) -> None:
    """Check that what was given has the fields of a part, of their types.

    Args:
        place: where it lies in the whole.

    Raises:
        CheckpointError: naming the first field that is missing or of another type.
    """
    try:
        part.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in (*place, *first["loc"]))
        found = "" if first["type"] == "missing" else f", got {first['input']!r:.60}"
        raise CheckpointError(
            f"the checkpoint is no state of an engine: {where}: {first['msg']}{found}; resume from another one"
        ) from None


def _parts(state: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every model with its optimizer that a load may read, and what a message calls it."""
    yield "converged point", state["converged"]
    for index, part in (state["opening"] or {}).items():
        yield f"replica {index} at the window's opening", part
    for index, part in state["open"]["replicas"].items() if state["open"] is not None else ():
        yield f"replica {index}", part
    for name in ("held", "first"):
        point = (state["watch"] or {}).get(name)
        if point is not None:
            require_layout(PointPart, point, "watch", name)
            yield f"point the guard holds ({name})", point


def _require_model(place: str, model: nn.Module, saved: Mapping[str, Any]) -> None:
    tensors.reshard(model)
    own = model.state_dict()
    odd = sorted(name for name in own.keys() | saved.keys() if _kind(own, name) != _kind(saved, name))
    if odd:
        raise CheckpointError(
            f"the checkpoint's model does not fit ({place}): {odd[0]!r} is {_kind(saved, odd[0])} there and "
            f"{_kind(own, odd[0])} here (and {len(odd) - 1} more differ); build the model as it was"
        )


def _kind(named: Mapping[str, Any], name: str) -> str:
    if name not in named:
        return "missing"
    value = named[name]
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else "no tensor"


def _require_optimizer(place: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    groups, written = optimizer.param_groups, saved["param_groups"]
    counts = [len(group["params"]) for group in groups]
    theirs = [len(group["params"]) if isinstance(group.get("params"), list) else None for group in written]
    if counts != theirs:
        raise CheckpointError(
            f"the checkpoint's optimizer has parameter groups of {briefly(theirs, counts)} parameters, this one of "
            f"{briefly(counts, theirs)} ({place}); build the optimizer as it was"
        )
    known: dict[tuple[int, int, torch.dtype], dict[str, Any] | None] = {}
    for number, (group, kept) in enumerate(zip(groups, written, strict=True)):
        _require_group(f"{place}, parameter group {number}", group, kept)
        if getattr(optimizer, "state_in_parts", False):
            continue  # of shapes that it checks itself, when it loads them
        for index, parameter in zip(kept["params"], group["params"], strict=True):
            entries = saved["state"].get(index, {})
            where = f"{place}, parameter group {number}, parameter {index}"
            if not isinstance(entries, dict):
                raise CheckpointError(f"the checkpoint's optimizer state is no mapping ({where}); {AS_THEY_ARE}")
            if not entries:
                continue
            own, like = optimizer.state.get(parameter), parameter.shape
            if not own:
                kind = (number, parameter.dim(), parameter.dtype)
                if kind not in known:
                    known[kind] = _made(steps_by(optimizer, group), group, parameter)
                own, like = known[kind], torch.Size(STAND_IN_SIZES[: parameter.dim()])
            if own is not None:
                _require_entries(where, own, parameter, entries, like)


def _require_group(where: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Numbers must be there and be numbers; flags differ between versions of torch, which fills them in."""
    for name, value in own.items():
        if name == "params" or value is None or isinstance(value, (bool, str)):
            continue
        there = saved.get(name)
        if not _alike(value, there):
            raise CheckpointError(f"the checkpoint's {name} is {there!r:.60}, here it is {value!r:.60} ({where})")


def _alike(own: Any, saved: Any) -> bool:
    """Whether two options are both numbers, both sequences of as many, or of one type."""
    if isinstance(own, (tuple, list)):
        same_length = isinstance(saved, (tuple, list)) and len(own) == len(saved)
        return same_length and all(_alike(a, b) for a, b in zip(own, saved, strict=True))
    if isinstance(own, bool):
        return isinstance(saved, bool)
    if isinstance(own, Real) or (isinstance(own, Tensor) and own.dim() == 0):
        return not isinstance(saved, bool) and (
            isinstance(saved, Real) or (isinstance(saved, Tensor) and saved.dim() == 0)
        )
    return isinstance(saved, type(own)) and (not isinstance(own, Tensor) or own.shape == saved.shape)


def _require_entries(
    where: str, own: Mapping[str, Any], parameter: nn.Parameter, saved: Mapping[str, Any], like: torch.Size
) -> None:
    """The state of one parameter has the entries, shapes and kinds that this optimizer makes.

    Args:
        own: its state for this parameter or for one that stands in.
        like: the shape of that parameter.
    """
    lacking = sorted(key for key, value in own.items() if key not in saved and value is not None)
    if lacking:
        raise CheckpointError(f"the checkpoint's optimizer state lacks {lacking} ({where}); {AS_THEY_ARE}")
    for key, value in saved.items():
        mine = own.get(key)
        if value is None or (mine is not None and not isinstance(mine, Tensor)):
            if value is not None and not _alike(mine, value):
                raise CheckpointError(f"the checkpoint's {key} is {value!r:.60}, here it is {mine!r:.60} ({where})")
            continue
        found = tuple(value.shape) if isinstance(value, Tensor) else () if isinstance(value, (int, float)) else None
        allowed = {(), tuple(parameter.shape)}
        if mine is not None:
            allowed = {tuple(parameter.shape) if mine.shape == like else tuple(mine.shape)}
            if mine.dim() > 0 and mine.shape != like and like != parameter.shape:
                continue  # factored, say: what shape it has for this parameter only the optimizer knows
        floating = not isinstance(value, Tensor) or mine is None or value.dtype.is_floating_point
        if found not in allowed or floating != (mine is None or mine.dtype.is_floating_point):
            kind = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
            raise CheckpointError(
                f"the checkpoint's {key} is {kind}, and the parameter is {list(parameter.shape)} ({where}); "
                f"{AS_THEY_ARE}"
            )


def _made(optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any] | None:
    """The state that an optimizer makes of a parameter with so many dimensions, where that can be known."""
    if parameter.dim() > len(STAND_IN_SIZES):
        return None
    sizes = STAND_IN_SIZES[: parameter.dim()]
    return made_state(optimizer, group, torch.zeros(sizes, dtype=parameter.dtype, device=parameter.device))


def _require_averages(cycle: Cycle, saved: Mapping[str, Any]) -> None:
    shapes = [parameter.shape for parameter in tensors.moving(*cycle.hosts[0])]
    for key, mean in saved.items():
        values = mean.get("values") if isinstance(mean, dict) else None
        if not isinstance(values, list) or (values and [getattr(value, "shape", None) for value in values] != shapes):
            raise CheckpointError(
                f"the checkpoint's averaged weights {key!r} are not of this model; build the model as it was"
            )
