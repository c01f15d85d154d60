"""The laws of evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hdet.controllers import Estimate, Hold
from hdet.engine.engine import Engine
from hdet.errors import ConfigError
from hdet.evidence import Collector, Evidence, Harvest, Scene
from hdet.history import WindowRecord
from hdet.hparams import Beta1, Dropout, Knob, LearningRate, OuterLearningRate, Scalar, WeightDecay
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import ActsOn
from hdet.hparams.outer import OuterKnob
from hdet.hparams.space import Linear, Space
from hdet.replicas import replicate
from hdet.testing.ground import ADAMW, HELD_OUT, Ground, merge_of
from hdet.testing.law import broken, differing, require, require_same_model

WINDOW = 4
REPLICAS = 4
PLACEBO_WINDOWS = 16
PLACEBO_T, PLACEBO_SHARE = 6.0, 0.12
"""A knob without effect may have |t| above PLACEBO_T in PLACEBO_SHARE of all windows (Student's t with 2 degrees of
freedom, the fewest that evidence has here: 2.7 %)."""
TYPICAL = 1.8
"""And half of all windows may not be surer than this (the median of |t| is 0.82 with those degrees of freedom,
0.67 with many; of 7 windows it is above 1.8 in 5 of 1000 cases)."""

ASKED: Sequence[Knob] = (
    LearningRate(groups="taught"),
    WeightDecay(groups="taught"),
    Dropout(),
    Beta1(groups="taught"),
    OuterLearningRate(),
)


class OuterDecay(OuterKnob):
    """Decay of displacements, which begin at 0: a setting without effect."""

    kind: ClassVar[str] = "outer_decay"
    key: ClassVar[str] = "weight_decay"

    space: Space = Linear()
    bounds: tuple[float, float] = (-1.0, 1.0)


PLACEBOS: Sequence[Knob] = (
    LearningRate(groups="idle"),
    WeightDecay(groups="idle"),
    Beta1(groups="idle"),
    Scalar("idle", path="idle_scalar", bounds=(0.01, 10.0), effect="forward"),
    OuterDecay(),
)


def _engine(evidence: Evidence, knob: Knob, ground: Ground, windows: int) -> Engine:
    return Engine(
        replicate(*ground.make(), n=REPLICAS),
        # Controllers stop listening when it suits them; a law of evidence is about what it tells.
        [knob.replace(evidence=evidence, controller=knob.controller or Hold())],
        window=WINDOW,
        signal=ground.probe(),
        objective=ground.objective(),
        gradients="local" if evidence.diverges else "shared",
        total_steps=WINDOW * windows,
        merge=merge_of(knob),
    )


def _accepted(evidence: Evidence, knobs: Sequence[Knob], ground: Ground) -> Knob:
    """The first of the knobs that the evidence can judge."""
    reasons = []
    for knob in knobs:
        try:
            _engine(evidence, knob, ground, 1)
        except ConfigError as error:
            reasons.append(str(error))
        else:
            return knob
    broken(f"it accepts none of {[knob.label for knob in knobs]}: {'; '.join(reasons)}; name a knob= that it can judge")


def _asked(evidence: Evidence, ground: Ground | None, knob: Knob | None) -> tuple[Ground, Knob]:
    ground = ground or ADAMW
    return ground, (_accepted(evidence, ASKED, ground) if knob is None else knob)


def _sharded(model: nn.Module, step: int, replica: int) -> Tensor:
    """The built-in loss, each replica's twice that of the one before; held-out sub-batches are all alike."""
    loss = ADAMW.loss(model, step, replica)
    return loss if step == HELD_OUT else loss * 2.0**replica


def every_window_gives_an_estimate(evidence: Evidence, ground: Ground | None, knob: Knob | None) -> None:
    """Each window has an estimate of the knob, and some window has learnt something."""
    ground, knob = _asked(evidence, ground, knob)
    with torch.random.fork_rng(devices=[]):
        engine = _engine(evidence, knob, ground, 3)
        records = ground.train(engine, 3 * WINDOW)
    for record in records:
        found = record.estimates.get(knob.label)
        require(found is not None, f"window {record.window} has no estimate of {knob.label}")
    told = [_estimate(record, knob) for record in records]
    require(any(estimate.known for estimate in told), f"three windows have taught nothing about {knob.label}: {told}")
    if evidence.averages:
        missing = [record.window for record in records if "averaged" not in record.estimates[knob.label]]
        require(not missing, f"it `averages`, and windows {missing} have no estimate at averaged weights")


def a_placebo_is_told_apart(evidence: Evidence, ground: Ground | None, knob: Knob | None) -> None:
    """A knob without effect is rarely judged to have one with great certainty, and mostly with none to speak of.

    The replicas' data differ in kind, as shards do: evidence that gives a replica the same level for long takes
    the shard's effect for the knob's.
    """
    if ground is not None or knob is not None:
        return  # what has no effect is known of the built-in ground alone
    ground = Ground(ADAMW.make, _sharded)
    placebo = _accepted(evidence, PLACEBOS, ground).replace(controller=Hold())
    with torch.random.fork_rng(devices=[]):
        engine = _engine(evidence, placebo, ground, PLACEBO_WINDOWS)
        records = ground.train(engine, PLACEBO_WINDOWS * WINDOW)
    told = [_estimate(record, placebo) for record in records]
    ts = np.abs([estimate.t for estimate in told if estimate.known])
    if not len(ts):
        return  # a knob that moves nothing may leave nothing to say
    share, middle = float((ts > PLACEBO_T).mean()), float(np.median(ts))
    require(
        share <= PLACEBO_SHARE,
        f"{share:.0%} of {len(ts)} windows had |t| above {PLACEBO_T:g} for a knob without effect",
    )
    require(
        middle <= TYPICAL,
        f"half of {len(ts)} windows had |t| above {middle:.2f} for a knob without effect; up to {TYPICAL:g} is chance",
    )


def what_is_measured_is_put_back(evidence: Evidence, ground: Ground | None, knob: Knob | None) -> None:
    """Without divergence, and at spread 0 if need be, it leaves training to the bit as it is without evidence."""
    ground, knob = _asked(evidence, ground, knob)
    if evidence.diverges:
        return
    held = knob.replace(controller=Hold())
    if differing(*(_trained(given, held, ground) for given in (evidence, Silent()))) is not None:
        still = held.replace(spread=held.spread.replace(width=0.0))  # there may have been levels in the forward passes
        one, other = (_trained(given, still, ground) for given in (evidence, Silent()))
        require_same_model(one, other, "is not what training without it makes of it, with a controller that holds")


class Silent(Evidence):
    """Looks at nothing."""

    kind: ClassVar[str] = "silent"
    sees: ClassVar[frozenset[ActsOn]] = frozenset({"update", "forward", "merge"})

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> Collector:
        return _Silent(scene, knobs)


class _Silent(Collector):
    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        return {knob.name: Estimate.nothing() for knob in self.knobs}


def _trained(evidence: Evidence, knob: Knob, ground: Ground) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        engine = _engine(evidence, knob, ground, 3)
        ground.train(engine, 3 * WINDOW)
    return engine.replicas[0].model


def a_resume_in_mid_window_is_the_same_run(evidence: Evidence, ground: Ground | None, knob: Knob | None) -> None:
    """Saved in mid-window as plain numbers and tensors and taken up anew, a run ends in the same bits."""
    ground, knob = _asked(evidence, ground, knob)
    windows, middle = 3, WINDOW + WINDOW // 2
    with torch.random.fork_rng(devices=[]):
        whole = _engine(evidence, knob, ground, windows)
        expected = ground.train(whole, windows * WINDOW)
        second = ground.taken_up(lambda: _engine(evidence, knob, ground, windows), middle)
        records = ground.train(second, windows * WINDOW)
    for record, resumed in zip(expected[-len(records) :], records, strict=True):
        for what in ("bases", "values", "estimates", "moves"):
            a, b = str(getattr(record, what)), str(getattr(resumed, what))
            require(a == b, f"window {record.window} has the {what} {a}, and {b} in the run that was taken up")
    one, other = (engine.replicas[0].model for engine in (whole, second))
    require_same_model(one, other, "differs at the end of the run that was taken up")


def _estimate(record: WindowRecord, knob: Knob) -> Estimate:
    told = record.estimates[knob.label]
    return Estimate(told["slope"], told["curvature"], told["stderr"], told["curvature_stderr"])
