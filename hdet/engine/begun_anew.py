"""Whether a schedule warms up once more, under an optimizer that is in mid-course."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.optim import Optimizer

from hdet.evidence import Window
from hdet.hparams.binding import GroupBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.user_warning import warn

COUNT = "step"
"""What optimizers of torch that count their steps call them in their state."""


def look(optimizers: Iterable[Optimizer], knobs: Sequence[BoundKnob], window: Window) -> None:
    """The run's first window is done: warn if steps had been made before it, and a learning rate warms up all the same.

    A model and an optimizer that come back from a checkpoint without the search's state look like that, unless a torch
    scheduler comes back with them and is still in its warm-up: then hdet may have joined in only now.
    """
    rising = [
        knob
        for knob in knobs
        for binding in knob.bindings[:1]
        if isinstance(binding, GroupBinding)
        and binding.key == "lr"
        and knob.schedule.total_steps is not None
        and knob.schedule(0) < min(knob.schedule(window.stop), knob.peak / 2)
    ]
    if not rising:
        return
    before = max(map(_made, optimizers)) - window.stop - min(knob.schedule.steps_before() for knob in rising)
    if before > 1:  # torch.distributed.checkpoint makes one, at a rate of 0, to see what an optimizer keeps
        name = rising[0].name
        warn(
            f"the optimizer had made {before} steps before this run's first, and {name} warms up once more: a run "
            f"that goes on loads the state of its search too (load_state_dict); where a new schedule is meant, ignore "
            f"this"
        )


def _made(optimizer: Optimizer) -> int:
    """The steps that an optimizer has counted for one of its parameters; 0 if it does not count."""
    states = (state for state in optimizer.state.values() if isinstance(state, Mapping) and COUNT in state)
    return int(next(states, {COUNT: 0})[COUNT])
