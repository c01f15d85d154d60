"""Whether all processes judge by the same held-out data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hdet.errors import StepError
from hdet.replicas import Replicas
from hdet.replicas.replicas import present
from hdet.signals import Probe

ROUNDING = 1e-6


def require_same_probe(replicas: Replicas, probe: Probe) -> None:
    """Compare how many batches each process gave its probe, how many numbers are in them, and their sum. A collective.

    A window's points are shared out over the processes, so a difference between their data would pass for one between
    points. Only a list is looked at: batches that a function or a loader gives are not drawn for this.

    Raises:
        StepError: they differ.
    """
    if not isinstance(probe.batches, (list, tuple)) or len(replicas.local) == replicas.size:
        return
    tensors = [leaf for leaf in tree_leaves(probe.batches) if isinstance(leaf, Tensor)]
    total = sum(float(tensor.detach().double().nan_to_num().sum()) for tensor in tensors if not tensor.is_complex())
    facts = [float(len(probe.batches)), float(sum(tensor.numel() for tensor in tensors)), total]
    device = next(iter(replicas.hosts[0][0].parameters())).device
    table = replicas.gather(torch.tensor([facts], dtype=torch.float64, device=device).expand(len(replicas.local), -1))
    table = table[present(table)]
    if not np.allclose(table, table[0], rtol=ROUNDING):
        raise StepError(
            f"the probe's batches differ between processes (how many, how many numbers, their sum: "
            f"{[tuple(row) for row in table.tolist()]}), so that their difference would pass for one between rates; "
            f"give each process the same held-out data, not its part as by a DistributedSampler"
        )
