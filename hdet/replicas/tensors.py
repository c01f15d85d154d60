"""The tensors of one replica: which there are, and arithmetic on lists of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.hparams.param_groups import ids_of
from hdet.replicas.dense import has_arithmetic, unwritten
from hdet.replicas.walk import Walk, fully_sharded
from hdet.replicas.written_buffers import attributes_kept, buffers_kept, frozen_kept, rows_kept

SMALL = 2**13
"""Elements up to which tensors are joined: one alone costs an operator's call, which is more than its arithmetic."""

PASSING = 2**18
"""Elements up to which small tensors are worked on together where all of the weights need not be in memory."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor sharded over ranks, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def sharded_as(part: Tensor, live: Tensor) -> Tensor:
    """This rank's part of a tensor as one sharded like the live tensor; where that is not sharded, the part itself."""
    if not hasattr(live, "device_mesh"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.to(local(live.detach()).device),
        live.device_mesh,
        live.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )


def at_home(tensor: Tensor, live: Tensor) -> Tensor:
    """A sharded tensor in the mesh that the live one lies in, sharing its memory, where these are of the same ranks.

    A mesh that was pickled has the names that its groups had in another process, where they may be of other ranks here.
    """
    mesh = getattr(live, "device_mesh", None)
    if mesh is None or getattr(tensor, "device_mesh", None) != mesh:
        return tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local(tensor),
        mesh,
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor sharded over ranks (a collective of these), any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Partitioned(nn.Module):
    """A model whose parameters are this rank's parts of those that its passes gather."""

    def reshard(self) -> None:
        """Let go of what was gathered; it is of the weights as they were."""
        raise NotImplementedError


def reshard(model: nn.Module) -> None:
    """Make a fully sharded model's parameters the shards again: after a forward alone they may not be.

    Whoever writes weights calls it before, so that the next pass gathers what was written.
    """
    if isinstance(model, Partitioned):
        model.reshard()
    for module in fully_sharded(model.modules()):
        module.reshard()


def parameters(model: nn.Module, which: Sequence[bool] | None = None) -> list[Tensor]:
    """Every parameter once (tied ones too), frozen ones included, detached and sharing memory; of sharded ones
    this rank's part.

    Args:
        which: of them to give; all by default.
    """
    reshard(model)
    every = [parameter for parameter in model.parameters() if parameter.numel()]
    return [local(own.detach()) for own in (every if which is None else compress(every, which))]


def is_inexact(tensor: Tensor) -> bool:
    """Whether it holds floating or complex numbers: integers, as of quantised weights, have no gradient and no mean."""
    return tensor.is_floating_point() or tensor.is_complex()


def can_move(walk: Walk, optimizer: Optimizer) -> list[tuple[nn.Parameter, bool]]:
    """Each of a model's parameters, and whether training can change it: it is trained, or the optimizer holds it.

    What has no arithmetic, as quantised weights in integers or float8, has no gradient whoever holds it.
    """
    held = ids_of(optimizer)
    return [(own, own.requires_grad or (id(own) in held and has_arithmetic(own))) for own in walk.every()]


def moving_parameters(model: nn.Module, optimizer: Optimizer, walk: Walk | None = None) -> list[nn.Parameter]:
    """The parameters that training can change; `walk` is one of this model that is kept."""
    walk = walk if walk is not None else Walk(model)
    return [parameter for parameter, moves in can_move(walk, optimizer) if moves and parameter.numel()]


def frozen(model: nn.Module, optimizer: Optimizer, walk: Walk) -> list[nn.Parameter]:
    """The others; `walk` is one of this model that is kept."""
    return [parameter for parameter, moves in can_move(walk, optimizer) if not moves and parameter.numel()]


def moving(model: nn.Module, optimizer: Optimizer, walk: Walk | None = None) -> list[Tensor]:
    """Of `parameters(model)` those that training can change; `walk` is one of this model that is kept."""
    return [local(parameter.detach()) for parameter in moving_parameters(model, optimizer, walk)]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that receive gradients."""
    reshard(model)
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()]


def borrowed(model: nn.Module) -> bool:
    """Whether other tensors stand in the places of a model's parameters, as while `torch.func` runs it."""
    return not all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def pieces(parameter: Tensor) -> int:
    """How many ranks' parts make up one copy of a sharded parameter; 1 of any other."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return 1
    cut = [size for size, placement in zip(mesh.shape, parameter.placements, strict=True) if placement.is_shard()]  # type: ignore[attr-defined]
    return math.prod(cut)


def gradient(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient, zeros where it has none; of a sharded one this rank's part.

    Raises:
        ConfigError: it is sparse.
    """
    held = parameter.grad
    if held is None:
        held = parameter.grad = torch.zeros_like(parameter)
    if held.layout != torch.strided:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} has a gradient of layout {held.layout}, and "
            f"replicas share dense gradients only; use torch.nn.Embedding(sparse=False), or gradients='local'"
        )
    return local(held)


def with_mean(model: nn.Module) -> list[bool]:
    """Which of `model.buffers()` can be averaged; of the others one replica's are taken over. Synchronises.

    Counters and masks of booleans have no mean, nor has a buffer that holds an infinity, such as a causal mask, nor one
    without arithmetic.
    """
    buffers = list(model.buffers())
    held = [n for n, b in enumerate(buffers) if is_inexact(b) and has_arithmetic(b) and b.numel()]
    sound = finite([as_real(buffers[number]) for number in held]).tolist() if held else []
    averaged = dict(zip(held, sound, strict=True))
    return [averaged.get(number, False) for number in range(len(buffers))]


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, without a graph."""
    with torch.no_grad():
        if hasattr(torch, "_foreach_clone"):  # torch 2.11 has none
            return list(torch._foreach_clone(list(tensors))) if tensors else []
        return [tensor.clone() for tensor in tensors]


@torch.no_grad()
def copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Write `sources` over `targets`, across devices and dtypes."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


@torch.no_grad()
def largest(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)] largest absolute values, on the device of the first; NaN where one is. No synchronisation."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        # There the two ends take a fifteenth of the time of the norm.
        found = [torch.maximum(high, -low) for low, high in map(torch.aminmax, tensors)]
    else:
        found = list(torch._foreach_norm(list(tensors), math.inf))
    if len({(own.dtype, own.device) for own in found}) > 1:
        found = [own.float().to(found[0].device) for own in found]
    return torch.stack(found)


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """[len(tensors)] booleans, on the device of the first: no element is infinite or NaN. No synchronisation."""
    # Unlike a sum the largest absolute value overflows in no format.
    return largest(tensors).isfinite()


@torch.no_grad()
def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """A 0-dim boolean tensor: no element of those that have arithmetic is infinite or NaN. No synchronisation."""
    large: list[Tensor] = []
    small: list[Tensor] = []
    for tensor in map(as_real, filter(has_arithmetic, tensors)):
        if tensor.numel():
            (small if tensor.numel() <= SMALL else large).append(tensor)
    flags = [finite(large).all()] if large else []
    for own in alike(small):
        flags += [finite([joined(own[part])])[0] for part in slices(own)]
    if not flags:
        return torch.tensor(True, device="cpu")
    return torch.stack([flag.to(flags[0].device) for flag in flags]).all()


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> list[float]:
    """Their Euclidean norms, in float32; waits for the device once."""
    found = lengths(tensors)
    told: list[float] = torch.stack([own.to(found[0].device).float() for own in found]).tolist() if found else []
    return told


def lengths(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Their Euclidean norms in float32 at least, each where its tensor lies."""
    if any(tensor.dtype.itemsize < 4 for tensor in tensors):  # whose own norm would have their precision
        return [torch.linalg.vector_norm(own, dtype=_at_least_float32(own.dtype)) for own in tensors]
    return list(torch._foreach_norm(list(tensors))) if tensors else []


def _at_least_float32(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype.itemsize < 4 else None


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, in its memory; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of one dtype and device together."""
    if len({(t.dtype, t.device) for t in tensors}) == 1:
        return [list(tensors)]
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


@torch.no_grad()
def mean_(
    members: Sequence[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]], weights: Sequence[float] | None = None
) -> None:
    """Write the element-wise mean of the members' tensors to every target, reduced in float32 at least.

    Computed as first - mean(first - member), which leaves members that are identical as they are, bit for bit
    (the sign of a zero included), whatever their number.

    Args:
        weights: one for each member, above 0, of any sum; equal ones where there are none.
    """
    if not members or not members[0]:
        return
    first = [wide(t) for t in members[0]]
    merged: Sequence[Tensor] = first
    if len(members) > 1:
        total = [torch.zeros_like(t) for t in first]
        weights = [1.0] * len(members) if weights is None else weights
        for member, weight in zip(members[1:], weights[1:], strict=True):
            differences = torch._foreach_sub(first, [wide(t) for t in member])
            if weight != 1.0:
                torch._foreach_mul_(differences, weight)
            torch._foreach_add_(total, differences)
        torch._foreach_mul_(total, 1.0 / sum(weights))
        merged = torch._foreach_sub(first, total)
    for target in targets:
        copy_(target, merged)


def slices(of: Sequence[Tensor], elements: int = PASSING) -> Iterator[slice]:
    """Consecutive parts of a list, each of no more elements, or of one tensor: what is made of a part is small."""
    first = total = 0
    for number, tensor in enumerate(of):
        if total and total + tensor.numel() > elements:
            yield slice(first, number)
            first, total = number, 0
        total += tensor.numel()
    if first < len(of):
        yield slice(first, len(of))


STRETCH = 2**22
"""Elements up to which a large tensor is worked on in one: enough to keep an accelerator busy, and 16 MB in float32."""


@dataclass(frozen=True)
class Portion:
    """Consecutive tensors of a list, or some of the elements of one.

    Attributes:
        places: which of the tensors.
        elements: which elements of the only one; `None` for all.
    """

    places: slice
    elements: slice | None = None

    def of(self, every: Sequence[Tensor]) -> list[Tensor]:
        """These of a list of tensors, sharing memory; a stretch of one has one dimension."""
        own = list(every[self.places])
        return own if self.elements is None else [own[0].view(-1)[self.elements]]


def portions(*lists: Sequence[Tensor]) -> Iterator[Portion]:
    """Consecutive parts of lists of tensors of the same shapes: what is made of a part is small.

    Small tensors are taken together, as by `slices`, and large ones a stretch at a time (where they are contiguous).
    """
    for places in slices(lists[0], min(PASSING, STRETCH)):
        elements = lists[0][places.start].numel()
        if elements > STRETCH and all(every[places.start].is_contiguous() for every in lists):
            for first in range(0, elements, STRETCH):
                yield Portion(places, slice(first, min(first + STRETCH, elements)))
        else:
            yield Portion(places)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all, one after another; of one contiguous tensor its own memory."""
    if len(tensors) > 1 and all(tensor.dim() == 1 for tensor in tensors):
        return torch.cat(list(tensors))  # without views, which of small tensors take longer than copying them
    return _flatten_dense_tensors(list(tensors))  # type: ignore[no-any-return]


def parted(whole: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of what `joined` made of tensors of these shapes."""
    pieces = torch.split(whole, [tensor.numel() for tensor in like])
    return [own if one.dim() == 1 else own.view(one.shape) for own, one in zip(pieces, like, strict=True)]


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """float32 at least; complex stays complex.

    >>> wide_type(torch.bfloat16), wide_type(torch.complex64)
    (torch.float32, torch.complex64)
    """
    # One byte, float8 or an integer, is asked apart: torch promotes no float8.
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least; complex stays complex."""
    return tensor.to(wide_type(tensor.dtype))


@contextmanager
def substituted(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Put `values` in place of `tensors` inside the block, in their own memory, and put them back after."""
    with put_aside(tensors):
        copy_(tensors, values)
        yield


@contextmanager
def put_aside(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """After the block `tensors` hold what they hold now, in their own memory, whatever is written over them inside.

    It gives the copies that are put back.
    """
    saved = clones(tensors)
    with unwritten(tensors):
        try:
            yield saved
        finally:
            copy_(tensors, saved)


@contextmanager
def made_anew() -> Iterator[None]:
    """Weights are cast (autocast) and worked out (`parametrize.cached`) anew inside the block.

    What is kept for an enclosing block of the loop's is of other weights. Of casts nothing is kept after it either.
    """
    torch.clear_autocast_cache()
    held = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = held
        torch.clear_autocast_cache()


@contextmanager
def evaluating(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[None]:
    """Eval mode inside the block; afterwards each submodule is as it was, however mixed they were, buffers too.

    The weights are those that the optimizer evaluates (`evaluated_weights`), also where autocast is on.
    """
    modes = _modes(model)
    try:
        model.eval()
        modules = list(model.modules())  # not before: a model may take others for evaluation
        with (
            attributes_kept(modules),
            buffers_kept(modules),
            evaluated_weights(model, optimizer),
            rows_kept(modules),
            frozen_kept(modules),
            made_anew(),
        ):
            try:
                yield
            finally:
                reshard(model)  # else the next forward would take the weights gathered here
    finally:
        _put_back_modes(modes)


def _modes(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Of every module whether it is in training mode, each after all that it is in."""
    found: dict[nn.Module, bool] = {}
    _go_through(model, set(), found)
    return list(reversed(found.items()))


def _go_through(module: nn.Module, seen: set[nn.Module], found: dict[nn.Module, bool]) -> None:
    """What is in a module first, then itself. (A function within another would hold itself, and the model, alive.)"""
    seen.add(module)
    for own in module.children():
        if own not in seen:
            _go_through(own, seen, found)
    found[module] = module.training


def _put_back_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """By each module's own `train`, which may do more than set the mode.

    A layer may fold an adapter into its weights in eval mode, or keep there what it has worked out from them.
    """
    for module, mode in modes:
        if module.training != mode:
            module.train(mode)  # of all in it too; their turn comes
    for module, mode in modes:
        if module.training != mode:  # its own `train` does as it likes
            module.training = mode


@contextmanager
def evaluated_weights(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """An optimizer with modes of its own (Schedule-Free: `optimizer.eval()`) is in eval mode inside the block.

    Weights that its switching back would only restore up to rounding are put back exactly.
    """
    switched: Any = optimizer
    trains = getattr(optimizer, "train_mode", True)  # a wrapper's; else every group's
    if not hasattr(optimizer, "eval") or not all(group.get("train_mode", trains) for group in switched.param_groups):
        yield  # it has no modes, or is in eval mode already
        return
    with put_aside(parameters(model)):
        switched.eval()
        try:
            yield
        finally:
            reshard(model)
            switched.train()


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Training mode inside the block; a model that is in it is left as it is, with parts it may keep in eval mode."""
    modes = [] if model.training else _modes(model)
    try:
        if modes:
            model.train()
        yield
    finally:
        reshard(model)  # else the next forward would take the weights gathered here
        _put_back_modes(modes)
