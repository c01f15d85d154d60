"""Levels as a normal distribution has them, for evolution strategies."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hdet.hparams.spread import Spread, mirrored
from hdet.spec import register


@register
class Gaussian(Spread):
    """Normal scores: the quantiles (r + 1/2) / N of a normal distribution, scaled to a mean square of width^2.

    The perturbations of evolution strategies (Salimans et al. 2017, arXiv 1703.03864), stratified: drawn at random,
    their mean square would differ from window to window, and with it the slope. `TwoLevel` is the special case of signs
    in place of normal numbers; its columns can be orthogonal, so that knobs do not blur each other.

    >>> from hdet.contrib import Gaussian
    >>> Gaussian(0.5).levels(4).round(3).tolist()
    [-0.681, -0.189, 0.189, 0.681]
    """

    def _levels(self, n: int) -> NDArray[np.float64]:
        scores = np.array([NormalDist().inv_cdf(1 - (r + 0.5) / n) for r in range(n // 2)])
        return mirrored(scores * (self.width / np.sqrt(2 * (scores**2).sum() / n)), n)
