"""Analytic evidence: the direction a knob of the update moves the weights in, known by its formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.controllers import Controller, Estimate, Regularize
from hdet.errors import CheckpointError, ConfigError
from hdet.evidence.parts.batch_statistics import Statistics
from hdet.evidence.parts.directional import Block, Direction, Directional, DirectionalCollector
from hdet.evidence.parts.losses_at import statistics_of_average
from hdet.evidence.parts.preconditioner import decoupled, preconditioner, shrinkage
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import Knob
from hdet.hparams.space import Log, Relative, Space
from hdet.replicas import tensors
from hdet.replicas.chained_optimizer import steps_by
from hdet.replicas.tensors import Portion
from hdet.spec import register


@register
class Analytic(Directional):
    """The probe along D = d theta / d log(decay), which weight decay's own formula gives; nothing diverges.

    With a little more decay lambda a step moves the weights further by lr_t lambda_t theta_t (decoupled), or by
    P_t lambda_t theta_t through the preconditioner P (L2); and what it moved decays in the steps that follow. With the
    mean of the window's weights for every theta_t this comes to D = -(1 - exp(-pull)) theta, where the pull is the sum
    of lr_t lambda_t or P_t lambda_t. It is read at this mean, where the noise of single steps does not count, and which
    is already there for `Line`. L(theta + x D) at a few x then gives the slope.

    D says what decay did, and nothing of how gradients answered. The loss bends, so x is kept so small that |x D| stays
    within `reach` of the weights it moves.

    Args:
        width: how far the points reach, in coordinate units, if `reach` allows.
        points: where the probe is evaluated, in units of `width`; three or more give a curvature too.
        reach: largest |x D| over the norm of the weights that decay.
        stride: of the average, take every stride-th step's weights; by default as many as leave at least 128 in the
            window.
    """

    spaces: ClassVar[tuple[type[Space], ...]] = (Log, Relative)

    width: float = Field(default=1.0, gt=0, le=10)
    stride: int | None = Field(default=None, ge=1)

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> AnalyticCollector:
        return AnalyticCollector(self, scene, knobs)

    def default_controller(self, knob: Knob) -> Controller:
        return Regularize() if isinstance(knob.space, Log) else super().default_controller(knob)


@dataclass(frozen=True)
class Pull:
    """What decay did to the parameters of a group.

    Attributes:
        total: the sum of lr * decay over the window's steps (`shrinkage`).
        is_direct: whether decay acts on the weights and not through their gradient.
        scale: P of a parameter, or of some elements, where it is not that of the optimizer as it is.
    """

    optimizer: Optimizer
    group: dict[str, Any]
    total: float
    is_direct: bool
    scale: Callable[[nn.Parameter, slice | None], Tensor | float] | None = None

    def through_gradient(
        self, parameter: nn.Parameter, weights: Tensor, elements: slice | None = None
    ) -> Tensor | None:
        """What it did to one parameter, or to some elements, where it acts through the gradient: through P."""
        if parameter.is_complex():  # whose two parts have steps of their own
            return None
        if self.scale is not None:
            scale: Tensor | float | None = self.scale(parameter, elements)
        else:
            scale = preconditioner(self.optimizer, self.group, parameter, rate=1.0, elements=elements)
        if scale is None:
            return None
        # P is negative where an optimizer maximises, which turns gradients around and leaves decay as it is.
        pull = scale * (-self.total if self.group.get("maximize") else self.total)
        return weights * (torch.expm1(-pull) if isinstance(pull, Tensor) else math.expm1(-pull))


Direct = dict[tuple[float, torch.dtype, torch.device], list[int]]
"""Places of weights that decay acts on directly, by the sum of lr * decay, their dtype and device."""


def _by_kind(pulls: Sequence[Pull | None], weights: Sequence[Tensor]) -> tuple[list[tuple[int, Pull]], Direct]:
    """Which weights decay pulls through their gradient, and which directly."""
    through_gradient: list[tuple[int, Pull]] = []
    direct: Direct = {}
    for place, (pull, own) in enumerate(zip(pulls, weights, strict=True)):
        if pull is None:
            continue
        if pull.is_direct:
            direct.setdefault((pull.total, own.dtype, own.device), []).append(place)
        else:
            through_gradient.append((place, pull))
    return through_gradient, direct


class AnalyticCollector(DirectionalCollector):
    """Sums what decay multiplied the weights by over the window."""

    def __init__(self, spec: Analytic, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(spec, scene, knobs)
        self.stride = spec.stride
        scene.follow(spec.stride)
        self.bindings = [_decay(knob) for knob in knobs]
        self.pulls = self._none()
        read = {
            (id(own.optimizer), index, key, None)
            for own in self.bindings
            for index in own.indices
            for key in ("lr", "weight_decay")
        }
        self._off_base = scene.apart and not read.isdisjoint(scene.sets_apart)  # the first replica's, which are read

    def _none(self) -> list[list[float | Tensor]]:
        return [[0.0] * len(binding.indices) for binding in self.bindings]

    def open(self, window: Window) -> None:
        self.pulls = self._none()

    def after_update(self, window: Window, step: int) -> None:
        with self.scene.at_base() if self._off_base else nullcontext():
            for pulls, binding in zip(self.pulls, self.bindings, strict=True):
                groups = binding.optimizer.param_groups
                for place, index in enumerate(binding.indices):  # as they are in force, each group's own
                    pulls[place] = pulls[place] + shrinkage(groups[index])

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        now = self.scene.moving.values()
        # Replicas that come apart are judged by their mean, and each knows of its own steps alone.
        self._stepped = [True] * len(now) if self.scene.apart else _stepped(self.scene.opening(), now)
        found = super().close(harvest)
        if harvest.window.start > 0:
            return found
        norms, own = self.scene.excesses
        return {name: replace(told, excess=norms, own_excess=own) for name, told in found.items()}

    def centre(self, harvest: Harvest) -> list[Tensor]:
        return self.scene.averaged(harvest.valid, self.stride)

    def statistics(self, harvest: Harvest, centre: Sequence[Tensor]) -> Statistics:
        return statistics_of_average(self.scene, harvest, self.stride, centre)

    def direction(self, k: int, harvest: Harvest) -> Direction:
        binding, pulls = self.bindings[k], [float(pull) for pull in self.pulls[k]]
        weights = self.scene.moving.parameters[0]
        pull_of: dict[int, Pull] = {}
        for index, pull in zip(binding.indices, pulls, strict=True):
            group = binding.optimizer.param_groups[index]
            if pull != 0.0:
                trained = [parameter for parameter in group["params"] if parameter.requires_grad]
                is_direct = decoupled(binding.optimizer, group)
                own = Pull(binding.optimizer, group, pull, is_direct)
                if self.scene.apart and not is_direct:
                    own = self._of_first(own, [parameter for parameter in trained if not parameter.is_complex()])
                pull_of.update({id(parameter): own for parameter in trained})
        every = [pull_of.get(id(own)) if moved else None for own, moved in zip(weights, self._stepped, strict=True)]
        # By a part's first tensor: each part is asked for at every point.
        pulled: dict[int, tuple[list[tuple[int, Pull]], Direct]] = {}

        def of(part: Portion, centre: Sequence[Tensor]) -> list[Block]:
            first = part.places.start
            if first not in pulled:
                pulled[first] = _by_kind(every[part.places], centre)
            through_gradient, direct = pulled[first]
            found: list[Block] = []
            for place, pull in through_gradient:
                way = pull.through_gradient(weights[first + place], centre[place], part.elements)
                if way is not None:
                    found.append(Block([place], centre[place].reshape(-1), way.reshape(-1)))
            for (total, *_), places in direct.items():
                joined = tensors.joined([centre[place] for place in places])
                found.append(Block(places, joined, joined * math.expm1(-total)))
            return found

        return of

    def _of_first(self, pull: Pull, parameters: Sequence[nn.Parameter]) -> Pull:
        """It goes by the first replica's moments in every process, and by bases where replicas come apart.

        Several processes keep P of all parameters, which is sent; that of SGD has no moments.
        """

        def own(parameter: nn.Parameter, elements: slice | None) -> Tensor | float:
            p = preconditioner(pull.optimizer, pull.group, parameter, rate=1.0, elements=elements)
            return tensors.wide(p) if isinstance(p, Tensor) else p or 0.0

        replicas = self.scene.replicas
        if len(replicas.local) == replicas.size or isinstance(steps_by(pull.optimizer, pull.group), torch.optim.SGD):
            return replace(pull, scale=own)
        with self.scene.at_base():
            held = [own(parameter, None) for parameter in parameters]
        # A gradient, and so a state, may be there in some replicas only; all send as many numbers.
        local = [tensors.wide(tensors.local(parameter.detach())) for parameter in parameters]
        sent = [
            p.to(like.dtype, copy=True) if isinstance(p, Tensor) else torch.full_like(like, p)
            for p, like in zip(held, local, strict=True)
        ]
        replicas.take_firsts(sent)
        found = {id(parameter): p for parameter, p in zip(parameters, sent, strict=True)}

        def scale(parameter: nn.Parameter, elements: slice | None) -> Tensor:
            return found[id(parameter)] if elements is None else found[id(parameter)].reshape(-1)[elements]

        return replace(pull, scale=scale)

    def _stretch(self, centre: Sequence[Tensor], direction: Direction) -> float:
        with self.scene.at_base() if self.scene.apart else nullcontext():  # P holds momentum, which may be a knob's
            return super()._stretch(centre, direction)

    def norms(self, weights: Tensor, direction: Tensor) -> tuple[float, float]:
        # Of sharded weights each process sees a part; a replica's number is the mean over its parts.
        replicas = self.scene.replicas
        squares = torch.stack([own.square().sum() for own in (weights, direction)])
        of_weights, of_direction = replicas.gather(squares.expand(len(replicas.local), -1))[0]
        return math.sqrt(of_weights), math.sqrt(of_direction)

    def state_dict(self) -> dict[str, Any]:
        return {"pulls": [[float(pull) for pull in pulls] for pulls in self.pulls]}

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        if window is not None:
            pulls: list[list[float | Tensor]] = [[float(pull) for pull in own] for own in state["pulls"]]
            if list(map(len, pulls)) != list(map(len, self.pulls)):
                raise CheckpointError(f"the checkpoint's pulls of decay, {pulls}, are of other parameter groups")
            self.pulls = pulls


def _stepped(begun: Sequence[Tensor], now: Sequence[Tensor]) -> list[bool]:
    """Which weights the optimizer has made a step with: it leaves alone what has no gradient, decay included.

    Where norms are equal all of a tensor is compared, and hardly any other is. Of no elements nothing is known.
    """
    here = [number for number, (one, other) in enumerate(zip(begun, now, strict=True)) if one.device == other.device]
    norms = zip(*(tensors.norms([own[number] for number in here]) for own in (begun, now)), strict=True)
    apart = {number for number, (a, b) in zip(here, norms, strict=True) if a != b}
    return [
        number in apart or not one.numel() or not _equal(one, other)
        for number, (one, other) in enumerate(zip(begun, now, strict=True))
    ]


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, a stretch at a time: the first one tells nearly always."""
    for part in tensors.portions([one], [other]):
        (own,), (its,) = part.of([one]), part.of([other])
        if not torch.equal(own.to(its.device), its):
            return False
    return True


def _decay(knob: BoundKnob) -> GroupBinding:
    binding = knob.bindings[0]
    if not isinstance(binding, GroupBinding) or binding.key != "weight_decay":
        raise ConfigError(
            f"{knob.name}: Analytic evidence knows the direction of weight decay only; use Line for learning rates, "
            f"Contrast for knobs of the forward pass, Divergent for others"
        )
    return binding
