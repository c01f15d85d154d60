"""What an optimizer's parameter groups hold."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Every parameter that an optimizer holds, group after group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def first_trained(optimizer: Optimizer) -> nn.Parameter | None:
    """The first parameter of an optimizer that is not frozen."""
    return next((own for group in optimizer.param_groups for own in group["params"] if own.requires_grad), None)


def ids_of(optimizer: Optimizer) -> set[int]:
    """The identities of these parameters."""
    return {id(parameter) for parameter in parameters_of(optimizer)}
