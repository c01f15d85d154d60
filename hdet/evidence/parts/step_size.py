"""How large a step can be beside the weights that it changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hdet.evidence.scene import Scene
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.replicas.tensors import local

SCALE_FREE = ("exp_avg_sq", "exp_inf")
"""State of optimizers whose step does not grow with the gradient: Adam and those made after it."""

MOST_DECAY = 0.01
"""Share of a weight that decay may take in a step at the peak; beyond it rate and decay soon make the weights."""

KEPT = (0.03, 3.0)
"""Root mean square of a matrix that about keeps the scale of its inputs, times the root of its shorter side.

Usual first weights have 0.5 to 1.5, those of small GPTs 0.07 to 0.5, and what begins at zeros 0. `nn.Embedding` is
drawn with 1 for each weight: the root of its width."""


@torch.no_grad()
def step_size(scene: Scene, knobs: Sequence[BoundKnob]) -> float | None:
    """How far Adam's first steps at the peak of a schedule change matrices; 1 is by as much as they hold.

    An early step changes every weight by about the learning rate, and a matrix [m, n] in one direction: it has rank 1,
    and a spectral norm of `lr sqrt(m n)`. Random weights of root mean square w have one of `w (sqrt(m) + sqrt(n))`.
    Their ratio says the same of small and large models (Yang, Simon and Bernstein 2023, arXiv:2310.17813). Dimensions
    past the first count as one, as of a convolution; three may be a stack of matrices, and the larger ratio counts.

    Args:
        knobs: learning rates, shift included.

    Returns:
        The median over matrices (of sharded ones the mean over ranks of their medians), the same on every process.
        None where steps follow from more than the rate (an optimizer that is not of Adam's kind), where decay takes
        more than `MOST_DECAY` in one of them, or where there is no matrix.
    """
    found = [own for knob in knobs for own in _matrices(knob)]
    if found and max(own.decay for own in found) > MOST_DECAY:
        found = []
    return _over_ranks(scene, [_steps(found, [local(own.parameter) for own in found])])[0]


@torch.no_grad()
def step_ratios(scene: Scene, knobs: Sequence[BoundKnob]) -> list[float | None]:
    """The step size of each of several rates over the geometric mean of all, at the window's first weights.

    A matrix that holds next to nothing, as of a layer that begins at zeros, or far more than what keeps the scale of
    its inputs, as `nn.Embedding` by default, does not count: what it holds says nothing of how far it should go.

    Returns:
        One for each rate, the same on every process; None where steps follow from more than the rate, or where there
        is no matrix.
    """
    parameters = scene.moving.parameters[0]
    first = {id(parameter): held for parameter, held in zip(parameters, scene.opening(), strict=True)}
    steps = []
    for knob in knobs:
        found = [own for own in _matrices(knob) if _keeps_scale(first[id(own.parameter)], own.parameter)]
        steps.append(_steps(found, [first[id(own.parameter)] for own in found]))
    sizes = _over_ranks(scene, steps)
    logs = [math.log(size) for size in sizes if size]
    mean = math.exp(math.fsum(logs) / len(logs)) if logs else 1.0
    return [size / mean if size else None for size in sizes]


class _Matrix(NamedTuple):
    """A matrix that a learning rate moves, the rate at its peak with the shift, and the share that decay takes."""

    parameter: nn.Parameter
    rate: float
    decay: float


def _steps(found: Sequence[_Matrix], weights: Sequence[Tensor]) -> list[float]:
    """What a step at the peak is to each matrix that holds these weights."""
    if not found:
        return []
    device = weights[0].device
    norms = torch.stack([norm.to(device).float() for norm in torch._foreach_norm(list(weights))]).tolist()
    return [
        own.rate * _gain(own.parameter) * math.sqrt(held.numel()) / norm
        for own, held, norm in zip(found, weights, norms, strict=True)
        if 0.0 < norm < math.inf
    ]


def _over_ranks(scene: Scene, ratios: Sequence[Sequence[float]]) -> list[float | None]:
    """The median of each row, the mean over the ranks that have one; None where none has. One collective."""
    row = [(float(np.median(own)), 1.0) if own else (0.0, 0.0) for own in ratios]
    sent = torch.tensor(row, dtype=torch.float64).flatten()
    told = scene.replicas.gather(sent.expand(len(scene.replicas.local), -1)).reshape(-1, len(ratios), 2)
    return [next((float(own / ranks) for own, ranks in told[:, k] if ranks > 0.0), None) for k in range(len(ratios))]


def _matrices(knob: BoundKnob) -> Iterator[_Matrix]:
    """Matrices that this learning rate moves by steps of Adam's kind."""
    binding = knob.bindings[0]
    assert isinstance(binding, GroupBinding)
    for index, ratio in zip(binding.indices, binding.ratios, strict=True):
        group = binding.optimizer.param_groups[index]
        rate, decay = knob.learned.value * ratio, knob.peak * ratio * float(group.get("weight_decay") or 0.0)
        for parameter in group["params"] if rate else ():
            held = binding.optimizer.state.get(parameter, {})
            if _gain(parameter) and local(parameter).numel() and any(key in held for key in SCALE_FREE):
                yield _Matrix(parameter, rate, decay)


def _keeps_scale(weights: Tensor, parameter: nn.Parameter) -> bool:
    """Whether outputs are of the order of inputs, by what each weight holds and the shorter side."""
    short = min(len(parameter), math.prod(parameter.shape[1:]))
    return KEPT[0] ** 2 < float(weights.float().square().mean()) * short < KEPT[1] ** 2


def _gain(parameter: nn.Parameter) -> float:
    """The spectral norm of a matrix of ones over that of random weights whose mean square is 1; 0 of a vector."""
    shapes = [(len(parameter), math.prod(parameter.shape[1:]))] if parameter.ndim > 1 else []
    if parameter.ndim == 3:
        shapes.append((parameter.shape[1], parameter.shape[2]))
    return max((math.sqrt(m * n) / (math.sqrt(m) + math.sqrt(n)) for m, n in shapes if min(m, n) > 1), default=0.0)
