"""How a base moves. NumPy only: nothing here, or below, imports torch.

| what | where |
|---|---|
| `Comparison` -> `Estimate` | an `Estimator`: `LeastSquares`, `Softmax` |
| `Estimate` -> a move | a `Controller`: one a file |
| what `Calibrate` and `Regularize` are made of | `Ruled`: `rules/` has one `Rule` a file, `vetoes/` one `Veto` |
| state <-> plain numbers | `to_plain`, `from_plain` |
"""

from hdet.controllers.calibrate import Calibrate
from hdet.controllers.controller import Context, Controller, Judgement
from hdet.controllers.estimate import Estimate
from hdet.controllers.gated import Gated, GatedState
from hdet.controllers.heavy_ball import HeavyBall, MomentumState
from hdet.controllers.hold import Hold
from hdet.controllers.newton import Newton
from hdet.controllers.paper import Paper, PaperState
from hdet.controllers.part import Rule, Veto
from hdet.controllers.pooled import Pooled
from hdet.controllers.regularize import Regularize
from hdet.controllers.ruled import Ruled, RuledState
from hdet.controllers.state import NoState, from_plain, to_plain

__all__ = [
    "Calibrate",
    "Context",
    "Controller",
    "Estimate",
    "Gated",
    "GatedState",
    "HeavyBall",
    "Hold",
    "Judgement",
    "MomentumState",
    "Newton",
    "NoState",
    "Paper",
    "PaperState",
    "Pooled",
    "Regularize",
    "Rule",
    "Ruled",
    "RuledState",
    "Veto",
    "from_plain",
    "to_plain",
]
