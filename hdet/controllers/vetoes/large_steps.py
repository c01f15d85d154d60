"""Where training has only begun, no rate is raised to where its steps are large beside the weights."""

from __future__ import annotations

import math

from pydantic import Field

from hdet.controllers.beginning import HUGE, Beginning, OfBeginning, huge_as_given
from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Veto
from hdet.spec import register


@register
class LargeSteps(OfBeginning, Veto):
    """While an untrained model warms up, raise no rate to where its steps are large.

    The first windows learn what takes few and large steps (in language models, how often each token comes), and call
    for more than what comes later can bear: attention that has seen too large steps learns no more. It holds after a
    rewind or a new start, too, which show that steps were too large.

    The schedule as given is within reach all the same, unless its steps are huge.

    Args:
        large: `step_size` from which steps are large; 0 holds nothing back. At the best rates of 13 tasks by AdamW, of
            untrained models, it is 0.13 to 3.7, and evidence may go there once the warm-up is over.
        huge: `step_size` of the schedule as given above which it is not within reach; 0 leaves all within reach.

    >>> veto, more = LargeSteps(), Estimate(slope=-0.3, stderr=0.1, step_size=1.0)
    >>> begun = veto.begin(veto.start(), Estimate(slope=0.0, excess=1.0))
    >>> round(veto.allow(1.0, begun, more, Context()), 3)  # to twice of it
    0.693
    """

    large: float = Field(default=2.0, ge=0, le=1000)
    huge: float = Field(default=HUGE, ge=0, le=1000)

    def retreat(self, state: Beginning, context: Context) -> Beginning:
        return state

    def allow(self, move: float, state: Beginning, estimate: Estimate, context: Context) -> float:
        size = estimate.step_size
        if not state.untrained or not size or self.large == 0.0:
            return move
        given = 0.0 if huge_as_given(estimate, context, self.huge) else -context.shift
        return min(move, max(0.0, given, math.log(self.large / size)))
