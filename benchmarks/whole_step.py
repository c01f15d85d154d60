"""Whole steps under DistributedDataParallel with hdet over without, on one model in one run, 2 ranks over gloo.

    python benchmarks/whole_step.py [--minutes 10] [--evidence apart|update]

A GPT of a million parameters by AdamW. Steps come in threes, in random order: with hdet's calls, without, and without
again, so that what noise alone does to a ratio is seen beside it. Time is CPU time of both ranks' processes, all
threads: waiting for another process on a shared machine does not count. Printed: medians over threes of the ratios with
95 % intervals (bootstrap), the CPU time of a window's end, and both together at windows of 100 and 1000 steps.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.app.tasks.gpt import GPT, VOCABULARY
from hdet.hparams.knob import Knob

WIDTH, DEPTH, CONTEXT, BATCH = 128, 5, 64, 16
WINDOW = 20
"""Steps with hdet between two measured ends of a window."""

KINDS = ("with", "without", "without again")


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def engine_of(model: nn.Module, optimizer: torch.optim.Optimizer, evidence: str, probe: list[Tensor]) -> hdet.Engine:
    """Rate and decay, from replicas that come apart, or read off the updates of ranks that stay alike."""
    knobs: list[Knob] = [hdet.LearningRate(), hdet.WeightDecay()]
    signal = None
    if evidence == "update":
        knobs = [hdet.LearningRate(evidence=hdet.evidence.Line()), hdet.WeightDecay(evidence=hdet.evidence.Analytic())]
        signal = hdet.Probe(loss_of, probe)
    return hdet.Engine(hdet.distribute(model, optimizer), knobs, window=WINDOW, signal=signal)


def measure(minutes: float, evidence: str) -> None:
    torch.manual_seed(0)
    network = GPT(
        width=WIDTH, depth=DEPTH, heads=4, context=CONTEXT, dropout=0.0, generator=torch.Generator().manual_seed(0)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=drawn) for _ in range(4)]
    engine = engine_of(model, optimizer, evidence, batches[:2])
    tokens = batches[2]
    ended = [0.0]  # CPU seconds of the last call that closed a window, 0 where the last step closed none

    def plain() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    def searched() -> None:
        with engine.replicas[0] as replica:
            loss = loss_of(replica.model, tokens)
            loss.backward()
        engine.share_gradients()
        optimizer.step()
        optimizer.zero_grad()
        began = time.process_time()
        closed = engine.step([loss])
        ended[0] = time.process_time() - began if closed is not None else 0.0

    steps: dict[str, Callable[[], None]] = {"with": searched, "without": plain, "without again": plain}
    order = random.Random(0)
    rows: list[list[float]] = []
    ends: list[float] = []
    for _ in range(5):
        for step in steps.values():
            step()
    began = time.monotonic()
    while _goes_on(time.monotonic() - began < 60 * minutes):
        spent: dict[str, float] = {}
        for kind in order.sample(KINDS, len(KINDS)):
            since = time.process_time()
            steps[kind]()
            spent[kind] = time.process_time() - since
        if ended[0]:
            ends.append(ended[0])
        else:
            rows.append([spent[kind] for kind in KINDS])
    told = torch.tensor(rows, dtype=torch.float64)
    closing = torch.tensor(ends, dtype=torch.float64)
    for own in (told, closing):
        dist.all_reduce(own)
    if dist.get_rank() == 0:
        report(sum(p.numel() for p in network.parameters()), evidence, told.numpy(), closing.numpy())


def _goes_on(own: bool) -> bool:
    """Whether there is time left, by rank 0's clock."""
    flag = torch.tensor([own])
    dist.broadcast(flag, 0)
    return bool(flag)


def interval(ratios: NDArray[np.float64]) -> tuple[float, float, float]:
    """The median, and the 2.5 and 97.5 percentiles of the medians of 2,000 resamples."""
    drawn = np.random.default_rng(0)
    medians = [np.median(drawn.choice(ratios, len(ratios))) for _ in range(2_000)]
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def report(parameters: int, evidence: str, rows: NDArray[np.float64], ends: NDArray[np.float64]) -> None:
    searched, once, again = rows.T
    plain = (once + again) / 2
    print(f"{parameters:,} parameters, {BATCH * CONTEXT} tokens a rank and step, evidence: {evidence}")
    print(f"{len(rows):,} threes of steps, {len(ends)} window ends; CPU time of {dist.get_world_size()} ranks together")
    print(f"a step without: {1e3 * np.median(plain):.1f} ms")
    for name, ratios in (("with / without", searched / plain), ("without / without", once / again)):
        print("{:<20}{:8.4f}x  ({:.4f} to {:.4f})".format(name, *interval(ratios)))
    if not len(ends):
        print("no window has ended: give it more minutes", flush=True)
        return
    print(f"a window's end: {1e3 * np.median(ends):.1f} ms")
    middle, low, high = interval(searched / plain)
    for window in (100, 1000):
        end = float(np.median(ends) / np.median(plain)) / window
        print(
            f"window {window:>5}, ends included {middle + end:8.4f}x  ({low + end:.4f} to {high + end:.4f})", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--evidence", choices=("apart", "update"), default="apart")
    given = parser.parse_args()
    on_ranks(measure, 2, given.minutes, given.evidence)


if __name__ == "__main__":
    main()
