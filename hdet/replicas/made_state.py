"""What state an optimizer will have of a parameter, without a step of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

NAMES = ("params", "name", "param_names")


def made_state(optimizer: Optimizer, group: Mapping[str, Any], zeros: Tensor) -> dict[str, Any] | None:
    """The state that an optimizer of torch's makes of such a parameter, found by a step of another of its class.

    Args:
        group: the parameter group with its settings.
        zeros: a tensor like the parameter, which the other one steps.

    Returns:
        The state, empty where it has none; `None` where that cannot be known: another library's may need its ranks, or
        a closure.
    """
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):  # Adafactor's is "torch.optim" itself
        return None
    stand_in = nn.Parameter(zeros)
    stand_in.grad = torch.zeros_like(stand_in)
    options = {name: value for name, value in group.items() if name not in NAMES}
    try:
        make: Callable[[list[dict[str, Any]]], Optimizer] = type(optimizer)
        other = make([{**options, "params": [stand_in]}])
        other.step()
    except (TypeError, ValueError, RuntimeError):  # LBFGS wants a closure, SparseAdam sparse gradients
        return None
    return dict(other.state[stand_in])
