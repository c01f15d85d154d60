"""The laws of knobs."""

from __future__ import annotations

import math
from collections.abc import Set

import torch
from torch import nn
from torch.optim import Optimizer

from hdet.controllers import Hold
from hdet.engine.engine import Engine
from hdet.evidence import Divergent, Line, OuterLine
from hdet.hparams import Knob
from hdet.hparams.binding import Binding
from hdet.replicas import replicate
from hdet.testing.ground import Ground, ground_of, merge_of
from hdet.testing.law import require, require_same_model, same_generators

WINDOW, WINDOWS = 3, 2
SINGLE = 2e-7
"""Relative rounding of a value that is held in float32."""


def _bound_pair(knob: Knob, ground: Ground | None) -> tuple[Binding, Binding]:
    """The knob in two replicas of one model."""
    hosts = replicate(*ground_of(knob, ground).make(), n=2).hosts
    one, other = (_bound(knob, model, optimizer) for model, optimizer in hosts)
    return one, other


def _bound(knob: Knob, model: nn.Module, optimizer: Optimizer) -> Binding:
    with same_generators("bind"):
        binding: object = knob.bind(model, optimizer)
    wanted = "a binding, with read, write, overwritten and targets"
    require(isinstance(binding, Binding), f"bind returned {binding!r}; it returns {wanted}")
    assert isinstance(binding, Binding)
    require(isinstance(binding.targets, Set), f"its targets are {binding.targets!r}, which is no frozenset")
    return binding


def _values(knob: Knob, held: float) -> list[float]:
    """Values to write: near the one held, and the bounds where they are finite."""
    low, high = knob.bounds
    near = [min(max(knob.space.apply(held, shift), low), high) for shift in (0.05, -0.05, 0.3, -0.3)]
    return [value for value in (held, *near, low, high, held) if math.isfinite(value)]


def _require_inside(knob: Knob, value: float, when: str) -> None:
    low, high = knob.bounds
    # A ratio between groups is divided out again in double precision; float32 would be off by far more.
    slack = 1e-14 * max(abs(low), abs(high), abs(value)) if math.isfinite(low) and math.isfinite(high) else 0.0
    require(low - slack <= value <= high + slack, f"{when} it reads {value!r}, outside {knob.bounds}")


def what_is_written_is_read(knob: Knob, ground: Ground | None) -> None:
    """A value that is written is read back, up to float32's rounding and never outside the bounds."""
    binding, _ = _bound_pair(knob, ground)
    held = binding.read()
    require(math.isfinite(held), f"it reads {held!r} before anything is written")
    for value in _values(knob, held):
        binding.write(value)
        read = binding.read()
        require(abs(read - value) <= SINGLE * abs(value) + 1e-30, f"{value!r} was written, and {read!r} is read")
        _require_inside(knob, read, f"after {value!r} was written")
        other = binding.overwritten(value)
        require(other is None, f"{value!r} was written, nobody wrote after it, and overwritten({value!r}) is {other!r}")


def replicas_are_independent(knob: Knob, ground: Ground | None) -> None:
    """Writing in one replica leaves its copy as it was: they have no scalar in common."""
    one, other = _bound_pair(knob, ground)
    require(bool(one.targets), "it names no target, so that two knobs on one scalar would go unnoticed")
    shared = one.targets & other.targets
    require(not shared, f"two replicas share the targets {set(shared)}")
    before = other.read()
    for value in _values(knob, before):
        one.write(value)
        require(
            other.read() == before,
            f"{value!r} was written in one replica, and the other went from {before!r} to {other.read()!r}",
        )


def binding_writes_nothing(knob: Knob, ground: Ground | None) -> None:
    """To bind a knob, twice over, changes nothing, and both times it names the same scalars."""
    model, optimizer = ground_of(knob, ground).make()
    first = _bound(knob, model, optimizer)
    held = first.read()
    second = _bound(knob, model, optimizer)
    require(first.targets == second.targets, f"its targets are {set(first.targets)} and then {set(second.targets)}")
    require(second.read() == held, f"it reads {held!r}, and {second.read()!r} when bound again")


def what_it_changes_is_declared(knob: Knob, ground: Ground | None) -> None:
    """A value that changes the loss of given weights says so: by `biases_loss`, and in eval mode by `acts_in_eval`."""
    ground = ground_of(knob, ground)
    told = {"biases_loss": knob.biases_loss or knob.accept_bias, "acts_in_eval": knob.acts_in_eval}
    for name in [name for name, declared in told.items() if not declared and knob.acts_on != "merge"]:
        training = name == "biases_loss"
        start, *values = _values(knob, _bound(knob, *ground.make()).read())
        held = _loss_at(knob, ground, start, training)
        for value in values:
            loss = _loss_at(knob, ground, value, training)
            same = math.isclose(loss, held, rel_tol=1e-5, abs_tol=1e-12) or (math.isnan(loss) and math.isnan(held))
            mode = "training" if training else "eval mode, which is to be the held-out loss,"
            require(same, f"{name} is False, and at the value {value!r} the loss in {mode} is {loss}, not {held}")


def _loss_at(knob: Knob, ground: Ground, value: float, training: bool) -> float:
    """The loss of fresh weights at a value."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model, optimizer = ground.make()
        _bound(knob, model, optimizer).write(value)
        torch.manual_seed(0)
        return float(ground.loss(model.train(training), 0, 0))


def with_spread_zero_it_changes_nothing(knob: Knob, ground: Ground | None) -> None:
    """Two windows with spread 0 train the very bits that plain training does."""
    ground = ground_of(knob, ground)
    still = knob.replace(spread=knob.spread.replace(width=0.0), controller=Hold(), evidence=None)
    steps = WINDOW * WINDOWS

    def follow(model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if knob.schedule is not None:
            knob.bind(model, optimizer).write(knob.schedule(step))

    merge = merge_of(knob)

    def trained(knobs: list[Knob]) -> Engine:
        replicas = replicate(*ground.make(), n=2)
        engine = Engine(replicas, knobs, window=WINDOW, gradients="local", total_steps=steps, merge=merge)
        ground.train(engine, steps, same_data=True)
        return engine

    with torch.random.fork_rng(devices=[]):
        # What a merge steps with is no part of plain training.
        plain = ground.train_plainly(steps, follow) if merge is None else trained([]).replicas[0].model
        engine = trained([still])
    require_same_model(plain, engine.replicas[0].model, f"is not what plain training makes of it in {steps} steps")


def explored_it_stays_in_bounds(knob: Knob, ground: Ground | None) -> None:
    """Two windows as declared: every value in force lies in the bounds, and all replicas end with one."""
    ground = ground_of(knob, ground)
    steps = WINDOW * WINDOWS
    evidence = knob.evidence or (
        Line() if knob.controller is not None and knob.controller.needs_averaged else Divergent()
    )
    if knob.acts_on == "merge":
        evidence = OuterLine()
    with torch.random.fork_rng(devices=[]):
        engine = Engine(
            replicate(*ground.make(), n=4),
            [knob.replace(evidence=evidence)],
            window=WINDOW,
            gradients="shared" if evidence.shared else "local",
            signal=ground.probe(),
            objective=ground.objective(),
            total_steps=steps,
            merge=merge_of(knob),
        )
        bindings = engine.knobs[0].bindings

        def look(step: int) -> None:
            for index, binding in enumerate(bindings):
                _require_inside(knob, binding.read(), f"in step {step}, in replica {index},")

        records = ground.train(engine, steps, look)
    require(len(records) == WINDOWS, f"{len(records)} windows were closed in {steps} steps")
    ended = {binding.read() for binding in bindings}
    require(len(ended) == 1, f"after the run the replicas hold the values {sorted(ended)}")
    for replica in engine.replicas[1:]:
        differs = f"is another in replica {replica.index} after the run"
        require_same_model(replica.model, engine.replicas[0].model, differs)
