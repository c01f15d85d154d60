"""How training has begun, and what that says of the first windows: how far a rate is raised, and how far lowered."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Part

LOWEST_BEST = 0.13
"""The smallest `step_size` at the best rates of 13 tasks by AdamW, of untrained models (`benchmarks/step_sizes.py`)."""
TINY = 0.03
"""The `step_size` below which steps are tiny: less than a quarter of `LOWEST_BEST`, at which a run is entered for
caution that heads for it."""
SHORT_OF = 1.0
"""How far below the bottom of a parabola in the rate a pretrained model's first raise stays, in coordinates."""
HUGE = 12.0
"""The `step_size` above which steps are huge. The best rates of those tasks have 0.13 to 3.7, and one beside a strong
decay, of a model that is mostly embeddings, has 8.3."""
SURE = 2.0
"""t at the last weights above which a line is believed that shows a wreck."""


def huge_as_given(estimate: Estimate, context: Context, huge: float) -> bool:
    """Whether the schedule as given has a `step_size` above `huge`, which makes it no guess; of a `huge` of 0 never."""
    size = estimate.step_size
    return bool(size and huge and math.log(size) - context.shift > math.log(huge))


@dataclass(frozen=True)
class Beginning:
    """How training has begun.

    Attributes:
        untrained: whether the run began with untrained weights, and its first warm-up is not over.
        pretrained: the same of weights that had been trained; neither where nobody knows.
        last: the schedule after the window before; 0 where there was none.
        fell: whether it has ever fallen: then the warm-up is over.
    """

    untrained: bool = False
    pretrained: bool = False
    last: float = 0.0
    fell: bool = False


class KnowsPretrained(Part):
    """Knows until the run's end whether its first weights had been trained, by `pretrained` of its state."""

    def begin(self, state: Any, estimate: Estimate) -> Any:
        return replace(state, pretrained=bool(estimate.pretrained))

    def retreat(self, state: Any, context: Context) -> Any:
        return replace(self.start(), pretrained=state.pretrained)

    def restart(self, state: Any, context: Context) -> Any:
        return self.retreat(state, context)


class OfBeginning(Part):
    """Knows whether the run began with untrained weights, or with trained ones, and still warms up.

    By default it forgets that where the run goes back: something was too large. A new start has untrained weights
    again, so that is kept there; that weights were pretrained, which allows larger raises, is forgotten.
    """

    def start(self) -> Beginning:
        return Beginning()

    def begin(self, state: Any, estimate: Estimate) -> Any:
        return replace(state, untrained=bool(estimate.untrained), pretrained=bool(estimate.pretrained))

    def restart(self, state: Any, context: Context) -> Any:
        return replace(state, pretrained=False)

    def observe(self, state: Any, estimate: Estimate, context: Context) -> Any:
        fell = state.fell or context.schedule_next < state.last
        untrained, pretrained = state.untrained and not fell, state.pretrained and not fell
        return replace(state, untrained=untrained, pretrained=pretrained, last=context.schedule_next, fell=fell)


class OfRaises(OfBeginning):
    """Knows how far a raise goes while training begins, where evidence calls for more.

    A window's line tells of rates a few times higher, and one raise goes no further by itself.

    Of an untrained model no best steps are known that are tiny, and the warm-up does not wait: from a hundredth of the
    best rate most of it is over before such raises have made up for that. So it goes to `LOWEST_BEST` at once.

    Of a pretrained one it goes the further the more certain the slope is: there the first windows call for no more
    than the later ones can bear, and fine-tuning is short. In the first window it goes to where the loss is lowest as
    a parabola in the rate itself, less a factor of e, if that is further.

    Args:
        significance: |t| at the last weights from which they are believed.
        tiny: `step_size` below which an untrained model's steps are tiny; 0 leaves raises as they are.
        furthest: largest raise of a pretrained model, in coordinates; 0 leaves raises as they are.
        ceiling: largest shift that a raise from tiny steps, or of a pretrained model's first window, leads to.
    """

    significance: float = Field(default=2.0, gt=0, le=100)
    tiny: float = Field(default=TINY, ge=0, le=LOWEST_BEST)
    furthest: float = Field(default=2.5, ge=0, le=10)
    ceiling: float = 5.0

    def limited(self, limit: float, state: Beginning, estimate: Estimate) -> float:
        """The largest move: `limit`, or of a pretrained model's raise as many times that as it is significant."""
        if not state.pretrained:
            return limit
        return max(limit, min(self.furthest, limit * -estimate.t_of_eight / self.significance))

    def at_least(self, move: float, state: Beginning, estimate: Estimate, context: Context) -> float:
        """The raise, or the one that the beginning calls for if that is larger; anything else as it is."""
        if move <= 0.0:
            return move
        return max(move, min(self._called_for(state, estimate), self.ceiling - context.shift))

    def _called_for(self, state: Beginning, estimate: Estimate) -> float:
        """From tiny steps of an untrained model to `LOWEST_BEST`; of a pretrained one what the first window tells."""
        size = estimate.step_size
        if state.untrained and size and size < self.tiny:
            return math.log(LOWEST_BEST / size)
        # `Estimate.pretrained` is told in the first window alone.
        if state.pretrained and estimate.pretrained and estimate.bottom is not None and self.furthest > 0.0:
            return estimate.bottom - SHORT_OF
        return 0.0


class OfSmallSteps(OfBeginning):
    """Knows how far a learning rate can be lowered before its steps are small.

    In the first windows of an untrained model, a single direction (in language models, how often each token comes)
    makes up most of the gradient, and few steps use it up, at any rate. Lines along these steps have their minimum
    early, the sooner the larger the model, and call for less at rates far below the best one.

    It holds while the schedule rises, which is where evidence tells `Estimate.step_size`, and if the first weights were
    untrained (`Estimate.untrained`): so not in fine-tuning, where small steps do harm.

    Args:
        small: `step_size` up to which steps are small. At the best rates of 13 tasks by AdamW, of untrained models, it
            is 0.13 to 3.7, and below 0.46 in three of them (`benchmarks/step_sizes.py`).
    """

    small: float = Field(default=1.0, ge=0, le=100)

    def room(self, state: Beginning, estimate: Estimate, context: Context) -> float | None:
        """The move to where steps are small, or to the schedule as given if that is lower; None says nothing."""
        size = estimate.step_size
        if not state.untrained or not size or self.small == 0.0:
            return None
        return min(-context.shift, math.log(self.small / size))


@dataclass(frozen=True)
class HarmlessState(Beginning):
    """How training has begun.

    Attributes:
        wreck: whether a line has shown that small steps wreck the network.
    """

    wreck: bool = False


class OfHarmlessSteps(OfSmallSteps):
    """Knows besides whether small steps are harmless: in some networks they wreck what is learned.

    A product or an exponential of what layers say, as in a normalizing flow, can blow up along steps that are small
    beside the weights. A line shows it, if its loss grows by more than the cube of the rate (`Estimate.opening`) to
    more than `wrecked` times what it was at the window's opening. A mean square of outputs that are linear along the
    line does not: by the time it is ten times as large, it grows like the square. A loss whose zero is its own is
    meant: where the opening's is 0 or less, nothing is shown.

    Args:
        wrecked: the loss along small steps, in units of that at the window's opening, above which they are no longer
            taken to be harmless.
    """

    wrecked: float = Field(default=10.0, gt=1)

    def start(self) -> HarmlessState:
        return HarmlessState()

    def observe(self, state: HarmlessState, estimate: Estimate, context: Context) -> HarmlessState:
        seen: HarmlessState = super().observe(state, estimate, context)
        opening, size = estimate.opening or 0.0, estimate.step_size or math.inf
        wrecks = size <= self.small and 0.0 < self.wrecked * opening < (estimate.level or 0.0)
        return replace(seen, wreck=True) if wrecks and estimate.t_of_eight > SURE else seen

    def room(self, state: Any, estimate: Estimate, context: Context) -> float | None:
        return None if state.wreck else super().room(state, estimate, context)
