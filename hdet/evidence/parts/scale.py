"""What a matrix of weights is, and how large those that it holds are."""

from __future__ import annotations

import math

from torch import nn

HELD = 0.03
"""Root mean square of a matrix's weights, times the root of its longer side, below which it holds next to nothing.

Usual first weights have 0.5 and more, and what begins at zeros 0."""


def spectral_gain(parameter: nn.Parameter) -> float:
    """The spectral norm of a matrix of ones over that of random weights whose mean square is 1; 0 of a vector."""
    return _gain(matrix_shape(parameter))


def matrix_shape(parameter: nn.Parameter) -> tuple[int, int]:
    """Rows and columns of what counts as a matrix: the dimensions past the first as one, or each of a stack's."""
    shapes = [(len(parameter), math.prod(parameter.shape[1:]))] if parameter.ndim > 1 else [(0, 0)]
    if parameter.ndim == 3:
        shapes.append((parameter.shape[1], parameter.shape[2]))
    return max(shapes, key=_gain)


def holds(parameter: nn.Parameter, squares: float, count: float) -> bool:
    """Whether a matrix holds more than next to nothing, by the squared norm of this many of its weights."""
    return squares > 0.0 and math.sqrt(max(matrix_shape(parameter)) * squares / count) > HELD


def _gain(shape: tuple[int, int]) -> float:
    m, n = shape
    return math.sqrt(m * n) / (math.sqrt(m) + math.sqrt(n)) if min(m, n) > 1 else 0.0
