"""The scale of a learning rate: raised on what the last weights prove, lowered on what averaged weights prove."""

from __future__ import annotations

from pydantic import Field

from hdet.controllers.part import Rule, Veto
from hdet.controllers.ruled import Ruled
from hdet.controllers.rules import (
    AwaitSchedule,
    CatchUp,
    CutBack,
    LookAhead,
    Lower,
    Raise,
    Regain,
    Return,
    Stall,
    WarmUp,
)
from hdet.controllers.vetoes import LargeSteps, SmallSteps
from hdet.spec import register


@register
class Calibrate(Ruled):
    """Find the scale of a learning rate while the run goes on; for a knob in `Log` space, judged by `Line`.

    The last weights flatter small steps: these quiet gradient noise now and cost progress later (short-horizon bias,
    Wu et al. 2018, arXiv:1803.02021). Averaged weights flatter large steps. So the last weights are believed where they
    call for more, and averaged weights where they call for less; averaged weights that call for more only bring back
    what was lowered. In this order:

    | rule | the base |
    |---|---|
    | `CutBack` | goes down at once, early in the warm-up, if the steps at the base are huge |
    | `Regain` | goes back up to the schedule as given, early in the warm-up, if the steps at the base are small |
    | `LookAhead` | follows the estimates taken ahead of it, early in the warm-up |
    | `Lower` | goes down, if averaged weights call for less |
    | `Stall` | goes down, if training is stalled and the last weights call for less |
    | `AwaitSchedule` | waits for the warm-up to come up to it, if the last weights call for less |
    | `WarmUp` | holds, as long as the schedule is low |
    | `Raise` | goes up, if the last weights call for more |
    | `Return` | goes back up to the schedule as given, where nothing calls for less any more |
    | `CatchUp` | goes up to where steps begin to matter, while an untrained model warms up |

    While an untrained model warms up, the veto `SmallSteps` lets nothing lower a rate below where its steps are small,
    `Return` goes no further than there where `t >= 0`, and `LargeSteps` lets nothing raise it to where they are large.

    Args:
        rules, vetoes: see above; a number of theirs can be given here, and every part that has it takes it.
        until: share of the run after which the base holds and nothing is measured: the rest of a decaying schedule
            cannot pay for a probe.
        retreat_factor: factor below the value that had worked at which the base goes on after a rewind.

    Raises:
        ConfigError: the evidence has no judgement at averaged weights.

    >>> from hdet.controllers import Context, Estimate
    >>> calibrate = Calibrate(significance=2.0)
    >>> raising = Estimate(slope=-0.3, curvature=1.0, stderr=0.1, averaged=Estimate(slope=0.1, stderr=0.1))
    >>> calibrate.step(calibrate.start(), raising, Context())[0]
    0.3
    """

    rules: tuple[Rule, ...] = (
        CutBack(),
        Regain(),
        LookAhead(),
        Lower(),
        Stall(),
        AwaitSchedule(),
        WarmUp(),
        Raise(),
        Return(),
        CatchUp(),
    )
    vetoes: tuple[Veto, ...] = (SmallSteps(), LargeSteps())
    until: float = Field(default=0.85, gt=0, le=1)
    retreat_factor: float = Field(default=3.0, ge=1, le=100)
