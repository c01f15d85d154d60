"""The strength of weight decay: moved by evidence of many windows, as far as what that evidence cannot see allows."""

from __future__ import annotations

from pydantic import Field

from hdet.controllers.part import Rule, Veto
from hdet.controllers.ruled import Ruled
from hdet.controllers.rules import Leap, SlopeSum, Spare
from hdet.controllers.vetoes import DoesHarm, KeepsGap, KeepsWeights, NeedsGap, NotEarly, WithinSpan
from hdet.spec import register


@register
class Regularize(Ruled):
    """Find the strength of weight decay; for a knob in `Log` space, judged by `Analytic`.

    That evidence tells of the next steps, and decay acts on the whole run. So the slopes of several windows are summed,
    and a sum beyond its gate is not enough for a move. The rules, in their order:

    | rule | the base |
    |---|---|
    | `Spare` | goes down at once, whatever vetoes say, where decay would take much of pretrained weights |
    | `Leap` | goes up at once to where it has an effect, if it has none and more is called for |
    | `SlopeSum` | goes against the sum of slopes |

    Each veto forbids a move, or shortens it:

    | veto | forbids |
    |---|---|
    | `NeedsGap` | to raise above the schedule as given, unless the model overfits |
    | `KeepsGap` | to lower, while the model overfits |
    | `NotEarly` | to raise above the schedule as given, before weights have learnt something |
    | `WithinSpan` | to raise beyond what was measured |
    | `DoesHarm` | to lower what is too weak to do harm |
    | `KeepsWeights` | to raise to where `Spare` would lower it |

    After a rewind it goes on with the value that had worked, if that is lower.

    Args:
        rules, vetoes: see above; a number of theirs can be given here, and every part that has it takes it.
        until: share of the run after which the base holds and nothing is measured.
        retreat_factor: factor below the value that had worked at which the base goes on after a rewind.

    >>> from hdet.controllers import Context, Estimate
    >>> regularize, too_much = Regularize(rate=0.5), Estimate(slope=0.2, stderr=0.05, level=1.0, span=1.0)
    >>> for loss in (0.9, 0.7, None):
    ...     judged = regularize.judge(regularize.start(), too_much, Context(length=30, loss=loss))
    ...     print(judged.move, judged.rule, judged.veto or "-")
    -0.5 slope_sum -
    0.0 slope_sum keeps_gap
    0.0 slope_sum keeps_gap
    """

    rules: tuple[Rule, ...] = (Spare(), Leap(), SlopeSum())
    vetoes: tuple[Veto, ...] = (NeedsGap(), KeepsGap(), NotEarly(), WithinSpan(), DoesHarm(), KeepsWeights())
    until: float = Field(default=0.85, gt=0, le=1)
