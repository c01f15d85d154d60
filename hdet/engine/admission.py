"""What is refused before a run starts: declarations that contradict each other or cannot be identified."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from numbers import Integral

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hdet.engine.guard import Guard
from hdet.engine.tail import Tail
from hdet.errors import ConfigError, IdentifiabilityError
from hdet.evidence.contrast import Contrast
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import Knob
from hdet.hparams.param_groups import first_trained, parameters_of
from hdet.merging import Merge
from hdet.replicas import Replicas
from hdet.signals import Objective, Probe, Signal
from hdet.spec import Spec
from hdet.windows import FixedWindow, Windows


def declared(argument: str, given: object, *kinds: type) -> None:
    """What was passed is of the kind that the argument takes; where it takes an int, NumPy's is one too."""
    taken = (*kinds, Integral) if int in kinds else kinds
    if not isinstance(given, taken) or isinstance(given, bool):
        allowed = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(f"{argument} must be of type {allowed}, got {given!r}")


def windows(window: object) -> Windows:
    """What says how long each window is, of that or a number of steps."""
    declared("window", window, int, Windows)
    if isinstance(window, Windows):
        return window
    return FixedWindow(counted("window", window))


def whole(argument: str, given: object) -> int:
    """A whole number as Python's."""
    declared(argument, given, int)
    assert isinstance(given, Integral)
    return int(given)


def counted(argument: str, given: object) -> int:
    """A whole number as Python's, 1 or more."""
    number = whole(argument, given)
    if number < 1:
        raise ConfigError(f"{argument} must be at least 1, got {number}")
    return number


def switched(**given: object) -> None:
    """Each argument is True or False."""
    for argument, switch in given.items():
        if not isinstance(switch, (bool, np.bool_)):
            raise ConfigError(f"{argument} is True or False, got {switch!r}")


def trained(optimizer: Optimizer) -> None:
    """There is something that steps can change."""
    if first_trained(optimizer) is None:
        raise ConfigError(
            "no parameter that the optimizer holds requires a gradient, so nothing is trained; call "
            "model.requires_grad_(), or thaw a part, before"
        )


def of_these(replicas: Replicas, model: nn.Module, optimizer: Optimizer) -> None:
    """Replicas that are given beside a model and an optimizer are theirs, whatever wraps them."""
    own = [id(group) for group in replicas.hosts[0][1].param_groups]
    same = own == [id(group) for group in optimizer.param_groups]
    if not same or set(parameters_of(optimizer)).isdisjoint(model.parameters()):
        raise ConfigError(
            "replicas= are of another model or optimizer than those that were given beside them, and what is found "
            "would not be in force in a loop that steps these; make the replicas from the same two"
        )


def as_many_passes(replicas: Replicas, micro_batches: int | None) -> None:
    """A number of micro-batches that is given beside replicas is that of theirs."""
    if micro_batches not in (None, passes := len(replicas.local)):
        raise ConfigError(
            f"micro_batches={micro_batches} was given beside replicas= of {passes} passes a step; leave one "
            f"of the two out"
        )


def can_be_trained_later() -> None:
    """What is made now can be written over in training."""
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "hdet.attach, or an engine, was called under torch.inference_mode(), and what is made there is not written "
            "over in training; call it outside of that block"
        )


def listed(knobs: object) -> None:
    """Knobs are given as a list of them."""
    if not isinstance(knobs, Collection) or isinstance(knobs, str) or getattr(knobs, "ndim", 1) == 0:
        raise ConfigError(f"knobs is a list of knobs, got {knobs!r}; give [hdet.Dropout()], say")
    for knob in knobs:
        declared("a knob", knob, Knob)


def unique_names(knobs: Sequence[Knob]) -> None:
    """Two knobs of one name would share designs and history; a terminal would obey what it cannot print."""
    names = [knob.label for knob in knobs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two knobs are called {name!r}; give one of them name=...")
        if not name.isprintable():
            raise ConfigError(
                f"a knob is called {name!r}, which cannot be printed; give it name=..., or the parameter group or "
                f"module that it is called after another name"
            )


def separate_targets(knobs: Sequence[BoundKnob]) -> None:
    """Two knobs that write one scalar would overwrite each other."""
    owners: dict[Hashable, str] = {}
    for knob in knobs:
        for target in knob.bindings[0].targets:
            if target in owners:
                raise ConfigError(
                    f"knobs {owners[target]!r} and {knob.name!r} write the same scalar; "
                    f"narrow one of them by groups= or pattern=, or drop it"
                )
            owners[target] = knob.name


SEEN_BY = {
    "update": (
        "on the update",
        "hdet.evidence.Line (line) for a learning rate, Analytic (analytic) for weight decay, Recursion (recursion) "
        "for momentum, betas and clipping, Divergent (divergent) for any",
    ),
    "forward": (
        "in the forward pass",
        "hdet.evidence.Contrast (contrast) or MixedDifference (mixed_difference), or Divergent (divergent) with "
        "gradients='local'",
    ),
    "merge": ("on the merge's step", "hdet.evidence.OuterLine (outer_line)"),
}
"""By what a knob acts on: that in words, and the evidence that sees it, with its kind in a run file."""


def identifiable(
    knob: BoundKnob, replicas: Replicas, signal: Signal, objective: Objective | None, gradients: str
) -> None:
    """A knob must be able to show its effect in the evidence it is given, and that must have what it measures by."""
    spec, name, evidence = knob.spec, knob.name, knob.evidence
    if spec.acts_on not in SEEN_BY:
        raise ConfigError(f"{name}: acts_on is {spec.acts_on!r}; a knob acts on one of {sorted(SEEN_BY)}")
    explored = spec.spread.width != 0.0
    if evidence.diverges and explored:
        if spec.acts_on == "merge":
            raise IdentifiabilityError(
                f"{name} acts on the step that all replicas make together at a window's end, so replicas that diverge "
                f"cannot tell its levels apart; give it no evidence, or evidence=hdet.evidence.OuterLine()"
            )
        if replicas.size < 2:
            raise ConfigError(
                f"{name}: a spread of {spec.spread.width:g} needs at least 2 replicas to compare, there is "
                f"{replicas.size}; replicate with n >= 2, set its spread to width 0, or take evidence that needs no "
                f"divergence"
            )
        if not replicas.diverge:
            raise ConfigError(
                f"{name}: micro-batches of one model cannot diverge; use hdet.replicate, or evidence that needs no "
                f"divergence"
            )
        if gradients == "shared" and spec.acts_on not in evidence.sees:
            raise IdentifiabilityError(
                f"{name} acts in the forward pass, and under shared gradients all replicas receive the same update, so "
                f"diverged replicas cannot tell its levels apart; use gradients='local', or counterfactual evidence "
                f"(evidence=hdet.evidence.Contrast())"
            )
        if spec.biases_loss and not isinstance(signal, Probe) and not spec.accept_bias:
            raise IdentifiabilityError(
                f"{name} changes the training loss it would be judged by; give the engine signal=hdet.Probe(...) (in a "
                f"run file, signal: probe), or accept_bias=True to see what goes wrong"
            )
    if not evidence.diverges and spec.acts_on not in evidence.sees:
        where, others = SEEN_BY[spec.acts_on]
        raise IdentifiabilityError(
            f"{name} acts {where}, of which {evidence.kind} evidence sees nothing; give the knob other evidence: "
            f"{others}"
        )
    if evidence.spaces and not isinstance(spec.space, evidence.spaces):
        raise ConfigError(
            f"{name}: {evidence.kind} evidence measures factors, which a {type(spec.space).__name__} space has not; "
            f"give the knob space=hdet.spaces.Log(), or other evidence"
        )
    if evidence.shared and gradients == "local" and replicas.diverge:
        raise IdentifiabilityError(
            f"{name}: {evidence.kind} evidence compares gradients at weights that all replicas share, and local "
            f"gradients drive the weights apart; use gradients='shared', or evidence=hdet.evidence.Divergent()"
        )
    if knob.controller.needs_averaged and not evidence.averages:
        raise ConfigError(
            f"{name}: the controller {knob.controller.kind} needs a judgement at window-averaged weights, which "
            f"{evidence.kind} evidence has not; take other evidence (hdet.evidence.Line) or another controller, such "
            f"as hdet.controllers.Gated or hdet.controllers.Newton"
        )
    if evidence.needs_probe and not isinstance(signal, Probe):
        raise ConfigError(
            f"{name}: {evidence.kind} evidence measures a held-out loss; give signal=hdet.Probe(...) (in a run file, "
            f"signal: probe)"
        )
    if evidence.needs_objective and objective is None:
        raise ConfigError(
            f"{name}: {evidence.kind} evidence evaluates the training loss by itself, on training batches, and was not "
            f"told how; give the engine objective=hdet.Objective(loss, batches)"
        )


def has_outer_optimizer(knob: Knob, merge: Merge, outer: Sequence[Optimizer]) -> None:
    """A setting of the merge's optimizer needs a merge that has one."""
    if not outer:
        raise ConfigError(
            f"{knob.label} is a setting of the optimizer that a merge steps with, and the merge {merge.kind} has none; "
            f"give the engine merge=hdet.merges.Outer(), or drop the knob"
        )


def steps_at_window_ends(knob: Knob, replicas: Replicas) -> None:
    """A setting of the merge's optimizer is judged between the merge and its step, with the window's evidence."""
    if replicas.overlaps:
        raise ConfigError(
            f"{knob.label} is judged at a window's end, between the merge and the outer step, and with overlap= both "
            f"come later; drop the knob or overlap="
        )


def paired(knobs: Sequence[BoundKnob], replicas: Replicas) -> bool:
    """Whether replicas go in pairs that take the same data: as all `Contrast`s say, and there is a replica for each."""
    said = {knob.name: knob.evidence.paired for knob in knobs if isinstance(knob.evidence, Contrast)}
    if len(set(said.values())) > 1:
        raise ConfigError(
            f"whether replicas go in pairs is one answer for the whole engine, since it decides which data they take, "
            f"and the knobs' Contrast(paired=...) differ: {said}; declare the same for all"
        )
    if not any(said.values()):
        return False
    if replicas.size % 2:
        raise ConfigError(
            f"Contrast(paired=True) compares replicas two by two, and there are {replicas.size}; take an even number, "
            f"or paired=False"
        )
    return True


def common_total(knobs: Sequence[BoundKnob], given: int | None) -> int | None:
    """The run's length: as given, or as the schedules agree on."""
    lengths = {knob.name: knob.schedule.total_steps for knob in knobs if knob.schedule.total_steps is not None}
    if given is not None:
        return counted("total_steps", given)
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"the schedules end at different steps {lengths}; give the engine total_steps=")
    return next(iter(lengths.values()), None)


def judged_by_a_probe(name: str, given: Spec | None, family: type[Spec], signal: Signal) -> None:
    """A guard or a tail is one, and has a held-out loss to judge by."""
    declared(name, given, family, type(None))
    if given is not None and not isinstance(signal, Probe):
        raise ConfigError(
            f"{name}={type(given).__name__}() compares the held-out loss at two points; give the engine "
            f"signal=hdet.Probe(...) (in a run file, signal: probe)"
        )


def one_model(merge: Merge, guard: Guard | None, tail: Tail | None, knobs: Sequence[BoundKnob]) -> None:
    """What looks at the one model that all replicas become needs a merge that makes them one."""
    if merge.makes_alike:
        return
    if guard is not None:
        raise ConfigError(
            f"the merge {merge.kind} leaves replicas apart, and {type(guard).__name__} would judge the first of them "
            f"and send all back to its point; give guard=None (Exploit itself gives up members that do badly)"
        )
    if tail is not None:
        raise ConfigError(
            f"the merge {merge.kind} leaves replicas apart, and {type(tail).__name__} would give all of them one mean "
            f"of the weights; give tail=None"
        )
    lines = [knob.name for knob in knobs if not knob.evidence.diverges]
    if lines:
        raise IdentifiabilityError(
            f"{', '.join(lines)}: the merge {merge.kind} leaves replicas apart, so there are no common weights about "
            f"which a held-out loss could be read; take evidence that compares replicas, such as "
            f"hdet.evidence.Population()"
        )
