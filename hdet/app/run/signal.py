"""What a run's replicas are compared by, as a declaration: the task supplies the losses and the batches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hdet import signals
from hdet.app.tasks import Workload
from hdet.spec import Spec, register


class Signal(Spec, family="signal"):
    """The root of signals a run can be declared with; `hdet.signals` has the objects they make."""

    def build(self, workload: Workload) -> signals.Signal:
        """The engine's signal on the workload's data."""
        raise NotImplementedError


@register
class TrainingLoss(Signal):
    """Each replica's mean training loss over the window.

    >>> TrainingLoss().to_dict()
    {'kind': 'training_loss'}
    """

    def build(self, workload: Workload) -> signals.Signal:
        return signals.TrainingLoss()


@register
class Probe(Signal):
    """The task's held-out probe batches, fresh each window and the same for all replicas.

    Attributes:
        at: judge the last weights of a window or their average over it.
        stride: with `average`, take every stride-th step's weights.

    >>> Probe(at="average").stride
    1
    """

    at: Literal["last", "average"] = "last"
    stride: int = Field(default=1, ge=1)

    def build(self, workload: Workload) -> signals.Signal:
        return signals.Probe(workload.loss, workload.probe, at=self.at, stride=self.stride)
