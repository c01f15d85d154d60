"""A spread with levels near and far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hdet.hparams.spread import Spread, mirrored
from hdet.spec import register


@register
class Geometric(Spread):
    """Exponentially spaced: +-w, +-w/ratio, +-w/ratio^2, ...; an odd one out stays at the base.

    A few replicas look far while most stay near, for a knob whose scale is not known.

    >>> from hdet.contrib import Geometric
    >>> Geometric(0.8, ratio=4.0).levels(4).tolist()
    [-0.8, -0.2, 0.2, 0.8]
    """

    ratio: float = Field(default=2.0, gt=1, kw_only=False)

    def _levels(self, n: int) -> NDArray[np.float64]:
        magnitudes = np.full(n // 2, self.width)
        for k in range(1, n // 2):
            magnitudes[k] = magnitudes[k - 1] / self.ratio
        return mirrored(magnitudes, n)
