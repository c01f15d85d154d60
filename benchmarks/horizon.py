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
absolute value. A signal that asks for more (or less) at every rate at which SGD is stable has no such rate:
`never` is then 1 and the two are null. The seed draws the spectrum h and the start.
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
# Up to where SGD is stable: at 2 / h, and the largest h is near 1.
RATES = np.geomspace(3e-3, 1.95, 80)


class Quadratic:
    """Exact first and second moments of SGD, [C] or, at several rates at once, [R, C]."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.curvature = np.sort(np.exp(rng.uniform(math.log(1e-3), 0.0, COORDINATES)))
        self.start = rng.standard_normal(COORDINATES) * 2

    def loss(self, mean: Array, variance: Array) -> Array:
        """E L, [R]."""
        expected: Array = 0.5 * (mean**2 + variance) @ self.curvature
        return expected

    def advance(self, mean: Array, variance: Array, rate: Array) -> tuple[Array, Array]:
        """One step at rates [R]."""
        shrink = 1 - rate[:, None] * self.curvature
        return shrink * mean, shrink**2 * variance + (rate[:, None] * NOISE) ** 2 * self.curvature

    def run(self, peak: Array, until: int) -> tuple[Array, Array]:
        """Moments [R, C] at a step of whole runs at peak rates [R]."""
        mean, variance = self.start, np.zeros(COORDINATES)
        for t in range(until):
            mean, variance = self.advance(mean, variance, peak * schedule(t))
        return mean, variance

    def judged(self, mean: Array, variance: Array, peak: Array, first: int, window: int, signal: str) -> Array:
        """The signal [R] after a window at peak rates [R], from given moments."""
        total = np.zeros(len(peak))
        positions, shrinks, variances = [], [], []
        for t in range(first, first + window):
            rate = peak * schedule(t)
            total += self.loss(mean, variance)
            mean, variance = self.advance(mean, variance, rate)
            positions.append(mean)
            variances.append(variance)
            shrinks.append(1 - rate[:, None] * self.curvature)
        if signal == "last":
            return self.loss(mean, variance)
        if signal == "training":
            return total / window
        # Var of the mean of theta_1..theta_T: cov(theta_s, theta_t) = (product of shrinks s+1..t)
        # var(theta_s)
        covariance = np.zeros((len(peak), COORDINATES))
        onward = np.zeros((len(peak), COORDINATES))  # sum over t > s of the products, from the back
        for s in range(window - 1, -1, -1):
            covariance += variances[s] * (1 + 2 * onward)
            onward = shrinks[s] * (1 + onward)
        return self.loss(np.mean(positions, axis=0), covariance / window**2)


def schedule(t: int) -> float:
    """The share of the peak at step t."""
    return math.sqrt(1 - t / STEPS)


def sign_change(values: Array) -> float | None:
    """The rate where slopes last turn from negative (more is better) to positive; `None` if they never do."""
    negative = np.flatnonzero(values < 0)
    if not len(negative) or negative[-1] + 1 == len(RATES):
        return None
    index = int(negative[-1])
    share = values[index] / (values[index] - values[index + 1])
    return float(np.exp(np.log(RATES[index]) + share * np.log(RATES[index + 1] / RATES[index])))


def best_rate(task: Quadratic) -> float:
    """The peak rate with the least E L at the run's end, to 1e-4: the grid around the best is refined."""
    rates = RATES
    index = int(np.argmin(task.loss(*task.run(rates, STEPS))))
    if index in (0, len(rates) - 1):
        raise SystemExit(f"the best rate lies outside {RATES[0]:g} to {RATES[-1]:g}")
    while rates[index + 1] / rates[index - 1] > 1 + 1e-4:
        rates = np.geomspace(rates[index - 1], rates[index + 1], 21)
        index = int(np.argmin(task.loss(*task.run(rates, STEPS))))
    return float(rates[index])


def slopes(task: Quadratic, first: int, window: int, signal: str) -> Array:
    """d signal / d log rate of a window that opens at a step of the run, at each of RATES."""
    moments = task.run(RATES, first)
    above, below = (task.judged(*moments, RATES * math.exp(x), first, window, signal) for x in (1e-3, -1e-3))
    return (above - below) / 2e-3


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
    best = best_rate(task)
    turns = sign_change(slopes(task, round(given.when * STEPS), given.window, given.signal))
    ratio = None if turns is None else math.log(turns / best)
    result = {
        "bias": None if ratio is None else abs(ratio),
        "log_ratio": ratio,
        "never": int(turns is None),
        "turns_at": turns,
        "best": best,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "result.json").write_text(json.dumps(result))
    print(result)


if __name__ == "__main__":
    main()
