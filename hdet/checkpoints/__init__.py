"""A search in checkpoints: by torch.distributed.checkpoint, and as folders."""

from hdet.checkpoints.folder import CheckpointFolder
from hdet.checkpoints.stateful import Stateful

__all__ = ["CheckpointFolder", "Stateful"]
