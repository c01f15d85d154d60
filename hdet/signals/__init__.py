"""What replicas are compared by."""

from hdet.signals.objective import Objective
from hdet.signals.probe import Probe
from hdet.signals.training_loss import TrainingLoss

Signal = TrainingLoss | Probe

__all__ = ["Objective", "Probe", "Signal", "TrainingLoss"]
