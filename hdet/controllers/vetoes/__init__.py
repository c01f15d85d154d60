"""Reasons to hold a move back; see `hdet.controllers.Ruled`.

| for | vetoes |
|---|---|
| a learning rate | `SmallSteps`, `LargeSteps` |
| a weight decay, judged by its formula | `NeedsGap`, `KeepsGap`, `NotEarly`, `WithinSpan`, `DoesHarm` |
| a weight decay in fine-tuning | `KeepsWeights` |
"""

from hdet.controllers.vetoes.does_harm import DoesHarm
from hdet.controllers.vetoes.gap import KeepsGap, NeedsGap
from hdet.controllers.vetoes.keeps_weights import KeepsWeights
from hdet.controllers.vetoes.large_steps import LargeSteps
from hdet.controllers.vetoes.not_early import NotEarly
from hdet.controllers.vetoes.small_steps import SmallSteps
from hdet.controllers.vetoes.within_span import WithinSpan

__all__ = [
    "DoesHarm",
    "KeepsGap",
    "KeepsWeights",
    "LargeSteps",
    "NeedsGap",
    "NotEarly",
    "SmallSteps",
    "WithinSpan",
]
