"""What the report of a long run takes: seconds to make the page, and its size.

    python benchmarks/report_page.py --windows 10000 --knobs 8 --replicas 64

The history is made up: every window moves every knob and has an estimate at the last and at averaged weights.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from hdet.record import WindowRecord
from hdet.report import page


def history(windows: int, knobs: int, replicas: int) -> list[WindowRecord]:
    """A run of so many windows, from fixed random numbers."""
    rng = np.random.default_rng(0)
    names = [f"knob_{index}" for index in range(knobs)]
    value = dict.fromkeys(names, 0.1)
    made = []
    for w in range(windows):
        moves = {name: float(move) for name, move in zip(names, rng.normal(0, 0.01, knobs), strict=True)}
        closed = {name: value[name] * float(np.exp(moves[name])) for name in names}
        estimates = {
            name: {"slope": float(slope), "stderr": 1.0, "averaged": {"slope": float(slope) / 2, "stderr": 1.0}}
            for name, slope in zip(names, rng.normal(0, 2, knobs), strict=True)
        }
        made.append(
            WindowRecord(
                window=w,
                start=10 * w,
                stop=10 * w + 10,
                bases=dict(value),
                values={name: (value[name] * rng.uniform(0.8, 1.2, replicas)).tolist() for name in names},
                losses=rng.uniform(1, 2, replicas).tolist(),
                estimates=estimates,
                moves=moves,
                merged=True,
                seconds=1.0,
                closing=0.1,
                learned={name: {"start": 0.1, "opened": value[name], "closed": closed[name]} for name in names},
            )
        )
        value = closed
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--knobs", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=64)
    options = parser.parse_args()
    run = history(options.windows, options.knobs, options.replicas)
    wall, busy = time.perf_counter(), time.process_time()
    text = page(run)
    print(f"{options.windows} windows, {options.knobs} knobs, {options.replicas} replicas")
    print(f"page: {time.perf_counter() - wall:.2f} s by the clock, {time.process_time() - busy:.2f} s of the processor")
    print(f"size: {len(text.encode()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
