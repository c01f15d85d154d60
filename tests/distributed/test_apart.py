"""Ranks that come apart in silence are noticed; one rank's infinity stays its own. Real processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from training import batch, batch_normed, loss_of, network, optimizer_of, probe, weights

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError, StepError
from hdet.spreads import TwoLevel

STEPS, WINDOW = 12, 4
Found = dict[str, Any]


def still() -> list[hdet.Knob]:
    return [hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold())]


def engine_of(home: hdet.replicas.Replicas, **options: Any) -> hdet.Engine:
    return hdet.Engine(home, still(), **{"window": WINDOW, "total_steps": STEPS, **options})


def train(
    engine: hdet.Engine,
    *,
    model_of: Callable[[nn.Module], nn.Module] = lambda model: model,
    quiet: Callable[[nn.Module], Any] = lambda model: nullcontext(),
    share: bool = True,
    passes: int = 1,
    before_update: Callable[[int], object] = lambda step: None,
    after_update: Callable[[int], object] = lambda step: None,
) -> str:
    """Train to the end. Returns the error that ended it before, if one did."""
    try:
        for step in range(STEPS):
            losses = []
            for replica in engine.replicas:
                with replica, quiet(replica.model):
                    for number in range(passes):
                        loss = loss_of(model_of(replica.model), batch(step, 10 * replica.index + number)) / passes
                        loss.backward()
                losses.append(loss.detach())
            if share:
                engine.share_gradients()
            else:
                engine.gradients_are_shared()
            before_update(step)
            for optimizer in engine.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            after_update(step)
            engine.step(losses)
    except StepError as error:
        return str(error)
    return ""


def data_parallel() -> tuple[DistributedDataParallel, hdet.Engine]:
    model = DistributedDataParallel(network())
    return model, engine_of(hdet.distribute(model, optimizer_of(model)))


def recipe() -> Found:
    """The recipe on a wrapped model whose backward never averages gradients."""
    model = DistributedDataParallel(network())
    optimizer = optimizer_of(model)
    found: Found = {}
    with pytest.raises(ConfigError) as caught:
        hdet.recommended(model, optimizer, total_steps=STEPS, probe=probe(), quiet=True)
    found["alone"] = str(caught.value)
    home = hdet.distribute(model, optimizer)
    engine = hdet.recommended(model, optimizer, total_steps=STEPS, probe=probe(), quiet=True, replicas=home)
    found["error"] = train(engine, quiet=lambda model: model.no_sync())
    return found


def joined() -> str:
    """What the first step says where ranks may make different numbers of steps."""
    model, engine = data_parallel()
    with Join([model]):  # type: ignore[list-item]
        return train(engine)


def refused() -> Found:
    found: Found = {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made: dict[str, Callable[[], nn.Module]] = {
        "DistributedDataParallel": lambda: DistributedDataParallel(network()),
        "a part of the model": lambda: nn.Sequential(DistributedDataParallel(network())),
        "fully_shard": lambda: fully_shard(network(), mesh=mesh),
    }
    for name, make in made.items():
        for call in (hdet.replicate, hdet.micro_batches):
            model = make()
            try:
                call(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
                found[name, call.__name__] = ""
            except ConfigError as error:
                found[name, call.__name__] = str(error)
    pipeline = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "pp"))
    stage = PipelineStage(network(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    for name, model, given in (("mesh", network(), pipeline), ("stage", stage, None)):
        with pytest.raises(ConfigError) as caught:
            hdet.distribute(model, optimizer_of(network()), mesh=given)
        found["pipeline", name] = str(caught.value)
    plain = network()
    found["plain"] = hdet.micro_batches(plain, optimizer_of(plain), 2).size
    return found


def one_nudged() -> Found:
    """One rank's weights are off by a rounding: no error, and the merge makes them one again."""
    model, engine = data_parallel()

    def after_update(step: int) -> None:
        if step == WINDOW + 1 and dist.get_rank() == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0 + 2.0**-23)

    error = train(engine, after_update=after_update)
    return {"error": error, "weights": weights(engine)[0], "merged": [record.merged for record in engine.history]}


def warm_start() -> Found:
    model = DistributedDataParallel(network())
    home = hdet.distribute(model, optimizer_of(model))
    engine = engine_of(home)
    hdet.perturb(home, noise=0.1)
    return {"error": train(engine), "weights": weights(engine)[0]}


def spiked(gradients: str) -> Found:
    """A gradient of rank 1 is finite, and its square is not."""
    model = DistributedDataParallel(network())
    optimizer = optimizer_of(model)
    knob = hdet.LearningRate(spread=TwoLevel(0.3), controller=Hold())
    engine = hdet.Engine(
        hdet.distribute(model, optimizer), [knob], window=WINDOW, total_steps=STEPS, gradients=gradients
    )

    def before_update(step: int) -> None:
        if step == WINDOW + 1 and dist.get_rank() == 1:
            next(iter(model.parameters())).grad[0, 0] = 1e22  # type: ignore[index]

    train(engine, before_update=before_update)
    states = [t for state in optimizer.state.values() for t in state.values()]
    return {
        "faults": [record.faults for record in engine.history],
        "finite": all(bool(t.isfinite().all()) for t in (*model.parameters(), *states)),
    }


def infinite_statistic() -> Found:
    model = DistributedDataParallel(batch_normed())
    knob = hdet.LearningRate(spread=TwoLevel(0.3), controller=Hold())
    engine = hdet.Engine(hdet.distribute(model, optimizer_of(model)), [knob], window=WINDOW, total_steps=STEPS)

    def after_update(step: int) -> None:
        if step == WINDOW + 1 and dist.get_rank() == 0:
            dict(model.named_buffers())["module.1.running_var"][0] = math.inf

    train(engine, after_update=after_update)
    return {
        "faults": [record.faults for record in engine.history],
        "buffers": [buffer.clone() for buffer in model.buffers()],
    }


def two_ranks() -> Found:
    found: Found = {}
    found["no_sync"] = train(data_parallel()[1], quiet=lambda model: model.no_sync())
    found["inner module"] = train(data_parallel()[1], model_of=lambda model: model.module)
    plain = network()
    found["not shared"] = train(engine_of(hdet.distribute(plain, optimizer_of(plain))), share=False)
    _, engine = data_parallel()
    found["accumulated"] = train(engine, passes=2)
    seats = DistributedDataParallel(network())
    home = hdet.distribute(seats, optimizer_of(seats), micro_batches=2)
    found["micro-batches"] = train(engine_of(home), model_of=lambda model: model.module)
    one = network()
    copies = engine_of(hdet.distribute(one, optimizer_of(one), copies=2))

    def forget_one(step: int) -> None:
        copies.optimizers[1].zero_grad()

    found["one optimizer not stepped"] = train(copies, before_update=forget_one)
    found["joined"] = joined()
    found["recipe"] = recipe()
    found["refused"] = refused()
    found["nudged"] = one_nudged()
    found["warm start"] = warm_start()
    found["local spike"] = spiked("local")
    found["statistic"] = infinite_statistic()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return launch(two_ranks, 2)


@pytest.mark.parametrize(
    "name", ["no_sync", "inner module", "not shared", "micro-batches", "one optimizer not stepped"]
)
def test_ranks_that_never_share_gradients_end_with_an_error_that_says_so(ranks: list[Found], name: str) -> None:
    for found in ranks:
        assert "come apart in the window that ended at step 4" in found[name]
        assert "last backward of every step outside no_sync()" in found[name]
        assert "engine.share_gradients()" in found[name]
    assert ranks[0][name] == ranks[1][name]


def test_ranks_that_may_make_different_numbers_of_steps_are_refused_in_the_first(ranks: list[Found]) -> None:
    """Else those with more batches wait at a window's end, until the group's timeout, for one that is done."""
    for found in ranks:
        assert "lets ranks make different numbers of steps" in found["joined"]


def test_gradients_that_are_accumulated_and_averaged_are_no_error(ranks: list[Found]) -> None:
    assert [found["accumulated"] for found in ranks] == ["", ""]


def test_the_recipe_on_a_wrapped_model_needs_the_ranks_and_sees_that_they_come_apart(ranks: list[Found]) -> None:
    for found in ranks:
        assert "averages the model's gradients over 2 ranks" in found["recipe"]["alone"]
        assert "hdet.distribute(model, optimizer)" in found["recipe"]["alone"]
        assert "have come apart" in found["recipe"]["error"]


@pytest.mark.parametrize("call", ["replicate", "micro_batches"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("DistributedDataParallel", "averages the model's gradients over 2 ranks"),
        ("a part of the model", "averages the model's gradients over 2 ranks"),
        ("fully_shard", "0.weight lies on a mesh of 2 ranks"),
    ],
)
def test_a_model_that_other_ranks_train_too_is_never_explored_by_engines_apart(
    ranks: list[Found], name: str, said: str, call: str
) -> None:
    for found in ranks:
        assert said in found["refused"][name, call]
        assert f"hdet.{call} makes replicas for this process alone" in found["refused"][name, call]
        assert found["refused"]["plain"] == 2


@pytest.mark.parametrize(
    ("name", "said"), [("mesh", "the mesh has a dimension 'pp'"), ("stage", "PipelineStage is one")]
)
def test_pipelines_of_stages_are_refused_by_name(ranks: list[Found], name: str, said: str) -> None:
    for found in ranks:
        assert f"does not explore pipelines of stages on several ranks ({said})" in found["refused"]["pipeline", name]


def test_a_rounding_is_no_error_and_is_merged_away(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["nudged"]["error"] == ""
        assert found["nudged"]["merged"] == [True, True, False]
    assert all(map(torch.equal, ranks[0]["nudged"]["weights"], ranks[1]["nudged"]["weights"]))


def test_a_warm_noisy_start_is_apart_on_purpose_and_merged(ranks: list[Found]) -> None:
    assert [found["warm start"]["error"] for found in ranks] == ["", ""]
    assert all(map(torch.equal, ranks[0]["warm start"]["weights"], ranks[1]["warm start"]["weights"]))


def test_a_moment_that_overflows_on_one_rank_fails_that_rank_only(ranks: list[Found]) -> None:
    for found in ranks:
        first, second, third = found["local spike"]["faults"]
        assert (first, third) == ([], [])
        assert second == [{"kind": "non_finite", "replica": 1, "step": 7, "where": "optimizer state"}]
        assert found["local spike"]["finite"]


def test_a_batch_statistic_that_overflows_on_one_rank_reaches_no_other(ranks: list[Found]) -> None:
    for found in ranks:
        assert [len(faults) for faults in found["statistic"]["faults"]] == [0, 1, 0]
        assert found["statistic"]["faults"][1][0]["where"] == "buffers"
        assert all(bool(buffer.isfinite().all()) for buffer in found["statistic"]["buffers"])
    assert all(map(torch.equal, ranks[0]["statistic"]["buffers"], ranks[1]["statistic"]["buffers"]))
