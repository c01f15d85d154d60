"""From the losses of one window to slopes: one estimator a file."""

from hdet.controllers.estimators.estimator import Comparison, Estimator
from hdet.controllers.estimators.least_squares import LeastSquares
from hdet.controllers.estimators.softmax import Softmax, SoftmaxState

__all__ = ["Comparison", "Estimator", "LeastSquares", "Softmax", "SoftmaxState"]
