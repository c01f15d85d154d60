"""Converge: what it costs to merge, against the fastest that the backend can do and against the naive way.

    python benchmarks/converge.py [--quick]

Real processes over gloo, 2 and 4 ranks. In turns, medians, every figure beside its own yardstick of the same run:

- a model of 10 M float32 in tensors of 1 M: merged by the persistent buckets, against one flat all_reduce of as
  many bytes that are already in place. To beat: 1.15x.
- 2,000 tensors of 200 float32: the same, against one all_reduce a tensor. To beat: 20x faster.
- the options: in the order of the replicas (exact), and differences in bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import on_ranks

from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.distributed.layout import of_group


def medians(ways: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            dist.barrier()
            began = time.perf_counter()
            way()
            dist.barrier()
            if turn:  # the first turn allocates
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in taken.items()}


def measure(turns: int) -> None:
    layout, device = of_group(None), torch.device("cpu")
    ranks = layout.places
    plain, exact = Exchange(layout, device, exact=False), Exchange(layout, device, exact=True)
    ones = [1.0] * ranks

    large = [torch.randn(1_000_000) for _ in range(10)]
    flat = torch.randn(10_000_000)
    half = [t.bfloat16() for t in large]
    found = medians(
        {
            "one flat all_reduce": lambda: dist.all_reduce(flat),
            "buckets": lambda: plain.reduce(large, large, ones, mean=True),
            "exact": lambda: exact.reduce(large, large, ones, mean=True),
            "bfloat16": lambda: exact.reduce(half, half, ones, mean=True),
        },
        turns,
    )
    if dist.get_rank() == 0:
        yard = found["one flat all_reduce"]
        for name, value in found.items():
            print(f"{ranks} ranks, 40 MB    {name:<22}{value * 1e3:9.1f} ms {value / yard:7.2f}x", flush=True)

    small = [torch.randn(200) for _ in range(2000)]
    found = medians(
        {
            "one all_reduce a tensor": lambda: [dist.all_reduce(t) for t in small],
            "buckets": lambda: plain.reduce(small, small, ones, mean=True),
        },
        turns,
    )
    if dist.get_rank() == 0:
        yard = found["one all_reduce a tensor"]
        for name, value in found.items():
            print(f"{ranks} ranks, 2000 x 200 {name:<22}{value * 1e3:9.1f} ms {yard / value:7.1f}x faster", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 turns instead of 15")
    turns = 3 if parser.parse_args().quick else 15
    for ranks in (2, 4):
        on_ranks(measure, ranks, turns)


if __name__ == "__main__":
    main()
