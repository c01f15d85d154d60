"""How an optimizer turns a gradient into an update, read from its state: theta <- theta - P g."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas.chained_optimizer import steps_by
from hdet.replicas.tensors import local
from hdet.user_warning import warn

Group = dict[str, Any]

MOST_MOMENTUM = 0.9999
"""What more counts as: at 1 and beyond what a lasting gradient comes to has no end."""

TELL_OF_DECAY = ("weight_decouple", "decouple", "decoupled")
"""Entries of groups that tell whether decay acts on the weights, beside torch's: of pytorch-optimizer, of Prodigy and
D-Adaptation, and of ADOPT."""

_warned: set[tuple[str, str]] = set()


def preconditioner(
    optimizer: Optimizer,
    group: Group,
    parameter: nn.Parameter,
    rate: float | None = None,
    elements: slice | None = None,
) -> Tensor | float | None:
    """The diagonal P by which this parameter's gradient is multiplied in an update, learning rate included.

    Nothing is read from an accelerator: rates and step counts that lie there stay there.

    | optimizer | P |
    |---|---|
    | Adam, AdamW, NAdam and others with `exp_avg_sq` and one `eps` | lr / (sqrt(v / (1 - beta2^t)) + eps) |
    | Adamax (`exp_inf`) | lr / exp_inf |
    | RMSprop (`square_avg`) | lr / (sqrt(v) + eps), / (1 - momentum); v less the mean's square if centered |
    | Adagrad (`sum`) | lr / (sqrt(sum) + eps), lr with its decay |
    | SGD | lr (1 - dampening) / (1 - momentum): what a lasting gradient comes to; momentum at most `MOST_MOMENTUM` |
    | any other | lr, with a warning that names the optimizer |

    Args:
        rate: in place of the group's learning rate; at 1 what an update is per unit of it, also where that is 0.
        elements: of these elements alone, as of a vector; of a sharded parameter among this rank's.

    With `maximize` P is negative. RAdam's rectification is left out: its first steps are read too large.

    Returns:
        A tensor like the parameter (of a sharded one this rank's part), a float, or `None` where the optimizer has no
        state of it, and keeps one of others. An element that never had a gradient has 0, not lr / eps: nothing is known
        of its steps.
    """
    lr = without_waiting(group["lr"]) if rate is None else rate
    state = optimizer.state.get(parameter, {})
    scale = _scale(steps_by(optimizer, group), group, state, parameter, lr, elements)
    return -scale if scale is not None and group.get("maximize") else scale


def _scale(
    optimizer: Optimizer,
    group: Group,
    state: Group,
    parameter: nn.Parameter,
    lr: Tensor | float,
    elements: slice | None,
) -> Tensor | float | None:
    def own(entry: str) -> Tensor | None:
        """What the state holds for each of the elements; `None` where it holds no such."""
        held = state.get(entry)
        if not isinstance(held, Tensor) or held.shape != parameter.shape:
            return None
        held = local(held)
        return held if elements is None else held.reshape(-1)[elements]

    if isinstance(optimizer, torch.optim.SGD):
        momentum = _momentum(group)
        return lr * (1.0 - float(group["dampening"]) if momentum else 1.0) / (1.0 - momentum)
    if not state and not keeps_nothing(optimizer):
        return None
    second = own("max_exp_avg_sq" if "max_exp_avg_sq" in state else "exp_avg_sq")
    # Some have another arithmetic for the same entry: Adafactor of Transformers, whose `eps` are two.
    if second is not None and isinstance(group.get("eps"), (int, float, Tensor)):
        correction: Tensor | float = 1.0
        steps = state.get("step", group.get("step"))  # some count in their groups
        corrects = "betas" in group and "adopt" not in type(optimizer).__name__.lower()
        if corrects and steps is not None:
            correction = 1.0 - without_waiting(group["betas"][1]) ** at_least_1(without_waiting(steps))
        return _over((second / correction).sqrt_().add_(float(group["eps"])), lr, felt=second)
    largest = own("exp_inf")
    if largest is not None:
        return _over(largest.clone(), lr, felt=largest > float(group["eps"]))  # which it adds to gradients of 0, too
    for entry in ("square_avg", "sum"):
        held = own(entry)
        if held is not None and "acc_delta" not in state:
            felt = held
            if group.get("centered"):
                mean = own("grad_avg")
                assert mean is not None
                held = (held - mean.square()).clamp_min(0.0)
            if "lr_decay" in group:
                lr = lr / (1.0 + (without_waiting(state["step"]) - 1.0) * float(group["lr_decay"]))
            divisor = (held.sqrt() + float(group["eps"])).mul_(1.0 - _momentum(group))
            return _over(divisor, lr, felt=felt)
    _warn(
        optimizer,
        "scales gradients, and takes its update for lr * gradient: slopes keep their sign wherever the true scaling is "
        "positive, and lose some of their power",
    )
    return lr


def _momentum(group: Group) -> float:
    return min(float(group.get("momentum", 0.0)), MOST_MOMENTUM)


def keeps_nothing(optimizer: Optimizer) -> bool:
    """Whether it has no state, though it may have stepped: of torch's own SGD alone; of others that is not known.

    To look into a state that is not there makes one of no entries.
    """
    stateful = type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.SGD)
    return all(isinstance(own, Mapping) and not own for own in optimizer.state.values()) and not stateful


def _over(divisor: Tensor, lr: Tensor | float, felt: Tensor) -> Tensor:
    """lr / divisor, in its memory; 0 where `felt`, the size of past gradients, is."""
    scale = torch.div(lr, divisor, out=divisor) if isinstance(lr, Tensor) else divisor.reciprocal_().mul_(lr)
    return scale.masked_fill_(felt == 0.0, 0.0)


def without_waiting(entry: float | Tensor) -> float | Tensor:
    """A number where it can be read without waiting for a device, else a 0-dim tensor."""
    if isinstance(entry, Tensor):
        return float(entry) if entry.device.type == "cpu" else entry.detach().reshape(())
    return float(entry)


def at_least_1(steps: float | Tensor) -> float | Tensor:
    return steps.clamp_min(1.0) if isinstance(steps, Tensor) else max(1.0, steps)


def decoupled(optimizer: Optimizer, group: Group) -> bool:
    """Whether weight decay acts on the weights directly (AdamW) and not through the gradient (L2)."""
    if "decoupled_weight_decay" in group:  # torch's own, and how a user tells
        return bool(group["decoupled_weight_decay"])
    told = next((bool(group[name]) for name in TELL_OF_DECAY if isinstance(group.get(name), int)), None)
    optimizer = steps_by(optimizer, group)
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith("torch.optim"):
        return name in ("AdamW", "Adafactor", "Muon") if told is None else told
    acts = name == "Adan" or told is not False  # Adan's other way is a proximal step, which shrinks weights as much
    if not acts:
        _warn(optimizer, "decays weights, and takes it for a gradient of decay * weight, as its parameter groups say")
    elif "AdamW" not in name:
        _warn(optimizer, "decays weights, and takes it for lr * decay * weight")
    return acts


def shrinkage(group: Group) -> Any:
    """The share of weights that decoupled decay takes in a step: lr * decay, or decay alone if it is `fixed_decay`."""
    fixed = group.get("fixed_decay") is True and group.get("weight_decouple") is True
    return group["weight_decay"] if fixed else group["lr"] * group["weight_decay"]


def _warn(optimizer: Optimizer, what: str) -> None:
    name = type(optimizer).__name__
    if (name, what) not in _warned:
        _warned.add((name, what))
        warn(f"hdet does not know how {name} {what}")
