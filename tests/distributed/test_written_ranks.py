"""Frozen parameters that somebody writes, as a teacher's, where replicas train apart on ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import batch_normed, network, optimizer_of, train

import hdet
from hdet.errors import StepError
from hdet.replicas.distributed import buffer_mean

Found = dict[str, Any]


class Taught(nn.Module):
    """A student, a teacher that the loop moves, and frozen weights that nobody means to move."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher, self.base = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.packed = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
        self.teacher.requires_grad_(False)
        self.base.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.student(self.base(inputs))
        return found


def taught() -> list[Found]:
    """What a rank's frozen parameters are after each of two merges."""
    torch.manual_seed(1)
    rank, model = dist.get_rank(), Taught()
    base, start = model.base.weight.clone(), model.teacher.weight[0, 0].item()
    replicas = hdet.distribute(model, optimizer_of(model.student))
    engine = hdet.Engine(replicas, [hdet.LearningRate()], window=2, total_steps=4, gradients="local")
    found = []
    for step in range(1, 5):
        train(engine, step)
        if step % 2 == 0:
            held = model.teacher.weight[0, 0].item(), model.teacher.bias[0].item(), model.packed.tolist()
            found.append({"held": held, "start": start, "base": torch.equal(model.base.weight, base)})
            continue
        with torch.no_grad():
            model.base.weight.add_(0.0)  # it counts as written, and is alike everywhere
            model.packed.fill_(rank + 10 * step)
            if rank == 2:  # what one rank writes counts on all
                model.teacher.weight.fill_(10.0 * step)
        model.teacher.bias.data = torch.full((6,), rank + 10.0 * step)
    return found


def taught_in_parts() -> list[float]:
    """A number of a rank's part of the teacher after each merge; one of the four parts alone is written."""
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = Taught()
    del model.packed  # integers are not sharded
    fully_shard(model, mesh=mesh["dp_shard"])
    replicas = hdet.distribute(model, optimizer_of(model.student), mesh=mesh)
    engine = hdet.Engine(replicas, [hdet.LearningRate()], window=2, total_steps=4, gradients="local")
    part = model.teacher.weight.to_local()  # type: ignore[operator]
    found = [part[0, 0].item()]
    for step in range(1, 5):
        train(engine, step, parts=(mesh.get_local_rank("dp_shard"),), each=2)
        model.reshard()  # type: ignore[operator]
        if step % 2 == 0:
            found.append(part[0, 0].item())
        elif dist.get_rank() == 3:
            with torch.no_grad():
                part.add_(1.0)
    return found


def test_where_one_part_of_a_sharded_teacher_is_written_all_ranks_agree() -> None:
    parts = launch(taught_in_parts, 4)
    for rank, found in enumerate(parts):
        moved = [0.0, 0.5, 1.0] if rank in (1, 3) else [0.0, 0.0, 0.0]
        assert found == pytest.approx([found[0] + way for way in moved])


def test_frozen_parameters_that_are_written_are_merged_and_others_keep_their_bits() -> None:
    """Of three ranks, whose mean of what is alike is not always the same bits."""
    for first, second in launch(taught, 3):
        weight, bias, packed = first["held"]
        assert weight == pytest.approx((2 * first["start"] + 10.0) / 3)
        assert bias == pytest.approx(11.0)
        assert packed == [10, 10]  # the first replica's
        assert second["held"][0] == pytest.approx((2 * weight + 30.0) / 3)
        assert second["held"][1] == pytest.approx(31.0)
        assert second["held"][2] == [30, 30]
        assert first["base"]
        assert second["base"]


def grown() -> tuple[list[float], float]:
    """A rank's cache, as long as its data were, and its batch statistic after a merge."""
    rank, model = dist.get_rank(), Taught()
    model.register_buffer("mean", torch.zeros(1))
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    replicas = hdet.distribute(model, optimizer_of(model.student))
    engine = hdet.Engine(replicas, [hdet.LearningRate()], window=2, total_steps=2, gradients="local")
    train(engine, 1)
    model.mean.fill_(float(rank))  # type: ignore[operator]
    model.cache = torch.full((1 + rank,), float(rank))
    train(engine, 2)
    return model.cache.tolist(), model.mean.item()  # type: ignore[operator]


def registered_on_one_rank(others: bool) -> str:
    """What a merge says where a rank has a buffer that the other has not, beside others or as the only one."""
    model = Taught()
    if others:
        model.register_buffer("mean", torch.zeros(1))
    replicas = hdet.distribute(model, optimizer_of(model.student))
    engine = hdet.Engine(replicas, [hdet.LearningRate()], window=2, total_steps=2, gradients="local")
    train(engine, 1)
    if dist.get_rank() == 1:
        model.register_buffer("cache", torch.zeros(3))
    try:
        train(engine, 2)
    except StepError as error:
        return str(error)
    return ""


def asked_for_buffers() -> list[int]:
    """How often merges ask for buffers, of a model that has none and of one that has batch statistics."""
    counts = []
    for made in (network, batch_normed):
        model = made()
        replicas = hdet.distribute(model, optimizer_of(model))
        engine = hdet.Engine(replicas, [hdet.LearningRate()], window=2, total_steps=4, gradients="local")
        with patch.object(buffer_mean, "average", wraps=buffer_mean.average) as average:
            train(engine, 4)
        counts.append(average.call_count)
    return counts


def exploited() -> list[float]:
    """The cache of a member of a population, of which one takes the place of the other."""
    rank, model = dist.get_rank(), Taught()
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    replicas = hdet.distribute(model, optimizer_of(model.student))
    knob, merge = hdet.LearningRate(evidence=hdet.evidence.Population()), hdet.merges.Exploit()
    engine = hdet.Engine(replicas, [knob], window=2, total_steps=4, gradients="local", merge=merge)
    train(engine, 1)
    model.cache = torch.full((2 - rank,), float(rank))
    train(engine, 2)
    return model.cache.tolist()  # type: ignore[operator]


def test_whoever_takes_a_members_place_has_its_cache() -> None:
    one, other = launch(exploited, 2)
    assert one == other
    assert one in ([0.0, 0.0], [1.0])


def test_a_cache_that_grows_with_each_ranks_data_stays_its_own() -> None:
    """Collectives of other lengths on each rank end the processes."""
    assert launch(grown, 2) == [([0.0], 0.5), ([1.0, 1.0], 0.5)]


def test_merges_of_a_model_without_buffers_ask_for_none() -> None:
    assert launch(asked_for_buffers, 2) == [[0, 2]] * 2


@pytest.mark.parametrize("others", [False, True])
def test_a_buffer_that_one_rank_alone_has_is_told_on_all(others: bool) -> None:
    for said in launch(registered_on_one_rank, 2, others):
        assert "the replicas do not hold the same buffers ('cache')" in said
