"""How large a step can be beside the weights that it changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from hdet.evidence.scene import Scene
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.replicas.tensors import local

SCALE_FREE = ("exp_avg_sq", "exp_inf")
"""State of optimizers whose step does not grow with the gradient: Adam and those made after it."""


@torch.no_grad()
def step_size(scene: Scene, knobs: Sequence[BoundKnob]) -> float | None:
    """How far Adam's first steps at the peak of a schedule change matrices; 1 is by as much as they hold.

    An early step changes every weight by about the learning rate, and a matrix [m, n] in one direction: it has rank 1,
    and a spectral norm of `lr sqrt(m n)`. Random weights of root mean square w have one of `w (sqrt(m) + sqrt(n))`.
    Their ratio says the same of small and large models (Yang, Simon and Bernstein 2023, arXiv:2310.17813). Dimensions
    of a convolution past the first count as one.

    Args:
        knobs: learning rates, shift included.

    Returns:
        The median ratio over matrices, the same on every process. None where steps follow from more than the rate (an
        optimizer that is not of Adam's kind), or where there is no matrix.
    """
    found = [own for knob in knobs for own in _matrices(knob)]
    own = math.nan
    if found:
        weights = [local(each) for each, _ in found]
        norms = torch.stack([norm.to(weights[0].device).float() for norm in torch._foreach_norm(weights)]).tolist()
        ratios = [
            rate * math.sqrt(each.numel() * held.numel()) / norm / (math.sqrt(rows) + math.sqrt(columns))
            for (each, rate), held, norm in zip(found, weights, norms, strict=True)
            for rows, columns in [(len(each), each.numel() // len(each))]
            if norm > 0.0
        ]
        own = float(np.median(ratios)) if ratios else math.nan
    rows = scene.replicas.gather(torch.full((len(scene.replicas.local), 1), own, dtype=torch.float64))
    return next((float(size) for size in rows[:, 0] if math.isfinite(size)), None)


def _matrices(knob: BoundKnob) -> Iterator[tuple[nn.Parameter, float]]:
    """Matrices that this learning rate moves by steps of Adam's kind, and their rate at the schedule's peak."""
    binding = knob.bindings[0]
    assert isinstance(binding, GroupBinding)
    for index, ratio in zip(binding.indices, binding.ratios, strict=True):
        for parameter in binding.optimizer.param_groups[index]["params"]:
            held = binding.optimizer.state.get(parameter, {})
            if parameter.ndim > 1 and local(parameter).numel() and any(key in held for key in SCALE_FREE):
                yield parameter, knob.learned.value * ratio
