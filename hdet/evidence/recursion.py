"""Recursion evidence: how a knob of the optimizer has moved the weights, followed step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hdet.errors import ConfigError
from hdet.evidence.parts.clip_derivative import ClipTrace
from hdet.evidence.parts.directional import Block, Direction, Directional, DirectionalCollector
from hdet.evidence.parts.weight_derivative import FirstTrace, MomentumTrace, SecondTrace, Trace, Value
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.clipping import ENTRY
from hdet.replicas import tensors
from hdet.replicas.tensors import Portion
from hdet.spec import register

NUDGE = 1e-4
KNOWN: Mapping[tuple[str, int | None], tuple[type[Trace], tuple[type[Optimizer], ...]]] = {
    ("momentum", None): (MomentumTrace, (SGD,)),
    ("betas", 0): (FirstTrace, (Adam, AdamW)),
    ("betas", 1): (SecondTrace, (Adam, AdamW)),
    (ENTRY, None): (ClipTrace, (SGD, Adam, AdamW)),
}
"""By entry of a parameter group, what follows it and whose."""


@register
class Recursion(Directional):
    """The probe along D = d theta / d coordinate of a knob of the optimizer, by its recursion; nothing diverges.

    Had the knob another value from the window's opening on, and every gradient been the same, the weights would be
    at theta + D dx. With a prime for the derivative, u the optimizer's update and r its learning rate,

        buf' = buf + mu buf'                  SGD's momentum mu; u' = buf', with Nesterov (mu buf)'
        m'   = m - g + beta1 m'               Adam's beta1; u' = (m / (1 - beta1^t))' / (sqrt(vhat) + eps)
        v'   = v - g^2 + beta2 v'             Adam's beta2; u' = mhat (1 / (sqrt(vhat) + eps))'
        g'   = g where clipped, else 0        the norm gradients are clipped to; buf', m' and v' follow from it
        D    <- (1 - r lambda) D - r u'       lambda a decoupled weight decay

    where buf, m and v on the right are those of the step before, and g is worked out from m and v as they were and
    are. All is times d value / d coordinate in the knob's space.

    The probe is read at the last weights, L(theta_T + x D), because D is what those weights would change by. Where
    memories are long or windows are, D is large; so x is kept so small that |x D| stays within `reach` of the weights
    it moves. docs/evidence.md says what it misses.

    Held beyond the model: two vectors of the size of the parameters that the knob acts on, in float32 at least, for
    each knob, three for clipping under Adam; about three more for a moment in each step. No step waits for the device.

    Args:
        width: how far the points reach, in coordinate units, if `reach` allows.
        points: where the probe is evaluated, in units of `width`; three or more give a curvature too.
        reach: largest |x D| over the norm of the weights that it moves.
    """

    width: float = Field(default=0.3, gt=0, le=3)

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> RecursionCollector:
        return RecursionCollector(self, scene, knobs)


class RecursionCollector(DirectionalCollector):
    """Follows D over the window."""

    def __init__(self, spec: Recursion, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(spec, scene, knobs)
        self.keeps_weights = not scene.apart
        # Replicas that stay alike have one D.
        self.hosts = list(scene.replicas.hosts if scene.apart else scene.replicas.hosts[:1])
        self._follow()

    def _follow(self) -> None:
        """Follow what is trained now, from here on."""
        self.traces = [
            [_traces(knob, host, model) for host, (model, _) in enumerate(self.hosts)] for knob in self.knobs
        ]

    def _is_outdated(self) -> bool:
        """Whether other parameters are trained than are followed."""
        return any(
            [id(p) for p in trace.parameters] != [id(p) for p in _trained(trace.optimizer, trace.index, model)]
            for hosts in self.traces
            for (model, _), traces in zip(self.hosts, hosts, strict=True)
            for trace in traces
        )

    def open(self, window: Window) -> None:
        if self._is_outdated():
            self._follow()  # nothing is lost: every window begins with a derivative of 0
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

    def centre(self, harvest: Harvest) -> list[Tensor]:
        return self.scene.weights(harvest.valid)

    def direction(self, k: int, harvest: Harvest) -> Direction:
        """The mean over valid replicas where these have come apart."""
        moving = self.scene.moving
        rows: list[list[Tensor | None]] = []
        for parameters, traces in zip(moving.parameters, self.traces[k], strict=False):
            own = {id(p): d for trace in traces for p, d in zip(trace.parameters, trace.direction, strict=True)}
            rows.append([own.get(id(p)) for p in parameters])
        found = rows[0]
        if self.scene.apart:
            with ExitStack() as stack:
                for host, row in enumerate(rows):
                    live = moving.values(host)
                    values = [torch.zeros_like(p) if d is None else d for p, d in zip(live, row, strict=True)]
                    stack.enter_context(tensors.substituted(live, values))
                mean = self.scene.replicas.combine(harvest.valid / harvest.valid.sum(), moving.flags)
            found = [None if d is None else m for m, d in zip(mean, rows[0], strict=True)]

        def of(part: Portion, centre: Sequence[Tensor]) -> list[Block]:
            elements = part.elements or slice(None)
            directions = [None if d is None else d.reshape(-1)[elements] for d in found[part.places]]
            alike: dict[tuple[torch.dtype, torch.dtype, torch.device], list[int]] = {}
            for place, (d, own) in enumerate(zip(directions, centre, strict=True)):
                if d is not None:
                    alike.setdefault((own.dtype, d.dtype, own.device), []).append(place)
            return [
                Block(
                    places,
                    tensors.joined([centre[place] for place in places]),
                    torch.cat([d for d in (directions[place] for place in places) if d is not None]),
                )
                for places in alike.values()
            ]

        return of

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
    if not isinstance(binding, GroupBinding) or (binding.key, binding.item) not in KNOWN:
        raise ConfigError(
            f"{knob.name}: Recursion evidence follows momentum, betas and the norm that gradients are clipped to; use "
            f"Line for learning rates, Analytic for weight decay, Contrast for knobs of the forward pass, Divergent "
            f"for others"
        )
    kind, optimizers = KNOWN[binding.key, binding.item]
    if type(binding.optimizer) not in optimizers:
        raise ConfigError(
            f"{knob.name}: Recursion evidence knows the recursions of torch.optim.SGD (momentum, clipping), Adam and "
            f"AdamW (betas, clipping), not those of {type(binding.optimizer).__name__}; take one of these, or "
            f"evidence=hdet.evidence.Divergent()"
        )
    if binding.key == "momentum" and knob.spec.bounds[0] <= 0.0:
        raise ConfigError(
            f"{knob.name}: at momentum 0 SGD keeps no buffer that Recursion evidence could follow, and the bounds "
            f"{knob.spec.bounds} allow it; give bounds=(0.1, {knob.spec.bounds[1]:g})"
        )
    traces: list[Trace] = []
    for index in binding.indices:
        parameters = _trained(binding.optimizer, index, model)
        _check(knob, binding.optimizer.param_groups[index], parameters)
        traces.append(kind(binding, index, parameters))
    return traces


def _trained(optimizer: Optimizer, index: int, model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a group that are trained in a model."""
    own = {id(p) for p in model.parameters() if p.numel() and p.requires_grad}
    return [p for p in optimizer.param_groups[index]["params"] if id(p) in own]


def _check(knob: BoundKnob, group: dict[str, Any], parameters: Sequence[nn.Parameter]) -> None:
    if any(hasattr(p, "to_local") for p in parameters):
        raise ConfigError(
            f"{knob.name}: Recursion evidence does not work on parameters that are sharded over ranks; use "
            f"evidence=hdet.evidence.Divergent()"
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
    if any(p.is_complex() for p in parameters):
        raise ConfigError(
            f"{knob.name}: Recursion evidence does not follow complex parameters; use "
            f"evidence=hdet.evidence.Divergent()"
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
