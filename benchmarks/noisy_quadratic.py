"""How good is the hypergradient? A noisy quadratic on which the truth is known to every digit.

    python benchmarks/noisy_quadratic.py --batch 8 --signal training --design permutation --window 20 \
        --averaging shared --seed 0 --out runs/one

L(theta) = sum_i h_i theta_i^2 / 2 with h from 1 to 0.01 over 24 coordinates; a batch of B examples gives the
gradient h_i (theta_i - xi_i) with xi ~ N(0, s^2 / B). N = 8 replicas train for a window with the rates of K =
4 groups of coordinates spread by +-a, as the library's designs hand them out, and the library's least squares
reads the slopes off.

The truth is d E L(theta_T) / d log rate_k of the merged run, from exact moments. Written to result.json:

    sign_error   share of windows and groups whose slope has the wrong sign
    slope_error  root mean square error of the slope over the truth's root mean square
    gain         <slope, truth> / <truth, truth>: the share of the true slope that the signal has on average, 1 if
                 it is unbiased. Noise does not bias it, unlike the size of a mean error
    merged       E L of the merged replicas over E L of the run without spread, at the window's end
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hdet.controllers.estimators import Comparison
from hdet.designs import Design, Fixed, Hadamard, LatinHypercube, Permutation
from hdet.estimators import LeastSquares
from hdet.spreads import Symmetric, TwoLevel

Array = NDArray[np.float64]

REPLICAS, GROUPS, COORDINATES, WINDOWS = 8, 4, 24, 1000
NOISE, RATE, EXAMPLES = 1.0, 0.3, 64
CURVATURE = np.logspace(0, -2, COORDINATES)
GROUP = np.arange(COORDINATES) % GROUPS
DESIGNS: dict[str, Design] = {
    "permutation": Permutation(),
    "hadamard": Hadamard(),
    "latin": LatinHypercube(),
    "fixed": Fixed(),
}


def expected_loss(start: Array, log_rates: Array, steps: int, variance: float) -> Array:
    """E L after `steps` from each start [W, D] at rates exp(log_rates) [K] times RATE: exact moments."""
    rate = RATE * np.exp(log_rates)[GROUP]
    shrink = 1 - rate * CURVATURE
    spread = (rate * CURVATURE) ** 2 * variance * sum(shrink ** (2 * t) for t in range(steps))
    return 0.5 * ((start * shrink**steps) ** 2 + spread) @ CURVATURE


def truth(start: Array, steps: int, variance: float) -> Array:
    """[W, K] slopes of `expected_loss` at 0, by central differences."""
    step = 1e-4
    moves = step * np.eye(GROUPS)
    slopes = [
        expected_loss(start, move, steps, variance) - expected_loss(start, -move, steps, variance) for move in moves
    ]
    return np.stack(slopes, axis=1) / (2 * step)


def main() -> None:
    """Simulate the windows of one setting and write its numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--signal", choices=["training", "paired", "probe", "unpaired probe"], default="training")
    parser.add_argument("--design", choices=list(DESIGNS), default="permutation")
    parser.add_argument("--window", type=int, default=20)
    parser.add_argument("--averaging", choices=["shared", "local"], default="shared")
    parser.add_argument("--spread", type=float, default=0.1)
    parser.add_argument("--noise", type=float, default=NOISE, help="standard deviation s of one example")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    deviation = given.noise / np.sqrt(given.batch)

    # Starts in mid-training: what is left of a start of unit size after 30 steps, plus the noise of a long
    # run.
    start = rng.standard_normal((WINDOWS, COORDINATES)) * ((1 - RATE * CURVATURE) ** 30 + 0.1)
    spread = TwoLevel(given.spread) if given.design == "hadamard" else Symmetric(given.spread)
    ladder = [spread.levels(REPLICAS)] * GROUPS
    names = [f"group{k}" for k in range(GROUPS)]
    design = DESIGNS[given.design]
    levels = np.stack(
        [
            design.assign(ladder, seed=given.seed, window=w, names=names, two_level=[spread.two_level] * GROUPS)
            for w in range(WINDOWS)
        ]
    )  # [W, N, K]
    rate = RATE * np.exp(levels)[:, :, GROUP]
    theta = np.repeat(start[:, None, :], REPLICAS, axis=1)
    total = np.zeros((WINDOWS, REPLICAS))
    for _ in range(given.window):
        same = given.signal == "paired"
        xi = deviation * rng.standard_normal((WINDOWS, 1 if same else REPLICAS, COORDINATES))
        xi = np.broadcast_to(xi, theta.shape)
        total += 0.5 * (theta - xi) ** 2 @ CURVATURE
        gradient = CURVATURE * (theta - xi)
        if given.averaging == "shared":
            gradient = np.broadcast_to(gradient.mean(axis=1, keepdims=True), theta.shape)
        theta = theta - rate * gradient
    losses = total / given.window
    if "probe" in given.signal:
        one = given.signal == "probe"
        xi = given.noise / np.sqrt(EXAMPLES) * rng.standard_normal((WINDOWS, 1 if one else REPLICAS, COORDINATES))
        losses = 0.5 * (theta - xi) ** 2 @ CURVATURE

    estimator = LeastSquares()
    found = np.array(
        [
            [
                estimate.slope
                for estimate in estimator.estimate(
                    estimator.start(GROUPS),
                    Comparison(levels[w], losses[w], np.zeros(GROUPS), np.ones(REPLICAS, dtype=bool)),
                )[0]
            ]
            for w in range(WINDOWS)
        ]
    )
    effective = 1 if given.signal == "paired" else REPLICAS
    variance = deviation**2 / effective
    known = truth(start, given.window, variance)
    scale = np.sqrt((known**2).mean())
    merged = 0.5 * theta.mean(axis=1) ** 2 @ CURVATURE
    plain = expected_loss(start, np.zeros(GROUPS), given.window, variance)
    result = {
        "sign_error": float((np.sign(found) != np.sign(known)).mean()),
        "slope_error": float(np.sqrt(((found - known) ** 2).mean()) / scale),
        "gain": float((found * known).sum() / (known**2).sum()),
        "merged": float(merged.mean() / plain.mean()),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "result.json").write_text(json.dumps(result))
    print(result)


if __name__ == "__main__":
    main()
