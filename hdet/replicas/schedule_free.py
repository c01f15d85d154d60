"""Schedule-Free optimizers train one sequence of weights and evaluate another, which is an average.

z is stepped, x is its weighted mean, and gradients are taken at y = (1 - beta) z + beta x. The model holds y while it
trains, and x after `optimizer.eval()`. Source: Defazio et al. 2024, arXiv 2405.15682.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.replicas import tensors


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Whether an optimizer, or the wrapper that it is, switches between training and evaluating an average."""
    switches = hasattr(optimizer, "train_mode") or "train_mode" in optimizer.param_groups[0]
    return switches and hasattr(optimizer, "eval")


def average(optimizer: Optimizer, group: dict[str, Any], y: Tensor, z: Tensor, kept: float = 1.0) -> Tensor:
    """x = z + (y - z) / beta, or kept x + (1 - kept) z: x once z has stood still while the rest of its weight came.

    Args:
        group: the parameter's, of the time of y and z.
    """
    # A wrapped optimizer has betas of its own, which do not lie between z and x.
    beta = getattr(optimizer, "momentum", None) or group.get("momentum") or group["betas"][0]
    return torch.lerp(tensors.wide(z), tensors.wide(y), kept / float(beta))
