"""How a base moves. NumPy only: nothing here, or below, imports torch.

| what | where |
|---|---|
| `Comparison` -> `Estimate` | an `Estimator`: `Marginal`, `LeastSquares`, `Kalman`, `Softmax` |
| `Estimate` -> a move | a `Controller`: `Hold`, `Gated`, `Momentum`, `Paper`, `Newton`, `Calibrate`, `Regularize` |
| state <-> plain numbers | `to_plain`, `from_plain` |
"""

from hdet.controllers.calibrate import Calibrate, CalibrateState
from hdet.controllers.controller import Context, Controller
from hdet.controllers.estimate import Estimate
from hdet.controllers.estimators.estimator import Comparison, Estimator
from hdet.controllers.estimators.kalman import Kalman, KalmanState
from hdet.controllers.estimators.least_squares import LeastSquares
from hdet.controllers.estimators.marginal import Marginal
from hdet.controllers.estimators.softmax import Softmax, SoftmaxState
from hdet.controllers.gated import Gated, GatedState
from hdet.controllers.hold import Hold
from hdet.controllers.momentum import Momentum, MomentumState
from hdet.controllers.newton import Newton
from hdet.controllers.paper import Paper, PaperState
from hdet.controllers.regularize import Regularize
from hdet.controllers.state import NoState, from_plain, to_plain

__all__ = [
    "Calibrate",
    "CalibrateState",
    "Comparison",
    "Context",
    "Controller",
    "Estimate",
    "Estimator",
    "Gated",
    "GatedState",
    "Hold",
    "Kalman",
    "KalmanState",
    "LeastSquares",
    "Marginal",
    "Momentum",
    "MomentumState",
    "Newton",
    "NoState",
    "Paper",
    "PaperState",
    "Regularize",
    "Softmax",
    "SoftmaxState",
    "from_plain",
    "to_plain",
]
