"""Can one run tell when its schedule should begin to fall? What a look ahead says, beside what is true at the end.

    python benchmarks/decay_start.py

A quadratic sum_i h_i theta_i^2 / 2 with gradient noise, h from 1 to 0.001 over 24 coordinates, SGD for S = 1000 steps
by `hdet.schedules.WSD` without a warm-up, everything in exact moments, so that no number is noisy.

The first table is the truth: the final loss by the share of the run in which the rate falls, at the peak rate that is
best for a share of 0.2, and at the one that is best for each. The second is what a look ahead from within the run says:
a copy whose rate falls to 0 over the next steps, its loss over that of the run that stays. Below 1 it says "fall now".
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hdet.schedules import WSD

Array = NDArray[np.float64]

STEPS, COORDINATES, NOISE = 1000, 24, 0.3
CURVATURE = np.logspace(0, -3, COORDINATES)
PEAKS = np.geomspace(0.01, 1.5, 40)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
LOOKS = (0.1, 0.2, 0.4, 0.6, 0.8)
AHEAD = (0.01, 0.05, 0.1)
Moments = tuple[Array, Array]
START: Moments = (np.ones(COORDINATES), np.zeros(COORDINATES))


def trained(moments: Moments, rates: Iterable[float]) -> Moments:
    """Mean and variance of theta after a step at each rate."""
    mean, variance = moments
    for rate in rates:
        shrink = 1 - rate * CURVATURE
        mean, variance = shrink * mean, shrink**2 * variance + (rate * CURVATURE * NOISE) ** 2
    return mean, variance


def loss(moments: Moments) -> float:
    """E L."""
    mean, variance = moments
    return float(0.5 * CURVATURE @ (mean**2 + variance))


def final(peak: float, share: float) -> float:
    """E L at the end of a run that falls over the last `share` of it."""
    schedule = WSD(float(peak), total_steps=STEPS, warmup=0.0, decay=share)
    return loss(trained(START, [schedule(step) for step in range(STEPS)]))


def best_peak(share: float) -> float:
    """The peak rate with the least final loss."""
    losses = [final(peak, share) for peak in PEAKS]
    return float(PEAKS[int(np.argmin(losses))])


def look(peak: float, at: float, ahead: float) -> float:
    """E L of a copy whose rate falls from step `at` S over `ahead` S steps, over that of the run that stays."""
    here = trained(START, [peak] * round(at * STEPS))
    steps = round(ahead * STEPS)
    fallen = trained(here, [peak * (steps - step) / steps for step in range(steps)])
    return loss(fallen) / loss(trained(here, [peak] * steps))


def main() -> None:
    best = {share: best_peak(share) for share in SHARES}
    peak = best[0.2]
    print(f"final loss by the share of the run that falls; at the peak {peak:.3g}, and at each one's best peak")
    for share in SHARES:
        print(f"  {share:4.2f}   {final(peak, share):.5f}   {final(best[share], share):.5f} at {best[share]:.3g}")
    print("\nloss after falling now, over the loss after staying (below 1: fall now)")
    print("  done   " + "  ".join(f"over {ahead:4.0%}" for ahead in AHEAD))
    for at in LOOKS:
        print(f"  {at:4.0%}   " + "  ".join(f"{look(peak, at, ahead):9.2f}" for ahead in AHEAD))


if __name__ == "__main__":
    main()
