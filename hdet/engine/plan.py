"""The plan: what an engine was declared to do, worked out and found possible before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

from torch import nn
from torch.optim import Optimizer

from hdet.engine import admission
from hdet.engine.defaults import complete
from hdet.engine.guard import Guard
from hdet.engine.tail import Tail
from hdet.errors import ConfigError
from hdet.evidence import Contrast, Evidence
from hdet.evidence.scene import Gradients
from hdet.hparams.binding import Binding
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import Knob
from hdet.merging import Mean, Merge
from hdet.replicas import Replicas
from hdet.signals import Objective, Probe, Signal, TrainingLoss
from hdet.windows import Windows

Bind = Callable[[Knob, nn.Module, Optimizer], Binding]
Place = Literal["device", "host"]


class Plan:
    """What is explored, by what evidence, over which windows; see `hdet.Engine` for its arguments.

    Nothing in it is replaced later; the knobs themselves move.

    Attributes:
        knobs: bound to the replicas of this process, with their evidence and controllers filled in.
        evidence: the distinct declarations, in the order of the knobs that name them.
        explored: whether any knob is explored by replicas that diverge.
        apart: whether replicas may hold other weights than each other at a window's end.
        paired: whether replicas go in pairs that take the same data.
        total_steps: the run's length; None for an open end.
        outer: by host, the optimizer that the merge steps with, whose settings knobs write; empty where it has none.

    Raises:
        ConfigError: what was declared cannot be; the message names the knob and the way out.
    """

    def __init__(
        self,
        replicas: Replicas,
        knobs: Sequence[Knob],
        *,
        window: int | Windows,
        signal: Signal | None,
        evidence: Evidence | None,
        merge: Merge | None,
        gradients: Gradients,
        seed: int,
        total_steps: int | None,
        anchor: Place,
        averages: Place,
        guard: Guard | None,
        tail: Tail | None,
        objective: Objective | None,
        noise_scale: bool,
        bind: Bind | None,
    ) -> None:
        for name, given, allowed in (
            ("gradients", gradients, ("shared", "local")),
            ("anchor", anchor, ("device", "host")),
            ("averages", averages, ("device", "host")),
        ):
            if given not in allowed:
                raise ConfigError(f"{name} must be {allowed[0]!r} or {allowed[1]!r}, got {given!r}")
        admission.switched(noise_scale=noise_scale)
        admission.declared("signal", signal, TrainingLoss, Probe, type(None))
        admission.declared("evidence", evidence, Evidence, type(None))
        admission.declared("merge", merge, Merge, type(None))
        admission.declared("objective", objective, Objective, type(None))
        admission.listed(knobs)
        admission.unique_names(knobs)
        self.replicas: Final = replicas
        self.windows: Final = admission.windows(window)
        signal = signal if signal is not None else TrainingLoss()
        self.signal: Final = signal
        self.gradients: Final[Gradients] = gradients
        self.seed: Final = admission.whole("seed", seed)
        self.anchor: Final[Place] = anchor
        self.averages: Final[Place] = averages
        self.guard: Final = guard
        self.tail: Final = tail
        self.objective: Final = objective
        self.noise_scale: Final = noise_scale
        bind = bind if bind is not None else lambda knob, model, optimizer: knob.bind(model, optimizer)
        merge = merge if merge is not None else Mean()
        self.merge: Final = merge
        outer = [own for own in (merge.outer_optimizer() for _ in replicas.hosts) if own is not None]
        self.outer: Final = outer

        def bindings(knob: Knob) -> list[Binding]:
            if knob.acts_on == "merge":
                admission.has_outer_optimizer(knob, merge, outer)
                admission.steps_at_window_ends(knob, replicas)
                return [knob.bind(model, own) for (model, _), own in zip(replicas.hosts, outer, strict=True)]
            return [bind(knob, model, optimizer) for model, optimizer in replicas.hosts]

        bound = [
            BoundKnob(knob, bindings(knob), replicas.size)
            for knob in (complete(knob, evidence, replicas.diverge) for knob in knobs)
        ]
        self.knobs: Final = bound
        admission.separate_targets(bound)
        for knob in bound:
            admission.identifiable(knob, replicas, signal, objective, gradients)
        self.paired: Final = admission.paired(bound, replicas)
        self.total_steps: Final = admission.common_total(bound, total_steps)
        admission.judged_by_a_probe("guard", guard, Guard, signal)
        admission.judged_by_a_probe("tail", tail, Tail, signal)
        sources: dict[Evidence, None] = {}
        for knob in bound:
            assert isinstance(knob.evidence, Evidence)  # each that can be declared is one
            sources[knob.evidence] = None
        self.evidence: Final = list(sources)
        admission.one_model(merge, guard, tail, bound)
        come_apart = [knob for knob in bound if knob.evidence.diverges and knob.spec.spread.width]
        self.explored: Final = bool(come_apart)
        self.sets_apart = frozenset(target for knob in come_apart for target in knob.bindings[0].targets)
        self.apart: Final = replicas.diverge and (gradients == "local" or self.explored or not merge.makes_alike)

    @property
    def numbered(self) -> bool:
        """Whether passes draw random numbers of their own: pairs that are compared, and something to compare."""
        return self.paired and any(knob.spec.spread.width for knob in self.knobs if isinstance(knob.evidence, Contrast))

    @property
    def counterfactual(self) -> bool:
        """Whether any knob is judged without replicas that diverge."""
        return not all(knob.evidence.diverges for knob in self.knobs)

    def judged_by(self, source: Evidence) -> list[BoundKnob]:
        """The knobs that one evidence judges, jointly."""
        return [knob for knob in self.knobs if knob.evidence == source]
