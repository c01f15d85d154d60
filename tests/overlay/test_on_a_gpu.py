"""`hdet.attach` where the model is on a GPU: mixed precision, compiled and graphed models, ranks over nccl."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import explicit_loop
import pytest
import torch
import torch.distributed as dist
from attach_parts import STEPS, batch, loss_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(0)
        layers = nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 3)
        return nn.Sequential(*layers).cuda()


def on_gpu(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    inputs, labels = batch(step, part)
    return inputs.cuda(), labels.cuda()


class Loss:
    """Cross-entropy in some precision."""

    def __init__(self, precision: str) -> None:
        self.dtype = PRECISIONS[precision]

    def __call__(self, model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cuda", self.dtype) if self.dtype else nullcontext():
            return loss_of(model, given)


def probe(loss: Callable[..., Tensor]) -> hdet.Probe:
    return hdet.Probe(loss, [on_gpu(-1, part) for part in range(8)])


STILL = [
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
]


def trained(
    precision: str = "float32",
    *,
    options: dict[str, Any] | None = None,
    attach: dict[str, Any] | None = None,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    steps: int = STEPS,
) -> tuple[dict[str, Tensor], hdet.Search | None]:
    """The weights after a run, plain where `attach` is None, and its search."""
    model = network()
    called = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, **(options or {}))
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "float16", init_scale=2.0**17)
    loss = Loss(precision)
    search = None
    if attach is not None:
        shared = {"probe": probe(loss), "total_steps": STEPS, "window": 5, "quiet": True}
        search = hdet.attach(called, optimizer, **{**shared, **attach})
    torch.manual_seed(1)
    for step in range(steps):
        value = loss(called, on_gpu(step))
        if search is not None:
            value = search.loss(value)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, search


OPTIONS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "capturable": {"capturable": True}}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_held_it_is_the_run_without_it_bit_for_bit(precision: str, options: dict[str, Any], assert_same: Any) -> None:
    plain, _ = trained(precision, options=options)
    held, search = trained(precision, options=options, attach={"knobs": STILL, "schedule": None})
    assert_same(held, plain)
    assert search is not None
    assert search.finished or precision == "float16"  # a scaler that begins too high skips steps
    assert all(math.isfinite(record.loss) for record in search.history)


def slopes(search: hdet.Search | None) -> list[float]:
    """What windows told of the learning rate."""
    assert search is not None
    return [record.estimates["learning_rate"]["slope"] for record in search.history]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_recipe_runs_to_its_end_wherever_memory_is_held(precision: str) -> None:
    told = []
    for kept in ("device", "host"):
        state, search = trained(precision, options={"fused": True}, attach={"anchor": kept, "averages": kept})
        assert search is not None
        assert search.finished or precision == "float16"
        assert all(bool(torch.isfinite(value).all()) for value in state.values() if value.is_floating_point())
        told.append(slopes(search))
    assert len(told[0]) >= STEPS // 5 - 2
    assert told[0][0] != 0.0
    assert told[1][0] == pytest.approx(told[0][0], rel=1e-2)  # later ones hang on what was decided


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_is_explored(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        _, search = trained(attach={}, wrap=lambda model: torch.compile(model, mode=mode), steps=20)
    assert search is not None
    assert len(search.history) == 4
    assert all(slopes(search))


def test_resumed_it_is_the_same_run(assert_same: Any) -> None:
    whole, _ = trained(attach={"micro_batches": 1})
    model, loss = network(), Loss("float32")

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, hdet.Search]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        options: dict[str, Any] = {"total_steps": STEPS, "window": 5, "quiet": True, "micro_batches": 1}
        return model, optimizer, hdet.attach(model, optimizer, probe=probe(loss), **options)

    saved: dict[str, Any] = {}
    for first, last in ((0, 17), (17, STEPS)):
        model, optimizer, search = begin()
        torch.manual_seed(1)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            search.load_state_dict(saved["search"])
            torch.cuda.set_rng_state(saved["numbers"])
        for step in range(first, last):
            search.loss(loss(model, on_gpu(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved = copy.deepcopy(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "search": search.state_dict(),
                "numbers": torch.cuda.get_rng_state(),
            }
        )
    assert_same(dict(model.state_dict()), whole)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, over nccl."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": lambda model: DistributedDataParallel(model, device_ids=[0]),
    "fsdp2": lambda model: fully_shard(model),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_over_nccl_the_recipe_runs_to_its_end(wrapper: str) -> None:
    model = network()
    called = WRAPPERS[wrapper](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    search = hdet.attach(called, optimizer, probe=probe(loss_of), total_steps=STEPS, window=5, quiet=True)
    for step in range(STEPS):
        search.loss(loss_of(called, on_gpu(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert search.finished
    assert any(slopes(search))


def test_two_replicas_on_a_gpu_merge() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    engine = hdet.Engine(
        hdet.replicate(model, optimizer, n=2),
        [hdet.LearningRate(), hdet.Dropout()],
        window=5,
        signal=probe(loss_of),
        gradients="local",
    )
    explicit_loop.train(engine, 20, loss=lambda model, step, replica: loss_of(model, on_gpu(step, replica)))
    assert len(engine.history) == 4
    assert all(math.isfinite(record.loss) for record in engine.history)
