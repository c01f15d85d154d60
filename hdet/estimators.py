"""From the losses of diverged replicas to slopes."""

from hdet.controllers.estimators import Comparison, Estimator, LeastSquares, Softmax

__all__ = ["Comparison", "Estimator", "LeastSquares", "Softmax"]
