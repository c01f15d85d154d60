"""The control plane alone: what a window's decisions cost at N replicas and K knobs, no training at all.

    python benchmarks/control_plane.py [--quick]

Each case runs the engine's own window on simulated replicas: designs drawn, values put in force, losses taken
from a table instead of a network, a joint regression, K controllers, the record. Printed: the median CPU seconds of
one process for closing a window and opening the next, the bytes its one collective brings to each rank
(`NUMBERS` in float64 a replica) and the seconds of the same for half as many replicas, to see that it grows no faster
than N. What it takes to draw the simulated losses is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hdet
from hdet.recipes.footprint import NUMBERS
from hdet.replicas import Replica, Replicas
from hdet.spaces import Log
from hdet.spreads import TwoLevel


class Simulated(Replicas):
    """N replicas of which this process hosts one; the others' numbers come from a generator."""

    diverge = True

    def __init__(self, n: int, knobs: int) -> None:
        model = nn.Linear(1, 1)
        self.scalars = [0.1] * knobs
        self.hosts = [(model, torch.optim.SGD(model.parameters(), lr=0.1))]
        self.local = [Replica(model, self.hosts[0][1], 0, 0)]
        self.size = n
        self.generator = np.random.default_rng(0)
        self.drawing = 0.0  # CPU seconds so far

    def scalar(self, k: int, replica: nn.Module) -> float:
        return self.scalars[k]

    def write(self, k: int, replica: nn.Module, value: float) -> None:
        self.scalars[k] = value

    def gather(self, rows: Tensor) -> NDArray[np.float64]:
        began = time.process_time()
        table = np.ones((self.size, rows.shape[1]))
        table[:, 0] = self.generator.normal(2.0, 0.1, self.size)
        self.drawing += time.process_time() - began
        return table

    def share_gradients(self) -> None:
        pass

    def mean(self, valid: Sequence[bool], optimizer_state: str, weights: NDArray[np.float64] | None = None) -> None:
        pass

    def copy(self, sources: Sequence[int]) -> None:
        pass

    def mean_buffers(self, valid: Sequence[bool]) -> None:
        pass

    def combine(self, weights: NDArray[np.float64], which: Sequence[bool] | None = None) -> list[Tensor]:
        return []


def engine_of(n: int, knobs: int) -> hdet.Engine:
    replicas = Simulated(n, knobs)
    declared = [
        hdet.Scalar(
            f"knob_{k}",
            get=partial(replicas.scalar, k),
            set=partial(replicas.write, k),
            space=Log(),
            bounds=(1e-6, 1e3),
            effect="update",
            biased=False,
            spread=TwoLevel(0.1),
        )
        for k in range(knobs)
    ]
    return hdet.Engine(replicas, declared, window=1)


def seconds(n: int, knobs: int, windows: int) -> float:
    engine = engine_of(n, knobs)
    replicas = engine.home
    assert isinstance(replicas, Simulated)
    engine.step([torch.ones(())])
    taken = []
    for _ in range(windows):
        began = time.process_time() - replicas.drawing
        engine.step([torch.ones(())])
        taken.append(time.process_time() - replicas.drawing - began)
        engine.history.windows.clear()
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 4,096 replicas")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    measure = partial(seconds, windows=3)
    print(f"{'N':>6} {'K':>3} {'s/window':>10} {'us per N K':>11} {'bytes':>10} {'against N/2':>12}")
    for knobs in (4, 16, 64):
        before = measure(32, knobs)
        n = 64
        while n <= (4096 if quick else 65536):
            now = measure(n, knobs)
            growth = f"{now / before:.2f}x"
            print(
                f"{n:>6} {knobs:>3} {now:>10.4f} {now / n / knobs * 1e6:>11.3f} {n * NUMBERS * 8:>10} {growth:>12}",
                flush=True,
            )
            before, n = now, n * 2
    print("growing no faster than N: a column of at most 2x (and noise)")


if __name__ == "__main__":
    main()
