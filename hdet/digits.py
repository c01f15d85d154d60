"""Numbers as people are shown them."""

from __future__ import annotations

import math


def four_digits(value: float) -> str:
    """A knob's value in four digits; from 0.9 to 1 in three of its distance to 1, as what betas and probabilities do.

    So no beta is shown as 1, which no optimizer takes.

    >>> [four_digits(value) for value in (0.0082153729, 0.95, 0.99997, 1e-5, 1.0)]
    ['0.008215', '0.95', '0.99997', '1e-05', '1']
    """
    if not 0.9 < value < 1.0:
        return f"{value:.4g}"
    return f"{value:.{2 - math.floor(math.log10(1.0 - value))}f}".rstrip("0")


def loss_digits(value: float | None) -> str:
    """A loss in four decimals; null, in a result, is one that is not finite."""
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.4f}"
