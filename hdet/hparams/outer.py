"""Knobs of the merge's own optimizer: the rate and the momentum of `hdet.merges.Outer`."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from hdet.errors import MatchError
from hdet.hparams.binding import GroupBinding
from hdet.hparams.knob import ActsOn, Knob
from hdet.hparams.space import Logit, Space
from hdet.spec import register


class OuterKnob(Knob):
    """A setting of the optimizer that a merge steps with; all replicas make that step together."""

    key: ClassVar[str]

    @property
    def acts_on(self) -> ActsOn:
        return "merge"

    def bind(self, model: nn.Module, optimizer: Optimizer) -> GroupBinding:
        """The setting in the merge's optimizer, which is what an engine hands over here."""
        if self.key not in optimizer.param_groups[0]:
            raise MatchError(
                f"{self.label}: the outer optimizer {type(optimizer).__name__} has no {self.key!r}; "
                f"its settings are {sorted(set(optimizer.param_groups[0]) - {'params'})}"
            )
        return GroupBinding(optimizer, (0,), (1.0,), self.key, None, self.bounds)


@register
class OuterLearningRate(OuterKnob):
    """The rate of `hdet.merges.Outer`. By default it begins at the merge's `lr`.

    >>> import hdet
    >>> hdet.merges.OuterLearningRate().label
    'outer_learning_rate'
    """

    key: ClassVar[str] = "lr"

    bounds: tuple[float, float] = (0.0, 10.0)


@register
class OuterMomentum(OuterKnob):
    """The momentum of `hdet.merges.Outer`, where its optimizer is SGD with momentum."""

    key: ClassVar[str] = "momentum"

    space: Space = Logit()
    bounds: tuple[float, float] = (0.1, 0.99)
