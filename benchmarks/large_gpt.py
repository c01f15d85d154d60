"""A GPT of 125 million or a billion parameters with hdet and without: time of a step, and waits for the device.

    python benchmarks/large_gpt.py [--size tiny|deep|125M|1B] [--device cuda] [--window 100] [--turns 5] [--quick]
    python benchmarks/large_gpt.py --rates --size 125M --device cuda      # what a rate for each matrix costs

One model under fused AdamW (with bfloat16 autocast on a GPU), its rate and decay read off its own updates (`Line`,
`Analytic`) with the guard, as the recipe sets them up where nothing else is explored. Windows with hdet and as many
plain steps take turns. Time is wall time up to the end of all kernels on a GPU, and CPU time of the process elsewhere.

Printed: a plain step, a step with hdet between window ends over it (median, least and most of the turns), a window's
end beyond a step, all of it together at this window and at 1000 steps, and what waits for the device: on a GPU the
synchronising calls that the driver saw and the profiler's synchronisation events, with hdet and without, between window
ends; elsewhere the reads of a tensor by the host.

With --rates three such models take turns: one without hdet, one with `hdet.attach`, and one with its
`rates="matrices"`, whose groups have eight rates between them. Printed are steps and window ends of both, as above.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from engine import gpu_clock, seen_by_driver, seen_by_torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import hdet
from hdet.app.tasks.gpt import GPT, VOCABULARY

SIZES = {
    "tiny": (64, 2, 4, 64, 4),
    "deep": (16, 18, 2, 16, 2),
    "125M": (768, 18, 12, 1024, 8),
    "1B": (2048, 20, 16, 1024, 4),
}
"""Width, depth, heads, context, and sequences in a batch. A step of "deep" is all calls, as many as of 125M."""

COUNTED, PROFILED = 20, 3
"""Steps whose waits the driver counts, and the profiler, which takes long to add up what it saw."""

SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


LONG = 20_000
"""Steps that runs are planned for, which none of them comes to."""

RATES = 8
"""Different rates that --rates gives to as many shares of the parameters."""


class Training:
    """One model that steps without hdet."""

    def __init__(self, size: str, device: str, dropout: float = 0.0, scheduled: bool = False) -> None:
        width, depth, heads, context, batch = SIZES[size]
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.model = GPT(width=width, depth=depth, heads=heads, context=context, dropout=dropout, generator=generator)
        self.model.to(device)
        self.optimizer = torch.optim.AdamW(self.groups(), lr=1e-4, weight_decay=0.1, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1e-3, 1.0, LONG) if scheduled else None
        shape = batch, context + 1
        self.batches = [torch.randint(VOCABULARY, shape, generator=generator).to(device) for _ in range(3)]
        self.probe = hdet.Probe(self.loss, self.batches[:2])

    def groups(self) -> Sequence[dict[str, Any]]:
        """As an optimizer takes them: all parameters in one."""
        return [{"params": list(self.model.parameters())}]

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def plain(self) -> None:
        self.told(self.loss(self.model, self.batches[2])).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()

    def told(self, loss: Tensor) -> Tensor:
        """The training loss, which nobody wants to know here."""
        return loss


class Searched(Training):
    """One model that steps with the engine's calls or without."""

    def __init__(self, size: str, device: str, window: int, stride: int) -> None:
        super().__init__(size, device)
        self.engine = hdet.Engine(
            hdet.micro_batches(self.model, self.optimizer, 1),
            [
                hdet.LearningRate(evidence=hdet.evidence.Line(stride=stride)),
                hdet.WeightDecay(evidence=hdet.evidence.Analytic(stride=stride)),
            ],
            window=window,
            signal=self.probe,
            guard=hdet.Rewind(),
        )

    def searched(self) -> None:
        with self.engine.replicas[0] as replica:
            loss = self.loss(replica.model, self.batches[2])
            loss.backward()
        self.engine.share_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.engine.step([loss])


class Attached(Training):
    """One model that steps with hdet's hooks: with one rate, or with one for each matrix."""

    def __init__(
        self, size: str, device: str, dropout: float, scheduled: bool, window: int, stride: int, matrices: bool
    ) -> None:
        self.cut = RATES if matrices else 1
        super().__init__(size, device, dropout, scheduled)
        self.search = hdet.attach(
            self.model,
            self.optimizer,
            probe=self.probe,
            scheduler=self.scheduler,
            total_steps=LONG,
            rates="matrices" if matrices else "together",
            window=window,
            stride=stride,
            micro_batches=1,
            quiet=True,
        )

    def told(self, loss: Tensor) -> Tensor:
        return self.search.loss(loss)

    def groups(self) -> Sequence[dict[str, Any]]:
        """Every so many-th parameter, at rates 2 ** (1 / 4) apart."""
        held = list(self.model.parameters())
        return [{"params": held[place :: self.cut], "lr": 1e-4 * 2 ** (place / 4)} for place in range(self.cut)]


def repeated(step: Callable[[], None], count: int) -> Callable[[], None]:
    def steps() -> None:
        for _ in range(count):
            step()

    return steps


def seconds(call: Callable[[], None], clock: Callable[[], float]) -> float:
    began = clock()
    call()
    return clock() - began


def synchronisations(call: Callable[[], None]) -> int:
    """What the profiler saw of a host that waits for its GPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
    return sum(event.count for event in seen.key_averages() if event.key in SYNCHRONISING)


def told(numbers: list[float]) -> str:
    return f"{np.median(numbers):.5f}x  ({min(numbers):.5f} to {max(numbers):.5f})"


def compare(
    plainly: Training,
    searched: dict[str, Callable[[], None]],
    window: int,
    turns: int,
    clock: Callable[[], float],
    where: str,
) -> None:
    """Print what steps and window ends cost with hdet, by its name, beside steps without."""
    for step in (plainly.plain, *searched.values()):  # the first windows take memory that the others keep
        repeated(step, 2 * window)()
    plain: list[float] = []
    between: dict[str, list[float]] = {name: [] for name in searched}
    ends: dict[str, list[float]] = {name: [] for name in searched}
    for _ in range(turns):
        for name, step in searched.items():
            between[name].append(seconds(repeated(step, window - 1), clock) / (window - 1))
            ends[name].append(seconds(step, clock) - between[name][-1])
        plain.append(seconds(repeated(plainly.plain, window), clock) / window)
    count = sum(parameter.numel() for parameter in plainly.model.parameters())
    print(f"{count:,} parameters, {plainly.batches[2][:, 1:].numel()} tokens a step, window {window}, on {where}")
    print(f"a plain step: {1e3 * float(np.median(plain)):.2f} ms")
    for name in searched:
        own, end = between[name], ends[name]
        print(f"{name}: a window's end: {1e3 * float(np.median(end)):.1f} ms")
        print("  a step beside one without:", told([ours / of for ours, of in zip(own, plain, strict=True)]))
        for length in (window, 1000):
            whole = [(ours + last / length) / of for ours, last, of in zip(own, end, plain, strict=True)]
            print(f"  W = {length}, the end with its probes included:", told(whole))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--window", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--stride", type=int, default=1, help="of the averages of weights")
    parser.add_argument("--rates", action="store_true", help="one rate and one for each matrix, both attached")
    parser.add_argument("--dropout", type=float, default=0.0, help="with --rates: of the model, and explored")
    parser.add_argument("--scheduler", action="store_true", help="with --rates: torch's own drives the rate")
    parser.add_argument("--quick", action="store_true", help="2 turns of windows of 20 steps")
    given = parser.parse_args()
    window, turns = (20, 2) if given.quick else (given.window, given.turns)
    clock = gpu_clock if given.device == "cuda" else time.process_time
    where = torch.cuda.get_device_name() if given.device == "cuda" else "a CPU, one thread"
    torch.set_num_threads(1)
    if given.rates:
        setup = given.size, given.device, given.dropout, given.scheduler
        plainly = Training(*setup)
        one, each = (Attached(*setup, window, given.stride, matrices) for matrices in (False, True))
        compare(plainly, {"one rate": one.plain, "a rate for each matrix": each.plain}, window, turns, clock, where)
        return
    training = Searched(given.size, given.device, window, given.stride)
    compare(training, {"hdet": training.searched}, window, turns, clock, where)

    seen = seen_by_driver if given.device == "cuda" else seen_by_torch
    name = "synchronising calls that the driver saw" if given.device == "cuda" else "reads of a tensor by the host"
    counted = min(COUNTED, window - 1)
    with_hdet = seen(repeated(training.searched, counted))
    repeated(training.searched, window - 1 - counted)()
    at_end = seen(training.searched)
    without = seen(repeated(training.plain, counted))
    print(f"{name}: {with_hdet} in {counted} steps with hdet, {without} in as many without, {at_end} at a window end")
    if given.device == "cuda":
        with_hdet = synchronisations(repeated(training.searched, PROFILED))
        without = synchronisations(repeated(training.plain, PROFILED))
        print(f"synchronisations that the profiler saw: {with_hdet} in {PROFILED} with hdet, {without} without")


if __name__ == "__main__":
    main()
