"""How far a model's weights are from random ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hdet.replicas import Replicas, tensors
from hdet.replicas.dense import is_dense
from hdet.replicas.moving import Moving
from hdet.replicas.replicas import present

ROUNDS = 10
"""Of power iteration, which finds strong directions first. A norm that is somewhat too small does no harm."""

SHARE = 0.75
"""Share of the matrices that are to look untrained: some are not drawn at random, as positions that are sines."""

TELLING = 1.5
"""Spectral norm that a matrix of rank 1 has to have, in these units; smaller matrices look random whatever they are."""


@torch.no_grad()
def excess(replicas: Replicas, moving: Moving, opening: Sequence[Tensor]) -> tuple[float, float]:
    """The spectral norms of a model's weights, in units of those of random weights of their scale.

    Independent random weights [m, n] of root mean square w have a spectral norm of about `w (sqrt(m) + sqrt(n))`, at
    most. Training adds strong directions to them (Martin and Mahoney 2018, arXiv:1810.01075). Frozen weights count as
    well; quantised and complex ones count as trained. Matrices of zeros, and those too small to tell, do not count.
    Sharded ones are gathered, one at a time.

    Args:
        opening: the weights that training can change, at the window's opening.

    Returns:
        what a quarter of the matrices exceed (`SHARE`), and the same of those that training can change, alike on every
        process; infinite where these cannot be told, and 0 where there is no matrix to tell by.
    """
    model = replicas.hosts[0][0]
    tensors.reshard(model)
    first = iter(opening)
    of_all: list[float] = []
    of_moving: list[float] = []
    every = [parameter.detach() for parameter in model.parameters() if parameter.numel()]
    for live, moves in zip(every, moving.flags, strict=True):
        part = next(first) if moves else tensors.local(live)
        if live.ndim > 1 and is_dense(live):
            weights = tensors.whole(tensors.sharded_as(part, live)).to(tensors.local(live).device)
            own = max(map(_of_stack, _matrices(weights)), default=0.0) if _is_plain(weights) else math.inf
            of_all += [own] if own > 0.0 else []
            of_moving += [own] if own > 0.0 and moves else []
    found = [float(np.quantile(own, SHARE, method="inverted_cdf")) if own else 0.0 for own in (of_all, of_moving)]
    row = torch.tensor([found, [float(bool(own)) for own in (of_all, of_moving)]], dtype=torch.float64, device="cpu")
    told = replicas.gather(row.flatten().expand(len(replicas.local), -1))
    each = told[present(told)].reshape(-1, 2, 2).tolist()
    whole, alone = (
        max((totals[k] / ranks[k] for totals, ranks in each if ranks[k] > 0.0), default=0.0) for k in range(2)
    )
    return whole, alone


def _is_plain(weights: Tensor) -> bool:
    return weights.is_floating_point() and weights.element_size() > 1


def _matrices(weights: Tensor) -> Iterator[Tensor]:
    """[stack, m, n]: dimensions past the first as one, as of a convolution; three may be a stack of matrices."""
    shapes = [(1, len(weights), -1)] + ([tuple(weights.shape)] if weights.ndim == 3 else [])
    for stack in map(weights.reshape, shapes):
        *_, m, n = stack.shape
        if math.sqrt(m * n) > TELLING * (math.sqrt(m) + math.sqrt(n)) and bool(stack.any()):
            yield stack


def _of_stack(stack: Tensor) -> float:
    """The spectral norm of a stack's matrices [s, m, n], in units of that of random weights of the same scale.

    Infinite where it cannot be worked out.
    """
    *_, m, n = stack.shape
    if stack.device.type == "cpu":
        stack = stack.float()  # products of half precision take many times as long there
    start = torch.randn(n, 1, generator=torch.Generator().manual_seed(0), device="cpu") / math.sqrt(n)
    one = start.to(stack).expand(len(stack), -1, -1)
    for _ in range(ROUNDS):
        other = nn.functional.normalize(stack @ one, dim=1)
        one = nn.functional.normalize(stack.mT @ other, dim=1)
    norms = (stack @ one).float().norm(dim=1)
    scale = stack.flatten(1).norm(dim=1, dtype=torch.float32) / math.sqrt(m * n)
    found = float(norms.sum() / scale.sum()) / (math.sqrt(m) + math.sqrt(n))
    return found if math.isfinite(found) else math.inf
