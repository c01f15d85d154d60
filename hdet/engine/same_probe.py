"""Whether all processes judge by the same held-out data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hdet.errors import StepError
from hdet.nested import mapped
from hdet.replicas import Replicas
from hdet.replicas.distributed.ranks import Ranks
from hdet.replicas.replicas import present
from hdet.signals import Probe

ROUNDING = 1e-6


def require_same_probe(replicas: Replicas, probe: Probe) -> None:
    """Compare how many batches each process gave its probe, what numbers are in them, and in what order. A collective.

    A window's points are shared out over the processes, so a difference between their data would pass for one between
    points; so would another order, since points are compared by sub-batch. Of a function or a loader the first window's
    batches are looked at, tensors and NumPy's arrays in nested mappings, lists and tuples. Ranks that share a replica
    may each have a part of the data, since their losses are averaged, in as many batches. Asked in a run's first
    window: later a process may have come back alone, and would wait for others that do not ask.

    Raises:
        StepError: they differ.
    """
    is_shared = isinstance(replicas, Ranks) and replicas.layout.parts > 1
    if len(replicas.local) == replicas.size and not is_shared:
        return
    batches = probe.draw(window=0, ahead=True)
    tensors = _tensors(batches)
    sums = [_sums(tensor, number) for number, tensor in enumerate(tensors) if not tensor.is_complex()]
    plain, ordered = (sum(one[k] for one in sums) for k in range(2))
    facts = [float(len(batches)), float(sum(tensor.numel() for tensor in tensors)), plain, ordered]
    device = next(iter(replicas.hosts[0][0].parameters())).device
    row = torch.tensor([*facts, facts[0] ** 2], dtype=torch.float64, device=device)
    table = replicas.gather(row.expand(len(replicas.local), -1))
    *means, square = table[present(table)].T
    # Of a replica on several ranks a gather has their mean: numbers are alike where the mean square is its square.
    if (square != means[0] ** 2).any() or not all(np.allclose(own, own[0], rtol=ROUNDING) for own in means):
        told = [tuple(map(float, own)) for own in zip(*means, strict=True)]
        raise StepError(
            f"the probe's batches differ between processes (how many, how many numbers, their sum, one that depends on "
            f"their order: {told}, here {tuple(facts)}), so that their difference would pass for one between rates; "
            f"give each process the same held-out data in the same order, not its part as by a DistributedSampler, nor "
            f"shuffled or drawn by itself (ranks that share one replica may have parts, in as many batches)"
        )


def _tensors(batches: object) -> list[Tensor]:
    """All numbers in some batches that are tensors or NumPy's arrays."""
    found: list[object] = []
    mapped(batches, found.append)
    leaves = [own for leaf in found for own in tree_leaves(leaf)]
    arrays = [torch.from_numpy(own.copy()) if _has_numbers(own) else own for own in leaves]
    return [own for own in arrays if isinstance(own, Tensor)]


def _has_numbers(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf" and leaf.dtype.itemsize <= 8


def _sums(tensor: Tensor, number: int) -> tuple[float, float]:
    """The sum of a tensor's numbers, and one in which each example of each tensor has a weight of its own."""
    values = tensor.detach().double().nan_to_num(nan=0.0, posinf=1.0, neginf=-1.0)  # as a mask's: a sum stays finite
    if values.layout == torch.strided and values.dim():
        values = values.reshape(len(values), -1).sum(dim=1) if values.numel() else values.new_zeros(1)
    else:
        values = values.sum().reshape(1)
    generator = torch.Generator("cpu").manual_seed(number)
    weights = torch.randn(len(values), dtype=values.dtype, generator=generator, device="cpu")
    return float(values.sum()), float(values @ weights.to(values.device))
