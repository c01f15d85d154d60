"""What hdet adds to a step of DistributedDataParallel: the same loop with and without, 2 and 4 ranks over gloo.

    python benchmarks/overhead.py [--quick]

A transformer of 0.86 M parameters by AdamW, learning rate and weight decay explored. Printed, medians:

- the share of a step that the engine's calls take between windows (`with replica`, `share_gradients`, `step`),
  in CPU time of the thread (they wait for nothing; their wall time on a shared machine is mostly other processes),
  and the wall time of a window's end (losses gathered, regression, merge, the next designs), divided by the
  window: overhead = calls / step + end / (window x step). To beat: 1.02x at a window of 100, 1.002x at 1000;
- whole steps with and without, in turns. On a shared machine this is noisy by several per cent.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet

WIDTH, LAYERS, LENGTH, BATCH, VOCABULARY = 128, 4, 64, 8, 256
BLOCK = 10
"""Steps in a turn; a window's end is measured apart."""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return found


def trainee() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Network())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def measure(turns: int) -> None:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
    plain, plain_optimizer = trainee()
    model, optimizer = trainee()
    engine = hdet.Engine(hdet.distribute(model, optimizer), [hdet.LearningRate(), hdet.WeightDecay()], window=BLOCK + 1)
    spent: list[float] = []
    ends: list[float] = []

    def alone() -> None:
        loss_of(plain, tokens).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def explored() -> None:
        clock = time.thread_time
        started = clock()
        replica = engine.replicas[0]
        replica.__enter__()
        entered = clock()
        loss = loss_of(replica.model, tokens)
        loss.backward()
        left = clock()
        replica.__exit__(None, None, None)
        engine.share_gradients()
        shared = clock()
        optimizer.step()
        optimizer.zero_grad()
        stepped, began = clock(), time.perf_counter()
        record = engine.step([loss])
        ended = clock()
        if record is None:
            spent.append((entered - started) + (shared - left) + (ended - stepped))
        else:
            ends.append(time.perf_counter() - began)

    times: dict[str, list[float]] = {"alone": [], "explored": []}
    for turn in range(turns + 1):
        for name, step in (("alone", alone), ("explored", explored)):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(BLOCK):
                step()
            if turn:
                times[name].append((time.perf_counter() - began) / BLOCK)
        dist.barrier()
        explored()  # closes the window
    if dist.get_rank():
        return
    plain_step, whole = statistics.median(times["alone"]), statistics.median(times["explored"])
    calls, end = statistics.median(spent), statistics.median(ends)
    ranks = dist.get_world_size()
    print(
        f"{ranks} ranks: a step alone {plain_step * 1e3:.1f} ms, hdet's calls {calls * 1e6:.0f} us, "
        f"a window's end {end * 1e3:.1f} ms"
    )
    for window in (100, 1000):
        print(f"{ranks} ranks: window {window:>4}  {1 + calls / plain_step + end / (window * plain_step):.4f}x")
    print(
        f"{ranks} ranks: whole steps between windows, with over without {whole / plain_step:.3f}x (noise included)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 turns instead of 20")
    turns = 3 if parser.parse_args().quick else 20
    for ranks in (2, 4):
        on_ranks(measure, ranks, turns)


if __name__ == "__main__":
    main()
