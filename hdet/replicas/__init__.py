"""Where replicas live: in one process, or over many."""

from hdet.replicas.in_process import Copies, Seats, micro_batches, replicate
from hdet.replicas.replica import Replica
from hdet.replicas.replicas import Replicas, Terms

__all__ = ["Copies", "Replica", "Replicas", "Seats", "Terms", "micro_batches", "replicate"]
