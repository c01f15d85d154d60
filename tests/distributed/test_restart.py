"""Ranks that begin anew from their first weights: real processes, and one of them is like the other afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training import network, probe, train

import hdet
from hdet.controllers import Calibrate
from hdet.schedules import Cosine

STEPS, WINDOW = 240, 8
HOMES = ["ddp", "ddp, noisy start", "plain, noisy start", "fsdp"]
Found = dict[str, Any]


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def begun_anew(home: str) -> Found:
    model = network()
    if home == "fsdp":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(model, mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=10.0, weight_decay=0.0)
    if home == "fsdp":
        replicas = hdet.distribute(model, optimizer, mesh=mesh)
    else:
        replicas = hdet.distribute(DistributedDataParallel(model) if "ddp" in home else model, optimizer)
    if "noisy" in home:
        hdet.perturb(replicas, 0.01)
    knob = hdet.LearningRate(
        schedule=Cosine(10.0, STEPS, warmup=0.5),
        bounds=(0.0, 1e4),
        controller=Calibrate(),
        evidence=hdet.evidence.Line(),
    )
    engine = hdet.Engine(
        replicas, [knob], window=WINDOW, signal=probe(), total_steps=STEPS, guard=hdet.Rewind(overshoot=1.1)
    )
    first = whole(model)
    turns: list[tuple[int, str]] = []
    again: list[torch.Tensor] = []
    while engine.step_count < 64:
        train(engine, engine.step_count + WINDOW)
        turns += [(engine.step_count, fault["kind"]) for fault in engine.history.windows[-1].faults]
        if turns and not again:
            engine.load_state_dict(engine.state_dict())  # each rank its own, which may lie apart again
            again = whole(model)
    return {"turns": turns, "first": first, "again": again, "last": whole(model), "bases": engine.bases}


def all_homes() -> dict[str, Found]:
    return {home: begun_anew(home) for home in HOMES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Found]]:
    return launch(all_homes, 2, limit=150.0)


@pytest.mark.parametrize("home", HOMES)
def test_each_rank_begins_anew_with_what_it_began_with(ranks: list[dict[str, Found]], home: str) -> None:
    for rank in ranks:
        found = rank[home]
        assert [kind for _, kind in found["turns"]][:1] == ["restarted"]
        for again, first in zip(found["again"], found["first"], strict=True):
            assert torch.equal(again, first)
    assert ranks[0][home]["turns"] == ranks[1][home]["turns"]


@pytest.mark.parametrize("home", HOMES)
def test_ranks_come_together_after_a_new_start_as_after_the_first(ranks: list[dict[str, Found]], home: str) -> None:
    """Where they began with noise of their own (`hdet.perturb`), too."""
    one, other = (rank[home] for rank in ranks)
    assert one["bases"] == other["bases"]
    for ours, theirs in zip(one["last"], other["last"], strict=True):
        assert torch.equal(ours, theirs)
    apart = any(not torch.equal(a, b) for a, b in zip(one["first"], other["first"], strict=True))
    assert apart == ("noisy" in home)
