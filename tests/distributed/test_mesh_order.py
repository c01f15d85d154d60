"""A mesh with its ranks in any order: torch sorts those of its groups, and a replica stays at its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Found, engine_of, many_ranks, one_process, outcome, sharded_over
from launch import launch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from training import batch, difference, loss_of, network, optimizer_of

import hdet
from hdet.errors import ConfigError

STEPS = 8
HOMES: dict[str, Found] = {"exact": {"exact": True}, "all-reduce": {}}


class OneUsesMore(nn.Module):
    """Whose second head has a gradient, and so an optimizer state, where it is asked for alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = network(), nn.Linear(6, 1)
        self.asked = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(inputs)
        return found + self.more(inputs) if self.asked else found


def trained(engine: hdet.Engine, failing: int | None) -> Found:
    for step in range(STEPS):
        losses = []
        for replica in engine.replicas:
            with replica:
                replica.model.asked = replica.index == 0
                loss = loss_of(replica.model, batch(step, replica.index))
                if replica.index == failing and step == 2:
                    loss = loss * float("nan")
                loss.backward()
            losses.append(loss.detach())
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        engine.step(losses)
    found = outcome(engine)
    model, optimizer = engine.hosts[0]
    found["moments"] = [optimizer.state[p][key] for p in model.parameters() for key in sorted(optimizer.state[p])]
    return found


def on_ranks() -> dict[Any, Found]:
    mesh = DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("dp",))
    found = {}
    for name, home in HOMES.items():
        for failing in (None, 0, 1):
            model = OneUsesMore()
            replicas = hdet.distribute(model, optimizer_of(model), mesh=mesh, **home)
            found[name, failing] = trained(engine_of(replicas, gradients="local", total_steps=STEPS), failing)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Found]]:
    return launch(on_ranks, 3)


@pytest.mark.parametrize("failing", [None, 0, 1])
@pytest.mark.parametrize("name", HOMES)
def test_replicas_lie_where_the_mesh_says(
    ranks: list[dict[Any, Found]], name: str, failing: int | None, assert_same: Any
) -> None:
    model = OneUsesMore()
    engine = engine_of(hdet.replicate(model, optimizer_of(model), n=3), gradients="local", total_steps=STEPS)
    expected = trained(engine, failing)
    for rank in ranks:
        found = rank[name, failing]
        assert_same(found, ranks[0][name, failing])
        for kind in ("weights", "moments"):
            assert difference(found[kind], expected[kind]) <= (0.0 if name == "exact" else 1e-6)


def sharded_on_ranks(order: list[list[int]]) -> Found | str:
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp_replicate", "dp_shard"))
    try:
        part = mesh.get_local_rank("dp_shard")
        return many_ranks(sharded_over(mesh["dp_shard"]), part=part, each=2, home={"mesh": mesh}, gradients="local")
    except ConfigError as error:
        return str(error)


def test_sharded_replicas_meet_over_the_same_shards() -> None:
    expected = one_process(2, each=2, gradients="local")
    for found in launch(sharded_on_ranks, 4, [[3, 2], [1, 0]]):
        assert difference(found["weights"], expected["weights"]) <= 1e-6


def test_sharded_replicas_that_would_meet_over_others_are_refused() -> None:
    for found in launch(sharded_on_ranks, 4, [[3, 1], [0, 2]]):
        assert "ranks of one column would hold different shards" in found


def torch_alone(order: list[list[int]]) -> float:
    """How far HSDP's step without hdet is off: its gradients are i (rank + 1) in row i."""
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    rows = torch.arange(8.0)
    expected = model.weight.detach() - 2.5 * rows[:, None]
    fully_shard(model, mesh=mesh)
    (model(torch.eye(8) * (dist.get_rank() + 1.0)) * rows).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    own = expected.chunk(2)[dist.get_group_rank(mesh.get_group("dp_shard"), dist.get_rank())]
    return difference([model.weight.detach().to_local()], [own])  # type: ignore[operator]


def test_torch_itself_mixes_shards_on_a_mesh_that_is_refused() -> None:
    """Where it no longer does, such a mesh may be right."""
    assert max(launch(torch_alone, 4, [[3, 2], [1, 0]])) <= 1e-5
    assert min(launch(torch_alone, 4, [[3, 1], [0, 2]])) > 1.0
