"""Whole steps under DistributedDataParallel with hdet over without, on one model in one run, 2 ranks over gloo.

    python benchmarks/whole_step.py [--minutes 10] [--evidence apart|update] [--merge average|keep] [--quick]

A GPT of a million parameters by AdamW. Steps come in threes, in random order: with hdet's calls, without, and without
again. Time is CPU time of both ranks' processes: waiting for another process on a shared machine does not count. What
hdet adds is told in two ways, each with a 95 % interval (bootstrap):

- hdet's own calls inside the steps are timed, of which a few hundred tell to a microsecond. What intervals of nothing
  take at the same places in the steps without is subtracted: where operators have filled the caches, whatever Python
  comes next is slow, and so is the clock. Together with a window's end the calls are printed as a share of the step, at
  windows of 100 and 1000 steps; evaluations of the probe apart. Weights are averaged in every other step here: a
  window of W steps is worked out from steps that do and steps that do not, as many as it would have of each.
- Whole steps with over whole steps without also have what hdet costs outside its calls: a processor's caches are full
  of other things after them. These ratios are much noisier; without over without shows how much.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Literal

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
from hdet.replicas.average import ENOUGH

WIDTH, DEPTH, CONTEXT, BATCH = 128, 5, 64, 16
WINDOW = 20
"""Steps with hdet between two measured ends of a window."""
STRIDE = 2
"""Of the averaged weights."""

KINDS = ("with", "without", "without again")


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class TimedProbe:
    """The probe's loss, and the CPU seconds of this process that it has taken so far."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, model: nn.Module, tokens: Tensor) -> Tensor:
        began = time.process_time()
        loss = loss_of(model, tokens)
        self.seconds += time.process_time() - began
        return loss


def engine_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    evidence: str,
    merge: Literal["average", "keep"],
    probe: TimedProbe,
    held_out: list[Tensor],
) -> hdet.Engine:
    """Rate and decay, from replicas that come apart, or read off the updates of ranks that stay alike."""
    knobs: list[Knob] = [hdet.LearningRate(), hdet.WeightDecay()]
    signal = None
    if evidence == "update":
        knobs = [
            hdet.LearningRate(evidence=hdet.evidence.Line(stride=STRIDE)),
            hdet.WeightDecay(evidence=hdet.evidence.Analytic(stride=STRIDE)),
        ]
        signal = hdet.Probe(probe, held_out)
    mean = hdet.merges.Mean(merge)
    return hdet.Engine(hdet.distribute(model, optimizer), knobs, window=WINDOW, signal=signal, merge=mean)


def measure(minutes: float, evidence: str, merge: Literal["average", "keep"]) -> None:
    torch.manual_seed(0)
    network = GPT(
        width=WIDTH, depth=DEPTH, heads=4, context=CONTEXT, dropout=0.0, generator=torch.Generator().manual_seed(0)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=drawn) for _ in range(4)]
    probe = TimedProbe()
    engine = engine_of(model, optimizer, evidence, merge, probe, batches[:2])
    tokens = batches[2]
    clock = time.thread_time
    # CPU seconds of the last step: entering the replica, leaving it, and after the update; and as many empty intervals.
    calls = nothing = 0.0
    ended = [0.0, 0.0]  # CPU seconds of a window's end beyond the probe, and of the probe; 0 where none has ended

    def plain() -> None:
        nonlocal nothing
        times = [clock()]
        times.append(clock())
        loss_of(model, tokens).backward()
        times.append(clock())
        times.append(clock())
        optimizer.step()
        optimizer.zero_grad()
        times.append(clock())
        times.append(clock())
        nothing = sum(np.diff(times)[::2].tolist())

    def searched() -> None:
        nonlocal calls, ended
        replica = engine.replicas[0]
        times = [clock()]
        replica.__enter__()
        times.append(clock())
        loss = loss_of(replica.model, tokens)
        loss.backward()
        times.append(clock())
        replica.__exit__(None, None, None)
        engine.share_gradients()
        times.append(clock())
        optimizer.step()
        optimizer.zero_grad()
        began, probed = time.process_time(), probe.seconds
        times.append(clock())
        closed = engine.step([loss])
        times.append(clock())
        calls = sum(np.diff(times)[::2].tolist())
        probed = probe.seconds - probed
        ended = [time.process_time() - began - probed, probed] if closed is not None else [0.0, 0.0]

    steps: dict[str, Callable[[], None]] = {"with": searched, "without": plain, "without again": plain}
    order = random.Random(0)
    rows: list[list[float]] = []
    ends: list[list[float]] = []
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
            ends.append(ended)
        else:
            averaged = float(engine.step_count % WINDOW % STRIDE == 0)
            rows.append([*(spent[kind] for kind in KINDS), calls, nothing, averaged])
    told = torch.tensor(rows, dtype=torch.float64)
    closing = torch.tensor(ends, dtype=torch.float64).reshape(-1, len(ended))
    for own in (told, closing):
        dist.all_reduce(own)
        own /= dist.get_world_size()
    if dist.get_rank() == 0:
        report(sum(p.numel() for p in network.parameters()), evidence, told.numpy(), closing.numpy())


def _goes_on(own: bool) -> bool:
    """Whether there is time left, by rank 0's clock."""
    flag = torch.tensor([own])
    dist.broadcast(flag, 0)
    return bool(flag)


def interval(statistic: Callable[..., float], *samples: NDArray[np.float64]) -> tuple[float, float, float]:
    """A statistic of samples, and the 2.5 and 97.5 percentiles of what it is of 1,000 resamples of each."""
    drawn = np.random.default_rng(0)
    again = [statistic(*(own[drawn.integers(len(own), size=len(own))] for own in samples)) for _ in range(1_000)]
    low, high = np.percentile(again, [2.5, 97.5])
    return statistic(*samples), float(low), float(high)


def line(name: str, unit: str, digits: int, told: tuple[float, float, float]) -> None:
    value, low, high = (f"{number:.{digits}f}" for number in told)
    print(f"{name:<44}{value:>10}{unit}  ({low} to {high})", flush=True)


def report(parameters: int, evidence: str, rows: NDArray[np.float64], ends: NDArray[np.float64]) -> None:
    """Print what was measured.

    Args:
        rows: CPU seconds of the three kinds of step, calls and nothing, and 1 where weights were averaged.
        ends: CPU seconds of ends of windows, and of the probe in them.
    """
    print(f"{parameters:,} parameters, {BATCH * CONTEXT} tokens a rank and step, evidence: {evidence}")
    print(f"{len(rows):,} threes of steps, {len(ends)} window ends; CPU time, mean of {dist.get_world_size()} ranks")
    searched, once, again, timed, nothing, averaged = rows.T
    plain, calls = (once + again) / 2, timed - nothing
    light, heavy = calls[averaged == 0.0], calls[averaged == 1.0]

    def mean(own: NDArray[np.float64]) -> float:
        return 1e3 * float(own.mean())

    def added(window: int) -> Callable[..., float]:
        share = 1.0 / max(1, window // ENOUGH)

        def of_a_step(*samples: NDArray[np.float64]) -> float:
            light, heavy, end, plain = (own.mean() for own in samples)
            return float(1.0 + ((1.0 - share) * light + share * heavy + end / window) / plain)

        return of_a_step

    line("a step without", " ms", 2, interval(mean, plain))
    line("hdet's calls in a step", " ms", 4, interval(mean, light))
    line("the same where weights are averaged, if any", " ms", 4, interval(mean, heavy))
    line("as many intervals of nothing, subtracted", " ms", 4, interval(mean, nothing))
    if len(ends):
        beyond, probing = ends.T
        line("a window's end beyond the probe", " ms", 2, interval(mean, beyond))
        line("its evaluations of the probe", " ms", 2, interval(mean, probing))
        for window in (100, 1000):
            line(f"W = {window}, by the calls", "x", 5, interval(added(window), light, heavy, beyond, plain))
            if probing.any():
                whole = beyond + probing
                line(f"W = {window}, the probe included", "x", 5, interval(added(window), light, heavy, whole, plain))
    else:
        print("no window has ended: give it more minutes")
    pairs = np.stack([searched, plain]), np.stack([once, again])
    for name, (one, other) in zip(("whole steps, with / without", "without / without"), pairs, strict=True):
        line(name, "x", 4, interval(lambda own: float(np.median(own)), one / other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--evidence", choices=("apart", "update"), default="apart")
    parser.add_argument("--merge", choices=("average", "keep"), default="average", help="of the optimizer's state")
    parser.add_argument("--quick", action="store_true", help="half a minute")
    given = parser.parse_args()
    on_ranks(measure, 2, 0.5 if given.quick else given.minutes, given.evidence, given.merge)


if __name__ == "__main__":
    main()
