"""Where a loop's replicas live: found from what wraps the model."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.replicas import Replicas, micro_batches


def home(model: nn.Module, optimizer: Optimizer, seats: int) -> Replicas:
    """The micro-batches of this process, and of the others that train the same model.

    Args:
        seats: passes of this process to an optimizer step.

    Raises:
        ConfigError: there are other processes, and nothing says how they train together.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"this is one of {dist.get_world_size()} processes, which hdet.attach cannot put together yet; give "
            f"replicas=hdet.distribute(model, optimizer), or write the loop for hdet.Engine"
        )
    return micro_batches(model, optimizer, seats)
