"""How large a step can be beside the weights that it changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from hdet.controllers.beginning import HUGE
from hdet.evidence.parts.scale import holds, spectral_gain
from hdet.evidence.scene import Scene
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.replicas import tensors
from hdet.replicas.replicas import present
from hdet.replicas.tensors import local

SCALE_FREE = ("exp_avg_sq", "exp_inf")
"""State of optimizers whose step does not grow with the gradient: Adam and those made after it."""

MOST_DECAY = 0.01
"""Share of a weight that decay may take in a step at the peak; beyond it rate and decay soon make the weights."""


@torch.no_grad()
def empty_at_first(scene: Scene, knobs: Sequence[BoundKnob]) -> list[int]:
    """Which matrices held next to nothing when the window opened, by this rank's part; asked for in the first window.

    What they hold later was made by the steps: beside it these are large, at any rate.

    Returns:
        their places among the model's parameters (`Moving.flags`).
    """
    own = {id(parameter) for knob in knobs for parameter, *_ in _matrices(knob)}
    found = [
        (place, parameter, values)
        for (place, parameter), values in zip(_placed(scene), scene.opening(), strict=True)
        if id(parameter) in own
    ]
    norms = tensors.norms([values for _, _, values in found])
    return [
        place
        for (place, parameter, values), norm in zip(found, norms, strict=True)
        if not holds(parameter, norm**2, values.numel())
    ]


@torch.no_grad()
def step_size(scene: Scene, knobs: Sequence[BoundKnob], empty: Sequence[int]) -> float | None:
    """How far Adam's first steps at the peak of a schedule change matrices; 1 is by as much as they hold.

    An early step changes every weight by about the learning rate, and a matrix [m, n] in one direction: it has rank 1,
    and a spectral norm of `lr sqrt(m n)`. Random weights of root mean square w have one of `w (sqrt(m) + sqrt(n))`.
    Their ratio says the same of small and large models (Yang, Simon and Bernstein 2023, arXiv:2310.17813). Dimensions
    past the first count as one, as of a convolution; three may be a stack of matrices, and the larger ratio counts.

    Args:
        knobs: learning rates, shift included.
        empty: which matrices do not count (`empty_at_first`).

    Returns:
        The median over matrices (of sharded ones the mean over ranks of their medians), the same on every process.
        None where steps follow from more than the rate (an optimizer that is not of Adam's kind), where there is no
        matrix, or where decay takes more than `MOST_DECAY` in one of them and steps are not `HUGE` all the same. What
        decay takes is told by the rate as given, and by the present one where steps as given would be `HUGE`: then
        that rate was no guess. Weights are those at the window's end.
    """
    left_out = {id(parameter) for place, parameter in _placed(scene) if place in empty}
    found = [own for knob in knobs for own in _matrices(knob) if id(own[0]) not in left_out]
    weights = [local(each) for each, *_ in found]
    gains = [
        (rate, given, spectral_gain(each) * math.sqrt(held.numel()) / norm)
        for (each, rate, given, _), held, norm in zip(found, weights, tensors.norms(weights), strict=True)
        if 0.0 < norm < math.inf
    ]
    own = [
        float(np.median([rate * gain for rate, _, gain in gains])) if gains else 0.0,
        float(np.median([given * gain for _, given, gain in gains])) if gains else 0.0,
        any(decay * rate > MOST_DECAY for _, rate, _, decay in found),
        any(decay * given > MOST_DECAY for _, _, given, decay in found),
        bool(gains),
    ]
    row = torch.tensor(own, dtype=torch.float64, device="cpu")
    rows = scene.replicas.gather(row.expand(len(scene.replicas.local), -1))
    sums = next((sums for sums in rows if sums[-1] > 0.0), None)  # over the ranks of one replica
    if sums is None:
        return None
    size, as_given = float(sums[0] / sums[-1]), sums[1] / sums[-1]
    strong_now, strong_as_given = sums[2:4] > 0.0
    strong = strong_now if as_given > HUGE else strong_as_given
    return None if strong and size <= HUGE else size


def _matrices(knob: BoundKnob) -> Iterator[tuple[nn.Parameter, float, float, float]]:
    """Matrices that this learning rate moves by steps of Adam's kind.

    With the rate at the schedule's peak, shift included and as given, and their weight decay.
    """
    binding = knob.bindings[0]
    assert isinstance(binding, GroupBinding)
    for index, ratio in zip(binding.indices, binding.ratios, strict=True):
        group = binding.optimizer.param_groups[index]
        rate, given, decay = knob.learned.value * ratio, knob.peak * ratio, float(group.get("weight_decay") or 0.0)
        for parameter in group["params"] if rate else ():
            if spectral_gain(parameter) and local(parameter).numel() and _scale_free(binding, parameter):
                yield parameter, rate, given, decay


def scale_free(scene: Scene, knobs: Sequence[BoundKnob]) -> bool:
    """Whether the steps that were made by these learning rates are all of Adam's kind, on any rank. One collective."""
    bindings = [binding for knob in knobs if isinstance(binding := knob.bindings[0], GroupBinding)]
    known = [
        any(key.partition(".")[0] in SCALE_FREE for key in state)  # "exp_avg_sq.0" of an optimizer that holds parts
        for binding in bindings
        for parameter in binding.parameters()
        if (state := binding.optimizer.state.get(parameter))  # none without a gradient, nor all under plain SGD
    ]
    row = torch.tensor([float(any(known)), float(not all(known))], device="cpu")
    told = scene.replicas.gather(row.expand(len(scene.replicas.local), -1))
    free, others = told[present(told)].max(axis=0)
    return bool(free > 0.0 and others == 0.0)


def _scale_free(binding: GroupBinding, parameter: nn.Parameter) -> bool:
    return any(key in binding.optimizer.state.get(parameter, {}) for key in SCALE_FREE)


def _placed(scene: Scene) -> Iterator[tuple[int, nn.Parameter]]:
    """The weights that training can change, with their places among the model's parameters."""
    places = (place for place, moves in enumerate(scene.moving.flags) if moves)
    return zip(places, scene.moving.parameters[0], strict=True)
