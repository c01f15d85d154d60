"""No rank takes a number from a tensor between window ends, whatever shares or shards its gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cases import sharded_over
from launch import launch
from reads import Reads
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import WIDTH, batch, loss_of

import hdet
from hdet.controllers import Hold

WINDOW = 4


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), hdet.nn.Dropout(0.1), nn.Linear(16, 1))


KNOBS = {
    "line": hdet.LearningRate(evidence=hdet.evidence.Line(read_average_above=None), controller=Hold()),
    "group lines": hdet.LearningRate(evidence=hdet.evidence.GroupLines(), controller=Hold()),
    "analytic": hdet.WeightDecay(evidence=hdet.evidence.Analytic(), controller=Hold()),
    "recursion": hdet.Beta1(evidence=hdet.evidence.Recursion(), controller=Hold()),
    "contrast": hdet.Dropout(evidence=hdet.evidence.Contrast(horizon=20), controller=Hold()),
    "contrast of one window": hdet.Dropout(evidence=hdet.evidence.Contrast(refresh=2), controller=Hold()),
    "mixed": hdet.Dropout(evidence=hdet.evidence.MixedDifference(), controller=Hold()),
    "diverged": hdet.LearningRate(controller=Hold()),
}
REFUSED = {("fsdp2", name) for name in ("recursion", "contrast", "contrast of one window", "diverged")}


def read(home: str, name: str, rate: float | torch.Tensor) -> list[int]:
    """How many numbers each step of two windows takes."""
    model: nn.Module = network()
    if home == "fsdp2":
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
        model = sharded_over(mesh["shard"])(model)
        options: dict[str, Any] = {"mesh": mesh, "replicate": "replicate", "micro_batches": 2}
    else:
        model, options = DistributedDataParallel(model), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=home == "ddp")
    engine = hdet.Engine(
        hdet.distribute(model, optimizer, **options),
        [KNOBS[name]],
        window=WINDOW,
        total_steps=3 * WINDOW,
        signal=hdet.Probe(loss_of, [batch(-1 - j, 99) for j in range(2)]),
        objective=hdet.Objective(loss_of, [batch(50, 10 + j) for j in range(2)]),
    )
    counts = []
    for step in range(2 * WINDOW):
        # Step counts, rates and a loss that lie on the host are read there; test_engine_waits has those that do not.
        there = [state["step"] for state in optimizer.state.values() if "step" in state]
        there += [group["lr"] for group in optimizer.param_groups if isinstance(group["lr"], torch.Tensor)]
        with Reads(besides=there) as reads:
            losses = []
            for replica in engine.replicas:
                with replica:
                    loss = loss_of(replica.model, batch(step, replica.index))
                    loss.backward()
                losses.append(loss.detach())
            engine.share_gradients()
        optimizer.step()
        optimizer.zero_grad()
        with Reads(besides=[*there, *losses]) as after:
            engine.step(losses)
        counts.append(len(reads.seen) + len(after.seen))
    return counts


def each() -> dict[tuple[str, str, str], list[int]]:
    return {
        (home, name, kind): read(home, name, torch.tensor(0.01) if kind == "tensor rate" else 0.01)
        for home in ("ddp", "fsdp2")
        for name in KNOBS
        for kind in ("rate", "tensor rate")
        if (home, name) not in REFUSED
    }


def test_no_step_but_a_windows_last_takes_a_number() -> None:
    for found in launch(each, 2):
        for case, counts in found.items():
            # The first step of a run may look at what it was given.
            middle = [count for step, count in enumerate(counts) if step % WINDOW != WINDOW - 1][1:]
            assert middle == [0] * len(middle), f"{case}: {counts}"
        assert any(counts[WINDOW - 1] for counts in found.values())
