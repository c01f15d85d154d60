"""How far the steps of several learning rates go beside the weights that they change."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from hdet.evidence.parts.scale import holds, matrix_shape, spectral_gain
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.schedule import Constant
from hdet.replicas import tensors
from hdet.replicas.chained_optimizer import OWNER
from hdet.replicas.replicas import present

KEPT = 3.0
"""Largest root mean square of a matrix that about keeps the scale of its inputs, times the root of its shorter side.

Usual first weights have 0.1 to 1.5. `nn.Embedding` is drawn with 1 for each weight: the root of its shorter side, which
counts up to 8."""

FARTHEST = 10.0
"""How many times off the median a rate's steps count in the mean, at the most: one rate is not to move all others."""

IDLE = 0.01
"""Share of the median below which steps, for their rate, tell nothing: weights behind zeros have no gradient yet."""

FINEST = 2.0
"""Steps, in units of the weights' last digit, below which what is left of an update after rounding tells nothing."""


ALIKE = 1e-3
"""Relative difference up to which the rates of groups are one: they differ in last digits, and by a tensor's dtype."""

SETTINGS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize"})
"""Switches of torch's optimizers that leave the scale of steps as it is."""


@dataclass(frozen=True)
class Ratios:
    """Where one of several learning rates stands among the others: `Estimate.step_ratio` and `Estimate.rate_ratio`."""

    step_ratio: float | None = None
    rate_ratio: float | None = None

    def shrunk(self, share: float) -> Ratios:
        """The same with a share of each, as a logarithm."""
        return Ratios(*(one and one**share for one in (self.step_ratio, self.rate_ratio)))


@torch.no_grad()
def compare(
    scene: Scene, harvest: Harvest, knobs: Sequence[BoundKnob], moves: Sequence[Sequence[bool]]
) -> list[Ratios]:
    """How far a window's steps went under each of several learning rates, over the geometric mean of all.

    The update U of a matrix [m, n] is of low rank while a window is short, so that its spectral norm is about its
    Frobenius norm |U|. That of random weights W is `(sqrt(m) + sqrt(n)) |W| / sqrt(m n)`. One over the other says how
    far the steps went (Yang, Simon and Bernstein 2023, arXiv:2310.17813). Of a rate the median over its matrices
    counts, as if its schedule had stood at the peak. In the mean one that is more than `FARTHEST` times off the median
    counts as that far off.

    A matrix that holds next to nothing, as of a layer that begins at zeros, or far more than what keeps the scale of
    its inputs, as `nn.Embedding` by default, does not count: what it holds says nothing of how far it should go. A rate
    of such matrices and of vectors is compared with the mean of those rates of its kind (`_kind`) that have a ratio,
    since optimizers take one rate for all of a model by default. How far that kind as a whole is to move counts in the
    next comparison only: beside another optimizer's, first steps mislead.

    What is frozen as the window ends does not count: if it moved, as a teacher that follows, no rate moved it.

    Args:
        moves: by rate, which of the weights (`Scene.moving`) it moves.

    Returns:
        One for each rate, the same on every process. Neither ratio where a matrix could count, but has not moved by
        more than rounding shows, or so far that its square overflows, or goes less than `IDLE` as far as the median for
        its rate, where there is none to compare with, where nothing trains, where the schedule's peak is not known, and
        where replicas come apart. No `rate_ratio` of a kind in which rounding hides the steps of others.
    """
    unknown = [Ratios()] * len(knobs)
    if scene.apart:
        return unknown
    gone = _gone(scene, harvest)
    trains = [parameter.requires_grad for parameter in scene.moving.parameters[0]]
    kinds = [_kind(knob) for knob in knobs]
    sizes, silent, hidden = [], [], set()
    for knob, kind, own in zip(knobs, kinds, moves, strict=True):
        # A frozen weight that moves all the same, as a teacher's that follows, moves by no rate.
        found = [far for far, *moved in zip(gone, own, trains, strict=True) if all(moved)]
        shown = [far for far in found if far]
        peak = _up_to_the_peak(knob, harvest.window)
        sizes.append(math.exp(float(np.median(np.log(shown)))) * peak if shown else 0.0)
        silent.append(bool(found) and not any(far is not None for far in found) and peak > 0.0)
        if not shown and 0.0 in found:  # where rounding hides some steps, those that show are of the higher rates
            hidden.add(kind)
    if not any(sizes):
        return unknown
    rates = [knob.learned.value for knob in knobs]
    sizes = _without_idle(sizes, rates)
    ratios, nearer = _over_their_mean(sizes)
    usual = defaultdict(list)  # by kind, the rates that have a ratio, as logarithms
    for ratio, rate, kind, near in zip(ratios, rates, kinds, nearer, strict=True):
        if ratio:
            usual[kind].append(math.log(rate) + near)
    return [
        Ratios(rate_ratio=rate / math.exp(float(np.mean(usual[kind]))))
        if is_silent and kind is not None and kind not in hidden and usual[kind]
        else Ratios(step_ratio=ratio)
        for ratio, rate, kind, is_silent in zip(ratios, rates, kinds, silent, strict=True)
    ]


def _without_idle(sizes: Sequence[float], rates: Sequence[float]) -> list[float]:
    """The sizes of steps, 0 where they are next to nothing for their rate."""
    for_their_rate = [size / rate if size else 0.0 for size, rate in zip(sizes, rates, strict=True)]
    usual = np.quantile([one for one in for_their_rate if one], 0.5, method="higher")  # of two the larger
    return [size if one > IDLE * usual else 0.0 for size, one in zip(sizes, for_their_rate, strict=True)]


def _over_their_mean(sizes: Sequence[float]) -> tuple[list[float | None], list[float]]:
    """Each size over their mean, None for 0; and what brings it within `FARTHEST` of the median, as a logarithm."""
    logs = np.log([size for size in sizes if size])
    middle, farthest = float(np.median(logs)), math.log(FARTHEST)

    def nearer(size: float) -> float:
        off = math.log(size) - middle
        return max(-farthest, min(farthest, off)) - off

    changes = [nearer(size) if size else 0.0 for size in sizes]
    mean = math.exp(float(np.mean(logs)) + math.fsum(changes) / len(logs))
    return [size / mean if size else None for size in sizes], changes


def _kind(knob: BoundKnob) -> Hashable:
    """What tells of which scale a rate is: the optimizer of a chain, and the switches of its groups.

    (Some optimizers step matrices by Muon and the rest by Adam, as an entry of the group says.) None where its groups
    differ, or hold unlike rates.
    """
    binding = knob.bindings[0]
    assert isinstance(binding, GroupBinding)
    found, rates = set(), []
    for index in binding.indices:
        group = binding.optimizer.param_groups[index]
        rates.append(float(group["lr"]))
        said = ((name, value) for name, value in group.items() if isinstance(value, (bool, str)) and name != "name")
        switches = tuple(sorted((name, str(value)) for name, value in said if name not in SETTINGS))
        found.add((group.get(OWNER), switches))
    return found.pop() if len(found) == 1 and math.isclose(min(rates), max(rates), rel_tol=ALIKE) else None


def _gone(scene: Scene, harvest: Harvest) -> list[float | None]:
    """How far each of the weights went: 0 where rounding hides it or it overflows, None where it does not count.

    One collective.
    """
    parameters = scene.moving.parameters[0]
    sums = [_sums(*ends) for ends in zip(scene.origin(), scene.moving.values(), strict=True)]
    row = torch.tensor(sums, dtype=torch.float64, device="cpu").flatten()
    # Of a sharded matrix the ranks' parts are added up, or their mean is taken: only what one is to another counts.
    told = scene.replicas.gather(row.expand(len(scene.replicas.local), -1))
    updates, weights, counts = told[present(told)][0].reshape(-1, 3).T
    steps = harvest.window.stop - harvest.window.start

    def far(parameter: nn.Parameter, update: float, held: float, count: float) -> float | None:
        if not _keeps_scale(parameter, held, count):
            return None
        return spectral_gain(parameter) * math.sqrt(update / held) if _shows(parameter, update, held, steps) else 0.0

    return [far(*one) for one in zip(parameters, updates, weights, counts, strict=True)]


def _sums(start: Tensor, end: Tensor) -> tuple[float, float, float]:
    """Of this rank's part of a matrix: the squared norms of its update and of its first weights, and their number."""
    if not start.is_floating_point():
        return 0.0, 0.0, 0.0
    update = held = 0.0
    for part in tensors.portions([start], [end]):
        (first,), (last,) = part.of([start]), part.of([end])
        first = tensors.wide(first.to(last.device))
        update += float((tensors.wide(last) - first).square().sum())
        held += float(first.square().sum())
    return update, held, float(start.numel())


def _keeps_scale(parameter: nn.Parameter, squares: float, count: float) -> bool:
    """Whether outputs are of the order of inputs, by what each weight holds and the sides."""
    if not spectral_gain(parameter) or not holds(parameter, squares, count):
        return False
    return math.sqrt(min(matrix_shape(parameter)) * squares / count) < KEPT


def _shows(parameter: nn.Parameter, update: float, squares: float, steps: int) -> bool:
    """Whether steps were large enough for the weights' precision: in bfloat16 most small ones are rounded away.

    The squared norm of an update may overflow, which tells nothing either.
    """
    return FINEST * steps * torch.finfo(parameter.dtype).eps < math.sqrt(update / squares) < math.inf


def _up_to_the_peak(knob: BoundKnob, window: Window) -> float:
    """The schedule's peak over its mean in the window; 0 where the peak is not known."""
    if knob.schedule.total_steps is None and not isinstance(knob.schedule, Constant):
        return 0.0
    mean = math.fsum(map(knob.schedule, range(window.start, window.stop))) / (window.stop - window.start)
    return knob.peak / mean if mean > 0.0 else 0.0
