"""Whether replicas that are to stay alike hold the same weights, told by marks that travel with a window's losses."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import StepError
from hdet.replicas import tensors
from hdet.replicas.anchor import Anchor
from hdet.replicas.replicas import Replicas

MARKS = 2
FOLDS = 64

ROUNDING = 0.01
"""How far apart, of what a window changed, replicas may be by rounding alone: unlike devices clip by unlike norms."""

SMALLEST = 1e-6
"""The same of the weights themselves, where a window changed next to nothing."""


def compared(replicas: Replicas) -> bool:
    """Whether there is more than one model over all processes."""
    return len(replicas.hosts) > 1 or replicas.size > len(replicas.local)


def unmarked() -> Tensor:
    """The marks of nothing."""
    return torch.zeros(MARKS, device="cpu")


@torch.no_grad()
def mark(model: nn.Module, optimizer: Optimizer) -> Tensor:
    """[2] numbers of all parameters that training can change. Equal bits have equal ones; no wait for the device."""
    own = [t for t in map(tensors.as_real, tensors.moving(model, optimizer)) if t.is_floating_point() and t.numel()]
    if not own:
        return unmarked()
    lengths = torch.stack([norm.to(own[0].device).float() for norm in torch._foreach_norm(own, 2.0)])
    # Weights of no ratio in common, so that changes of two tensors do not cancel.
    weights = torch.arange(1, len(own) + 1, dtype=lengths.dtype, device=lengths.device).sqrt()
    return torch.stack([(norms * weights).sum() for norms in (tensors.largest(own).float(), lengths)])


@torch.no_grad()
def require_alike(replicas: Replicas, valid: NDArray[np.bool_], anchor: Anchor, step: int) -> None:
    """Replicas whose marks differ are apart by rounding only. A collective; every process takes part.

    Distances are read off sketches: a change that is folded into a few sums of random signs keeps its length on
    average.

    Args:
        valid: [N] those that are compared.
        anchor: where the window began.
        step: of the run, at which it ended.

    Raises:
        StepError: they are apart by more, in every process.
    """
    moving = tensors.moving_parameters(*replicas.hosts[0])
    chosen = {id(parameter) for parameter in moving}
    names = [name for name, parameter in replicas.hosts[0][0].named_parameters() if id(parameter) in chosen]
    starts = anchor.values(moving)
    rows = [
        torch.stack([_sketch(own, start) for own, start in zip(tensors.moving(*host), starts, strict=True)])
        for host in replicas.hosts
    ]
    table = replicas.gather(torch.stack([rows[replica.host].flatten() for replica in replicas.local]))[valid]
    sketches = table.reshape(len(table), len(names), FOLDS + 2)  # [valid, tensors, ...]
    folded, moved, size = sketches[..., :FOLDS], np.sqrt(sketches[..., FOLDS]), np.sqrt(sketches[..., FOLDS + 1])
    apart = np.sqrt(np.square(folded - folded.mean(axis=0)).sum(axis=2))
    bound = np.maximum(ROUNDING * moved, SMALLEST * size)
    excess = np.where(apart > bound, apart / np.maximum(moved, bound), 0.0).max(axis=0)
    if not excess.any():
        return
    worst = int(excess.argmax())
    ways = (
        "Run forward on the model that hdet.attach was given, with the last backward of every step outside no_sync() "
        "and without a communication hook that averages over some ranks alone, as local SGD's; where a dimension of "
        "the mesh holds models that are trained apart, give hdet.attach replicas=hdet.distribute(...) over this "
        "model's part of the mesh"
        if replicas.left_to_loop
        else "Under DistributedDataParallel run forward on the wrapped model (replica.model), with the last backward "
        "of every step outside no_sync(); without it call engine.share_gradients(); step every optimizer of "
        "engine.optimizers; or declare gradients='local'"
    )
    raise StepError(
        f"the weights of the {len(valid)} replicas have come apart in the window that ended at step {step}, and "
        f"nothing was to set them apart: {names[worst]} differs by {excess[worst]:.2g} of what the window changed. "
        f"Each has stepped on a gradient of its own, or has not stepped. {ways}"
    )


def _sketch(own: Tensor, start: Tensor) -> Tensor:
    """[FOLDS + 2] the change folded, its squared length, and that of the tensor; on the host, in double precision."""
    flat, begun = (tensors.as_real(each).reshape(-1).to(own.device).double() for each in (own, start))
    change = flat - begun
    rows = -(-change.numel() // FOLDS)
    generator = torch.Generator().manual_seed(rows)
    signs = torch.randint(0, 2, (rows,), generator=generator, device="cpu").mul(2).sub(1).to(own.device, torch.float64)
    folded = signs @ nn.functional.pad(change, (0, rows * FOLDS - change.numel())).view(rows, FOLDS)
    return torch.cat([folded, torch.stack([change.square().sum(), flat.square().sum()])]).cpu()
