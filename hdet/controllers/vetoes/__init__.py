"""Reasons to hold a move back; see `hdet.controllers.Ruled`.

| for | vetoes |
|---|---|
| a learning rate | `AboveGiven` |
| a weight decay, judged by its formula | `NeedsGap`, `KeepsGap`, `WithinSpan`, `DoesHarm` |
"""

from hdet.controllers.vetoes.above_given import AboveGiven
from hdet.controllers.vetoes.does_harm import DoesHarm
from hdet.controllers.vetoes.gap import GapState, KeepsGap, NeedsGap
from hdet.controllers.vetoes.within_span import WithinSpan

__all__ = ["AboveGiven", "DoesHarm", "GapState", "KeepsGap", "NeedsGap", "WithinSpan"]
