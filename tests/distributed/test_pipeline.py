"""Two replicas of a pipeline of two stages: it trains, and hdet refuses it by name however it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.errors import ConfigError

STEPS, EXAMPLES, WIDTH = 30, 16, 6


def mean_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def pipeline(mesh: DeviceMesh) -> tuple[nn.Module, ScheduleGPipe]:
    """This rank's stage, of the same shapes as the other."""
    number = mesh.get_local_rank("pp")
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    return model, ScheduleGPipe(stage, n_microbatches=4, loss_fn=mean_squared_error)


def trained(mesh: DeviceMesh, model: nn.Module, schedule: ScheduleGPipe) -> list[float]:
    """The losses of a loop that shares gradients between a stage's replicas, on the last stage."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses: list[float] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("dp"))
        x = torch.randn(EXAMPLES, WIDTH, generator=generator)
        optimizer.zero_grad()
        if mesh.get_local_rank("pp") == 0:
            schedule.step(x)
        else:
            found: list[Tensor] = []
            schedule.step(target=0.5 * x.flip(1).tanh(), losses=found)
            losses.append(float(torch.stack(found).detach().mean()))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        optimizer.step()
    return losses


def refused(ask: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        ask()
    return str(caught.value)


def run() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    plain, schedule = pipeline(mesh)
    losses = trained(mesh, plain, schedule)
    model = DistributedDataParallel(plain, process_group=mesh.get_group("dp"))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    probe = hdet.Probe(lambda model, x: model(x).square().mean(1), [torch.ones(8, WIDTH)])
    asked: dict[str, Callable[[], object]] = {
        "the mesh has a dimension 'pp'": lambda: hdet.distribute(model, optimizer, mesh=mesh),
        "wrapped": lambda: hdet.distribute(model, optimizer, group=mesh.get_group("dp")),
        "plain": lambda: hdet.distribute(plain, optimizer),
        "attached": lambda: hdet.attach(model, optimizer, probe=probe, total_steps=STEPS, quiet=True).engine,
        "attached plain": lambda: hdet.attach(plain, optimizer, probe=probe, total_steps=STEPS, quiet=True).engine,
        "the recipe": lambda: hdet.recommended(
            model, optimizer, total_steps=STEPS, probe=probe, quiet=True, replicas=hdet.distribute(model, optimizer)
        ),
    }
    said = {name: refused(ask) for name, ask in asked.items()}
    same = all(torch.equal(own, before) for own, before in zip(model.parameters(), weights, strict=True))
    return {"losses": losses, "said": said, "same": same, "stage": mesh.get_local_rank("pp"), "rank": dist.get_rank()}


def test_two_replicas_of_two_stages_train_and_are_refused_by_name() -> None:
    for found in launch(run, 4):
        if found["stage"] == 1:
            assert found["losses"][-1] < 0.5 * found["losses"][0]
        for name, said in found["said"].items():
            what = name if "mesh" in name else f"the model is stage {found['stage']} of 2"
            assert f"does not explore pipelines of stages on several ranks ({what})" in said, name
        assert found["same"], "nothing was sent over a stage's weights"
