"""The guard: notices that training went wrong, goes back to an earlier point, and continues at a lower rate."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from hdet.controllers import Estimate
from hdet.evidence import Harvest, Scene
from hdet.evidence.parts.line_fit import along
from hdet.replicas.anchor import Anchor
from hdet.spec import Spec, register


class Guard(Spec, family="guard"):
    """Decides at a window's end whether the run goes back to an earlier point, and keeps that point."""

    def watch(self, scene: Scene) -> Watch:
        """The guard at work on one engine's replicas."""
        raise NotImplementedError


WRECKED = 1000.0
"""A wreck's held-out loss, at least, in units of the largest that was told so far."""

MOST_RISE = 3.0
"""Up to which a teacher that moves excuses a loss, in units of the largest that was told by the best point."""

Turn = Literal["rewound", "restarted"]
"""What a guard decides: to continue from the best point of the run, or to begin anew from its first weights."""

Because = Literal["standstill", "wreck", "overshoot"]
"""Why: no progress while the held-out loss rose, a held-out loss like no other before, or first steps too large."""


@register
class Rewind(Guard):
    """Go back to the best point of the run if training has made no progress for long, and continue at a lower rate.

    A network that a too large step has wrecked (dead units, saturated attention) gives no signal, so no knob can repair
    it. Two signs together show the damage at a window's end. First, training stands still: the window with the lowest
    mean training loss lies in the first `1 / patience` of the steps done. Second, on the same batch the held-out loss
    is higher now than there, by `significance` standard errors, or no longer finite. Overfitting does not trigger it,
    since the training loss falls. Useful regularisation does not, since the held-out loss falls. Then weights, buffers
    and optimizer state return to the best point. The step count goes on. Every controller is told
    (`Controller.retreat`): `Calibrate` continues below the rate that had worked there. A window whose training loss
    nobody told says nothing.

    A point at which the held-out loss is not finite, or a thousand times what a knob's evidence has told of it at most,
    is not kept, however low the training loss of its window was: its last step may have wrecked it. The run goes back
    at once, or begins anew where it has no point yet and still keeps the first weights. In the first window only a loss
    that is not finite shows that. Evidence has to tell a level: `Divergent` does not, and in the last 15 % of a run of
    `hdet.recommended` none is taken.

    The held-out loss of a model that holds another one's parameters too may rise because these have moved: a teacher's
    that follow the student, a critic's. So where the loop or a forward pass writes parameters that the optimizer does
    not step, the best point's own weights have to be better beside those of now as well, unless the loss is three times
    what it had been at most by then. A wreck that the others have taken over, as where adapters are merged into a
    frozen base, may stay.

    Some damage shows in no loss in time. Evidence taken ahead of the base during the warm-up shows it
    (`Estimate.offset`, see `Line`). If its moves lowered a rate by more than a factor of `overshoot` in all, the first
    steps count as lost, and the run begins anew from its first weights, at most once. Every controller is told
    (`Controller.restart`). Until looking ahead is over the first weights are kept as well. (With the set-up of
    `hdet.recommended` a factor of 4 takes evidence three windows, for which runs of less than some 400 steps are too
    short; a rate whose steps are known to be huge is cut back by as much in one.)

    Args:
        patience: how many times longer the run must be than it was at its best point.
        significance: standard errors of the paired held-out difference.
        overshoot: the factor above which a rate that looking ahead lowered was far too large; None never begins anew.
        keep: where the best point is kept: one more copy of weights and optimizer state, on the host by default. The
            first weights are kept there too.
    """

    patience: float = Field(default=1.5, gt=1, le=100)
    significance: float = Field(default=3.0, gt=0, le=100)
    overshoot: float | None = Field(default=4.0, gt=1, le=1000)
    keep: Literal["host", "device"] = "host"

    def watch(self, scene: Scene) -> Watch:
        return Watch(self, scene)


class Watch:
    """Keeps the best point of a run, and its first weights until looking ahead is over.

    Attributes:
        because: why the run goes back, where the last `look` says that it does.
    """

    because: Because | None = None
    first: Anchor | None

    def __init__(self, spec: Rewind, scene: Scene) -> None:
        self.spec = spec
        self.scene = scene
        self.forget()
        if spec.overshoot is not None:
            self.first = self._anchor()
            self.first.take(0)

    def forget(self) -> None:
        """Nothing is gone back to, as before the first step and after the last."""
        self.held, self.first = self._anchor(), None
        self.lowest, self.since = math.inf, 0
        self.bases: dict[str, float] = {}
        self.ahead: dict[str, float] = {}
        self.level = self.level_then = 0.0

    def begin(self) -> None:
        """Take the first weights again, before step 0."""
        if self.first is not None:
            self.first.take(0)

    def look(
        self,
        harvest: Harvest,
        bases: Mapping[str, float],
        ahead: Mapping[str, float],
        estimates: Collection[Estimate] = (),
    ) -> Turn | None:
        """Decide whether the run goes back, and to which point; else take this point if it is the best so far.

        Call after the replicas were merged.

        Args:
            bases: each knob's value in the window.
            ahead: the moves, in coordinates, that evidence taken ahead of the base called for. (A window in which
                all replicas became non-finite does not count.)
            estimates: what evidence told; their levels say about what the held-out loss is.
        """
        self.because = None
        levels = [(told.level, told.offset) for told in estimates if told.level is not None]
        sound = all(self._is_usual(level) for level, _ in levels)
        if sound:
            at_base = [abs(level) for level, offset in levels if not offset]
            self.level = max([self.level, *(at_base or [abs(level) for level, _ in levels])])
        else:
            turn, sound = self._of_wreck(harvest)
            if turn is not None:
                self.because = "wreck"
                return turn
        if self._overshot(ahead):
            self.because = "overshoot"
            return "restarted"
        loss, step = harvest.loss, harvest.window.stop
        if loss is None or not sound:
            return None
        if loss < self.lowest:
            self.held.take(step)
            self.lowest, self.since, self.bases, self.level_then = loss, step, dict(bases), self.level
            return None
        if not self._has_point or step < self.spec.patience * self.since:
            return None
        if not self._is_lost(harvest):
            return None
        self.because = "standstill"
        return "rewound"

    def _overshot(self, ahead: Mapping[str, float]) -> bool:
        """Whether looking ahead has shown that the first steps were far too large."""
        if self.first is None or self.spec.overshoot is None:
            return False
        if not ahead:
            self.first, self.ahead = None, {}
            return False
        for name, move in ahead.items():
            self.ahead[name] = self.ahead.get(name, 0.0) + move
        return min(self.ahead.values()) < -math.log(self.spec.overshoot)

    def _is_usual(self, level: float) -> bool:
        return math.isfinite(level) and level <= (WRECKED * self.level or math.inf)

    def _of_wreck(self, harvest: Harvest) -> tuple[Turn | None, bool]:
        """Where to from a point at which the held-out loss may be like no other; and whether it can be kept."""
        over = harvest.window.stop == harvest.window.total_steps
        point = self.held if self._has_point else None if over else self.first
        here, others_written = self._losses(harvest, nullcontext())
        now, finite = float(here.mean()), bool(np.isfinite(here).all())
        if self._is_usual(now):  # what was told may be ahead of the base
            return None, True
        of_others = finite and others_written.any()  # who may have done it alone
        if point is not None and not of_others and self._is_usual(self._losses(harvest, point.evaluated())[0].mean()):
            return "rewound" if self._has_point else "restarted", False
        # The batch is to blame, or who has written the others; or there is nothing to go back to.
        self.level = max(self.level, abs(now)) if finite else self.level
        return None, finite

    def _is_lost(self, harvest: Harvest) -> bool:
        """Whether the held-out loss is higher than at the best point, beyond chance, or has become infinite or NaN."""
        then, now, others_written = self._losses(harvest, self.held.evaluated(), nullcontext())
        if not self._is_higher(now, then):
            return False
        if not others_written.any() or not now.mean() <= MOST_RISE * (self.level_then or math.inf):
            return True
        return self._is_higher(now, self._losses(harvest, self.held.evaluated(stepped_alone=True))[0])

    def _is_higher(self, now: NDArray[np.float64], then: NDArray[np.float64]) -> bool:
        if np.isfinite(then).all() and not np.isfinite(now).all():
            return True
        return along((0.0, 1.0), np.stack([then, now])).t_of_eight > self.spec.significance

    def _losses(self, harvest: Harvest, *points: AbstractContextManager[None]) -> NDArray[np.float64]:
        """[points + 1, J] held-out losses on one batch inside each of some blocks; then whether others are written.

        Others are parameters that the optimizer does not step. Every process has what the first one found: losses may
        differ in the last bits.
        """
        scene = self.scene
        model, optimizer = scene.replicas.hosts[0]
        batches = scene.probe.draw(harvest.window.index)
        rows = []
        with scene.at_base():
            for point in points:
                with point:
                    rows.append(scene.probe.measure(model, harvest.window.index, optimizer, batches))
        rows.append(torch.full_like(rows[0], float(self.held.others_written())))
        found = scene.replicas.gather(torch.cat(rows).expand(len(scene.replicas.local), -1))
        return np.asarray(found[0]).reshape(len(rows), -1)

    def go_back(self, turn: Turn, step: int) -> int:
        """Put a point into every model; the run then has until `patience * step` to find a better one.

        Returns:
            The step at which the point was taken.
        """
        point = self.held
        if turn == "restarted":
            assert self.first is not None
            point, self.first, self.ahead = self.first, None, {}
            self.lowest, self.bases = math.inf, {}
        # The best point was taken after a merge; the first weights may be each process's own (`hdet.perturb`).
        self.scene.replicas.restored(merged=turn == "rewound")
        for model, optimizer in self.scene.replicas.hosts:
            point.restore(model, optimizer)
        self.since = step
        return point.step

    @property
    def _has_point(self) -> bool:
        return self.lowest < math.inf

    @property
    def point(self) -> Anchor | None:
        """The point that it would go back to; None while there is none."""
        return self.held if self._has_point else self.first

    @property
    def points(self) -> list[Anchor]:
        """Those that it keeps."""
        return [*([self.held] if self._has_point else []), *([self.first] if self.first is not None else [])]

    def state_dict(self, leave_out: Collection[str] = ()) -> dict[str, Any]:
        """The best point and what is known of it; the first weights while they are kept.

        Args:
            leave_out: names of the model's entries that the points do without.
        """
        return {
            "lowest": self.lowest,
            "since": self.since,
            "bases": dict(self.bases),
            "level": self.level,
            "level_then": self.level_then,
            "held": self.held.state_dict(leave_out=leave_out) if self._has_point else None,
            "ahead": dict(self.ahead),
            "first": self.first.state_dict(leave_out=leave_out) if self.first is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; without a held point (a sharded checkpoint has none) the watch starts anew."""
        self.forget()
        self.level = state.get("level", 0.0)  # states of older versions have neither
        self.level_then = state.get("level_then", 0.0)
        if state["first"] is not None:
            self.first, self.ahead = self._anchor(), dict(state["ahead"])
            self.first.load_state_dict(state["first"])
        if state["held"] is None:
            return
        self.lowest, self.since, self.bases = state["lowest"], state["since"], dict(state["bases"])
        self.held.load_state_dict(state["held"])

    def _anchor(self) -> Anchor:
        return Anchor(*self.scene.replicas.hosts[0], device="cpu" if self.spec.keep == "host" else None)
