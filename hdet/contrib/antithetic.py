"""Replicas in mirrored pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hdet.errors import ConfigError
from hdet.hparams.design import Design, Levels, Permutation, mirrored
from hdet.spec import register


@register
class Antithetic(Design):
    """Replicas in pairs whose levels are opposite in every knob, for any spread that is symmetric about its base.

    What is even about the base, such as curvature and the product of two knobs, cancels within a pair and never enters
    a slope. With `Gaussian` levels it is the mirrored sampling of evolution strategies (Brockhoff et al. 2010, PPSN XI;
    Salimans et al. 2017, arXiv 1703.03864). With `TwoLevel` it is a folded-over two-level design, of which `Hadamard`
    (foldover=True) is the orthogonal one: that is the special case in which all perturbations are as large.

    Of an odd number one replica, another in each window, stays at the base.

    >>> import numpy as np
    >>> from hdet.contrib import Antithetic, Gaussian
    >>> levels = [Gaussian(0.5).levels(4)] * 2
    >>> design = Antithetic().assign(levels, seed=0, window=3, names=["rate", "decay"], two_level=[False] * 2)
    >>> (design[0] + design[1]).tolist()
    [0.0, 0.0]
    """

    def _assign(
        self, levels: Levels, seed: int, window: int, names: Sequence[str], two_level: Sequence[bool]
    ) -> NDArray[np.float64]:
        for column, name in zip(levels, names, strict=True):
            if not np.array_equal(column, -column[::-1]):
                raise ConfigError(
                    f"knob {name!r} has levels that are not symmetric about its base, {column.tolist()}, which "
                    f"Antithetic cannot mirror; give it a spread that is (TwoLevel, hdet.contrib.Gaussian), or the "
                    f"design Permutation"
                )
        n = len(levels[0])
        pairs = n // 2
        design = np.zeros((n, len(names)))
        if pairs:
            upper = [column[n - pairs :] for column in levels]
            sizes = Permutation().assign(upper, seed=seed, window=window, names=names, two_level=two_level)
            signs = mirrored(pairs, seed=seed, window=window, names=names)
            design[: 2 * pairs] = signs * np.repeat(sizes, 2, axis=0)
        return np.roll(design, window, axis=0) if n % 2 else design
