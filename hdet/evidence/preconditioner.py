"""How an optimizer turns a gradient into an update, read from its state: theta <- theta - P g."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Group = dict[str, Any]

_warned: set[str] = set()


def preconditioner(optimizer: Optimizer, group: Group, parameter: nn.Parameter) -> Tensor | float | None:
    """The diagonal P by which this parameter's gradient is multiplied in an update, learning rate included.

    | optimizer | P |
    |---|---|
    | Adam, AdamW, NAdam, RAdam, Adamax-like with `exp_avg_sq` | lr / (sqrt(v / (1 - beta2^t)) + eps) |
    | RMSprop (`square_avg`) | lr / (sqrt(v) + eps), / (1 - momentum) |
    | Adagrad (`sum`) | lr / (sqrt(sum) + eps) |
    | SGD | lr / (1 - momentum): what a lasting gradient comes to |
    | any other | lr, with a warning that names the optimizer |

    Returns:
        A tensor like the parameter, a float, or `None` before the optimizer's first step.
    """
    lr = float(group["lr"])
    state = optimizer.state.get(parameter, {})
    if "betas" in group and "momentum" not in group and not state:
        return None
    second = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if isinstance(second, Tensor) and second.shape == parameter.shape:
        correction = 1.0
        if "step" in state and "betas" in group:
            correction = 1.0 - float(group["betas"][1]) ** max(1.0, float(state["step"]))
        return lr / ((second / correction).sqrt() + float(group["eps"]))
    for entry, smoothing in (("square_avg", True), ("sum", True)):
        held = state.get(entry)
        if smoothing and isinstance(held, Tensor) and held.shape == parameter.shape:
            return lr / (held.sqrt() + float(group["eps"])) / (1.0 - float(group.get("momentum", 0.0)))
    if isinstance(optimizer, torch.optim.SGD):
        return lr / (1.0 - float(group["momentum"]))
    name = type(optimizer).__name__
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"hdet does not know how {name} scales gradients and takes its update for lr * gradient; slopes keep their "
            f"sign wherever the true scaling is positive, and lose some of their power",
            stacklevel=2,
        )
    return lr


def decoupled(optimizer: Optimizer, group: Group) -> bool:
    """Whether weight decay acts on the weights directly (AdamW) and not through the gradient (L2)."""
    if isinstance(optimizer, torch.optim.AdamW):
        return True
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    return not isinstance(optimizer, (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad))
