"""From the losses of diverged replicas to slopes."""

from hdet.controllers.estimators import Comparison, Estimator, Kalman, LeastSquares, Marginal, Softmax

__all__ = ["Comparison", "Estimator", "Kalman", "LeastSquares", "Marginal", "Softmax"]
