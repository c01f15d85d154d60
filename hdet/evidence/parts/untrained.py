"""Whether a model's weights look as if nothing had trained them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hdet.evidence.scene import Scene
from hdet.replicas import tensors

ROUNDS = 10
"""Of power iteration. Too few of them make a norm too small, and strong directions are found first."""

EXCESS = 1.2
"""Largest spectral norm of an untrained matrix, in units of that of random weights of the same scale."""

SHARE = 0.75
"""Share of the matrices that have to look untrained: some are not drawn at random, as positions that are sines."""


@torch.no_grad()
def untrained(scene: Scene) -> bool:
    """Whether the weights at the window's opening look as if nothing had trained them.

    Independent random weights [m, n] of root mean square w have a spectral norm of about `w (sqrt(m) + sqrt(n))`, at
    most. Training adds strong directions to them (Martin and Mahoney 2018, arXiv:1810.01075). Frozen weights count as
    well, and quantised ones count as trained. Matrices of zeros, and those too small to tell, do not count.

    Returns:
        the same on every process; False where there is no matrix to tell by.
    """
    opening = iter(scene.opening())
    model = scene.replicas.hosts[0][0]
    found: list[float] = []
    for live, moves in zip(tensors.parameters(model), scene.moving.flags, strict=True):
        weights = next(opening) if moves else live
        if weights.ndim > 1 and weights.numel():  # of sharded ones this rank may hold nothing
            known = weights.is_floating_point() and weights.element_size() > 1
            found.append(max(map(_excess, _matrices(weights.to(live.device))), default=0.0) if known else math.inf)
    found = [excess for excess in found if excess > 0.0]
    row = torch.tensor([float(np.quantile(found, SHARE, method="lower")) if found else 0.0], dtype=torch.float64)
    told = scene.replicas.gather(row.expand(len(scene.replicas.local), -1))
    return 0.0 < max(float(excess) for (excess,) in told) <= EXCESS


def _matrices(weights: Tensor) -> Iterator[Tensor]:
    """[stack, m, n]: dimensions past the first as one, as of a convolution; three may be a stack of matrices."""
    shapes = [(1, len(weights), -1)] + ([tuple(weights.shape)] if weights.ndim == 3 else [])
    for stack in map(weights.reshape, shapes):
        *_, m, n = stack.shape
        if math.sqrt(m * n) > 1.25 * EXCESS * (math.sqrt(m) + math.sqrt(n)) and bool(stack.any()):
            yield stack


def _excess(stack: Tensor) -> float:
    """The spectral norm of a stack's matrices [s, m, n], in units of that of random weights of the same scale."""
    *_, m, n = stack.shape
    start = torch.randn(n, 1, generator=torch.Generator().manual_seed(0)).to(stack)
    one = start.expand(len(stack), -1, -1)
    for _ in range(ROUNDS):
        other = torch.nn.functional.normalize(stack @ one, dim=1)
        one = torch.nn.functional.normalize(stack.mT @ other, dim=1)
    norms = (stack @ one).float().norm(dim=1)
    scale = stack.flatten(1).norm(dim=1, dtype=torch.float32) / math.sqrt(m * n)
    return float(norms.sum() / scale.sum()) / (math.sqrt(m) + math.sqrt(n))
