"""Short-horizon bias: the rate at which a signal stops asking for less, against the rate that is truly best.

    python benchmarks/horizon.py --signal last --window 20 --when 0.3 --seed 0 --out runs/one

A quadratic sum_i h_i theta_i^2 / 2 with gradient noise, SGD at rate lr (1 - t / S)^(1/2) for S = 1000 steps,
everything in exact moments, so that no estimate is noisy. The truth is the peak rate with the least E
L(theta_S). A run at some peak rate reaches step `when` S; there a window of T steps is compared at rates
around it, judged by

    last       E L at the window's last weights
    training   the window's mean E L: the paper's training loss
    average    E L at the window's mean weights

and the slope's sign says whether it wants more or less. `log_ratio` in result.json is log(rate where the sign
changes / best rate), 0 for an unbiased signal, below 0 for one that asks for too little; `bias` is its
absolute value. The seed draws the spectrum h and the start.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
STEPS, COORDINATES, NOISE = 1000, 30, 0.3
RATES = np.exp(np.linspace(math.log(3e-3), math.log(1.5), 60))


class Quadratic:
    """Exact first and second moments of SGD."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.curvature = np.sort(np.exp(rng.uniform(math.log(1e-3), 0.0, COORDINATES)))
        self.start = rng.standard_normal(COORDINATES) * 2

    def loss(self, mean: Array, variance: Array) -> float:
        """E L."""
        return float(0.5 * self.curvature @ (mean**2 + variance))

    def advance(self, mean: Array, variance: Array, rate: float) -> tuple[Array, Array]:
        """One step at a rate."""
        shrink = 1 - rate * self.curvature
        return shrink * mean, shrink**2 * variance + (rate * NOISE) ** 2 * self.curvature

    def run(self, peak: float, until: int) -> tuple[Array, Array]:
        """Moments at a step of a whole run at a peak rate."""
        mean, variance = self.start, np.zeros(COORDINATES)
        for t in range(until):
            mean, variance = self.advance(mean, variance, peak * schedule(t))
        return mean, variance

    def judged(self, mean: Array, variance: Array, peak: float, first: int, window: int, signal: str) -> float:
        """The signal after a window at a rate, from given moments."""
        total = 0.0
        positions, shrinks, variances = [], [], []
        for t in range(first, first + window):
            rate = peak * schedule(t)
            total += self.loss(mean, variance)
            mean, variance = self.advance(mean, variance, rate)
            positions.append(mean)
            variances.append(variance)
            shrinks.append(1 - rate * self.curvature)
        if signal == "last":
            return self.loss(mean, variance)
        if signal == "training":
            return total / window
        # Var of the mean of theta_1..theta_T: cov(theta_s, theta_t) = (product of shrinks s+1..t)
        # var(theta_s)
        covariance = np.zeros(COORDINATES)
        onward = np.zeros(COORDINATES)  # sum over t > s of the products, from the back
        for s in range(window - 1, -1, -1):
            covariance += variances[s] * (1 + 2 * onward)
            onward = shrinks[s] * (1 + onward)
        return self.loss(np.mean(positions, axis=0), covariance / window**2)


def schedule(t: int) -> float:
    """The share of the peak at step t."""
    return math.sqrt(1 - t / STEPS)


def sign_change(values: Array) -> float:
    """The rate where slopes last turn from negative (more is better) to positive; an end if they never do."""
    negative = np.flatnonzero(values < 0)
    if not len(negative):
        return float(RATES[0])
    index = int(negative[-1])
    if index + 1 >= len(RATES):
        return float(RATES[-1])
    share = values[index] / (values[index] - values[index + 1])
    return float(np.exp(np.log(RATES[index]) + share * np.log(RATES[index + 1] / RATES[index])))


def main() -> None:
    """Find both rates for one signal, window and moment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--signal", choices=["last", "training", "average"], default="last")
    parser.add_argument("--window", type=int, default=20)
    parser.add_argument("--when", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    task = Quadratic(given.seed)
    first = round(given.when * STEPS)
    best = float(RATES[int(np.argmin([task.loss(*task.run(rate, STEPS)) for rate in RATES]))])
    slopes = []
    for rate in RATES:
        moments = task.run(rate, first)
        above, below = (
            task.judged(*moments, rate * math.exp(x), first, given.window, given.signal) for x in (1e-3, -1e-3)
        )
        slopes.append((above - below) / 2e-3)
    turns = sign_change(np.array(slopes))
    ratio = math.log(turns / best)
    given.out.mkdir(parents=True, exist_ok=True)
    result = {"bias": abs(ratio), "log_ratio": ratio, "turns_at": turns, "best": best}
    (given.out / "result.json").write_text(json.dumps(result))
    print(result)


if __name__ == "__main__":
    main()
