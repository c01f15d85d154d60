"""Where replicas lie on ranks: DistributedDataParallel, fully sharded and tensor parallel models, plain ones."""

from hdet.replicas.distributed.distribute import distribute
from hdet.replicas.distributed.process_group import process_group
from hdet.replicas.distributed.ranks import Ranks

__all__ = ["Ranks", "distribute", "process_group"]
