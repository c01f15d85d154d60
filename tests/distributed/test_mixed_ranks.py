"""Mixed differences where no rank sees a whole gradient: those of one process, and training goes on as it was."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import sharded_over
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training import WIDTH, batch, difference, loss_of, optimizer_of, told, weights

import hdet
from hdet.controllers import Controller, Gated, Hold
from hdet.errors import ConfigError
from hdet.replicas import gradients
from hdet.spreads import TwoLevel

STEPS, WINDOW = 12, 4
Found = dict[str, Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), hdet.nn.Dropout(0.3), nn.LayerNorm(16), nn.Linear(16, 1)
    )


def dropout(controller: Controller | None = None) -> hdet.Knob:
    return hdet.Dropout(evidence=hdet.evidence.MixedDifference(), controller=controller or Gated(0.1, gate=0.0))


def engine_of(replicas: hdet.replicas.Replicas, knob: hdet.Knob) -> hdet.Engine:
    return hdet.Engine(
        replicas,
        [knob],
        window=WINDOW,
        total_steps=STEPS,
        signal=hdet.Probe(loss_of, [batch(-1 - j, 99) for j in range(4)]),
        objective=hdet.Objective(loss_of, lambda window: [batch(50 + window, 10 + j) for j in range(6)]),
    )


def train(engine: hdet.Engine, parts: Sequence[int], each: int) -> None:
    """A replica's batch at a step is `each` batches, of which this process takes `parts`; dropout by their number."""
    for step in range(STEPS):
        losses = []
        for replica in engine.replicas:
            with replica:
                total = torch.zeros(())
                for part in parts:
                    torch.manual_seed(100 * step + replica.index * each + part)
                    loss = loss_of(replica.model, batch(step, replica.index * each + part)) / len(parts)
                    loss.backward()
                    total = total + loss.detach()
            losses.append(total)
        engine.share_gradients()
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        engine.step(losses)


def outcome(engine: hdet.Engine) -> Found:
    return {"history": told(engine), "weights": weights(engine)[0], "bases": engine.bases}


def on_ranks(wrap: Callable[[nn.Module], nn.Module], home: Found, part: int = 0, each: int = 1) -> Found:
    model = wrap(network())
    engine = engine_of(hdet.distribute(model, optimizer_of(model), **home), dropout())
    train(engine, (part,), each)
    return outcome(engine)


def undisturbed(mesh: Any) -> Found:
    """What a run that seeds once ends in with the evidence and without: weights, gradients, random numbers.

    A window closes while gradients are kept and are not to be reduced, as between micro-batches.
    """
    ends = []
    still = hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold())
    for knob in (dropout(Hold()), still):
        model = sharded_over(mesh)(network())
        optimizer = optimizer_of(model)
        engine = engine_of(hdet.distribute(model, optimizer, mesh=mesh), knob)
        torch.manual_seed(dist.get_rank())
        for step in range(STEPS):
            optimizer.zero_grad()
            model.set_requires_gradient_sync(True)
            with engine.replicas[0]:
                loss = loss_of(model, batch(step, dist.get_rank()))
                loss.backward()
            engine.share_gradients()
            optimizer.step()
            model.set_requires_gradient_sync(False)
            engine.step([loss.detach()])
        found = [*weights(engine)[0], *(parameter.grad.full_tensor() for parameter in model.parameters())]
        ends.append((found, torch.get_rng_state(), engine.history.windows[0].estimates))
    (ours, numbers, told), (plain, expected, _) = ends
    return {"difference": difference(ours, plain), "numbers": torch.equal(numbers, expected), "told": told["dropout"]}


def recommended(mesh: Any) -> Found:
    found: Found = {}
    for name, objective in (("with", hdet.Objective(loss_of, [batch(50, j) for j in range(4)])), ("without", None)):
        model = sharded_over(mesh)(network())
        optimizer = optimizer_of(model)
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            engine = hdet.recommended(
                model,
                optimizer,
                total_steps=STEPS,
                probe=hdet.Probe(loss_of, [batch(-1 - j, 99) for j in range(4)]),
                objective=objective,
                replicas=hdet.distribute(model, optimizer, mesh=mesh),
            )
        train(engine, (0,), 1)
        found[name] = {"history": told(engine), "said": shown.getvalue()}
    return found


def hooked(mesh: Any) -> int:
    """How often a hook that steps in backward is called for the probe's gradient and, after it, in training."""
    model = sharded_over(mesh)(network())
    called: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: called.append(1))
    gradients.summed(model, [loss_of(model, batch(0, 0))])
    before = len(called)
    loss_of(model, batch(0, 0)).backward()
    assert len(called) == before + len(list(model.parameters()))
    return before


def refused(replicas: hdet.replicas.Replicas, evidence: hdet.evidence.Evidence) -> str:
    try:
        engine_of(replicas, hdet.Dropout(evidence=evidence))
    except ConfigError as error:
        return str(error)
    return ""


def contrast_on_shards(mesh: Any) -> str:
    model = sharded_over(mesh["dp_shard"])(network())
    return refused(hdet.distribute(model, optimizer_of(model), mesh=mesh), hdet.evidence.Contrast())


def normed_over_ranks() -> str:
    model = network().append(nn.SyncBatchNorm(1))
    return refused(hdet.distribute(model, optimizer_of(model)), hdet.evidence.MixedDifference())


def everything() -> Found:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    shards = {"home": {"mesh": mesh}, "part": mesh.get_local_rank("dp_shard"), "each": 2}
    tensor_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp_replicate", "dp_shard"))

    def cut(model: nn.Module) -> nn.Module:
        return parallelize_module(model, tensor_mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    return {
        "hsdp": on_ranks(sharded_over(mesh), **shards),
        "shards": on_ranks(sharded_over(mesh["dp_shard"]), **shards),
        "fsdp": on_ranks(sharded_over(whole), {"mesh": whole}, whole.get_local_rank("dp_shard"), 4),
        "ddp": on_ranks(DistributedDataParallel, {}),
        "plain": on_ranks(lambda model: model, {}),
        "tensor parallel": on_ranks(cut, {"mesh": tensor_mesh}),
        "undisturbed": undisturbed(mesh),
        "recommended": recommended(mesh),
        "hooked": hooked(mesh),
        "contrast on shards": contrast_on_shards(mesh),
        "normed over ranks": normed_over_ranks(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return launch(everything, 4)


@cache
def one_process(n: int, each: int) -> Found:
    torch.set_num_threads(1)
    model = network()
    engine = engine_of(hdet.replicate(model, optimizer_of(model), n=n), dropout())
    train(engine, range(each), each)
    return outcome(engine)


@pytest.mark.parametrize(
    ("home", "n", "each"),
    [("hsdp", 2, 2), ("shards", 2, 2), ("fsdp", 1, 4), ("tensor parallel", 2, 1), ("ddp", 4, 1), ("plain", 4, 1)],
)
def test_every_home_measures_what_one_process_measures(ranks: list[Found], home: str, n: int, each: int) -> None:
    expected = one_process(n, each)
    for rank in ranks:
        found = rank[home]
        assert found["history"] == ranks[0][home]["history"]
        # The last window's estimate could move nothing any more and is not taken.
        for ours, theirs in zip(found["history"][:-1], expected["history"][:-1], strict=True):
            estimate, reference = ours["estimates"]["dropout"], theirs["estimates"]["dropout"]
            assert 0.0 < reference["stderr"] < float("inf")
            assert estimate["slope"] == pytest.approx(reference["slope"], abs=2e-3 * reference["stderr"])
            assert estimate["stderr"] == pytest.approx(reference["stderr"], rel=2e-3)
        assert found["bases"] == pytest.approx(expected["bases"], rel=1e-2)
        assert found["bases"]["dropout"] != pytest.approx(0.3)
        assert difference(found["weights"], expected["weights"]) < 1e-4


def test_training_on_shards_goes_on_as_it_was_bit_for_bit(ranks: list[Found]) -> None:
    for rank in ranks:
        assert (rank["undisturbed"]["difference"], rank["undisturbed"]["numbers"]) == (0.0, True)
        assert 0.0 < rank["undisturbed"]["told"]["stderr"] < float("inf")


def test_the_recipe_judges_dropout_on_shards_where_it_has_an_objective_and_says_so(ranks: list[Found]) -> None:
    for rank in ranks:
        given, left = rank["recommended"]["with"], rank["recommended"]["without"]
        assert re.search(r"\+ dropout: starts at .*; at each window's end a training batch runs", given["said"])
        assert "- dropout: left alone: on shards no gradient is seen whole" in left["said"]
        assert set(given["history"][0]["estimates"]) == {"learning_rate", "weight_decay", "dropout"}
        assert set(left["history"][0]["estimates"]) == {"learning_rate", "weight_decay"}


def test_contrast_on_shards_is_refused_and_the_way_out_named(ranks: list[Found]) -> None:
    for rank in ranks:
        assert "Contrast evidence looks at a replica's whole gradient" in rank["contrast on shards"]
        assert "evidence=hdet.evidence.MixedDifference()" in rank["contrast on shards"]


def test_layers_that_wait_for_other_ranks_in_a_pass_are_refused(ranks: list[Found]) -> None:
    for rank in ranks:
        assert rank["normed over ranks"].startswith("MixedDifference evidence runs forward passes on each replica by")
        assert "'6' is a SyncBatchNorm" in rank["normed over ranks"]


def test_an_optimizer_that_steps_in_backward_does_not_for_the_probes_gradient(ranks: list[Found]) -> None:
    assert [rank["hooked"] for rank in ranks] == [0] * len(ranks)
