"""Whether a model's weights look as if nothing had trained them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from hdet.evidence.scene import Scene
from hdet.replicas import tensors
from hdet.replicas.replicas import present

ROUNDS = 10
"""Of power iteration, which finds strong directions first. A norm that is somewhat too small does no harm."""

EXCESS = 1.2
"""Largest spectral norm of an untrained matrix, in units of that of random weights of the same scale."""

SHARE = 0.75
"""Share of the matrices that have to look untrained: some are not drawn at random, as positions that are sines."""


@torch.no_grad()
def untrained(scene: Scene) -> bool:
    """Whether the weights at the window's opening look as if nothing had trained them.

    Independent random weights [m, n] of root mean square w have a spectral norm of about `w (sqrt(m) + sqrt(n))`, at
    most. Training adds strong directions to them (Martin and Mahoney 2018, arXiv:1810.01075). Frozen weights count as
    well; quantised and complex ones count as trained. Matrices of zeros, and those too small to tell, do not count.
    Sharded ones are gathered, one at a time.

    Returns:
        the same on every process; False where there is no matrix to tell by.
    """
    model = scene.replicas.hosts[0][0]
    tensors.reshard(model)
    opening, found = iter(scene.opening()), []
    every = [parameter.detach() for parameter in model.parameters() if parameter.numel()]
    for live, moves in zip(every, scene.moving.flags, strict=True):
        part = next(opening) if moves else tensors.local(live)
        if live.ndim > 1:
            weights = tensors.whole(tensors.sharded_as(part, live)).to(tensors.local(live).device)
            found.append(max(map(_excess, _matrices(weights)), default=0.0) if _is_plain(weights) else math.inf)
    found = [excess for excess in found if excess > 0.0]
    most = float(np.quantile(found, SHARE, method="inverted_cdf")) if found else 0.0
    row = torch.tensor([most, float(bool(found))], dtype=torch.float64)
    told = scene.replicas.gather(row.expand(len(scene.replicas.local), -1))
    each = [total / ranks for total, ranks in told[present(told)] if ranks > 0.0]
    return bool(each) and bool(max(each) <= EXCESS)


def _is_plain(weights: Tensor) -> bool:
    return weights.is_floating_point() and weights.element_size() > 1


def _matrices(weights: Tensor) -> Iterator[Tensor]:
    """[stack, m, n]: dimensions past the first as one, as of a convolution; three may be a stack of matrices."""
    shapes = [(1, len(weights), -1)] + ([tuple(weights.shape)] if weights.ndim == 3 else [])
    for stack in map(weights.reshape, shapes):
        *_, m, n = stack.shape
        if math.sqrt(m * n) > 1.25 * EXCESS * (math.sqrt(m) + math.sqrt(n)) and bool(stack.any()):
            yield stack


def _excess(stack: Tensor) -> float:
    """The spectral norm of a stack's matrices [s, m, n], in units of that of random weights of the same scale.

    Infinite where it cannot be worked out.
    """
    *_, m, n = stack.shape
    if stack.device.type == "cpu":
        stack = stack.float()  # products of half precision take many times as long there
    start = torch.randn(n, 1, generator=torch.Generator().manual_seed(0)) / math.sqrt(n)
    one = start.to(stack).expand(len(stack), -1, -1)
    for _ in range(ROUNDS):
        other = nn.functional.normalize(stack @ one, dim=1)
        one = nn.functional.normalize(stack.mT @ other, dim=1)
    norms = (stack @ one).float().norm(dim=1)
    scale = stack.flatten(1).norm(dim=1, dtype=torch.float32) / math.sqrt(m * n)
    excess = float(norms.sum() / scale.sum()) / (math.sqrt(m) + math.sqrt(n))
    return excess if math.isfinite(excess) else math.inf
