"""Recursion evidence: how momentum or a beta has moved the weights, followed step by step as the optimizer works."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from hdet.controllers import Estimate
from hdet.errors import ConfigError
from hdet.evidence.collector import Collector, Harvest, Scene, Window
from hdet.evidence.fit import along
from hdet.evidence.points import losses_at
from hdet.evidence.trace import FirstTrace, MomentumTrace, SecondTrace, Trace, Value
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound import BoundKnob
from hdet.hparams.evidence import Evidence
from hdet.replicas import tensors
from hdet.spec import register

NUDGE = 1e-4


@register
class Recursion(Evidence):
    """The probe along D = d theta / d coordinate of momentum or a beta, which their recursions give; nothing diverges.

    Had the knob another value from the window's opening on, and every gradient been the same, the weights would be
    at theta + D dx. With a prime for the derivative, u the optimizer's update and r its learning rate,

        buf' = buf + mu buf'                  SGD's momentum mu; u' = buf', with Nesterov (mu buf)'
        m'   = m - g + beta1 m'               Adam's beta1; u' = (m / (1 - beta1^t))' / (sqrt(vhat) + eps)
        v'   = v - g^2 + beta2 v'             Adam's beta2; u' = mhat (1 / (sqrt(vhat) + eps))'
        D    <- (1 - r lambda) D - r u'       lambda a decoupled weight decay

    where buf, m and v on the right are those of the step before, and g is worked out from m and v as they were and
    are. All is times d value / d coordinate in the knob's space.

    The probe is read at the last weights, L(theta_T + x D), because D is what those weights would change by: what
    momentum does to the noise of single steps is in both and counts. As always with last weights, a short window
    flatters the less noisy side, here less momentum, which is the side that does no harm.

    Where memories are long or windows are, D is large; so x is kept so small that |x D| stays within `reach` of the
    weights it moves.

    Held beyond the model: two vectors of the size of the parameters that the knob acts on, in float32 at least, for
    each knob; about three more for a moment in each step. No step waits for the device.

    Args:
        width: how far the points reach, in coordinate units, if `reach` allows.
        points: where the probe is evaluated, in units of `width`; three or more give a curvature too.
        reach: largest |x D| over the norm of the weights that it moves.
    """

    sees: ClassVar[frozenset[str]] = frozenset({"update"})
    needs_probe: ClassVar[bool] = True

    width: float = Field(default=0.3, gt=0, le=3)
    points: tuple[float, ...] = (-1.0, 1.0)
    reach: float = Field(default=0.1, gt=0, le=1)

    @field_validator("points")
    @classmethod
    def _distinct(cls, points: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(points)) < 2:
            raise ValueError(f"a slope needs at least 2 distinct points, got {points}")
        return points

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> RecursionCollector:
        return RecursionCollector(self, scene, knobs)


class RecursionCollector(Collector):
    """Follows D over the window, and evaluates the probe along it."""

    def __init__(self, spec: Recursion, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        # Replicas that stay alike have one D.
        self.hosts = list(scene.replicas.hosts if scene.apart else scene.replicas.hosts[:1])
        self.traces = [
            [_traces(knob, host, model) for host, (model, _) in enumerate(self.hosts)] for knob in self.knobs
        ]

    def open(self, window: Window) -> None:
        for knob, hosts in zip(self.knobs, self.traces, strict=True):
            first = _value(knob, window.start)
            for trace in _flat(hosts):
                trace.open(first)

    def after_update(self, window: Window, step: int) -> None:
        for knob, hosts in zip(self.knobs, self.traces, strict=True):
            now = _value(knob, step)
            following = _value(knob, step + 1) if step + 1 < window.stop else now
            for trace in _flat(hosts):
                trace.follow(now, following)

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        window = harvest.window
        heard = [knob.controller.listens(window.stop, window.total_steps) for knob in self.knobs]
        found = {knob.name: Estimate.nothing() for knob in self.knobs}
        if not any(heard):
            return found
        centre = self.scene.weights(harvest.valid)
        points: list[Any] = []
        offsets: list[list[float]] = []
        for hosts in compress(self.traces, heard):
            direction = self._direction(hosts, harvest)
            width = self._width(centre, direction)
            offsets.append([width * point for point in self.spec.points])
            points += [partial(_moved, centre, direction, x) for x in offsets[-1]]
        with self.scene.at_base():
            losses = losses_at(self.scene.replicas, self.scene.probe, harvest, points)
        lines = losses.reshape(len(offsets), len(self.spec.points), -1)
        for knob, x, line in zip(compress(self.knobs, heard), offsets, lines, strict=True):
            if any(x):
                found[knob.name] = replace(along(x, line), level=float(line.mean()))
        return found

    def _direction(self, hosts: Sequence[Sequence[Trace]], harvest: Harvest) -> list[Tensor | None]:
        """D for each parameter of the model; the mean over valid replicas where these have come apart."""
        rows = []
        for (model, _), traces in zip(self.hosts, hosts, strict=True):
            own = {id(p): d for trace in traces for p, d in zip(trace.parameters, trace.direction, strict=True)}
            rows.append([own.get(id(p)) for p in model.parameters() if p.numel()])
        if not self.scene.apart:
            return rows[0]
        with ExitStack() as stack:
            for (model, _), row in zip(self.hosts, rows, strict=True):
                live = tensors.parameters(model)
                values = [torch.zeros_like(p) if d is None else d for p, d in zip(live, row, strict=True)]
                stack.enter_context(tensors.substituted(live, values))
            mean = self.scene.replicas.combine(harvest.valid / harvest.valid.sum())
        return [None if d is None else m for m, d in zip(mean, rows[0], strict=True)]

    def _width(self, centre: Sequence[Tensor], direction: Sequence[Tensor | None]) -> float:
        """The width, or as much of it as moves the weights by no more than `reach` of their norm; 0 without any D."""
        moved = [(c, d) for c, d in zip(centre, direction, strict=True) if d is not None]
        if not moved:
            return 0.0
        sizes = (
            torch.stack([norm.double() for norm in torch._foreach_norm([c for c, _ in moved])]),
            torch.stack([norm.double() for norm in torch._foreach_norm([d for _, d in moved])]),
        )
        weights, change = (float(torch.linalg.vector_norm(size)) for size in sizes)
        furthest = max(map(abs, self.spec.points)) * change
        return min(self.spec.width, self.spec.reach * weights / furthest) if furthest > 0.0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"traces": [[[trace.state_dict() for trace in host] for host in hosts] for hosts in self.traces]}

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        if window is None:
            return
        for hosts, saved in zip(self.traces, state["traces"], strict=True):
            for trace, own in zip(_flat(hosts), (own for host in saved for own in host), strict=True):
                trace.load_state_dict(own)


def _traces(knob: BoundKnob, host: int, model: nn.Module) -> list[Trace]:
    """A trace for each parameter group of a knob.

    Raises:
        ConfigError: the knob, its optimizer or its parameters are none that can be followed.
    """
    binding = knob.bindings[host]
    if not isinstance(binding, GroupBinding) or binding.key not in ("momentum", "betas"):
        raise ConfigError(
            f"{knob.name}: Recursion evidence follows momentum and betas only; use Line for learning rates, Analytic "
            f"for weight decay, Contrast for knobs of the forward pass, Divergent for others"
        )
    known = (SGD,) if binding.key == "momentum" else (Adam, AdamW)
    if type(binding.optimizer) not in known:
        raise ConfigError(
            f"{knob.name}: Recursion evidence knows the recursions of torch.optim.SGD (momentum), Adam and AdamW "
            f"(betas), not those of {type(binding.optimizer).__name__}; take one of these, or evidence=hdet.Divergent()"
        )
    if binding.key == "momentum" and knob.spec.bounds[0] <= 0.0:
        raise ConfigError(
            f"{knob.name}: at momentum 0 SGD keeps no buffer that Recursion evidence could follow, and the bounds "
            f"{knob.spec.bounds} allow it; give bounds=(0.1, {knob.spec.bounds[1]:g})"
        )
    kind = MomentumTrace if binding.key == "momentum" else (FirstTrace, SecondTrace)[binding.item or 0]
    own = {id(p) for p in model.parameters() if p.numel() and p.requires_grad}
    traces: list[Trace] = []
    for index in binding.indices:
        group = binding.optimizer.param_groups[index]
        parameters = [p for p in group["params"] if id(p) in own]
        _check(knob, group, parameters)
        traces.append(kind(binding, index, parameters))
    return traces


def _check(knob: BoundKnob, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
    if any(hasattr(p, "to_local") for p in parameters):
        raise ConfigError(
            f"{knob.name}: Recursion evidence does not work on parameters that are sharded over ranks; use "
            f"evidence=hdet.Divergent()"
        )
    if "betas" not in group:
        return
    if group["amsgrad"]:
        raise ConfigError(f"{knob.name}: Recursion evidence does not follow amsgrad's maximum; set amsgrad=False")
    if any(isinstance(beta, Tensor) and beta.device.type != "cpu" for beta in group["betas"]):
        raise ConfigError(
            f"{knob.name}: Recursion evidence would wait for the device at every step to read betas that lie there; "
            f"give the optimizer betas that are numbers"
        )
    narrow = {str(p.dtype) for p in parameters} - {"torch.float32", "torch.float64"}
    if narrow:
        raise ConfigError(
            f"{knob.name}: Recursion evidence works gradients out from the optimizer's running means, for which "
            f"{', '.join(sorted(narrow))} is too coarse; keep the parameters in float32"
        )


def _value(knob: BoundKnob, step: int) -> Value:
    value = knob.base(step)
    apply = knob.spec.space.apply
    return Value(value, (apply(value, NUDGE) - apply(value, -NUDGE)) / (2 * NUDGE))


def _flat(hosts: Sequence[Sequence[Trace]]) -> list[Trace]:
    return [trace for traces in hosts for trace in traces]


@torch.no_grad()
def _moved(centre: Sequence[Tensor], direction: Sequence[Tensor | None], factor: float) -> list[Tensor]:
    return [c if d is None or factor == 0.0 else c + d * factor for c, d in zip(centre, direction, strict=True)]
