"""Recovery: a run goes back to an earlier point, and every controller is told."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hdet.controllers import Context, Estimate
from hdet.engine.guard import Watch
from hdet.engine.plan import Plan
from hdet.evidence import Harvest
from hdet.hparams.bound_knob import BoundKnob
from hdet.replicas.anchor import Anchor


@dataclass(frozen=True)
class Recovery:
    """What going back came to.

    Attributes:
        fault: its entry in the window's record.
        moves: what each controller moved its base by, in coordinate units.
        alike: whether the point gone back to is the same in all processes, as from the first merge on.
    """

    fault: dict[str, Any]
    moves: dict[str, float]
    alike: bool


def restore(plan: Plan, anchor: Anchor) -> dict[str, Any]:
    """All replicas became non-finite: put the last converged point back. Returns the fault."""
    for model, optimizer in plan.replicas.hosts:
        anchor.restore(model, optimizer)
    return {"kind": "restored", "step": anchor.step}


def guarded(
    plan: Plan,
    watch: Watch,
    harvest: Harvest,
    bases: Mapping[str, float],
    ahead: Mapping[str, float],
    estimates: Collection[Estimate],
    context: Context,
) -> Recovery | None:
    """Let the guard see the merged point; go back to an earlier one where it says so.

    Args:
        bases: of the window that has closed.
        ahead: the moves that evidence taken ahead of the base called for, in coordinate units.
        estimates: what evidence told.
    """
    plan.replicas.advance(now=True)
    turn = watch.look(harvest, bases, ahead, estimates)
    if turn is None:
        return None
    point = watch.go_back(turn, context.step)
    worked = watch.bases if turn == "rewound" else None
    moves = retreat(plan.knobs, worked, replace(context, point=point))
    because = {} if watch.because is None else {"because": watch.because}
    return Recovery({"kind": turn, "step": point, **because}, moves, turn == "rewound")


def retreat(knobs: list[BoundKnob], worked: Mapping[str, float] | None, context: Context) -> dict[str, float]:
    """Training went wrong after the bases were these: every controller may keep away from what did it.

    Args:
        worked: None where the run begins anew.
    """
    return {
        knob.name: knob.restart(context) if worked is None else knob.retreat(worked[knob.name], context)
        for knob in knobs
    }
