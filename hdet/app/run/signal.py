"""What a run's replicas are compared by, as a declaration: the task supplies the losses and the batches."""

from __future__ import annotations

from typing import ClassVar, Literal

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
class DeclaredTrainingLoss(Signal):
    """Each replica's mean training loss over the window.

    >>> DeclaredTrainingLoss().to_dict()
    {'kind': 'training_loss'}
    """

    kind: ClassVar[str] = "training_loss"

    def build(self, workload: Workload) -> signals.Signal:
        return signals.TrainingLoss()


@register
class DeclaredProbe(Signal):
    """The task's held-out probe batches, fresh each window and the same for all replicas.

    Attributes:
        at: judge the last weights of a window or their average over it.
        stride: with `average`, take every stride-th step's weights; by default as many as leave at least 128 in the
            window.

    >>> DeclaredProbe(at="average", stride=2).stride
    2
    """

    kind: ClassVar[str] = "probe"

    at: Literal["last", "average"] = "last"
    stride: int | None = Field(default=None, ge=1)

    def build(self, workload: Workload) -> signals.Signal:
        return signals.Probe(workload.loss, workload.probe, at=self.at, stride=self.stride)
