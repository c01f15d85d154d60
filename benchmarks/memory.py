"""What the engine holds beyond plain DDP, by option: every tensor alive, counted, on each of 2 ranks over gloo.

    python benchmarks/memory.py [--quick]

A model of P = 4 MB of float32 parameters by AdamW (whose own state is 2 P). A row trains two windows with one
option and counts the storages of all tensors that are then alive, less those of the same training without hdet.
`host` and the like do not matter on a CPU, where both are one memory.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hdet


def alive() -> int:
    """Bytes of all distinct storages that Python can reach."""
    gc.collect()
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.device.type == "cpu":
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def trained(sides: int, with_hdet: bool, home: dict[str, Any], options: dict[str, Any]) -> tuple[int, int]:
    """Bytes held after five steps, and those of them that are buckets."""
    before = alive()
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(sides, sides, bias=False) for _ in range(4))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.ones(2, sides)
    engine = None
    if with_hdet:
        engine = hdet.Engine(
            replicas := hdet.distribute(model, optimizer, **home),
            [hdet.LearningRate(), hdet.WeightDecay()],
            window=2,
            **options,
        )
    for _ in range(5):
        if engine is None:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        with engine.replicas[0] as replica:
            loss = replica.model(inputs).square().mean()
            loss.backward()
        engine.share_gradients()
        optimizer.step()
        optimizer.zero_grad()
        engine.step([loss])
    return alive() - before, replicas.bytes_held if engine is not None else 0


def measure(sides: int) -> None:
    size = 4 * sides * sides * 4
    probe = hdet.Probe(lambda model, batch: model(batch).square().mean(), [torch.ones(2, sides)] * 2, at="average")
    keep = hdet.merges.Mean("keep")
    rows: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("shared gradients (the default)", {}, {}),
        ("local gradients", {}, {"gradients": "local"}),
        ("exact=True", {"exact": True}, {}),
        ("precision=torch.bfloat16", {"precision": torch.bfloat16}, {}),
        ("overlap=2, Mean('keep'), in flight", {"overlap": 2}, {"merge": keep}),
        ("Probe(at='average')", {}, {"signal": probe}),
    ]
    plain, _ = trained(sides, False, {}, {})
    if dist.get_rank() == 0:
        print(f"P = {size / 2**20:.1f} MiB; plain DDP with AdamW holds {plain / size:.2f} P")
    for name, home, options in rows:
        held, buckets = trained(sides, True, home, options)
        if dist.get_rank() == 0:
            more = (held - plain - buckets) / size
            print(f"{name:<36}{more:6.2f} P more, and buckets of {buckets / 2**20:.1f} MiB", flush=True)
    if dist.get_rank() == 0:
        print("the anchor is 3 P of it (parameters and both moments of AdamW) and lies on the host by anchor='host';")
        print("buckets grow with the model up to 2 x 16 MiB (four with precision=)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the parameters")
    run: Callable[..., None] = measure
    on_ranks(run, 2, 128 if parser.parse_args().quick else 512)


if __name__ == "__main__":
    main()
