"""Numbers that an optimizer keeps beside its `state`: in its parameter groups, and as attributes."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.hparams.clipping import ENTRY as CLIPPED
from hdet.replicas.chained_optimizer import OWNER, steps_by

SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""What torch's schedulers leave in parameter groups."""

SETTINGS = frozenset({"params", "lr", "betas", "momentum", "weight_decay", "eps", OWNER, CLIPPED}) | SCHEDULERS
"""Entries that are nobody's state, even of an optimizer whose constructor does not name them (a wrapper's)."""

OF_SCHEDULERS = ("_opt_called", "_step_count")
"""Attributes of an optimizer by which torch's schedulers see that it has stepped."""

PLAIN = (bool, int, float)


@cache
def _arguments(kind: type) -> frozenset[str]:
    """The names of a class's constructor arguments, its bases' included."""
    constructors = (vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base))
    return frozenset(name for constructor in constructors for name in inspect.signature(constructor).parameters)


@cache
def _nobodys_state(kind: type) -> frozenset[str]:
    """Entries of a group that are no state of an optimizer of this class."""
    return _arguments(kind) | SETTINGS


def kept_in_groups(optimizer: Optimizer) -> list[tuple[int, str]]:
    """Group and key of every number that an optimizer keeps as state in its parameter groups.

    These are Schedule-Free's `weight_sum`, Prodigy's `d` and the like. Arguments of the optimizer's constructor, such
    as the learning rate, are none of them, nor is what torch's schedulers leave there: they belong to the user, a
    scheduler or a knob.
    """
    found = []
    for index, group in enumerate(optimizer.param_groups):
        others = _nobodys_state(type(steps_by(optimizer, group)))  # type: ignore[arg-type]
        if group.keys() <= others:  # as of all of torch's, in each step
            continue
        own = [key for key in group if key not in others]
        found += [(index, key) for key in own if isinstance(group[key], (int, float, Tensor))]
    return found


def kept_as_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Numbers and switches that an optimizer keeps as attributes; its constructor's arguments are the user's.

    None of torch's own, and none of one that holds parts of the state, whose numbers are of its communication.
    """
    if type(optimizer).__module__.startswith("torch.") or getattr(optimizer, "state_in_parts", False):
        return {}
    others = _arguments(type(optimizer)).union(OF_SCHEDULERS)  # type: ignore[arg-type]
    return {name: value for name, value in vars(optimizer).items() if name not in others and type(value) in PLAIN}
