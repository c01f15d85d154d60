"""What hdet's calls take in a step, and at a window's end, beside the training itself, by the number of tensors.

    python benchmarks/per_step.py [--quick]

Tensors are tiny, so that time is that of calls and not of arithmetic: CPU time of the thread, medians over steps. Each
row is one part of a step in one setup, at 300 and at 2,000 tensors. To add a row, add a function to `ROWS`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from heap import settle
from torch import Tensor, nn

import hdet
from hdet.controllers import Hold

Engine = hdet.Engine
TENSORS = (300, 2_000)


class Many(nn.Module):
    """As many tensors of 8 numbers as are wanted, and a dropout."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(8) for _ in range(tensors))
        self.dropout = hdet.nn.Dropout(0.2)

    def forward(self) -> Tensor:
        return self.dropout(torch.stack(list(self.weights))).square().mean()  # type: ignore[no-any-return]


def contrast_engine(tensors: int, horizon: int, rate: float | Tensor) -> Engine:
    """Four micro-batches under AdamW; dropout explored, never moved."""
    model = Many(tensors)
    fused = isinstance(rate, Tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=fused, foreach=not fused)
    return Engine(
        hdet.micro_batches(model, optimizer, 4),
        [hdet.Dropout(evidence=hdet.evidence.Contrast(horizon=horizon, refresh=10_000), controller=Hold())],
        window=40,
        signal=hdet.Probe(lambda model, scale: model() * scale, [1.0, 1.1]),
    )


def steps(engine: Engine, count: int) -> Iterator[dict[str, float]]:
    """Seconds that the parts of each step took, but for steps that end a window."""
    clock = time.thread_time
    for _ in range(count):
        spent = {"entering a pass": 0.0, "leaving a pass": 0.0}
        losses = []
        for replica in engine.replicas:
            began = clock()
            replica.__enter__()
            spent["entering a pass"] += (clock() - began) / len(engine.replicas)
            loss = replica.model()
            loss.backward()
            settle()
            began = clock()
            replica.__exit__(None, None, None)
            spent["leaving a pass"] += (clock() - began) / len(engine.replicas)
            losses.append(loss.detach())
        engine.share_gradients()
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        settle()
        began = clock()
        record = engine.step(losses)
        spent["engine.step"] = clock() - began
        if record is None:
            yield spent


def contrast(horizon: int, rate: float | Tensor) -> Callable[[int, int], dict[str, float]]:
    """Medians over the window that follows the first, in which Adam has a state to read."""

    def measured(tensors: int, count: int) -> dict[str, float]:
        engine = contrast_engine(tensors, horizon, rate)
        for _ in steps(engine, 41):
            pass
        spent = list(steps(engine, count))
        return {part: statistics.median(one[part] for one in spent) for part in spent[0]}

    return measured


def updates(tensors: int, count: int) -> dict[str, float]:
    """Learning rate and decay by `Line` and `Analytic`, one micro-batch, so nothing to share; calls repeated alone."""
    model = Many(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = Engine(
        hdet.micro_batches(model, optimizer, 1),
        [
            hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold()),
            hdet.WeightDecay(evidence=hdet.evidence.Analytic(), controller=Hold()),
        ],
        window=count + 10,
        signal=hdet.Probe(lambda model, scale: model() * scale, [1.0, 1.1]),
    )
    loss, clock = torch.ones(()), time.thread_time
    spent: dict[str, list[float]] = {"share_gradients": [], "engine.step": []}
    for _ in range(count + 5):
        began = clock()
        engine.share_gradients()
        shared = clock()
        engine.step([loss])
        spent["engine.step"].append(clock() - shared)
        spent["share_gradients"].append(shared - began)
    return {part: statistics.median(own[5:]) for part, own in spent.items()}


def window_ends(tensors: int, count: int) -> dict[str, float]:
    """The recipe's rates and decay, and its guard: a window's end beside the forward passes of the probe."""
    clock = time.thread_time
    probing = 0.0

    def loss(model: nn.Module, scale: float) -> Tensor:
        nonlocal probing
        began = clock()
        found: Tensor = model() * scale
        probing += clock() - began
        return found

    model = Many(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = Engine(
        hdet.micro_batches(model, optimizer, 1),
        [
            hdet.LearningRate(evidence=hdet.evidence.Line(read_average_above=None), controller=Hold()),
            hdet.WeightDecay(evidence=hdet.evidence.Analytic(), controller=Hold()),
        ],
        window=2,
        signal=hdet.Probe(loss, [1.0, 1.1]),
        guard=hdet.Rewind(),
    )
    spent: dict[str, list[float]] = {"beyond the probes": [], "the probes": []}
    for _ in range(2 * max(3, count // 5)):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        probing, began = 0.0, clock()
        record = engine.step([torch.ones(())])
        taken = clock() - began
        if record is not None:
            spent["beyond the probes"].append(taken - probing)
            spent["the probes"].append(probing)
    return {part: statistics.median(own[1:]) for part, own in spent.items()}


ROWS: dict[str, Callable[[int, int], dict[str, float]]] = {
    "Line() and Analytic()": updates,
    "a window's end": window_ends,
    "Contrast(horizon=400)": contrast(400, 1e-3),
    "Contrast(horizon=400), tensor rate": contrast(400, torch.tensor(1e-3)),
    "Contrast()": contrast(0, 1e-3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=ROWS, help="this one alone")
    parser.add_argument("--quick", action="store_true", help="5 steps instead of 30")
    given = parser.parse_args()
    count = 5 if given.quick else 30
    torch.set_num_threads(1)
    print(f"{'ms':<56}" + "".join(f"{tensors:>8,}" for tensors in TENSORS))
    for name, measure in ROWS.items():
        if given.row not in (None, name):
            continue
        found = [measure(tensors, count) for tensors in TENSORS]
        for part in found[0]:
            print(f"{name + ', ' + part:<56}" + "".join(f"{1e3 * one[part]:8.3f}" for one in found), flush=True)


if __name__ == "__main__":
    main()
