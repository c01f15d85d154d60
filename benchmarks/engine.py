"""What the engine costs: its work in a step, at a window's end, and how often it waits for the device.

    OMP_NUM_THREADS=1 python benchmarks/engine.py [--quick] [--device cuda]

Trains the byte-level GPT of the `text` task (0.12 million parameters) with four knobs (learning rate on a
schedule, weight decay, dropout, attention temperature) at window 50. Engine and plain loop take turns in
one run, so that a busy machine slows both; every figure is a median over the turns. On a CPU time is this
process's CPU time, on a GPU wall time up to the end of all kernels.

Prints

- engine.step between window ends against the step it belongs to, for a process that hosts one replica (a
  rank) and for one that hosts N;
- the closing of windows apart: seconds, and its share when spread over the window's steps;
- a round of N replicas against N plain training steps of one model;
- reads of device memory by the host (on a GPU: waits that the driver saw) between window ends, and at them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.overrides import TorchFunctionMode

import hdet
from hdet.app.tasks.text import Text, TextWorkload
from hdet.schedules import OneCycle
from hdet.spreads import TwoLevel

WINDOW = 50
BATCH = 16
RATE = 1e-3


class Plain:
    """One model trained as without hdet."""

    def __init__(self, workload: TextWorkload) -> None:
        self.workload = workload
        self.model, self.optimizer = build(workload)
        self.schedule = schedule()

    def step(self, number: int, batch: Tensor) -> None:
        """One training step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(number)
        self.workload.loss(self.model, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Explored:
    """The same training under an engine, its own time taken apart."""

    workload: TextWorkload
    n: int
    clock: Callable[[], float]
    own: list[float] = field(default_factory=list)
    closing: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        probe = hdet.Probe(self.workload.loss, self.workload.probe)
        spread = TwoLevel(0.1 if self.n > 1 else 0.0)
        self.engine = hdet.Engine(
            hdet.replicate(*build(self.workload), n=self.n),
            [
                hdet.LearningRate(schedule=schedule(), spread=spread),
                hdet.WeightDecay(spread=spread),
                hdet.Dropout(spread=spread),
                hdet.AttentionTemperature(spread=spread),
            ],
            window=WINDOW,
            signal=probe,
            gradients="local",
        )

    def round(self, batches: list[Tensor]) -> float:
        """One step of every replica. Returns the time of all but a window's closing."""
        began = self.clock()
        losses = []
        for replica, batch in zip(self.engine.replicas, batches, strict=True):
            with replica:
                loss = self.workload.loss(replica.model, batch)
                loss.backward()
            losses.append(loss.detach())
        self.engine.share_gradients()
        for optimizer in self.engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        before = self.clock()
        record = self.engine.step(losses)
        after = self.clock()
        if record is not None:
            self.closing.append(after - before)
            return before - began
        self.own.append(after - before)
        return after - began


def build(workload: TextWorkload) -> tuple[nn.Module, Optimizer]:
    """The model, and fused AdamW over its decay and no-decay groups."""
    model = workload.model()
    for module in model.modules():
        if isinstance(module, hdet.nn.Dropout):
            module.p = 0.1
    return model, AdamW(workload.groups(model), lr=RATE, weight_decay=0.1, fused=True)


def schedule() -> OneCycle:
    """The learning rate's, over a run far longer than this one."""
    return OneCycle(RATE, total_steps=100_000)


def one_replica(workload: TextWorkload, clock: Callable[[], float], steps: int) -> dict[str, float]:
    """What a process that hosts one replica pays."""
    plain, explored = Plain(workload), Explored(workload, 1, clock)
    batches = [workload.batch(step, 0) for step in range(steps)]
    taken = []
    for step, batch in enumerate(batches):
        began = clock()
        plain.step(step, batch)
        taken.append(clock() - began)
        explored.round([batch])
    return summary(explored, float(np.median(taken)))


def n_replicas(workload: TextWorkload, clock: Callable[[], float], steps: int, n: int) -> dict[str, float]:
    """What a process that hosts N replicas pays, per round of N steps."""
    plain, explored = Plain(workload), Explored(workload, n, clock)
    taken, rounds = [], []
    for step in range(steps):
        batches = [workload.batch(step, replica) for replica in range(n)]
        for explores in (False, True) if step % 2 else (True, False):
            if explores:
                rounds.append(explored.round(batches))
                continue
            began = clock()
            for place, batch in enumerate(batches):
                plain.step(n * step + place, batch)
            taken.append(clock() - began)
    plain_round = float(np.median(taken))
    return {**summary(explored, plain_round), "round_ratio": float(np.median(rounds)) / plain_round}


def summary(explored: Explored, step: float) -> dict[str, float]:
    """Medians in seconds, and as shares of a step (of a round, for several replicas)."""
    own, closing = float(np.median(explored.own)), float(np.median(explored.closing))
    return {
        "step": step,
        "engine_step": own,
        "engine_step_share": own / step,
        "closing": closing,
        "closing_share": closing / WINDOW / step,
    }


class Reads(TorchFunctionMode):
    """Counts the calls that take numbers from a tensor to the host, for which a GPU would be waited for."""

    counted = frozenset({"item", "tolist", "cpu", "numpy", "equal", "nonzero", "allclose"}) | frozenset(
        f"__{name}__" for name in ("bool", "float", "int", "index", "array", "contains")
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += int(getattr(func, "__name__", "") in self.counted)
        return func(*args, **(kwargs or {}))


def waits(workload: TextWorkload, n: int, device: str) -> dict[str, float]:
    """Waits for the device in all of the engine's calls: between two window ends, and at one."""
    explored = Explored(workload, n, time.perf_counter)
    engine = explored.engine
    between = at_end = 0
    for step in range(WINDOW):
        batches = [workload.batch(step, replica) for replica in range(n)]
        losses = [workload.loss(r.model, batch) for r, batch in zip(engine.replicas, batches, strict=True)]
        for loss in losses:
            loss.backward()

        def calls(losses: list[Tensor] = losses) -> None:
            for replica in engine.replicas:
                with replica:
                    pass
            engine.share_gradients()
            engine.step(losses)

        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen = seen_by_driver(calls) if device == "cuda" else seen_by_torch(calls)
        if step < WINDOW - 1:
            between += seen
        else:
            at_end = seen
    return {"waits_between_window_ends": between, "waits_at_a_window_end": at_end}


def seen_by_torch(calls: Callable[[], None]) -> int:
    """On a CPU nothing waits: count what would, were the tensors on a GPU."""
    reads = Reads()
    with reads:
        calls()
    return reads.count


def seen_by_driver(calls: Callable[[], None]) -> int:
    """On a GPU torch can warn of every synchronising call."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def gpu_clock() -> float:
    """Wall time at the end of all kernels."""
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one window instead of three")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--out", type=Path, help="also write the figures there, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    gc.disable()  # a collection that falls into one loop and not the other is no cost of either
    windows, n = (1 if given.quick else 3), given.replicas
    clock = gpu_clock if given.device == "cuda" else time.process_time
    workload = Text().build(seed=0, batch_size=BATCH, device=given.device)

    one = one_replica(workload, clock, windows * WINDOW)
    several = n_replicas(workload, clock, windows * WINDOW, n)
    waited = waits(workload, n, given.device)
    where = torch.cuda.get_device_name() if given.device == "cuda" else platform.processor() or platform.machine()
    print(f"byte GPT, {BATCH} x 64 bytes a step, 4 knobs, window {WINDOW}; torch {torch.__version__} on {where}")
    for title, found in (("one replica: a plain step", one), (f"{n} replicas in process: {n} plain steps", several)):
        print(
            f"{title} {1e3 * found['step']:.2f} ms, "
            f"engine.step {1e3 * found['engine_step']:.3f} ms = {found['engine_step_share']:.2%} of it; "
            f"closing a window {1e3 * found['closing']:.1f} ms = {found['closing_share']:.2%} of its steps"
        )
    ratio = several["round_ratio"]
    with_closing = ratio + several["closing_share"]
    print(
        f"a round of {n} replicas: {ratio:.3f} x {n} plain steps between window ends, {with_closing:.3f} x with closing"
    )
    kind = "waits that the driver saw" if given.device == "cuda" else "reads of a tensor by the host"
    print(
        f"{kind} in the engine's calls: {waited['waits_between_window_ends']} in the {WINDOW - 1} steps "
        f"between window ends, {waited['waits_at_a_window_end']} at a window end"
    )
    if given.out:
        given.out.write_text(json.dumps({"one": one, "several": several, **waited}, indent=2) + "\n")


if __name__ == "__main__":
    main()
