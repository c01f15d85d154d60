"""How sure evolution strategies are of a slope, beside two-level designs: the variance over windows, on a quadratic.

    python benchmarks/evolution.py [--quick]

The signal is 1 + sum_k g_k z_k + z' H z / 2 plus noise that each replica has of its own, with known gradient g at the
base. Levels have a mean square of 1 in all designs. Printed for N replicas, K knobs, curvature and noise: the slope's
variance over windows, times N / noise^2 (or times N without noise), and in brackets its bias in standard errors, for

- i.i.d.: N/2 normal draws and their mirror images, as printed in Salimans et al. 2017, 1 / (N sigma) sum F epsilon;
- Gaussian: `hdet.contrib.Gaussian` levels in an `Antithetic` design, `EvolutionStrategy(ranks=False)`;
- signs: two levels in an `Antithetic` design, the same estimator;
- Hadamard: two levels in a `Hadamard` design, `LeastSquares`, which is what hdet does by default;
- foldover: the same with `Hadamard(foldover=True)`.
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from hdet.contrib import Antithetic, EvolutionStrategy, Gaussian
from hdet.controllers.state import NoState
from hdet.designs import Design, Hadamard
from hdet.estimators import Comparison, Estimator, LeastSquares
from hdet.spreads import Spread, TwoLevel

Array = NDArray[np.float64]

WAYS: dict[str, tuple[Design, Spread, Estimator]] = {
    "Gaussian": (Antithetic(), Gaussian(1.0), EvolutionStrategy(ranks=False)),
    "signs": (Antithetic(), TwoLevel(1.0), EvolutionStrategy(ranks=False)),
    "Hadamard": (Hadamard(), TwoLevel(1.0), LeastSquares()),
    "foldover": (Hadamard(foldover=True), TwoLevel(1.0), LeastSquares()),
}


def levels_of(way: str, n: int, knobs: int, window: int, generator: np.random.Generator) -> Array:
    """[N, K]"""
    if way == "i.i.d.":
        half = generator.standard_normal((n // 2, knobs))
        return np.concatenate([half, -half])
    design, spread, _ = WAYS[way]
    names = [f"knob {k}" for k in range(knobs)]
    return design.assign(
        [spread.levels(n)] * knobs, seed=0, window=window, names=names, two_level=[spread.two_level] * knobs
    )


def slope_of(way: str, levels: Array, losses: Array) -> Array:
    """[K]"""
    n, knobs = levels.shape
    if way == "i.i.d.":
        return np.asarray(losses @ levels / n)
    estimates, _ = WAYS[way][2].estimate(
        NoState(), Comparison(levels, losses, np.zeros(knobs), np.ones(n, dtype=np.bool_))
    )
    return np.array([estimate.slope for estimate in estimates])


def measured(way: str, n: int, knobs: int, curvature: float, noise: float, windows: int) -> tuple[float, float]:
    """The largest bias of a slope in standard errors, and the mean variance of the slopes."""
    generator = np.random.default_rng(0)
    gradient = np.linspace(-1.0, 1.0, knobs)
    mixed = generator.standard_normal((knobs, knobs))
    hessian = curvature * (mixed + mixed.T) / 2
    found = np.empty((windows, knobs))
    for window in range(windows):
        levels = levels_of(way, n, knobs, window, generator)
        signal = 1.0 + levels @ gradient + 0.5 * np.einsum("nk,kj,nj->n", levels, hessian, levels)
        found[window] = slope_of(way, levels, signal + noise * generator.standard_normal(n))
    spread = found.std(axis=0, ddof=1)
    bias = np.abs(found.mean(axis=0) - gradient)
    standard = np.maximum(spread / np.sqrt(windows), 1e-12)
    return float((bias / standard).max()), float((spread**2).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the windows")
    windows = 300 if parser.parse_args().quick else 3000
    print(f"{'N':>3} {'K':>2} {'curv':>5} {'noise':>5}  " + "".join(f"{way:>18}" for way in ("i.i.d.", *WAYS)))
    for n, knobs in ((8, 1), (8, 3), (16, 7)):
        for curvature, noise in ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
            cells = []
            for way in ("i.i.d.", *WAYS):
                bias, variance = measured(way, n, knobs, curvature, noise, windows)
                cells.append(f"{variance * n / (noise**2 or 1.0):11.3f} ({bias:3.1f})")
            print(f"{n:3} {knobs:2} {curvature:5.1f} {noise:5.1f}  " + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
