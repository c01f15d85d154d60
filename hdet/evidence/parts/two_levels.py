"""The two levels between which knobs of the forward pass are compared, and what is told of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hdet.controllers import Estimate
from hdet.controllers.gap import DECIDED, OTHER_SCALE, told_of_scale
from hdet.evidence.parts.line_fit import along
from hdet.evidence.parts.losses_at import Point, Write, losses_at
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.hparams.bound_knob import BoundKnob
from hdet.replicas import tensors
from hdet.user_warning import warn

MARGIN, FINE_TUNING_MARGIN = 0.02, 0.25
"""Shares of the training loss. Fine-tuning comes to a tenth and more, on data that hardly repeat too."""
CERTAIN = 3.0
"""|t| of eight sub-batches from which a single window is believed that calls for a bound."""
FIRST_WINDOWS = 6
"""Of a run: later ones may be overfitted by as much as losses on two scales differ."""


class Levels:
    """For each knob two levels, as far from its base to either side as its spread is wide.

    Near a bound both lie inside it, one of them on the bound. A base on its bound rests before `bound_from`, a share
    of the run, and later where nothing says that it should leave: where the held-out loss does not exceed the training
    loss by two standard errors and 2 %, in fine-tuning (of a pretrained model) by two standard errors and a quarter.
    (Knobs that also act in eval mode are no regularisers, and never rest.) Where a window called for its bound
    (|t| of eight sub-batches above `CERTAIN`), it rests until the run is twice as long.

    Losses on two scales cannot be compared, and then such a base rests for good. The first windows that tell a training
    loss show it, by the rule of `hdet.controllers.vetoes.NeedsGap`. A base that comes to its bound after the run's
    first `FIRST_WINDOWS` is compared all the same: what is overfitted by then may look like it.

    Attributes:
        half: [K] half the distance between a knob's levels, in coordinate units; 0 for a knob that rests.
        centre: [K] their middle, as an offset from the base; 0 but near a bound.
        other_scale: whether training and held-out loss are on two scales; None until windows have told.
        told_of_scale: what windows have told of it (`hdet.controllers.gap.told_of_scale`), and the last that did.
        called: [K] the step at which the last window that left no doubt ended, with the sign of its slope; 0 without.
        pretrained: whether the run's first weights had been trained.
    """

    def __init__(self, scene: Scene, knobs: Sequence[BoundKnob], bound_from: float) -> None:
        self.scene = scene
        self.knobs = knobs
        self.bound_from = bound_from
        self.half = np.zeros(len(knobs))
        self.centre = np.zeros(len(knobs))
        self.other_scale: bool | None = None
        self.told_of_scale = (0, -1)
        self.called = np.zeros(len(knobs))
        self.pretrained = False

    def place(self, window: Window, step: int, training: float) -> None:
        """Set the levels of a window by the bases at a step of it; `training` is the mean training loss, NaN unknown.

        Takes one probe where a knob may rest, which is the same on every process.
        """
        rooms = [knob.spec.space.room(knob.base(step), knob.spec.bounds) for knob in self.knobs]
        bound = {k for k, room in enumerate(rooms) if 0.0 in room and not self.knobs[k].spec.acts_in_eval}
        resting = {k for k in bound if step < 2.0 * self.called[k] * (1.0 if rooms[k][0] == 0.0 else -1.0)}
        if bound and (bound > resting or self.other_scale is None) and self._rests(window, step, training):
            resting = bound
        for k, (knob, (down, up)) in enumerate(zip(self.knobs, rooms, strict=True)):
            listens = knob.controller.listens(window.stop, window.total_steps)
            width = min(knob.spec.spread.width, (down + up) / 2) if listens and k not in resting else 0.0
            self.half[k] = width
            # About the base where there is room on both sides, else with one of the levels on the bound.
            self.centre[k] = max(0.0, width - down) - max(0.0, width - up)

    def _rests(self, window: Window, step: int, training: float) -> bool:
        """Whether regularisers on their bounds are left alone in this window: nothing says that they are needed."""
        early = window.total_steps is not None and step < self.bound_from * window.total_steps
        if self.other_scale is None and window.index >= FIRST_WINDOWS:
            self.other_scale = False
        if not math.isfinite(training) or self.other_scale or (early and self.other_scale is not None):
            return True
        model, optimizer = self.scene.replicas.hosts[0]
        with self.scene.at_base():
            measured = self.scene.probe.measure(model, window.index, optimizer)
        # Every process goes by the first one's reading: those of others may differ in the last bits.
        held_out = self.scene.replicas.gather(measured.expand(len(self.scene.replicas.local), -1))[0]
        level = float(held_out.mean())
        gap = level - training
        if not math.isfinite(gap):
            return True
        if self.other_scale is None:
            # Nothing is overfitted as early: gaps this large show another loss, or one that was divided.
            told, last = self.told_of_scale
            if window.index > last:  # the window that a checkpoint was taken in is placed twice
                told, other_scale = told_of_scale(told, gap > OTHER_SCALE * abs(level))
                self.told_of_scale = (told, window.index)
                self.other_scale = other_scale if told == DECIDED else None
            if self.other_scale:
                warn(
                    f"the training loss is far below the probe's from the first window on (now {training:.4g} and "
                    f"{level:.4g}), so the two are not on one scale, and knobs of the forward pass that lie on a bound "
                    f"(dropout at 0) stay there; give engine.step the mean loss of each replica's batch, undivided by "
                    f"the number of micro-batches"
                )
        error = float(held_out.std(ddof=1)) / math.sqrt(len(held_out))
        margin = (FINE_TUNING_MARGIN if self.pretrained else MARGIN) * abs(training)
        return early or self.other_scale is not False or not gap > 2.0 * error + margin

    def forget(self) -> None:
        """What windows called for, of a run that has gone back."""
        self.called[:] = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "other_scale": self.other_scale,
            "told_of_scale": list(self.told_of_scale),
            "called": self.called.tolist(),
            "pretrained": self.pretrained,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.other_scale = state["other_scale"]
        # States of older versions have none of these.
        told, last = state.get("told_of_scale", self.told_of_scale)
        self.told_of_scale = (told, last)
        self.called = np.array(state.get("called", np.zeros(len(self.knobs))))
        self.pretrained = state.get("pretrained", False)

    def told(self, estimates: Mapping[int, Estimate], harvest: Harvest) -> dict[str, Estimate]:
        """What every knob's controller is told, from slopes of one step by the knobs' numbers.

        A knob that also acts in eval mode changes the probe itself, besides what is learned: to the slope of the
        window's steps is added that of the probe between the two levels, at the window's last weights.
        """
        norms = self.scene.excess if harvest.window.start == 0 else None
        nothing = replace(Estimate.nothing(), excess=norms)
        self.pretrained = self.pretrained or bool(nothing.pretrained)
        found = {knob.name: nothing for knob in self.knobs}
        direct = self._direct([k for k in estimates if self.knobs[k].spec.acts_in_eval], harvest)
        steps = harvest.window.stop - harvest.window.start
        for k, estimate in estimates.items():
            if abs(estimate.t_of_eight) > CERTAIN:
                self.called[k] = math.copysign(harvest.window.stop, estimate.t)
            if k in direct:
                # Training batches and probe batches have no sub-batch in common.
                estimate = _added(steps, estimate, direct[k])
            found[self.knobs[k].name] = replace(estimate, offset=float(self.centre[k]), excess=norms)
        return found

    def _direct(self, numbers: Sequence[int], harvest: Harvest) -> dict[int, Estimate]:
        """What some knobs do to the probe itself, between their two levels at the weights as they are."""
        points: list[Point] = []
        for k in numbers:
            ends = (self.centre[k] - self.half[k], self.centre[k] + self.half[k])
            points += [partial(self._displaced, k, float(end), harvest.window.stop - 1) for end in ends]
        if not points:
            return {}
        with self.scene.at_base():
            losses = losses_at(self.scene, harvest, points)
        pairs = losses.reshape(len(numbers), 2, -1)
        return {k: along((-self.half[k], self.half[k]), pair) for k, pair in zip(numbers, pairs, strict=True)}

    def _displaced(self, number: int, offset: float, step: int) -> Write:
        """Writes the first model's weights as they are; as a side effect one knob is off its base."""
        self.write(step, number, offset)
        return partial(tensors.copy_, sources=self.scene.moving.values())

    def write(self, step: int, number: int, offset: float) -> None:
        """Put one knob off its base at a step, and the others at theirs, in all models of this process."""
        for k, knob in enumerate(self.knobs):
            value = knob.displaced(step, offset if k == number else 0.0)
            for host in range(len(self.scene.replicas.hosts)):
                knob.write(host, value)


def _added(steps: int, estimate: Estimate, direct: Estimate) -> Estimate:
    """`steps` times one estimate, and another that is independent of it; freedom by Welch and Satterthwaite."""
    errors = np.array([steps * estimate.stderr, direct.stderr])
    stderr = math.hypot(*errors)
    freedoms = [len(each.slopes) - 1 if each.slopes else each.freedom or math.inf for each in (estimate, direct)]
    shares = float(((errors / stderr) ** 4 / freedoms).sum()) if 0.0 < stderr < math.inf else 0.0
    freedom = 1.0 / shares if shares > 0.0 else None
    return Estimate(slope=steps * estimate.slope + direct.slope, stderr=stderr, freedom=freedom)
