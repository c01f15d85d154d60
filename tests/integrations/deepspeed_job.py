"""What torchrun starts for `test_deepspeed.py`: a loop as DeepSpeed's documentation writes it, on two ranks."""

from __future__ import annotations

import copy
import math
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn
from torch.nn import functional as F

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError, HdetError

# Collectives in shared memory are compiled when they are first asked for; gloo's own do.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS, PARTS = 24, 2
SETTINGS = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
HELD = [hdet.LearningRate(controller=Hold()), hdet.WeightDecay(controller=Hold())]


def batch(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    return inputs.to(dtype), inputs[:, :3].argmax(dim=1)


def loss_of(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(given[0]).float(), given[1])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def engine_of(
    stage: int, bf16: bool, zero: dict[str, Any] | None = None, scheduled: bool = False, by_layer: bool = False
) -> Any:
    model = network()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if by_layer:
        groups = [{"params": list(layer.parameters())} for layer in (model[0], model[3])]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": PARTS,
        "gradient_clipping": 1.0,
        # Under stage 3 matrices are gathered by layers, and vectors are kept whole.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20, **(zero or {})},
        "zero_allow_untested_optimizer": True,
    }
    if bf16:
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) if scheduled else None
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def left(engine: Any) -> list[Tensor]:
    """Weights, and this rank's masters and moments; under stage 3, where these end in padding, all ranks'."""
    if engine.zero_optimization_stage() == 3:
        own = list(engine.module.parameters())
        weights = gathered(engine)
        masters = [safe_get_full_fp32_param(p) for p in own]
        moments = [safe_get_full_optimizer_state(p, key) for p in own for key in ("exp_avg", "exp_avg_sq")]
        return [t.detach().cpu().clone() for t in (*weights, *masters, *moments)]
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    parts = [p for group in inner.param_groups for p in group["params"]]
    moments = [v for p in parts for v in inner.state[p].values() if isinstance(v, Tensor)]
    return copy.deepcopy([t.detach().cpu() for t in (*engine.module.parameters(), *parts, *moments)])


def gathered(engine: Any) -> list[Tensor]:
    """Whole weights, as anybody would read them who saves the model."""
    own = list(engine.module.parameters())
    if engine.zero_optimization_stage() < 3:
        return [p.detach().clone() for p in own]
    with deepspeed.zero.GatheredParameters(own):
        return [p.detach().clone() for p in own]


def run(
    stage: int,
    bf16: bool,
    wrecked: int | None = None,
    zero: dict[str, Any] | None = None,
    scheduled: bool = False,
    by_layer: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train; a search is attached where options are given. At one step the loss is infinite, if that is said."""
    engine = engine_of(stage, bf16, zero, scheduled, by_layer)
    dtype = next(engine.module.parameters()).dtype
    search = None
    if options:
        probe = hdet.Probe(loss_of, [batch(-1 - part, dtype) for part in range(8)])
        options = {"total_steps": STEPS, "window": 4, "quiet": True, **options}
        search = hdet.deepspeed.attach(engine, probe=probe, **options)
    for micro in range(STEPS * PARTS):
        torch.manual_seed(10 * micro + dist.get_rank())
        loss = loss_of(engine, batch(100 * micro + dist.get_rank(), dtype))
        if search is not None:
            search.loss(loss)
        engine.backward(loss * float("inf") if micro // PARTS == wrecked else loss)
        engine.step()
    found: dict[str, Any] = {"left": left(engine), "rates": [g["lr"] for g in engine.optimizer.param_groups]}
    if search is not None:
        found |= {
            "steps": search.engine.step_count,
            "shifts": {name: learned.factor for name, learned in search.shifts.items()},
            "t": [record.estimates.get("weight_decay", {}).get("t") for record in search.history],
            "foreseen": search.engine.knobs[0].schedule.total_steps,
            "ratio": search.history.windows[0].estimates.get("learning_rate[1]", {}).get("step_ratio"),
        }
    return found


def resumed(folder: Path, stage: int, bf16: bool, first: str) -> dict[str, Any]:
    """A run in one go, and the same from DeepSpeed's checkpoint and all ranks' search, in mid-window."""
    found: dict[str, Any] = {}
    for name in ("whole", "again"):
        engine = engine_of(stage, bf16)
        dtype = next(engine.module.parameters()).dtype
        probe = hdet.Probe(loss_of, [batch(-1 - part, dtype) for part in range(8)])
        options: dict[str, Any] = {"total_steps": STEPS, "window": 4, "quiet": True, "exclude": ["dropout"]}
        search = hdet.deepspeed.attach(engine, probe=probe, **options)
        if name == "again":
            loads = {
                "deepspeed": lambda own=engine: own.load_checkpoint(str(folder), tag=f"{stage}"),
                "hdet": lambda own=search: own.all_ranks.load_state_dict(found["state"]),
            }
            loads.pop(first)()
            loads.popitem()[1]()
        for micro in range(0 if name == "whole" else 10 * PARTS, STEPS * PARTS):
            if name == "whole" and micro == 10 * PARTS:
                engine.save_checkpoint(str(folder), tag=f"{stage}")
                found["state"] = search.all_ranks.state_dict()
            torch.manual_seed(10 * micro + dist.get_rank())
            engine.backward(search.loss(loss_of(engine, batch(100 * micro + dist.get_rank(), dtype))))
            engine.step()
        found[name] = left(engine), {knob: learned.factor for knob, learned in search.shifts.items()}
    return found


def accelerated(stage: int, **options: Any) -> dict[str, Any]:
    """A loop as Accelerate's documentation writes it, whose `prepare` makes the engine."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": PARTS,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "zero_allow_untested_optimizer": True,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    search = None
    if options:
        probe = hdet.Probe(loss_of, [batch(-1 - part, torch.float32) for part in range(8)])
        search = hdet.deepspeed.attach(
            engine, probe=probe, total_steps=STEPS, window=4, quiet=True, scheduler=scheduler, guard=None, **options
        )
    for micro in range(STEPS * PARTS):
        torch.manual_seed(10 * micro + dist.get_rank())
        with accelerator.accumulate(engine):
            loss = loss_of(engine, batch(100 * micro + dist.get_rank(), torch.float32))
            accelerator.backward(loss if search is None else search.loss(loss))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    found: dict[str, Any] = {"left": left(engine)}
    if search is not None:
        found["steps"] = search.engine.step_count
        found["shifts"] = {name: learned.factor for name, learned in search.shifts.items()}
    return found


def refusal(stage: int, **options: Any) -> str:
    try:
        run(stage, False, **options)
    except ConfigError as error:
        return str(error)
    return ""


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except HdetError as error:
        return str(error)
    return ""


def refused_of_an_optimizer() -> dict[str, str]:
    """Of one that its engine does not give or that is unknown, or whose parts are not those of a state or in place."""
    engine, unknown, moved = engine_of(1, False), engine_of(1, False), engine_of(3, False)
    probe = hdet.Probe(loss_of, [batch(-1 - part, torch.float32) for part in range(8)])
    options: dict[str, Any] = {"probe": probe, "total_steps": STEPS, "quiet": True}
    found = {"given itself": said(lambda: hdet.attach(engine.module, engine.optimizer, **options))}
    unknown.optimizer.optimizer = object()
    found["unknown"] = said(lambda: hdet.deepspeed.attach(unknown, **options))
    searches = [hdet.deepspeed.attach(own, **options) for own in (engine, moved)]

    def train(own: Any, search: hdet.Search) -> None:
        for micro in range(PARTS):
            own.backward(search.loss(loss_of(own, batch(micro, torch.float32))))
            own.step()

    for own, search in zip((engine, moved), searches, strict=True):
        train(own, search)
    state = searches[0].optimizer.state_dict()
    for held in state["state"].values():
        held["exp_avg.0"] = held["exp_avg.0"][:-1]
    found["another part"] = said(lambda: searches[0].optimizer.load_state_dict(state))
    for parameter in moved.module.parameters():
        parameter.ds_tensor.data = parameter.ds_tensor.data.clone()
    fewer = engine_of(3, False)
    next(fewer.module.parameters()).ds_process_group = dist.new_subgroups(1)[0]
    found["over fewer ranks"] = said(lambda: hdet.deepspeed.attach(fewer, **options))
    found["moved"] = said(searches[1].model.reshard)  # type: ignore[operator]
    return found


def went_back(stage: int, bf16: bool) -> tuple[list[Tensor], list[Tensor]]:
    """What a point holds, and what is there after training on and going back to it."""
    engine = engine_of(stage, bf16)
    dtype = next(engine.module.parameters()).dtype
    probe = hdet.Probe(loss_of, [batch(-1 - part, dtype) for part in range(8)])
    search = hdet.deepspeed.attach(engine, probe=probe, total_steps=STEPS, window=3, quiet=True, guard=None)
    held: list[Tensor] = []
    for micro in range(5 * PARTS):
        if micro == 3 * PARTS:
            held = left(engine)
        engine.backward(search.loss(loss_of(engine, batch(micro, dtype))))
        engine.step()
    search.engine.cycle.anchor.restore(*search.engine.hosts[0])
    return held, left(engine)


def slopes(stage: int) -> tuple[float, float]:
    """The rate's slope over the second window, as hdet found it, and by weights that are put into another model."""
    engine, width = engine_of(stage, bf16=False), 0.3
    probe = hdet.Probe(loss_of, [batch(-1 - part, torch.float32) for part in range(8)])
    options: dict[str, Any] = {"exclude": ["dropout", "weight_decay"], "schedule": None, "guard": None, "quiet": True}
    search = hdet.deepspeed.attach(engine, probe=probe, total_steps=STEPS, window=4, **options)
    points = []
    for micro in range(8 * PARTS):
        if micro == 4 * PARTS:
            points.append(gathered(engine))
        engine.backward(search.loss(loss_of(engine, batch(micro, torch.float32))))
        engine.step()
    points.append(gathered(engine))
    other, (start, end) = network().eval(), points

    @torch.no_grad()
    def loss_at(x: float) -> float:
        for own, first, last in zip(other.parameters(), start, end, strict=True):
            own.copy_(first + math.exp(x) * (last - first))
        return float(probe.measure(other, 0).mean())

    found = search.history.windows[-1].estimates["learning_rate"]["slope"]
    return found, (loss_at(width) - loss_at(-width)) / (2 * width)


def main(folder: Path) -> None:
    deepspeed.init_distributed("gloo")
    found: dict[Any, Any] = {}
    for stage, bf16 in SETTINGS:
        found[stage, bf16] = {
            "plain": run(stage, bf16),
            "held": run(stage, bf16, knobs=HELD, exclude=["dropout"], schedule=None, guard=None),
            "searched": run(stage, bf16, exclude=["dropout"]),
            "went back": went_back(stage, bf16) if stage else None,
        }
    found["scheduled"] = {  # without a search, and with one that is held
        (stage, bf16): (
            run(stage, bf16, scheduled=True),
            run(stage, bf16, scheduled=True, knobs=HELD, exclude=["dropout"], guard=None),
        )
        for stage, bf16 in [(0, False), (2, True), (3, False)]
    }
    found["accelerated"] = {
        stage: [accelerated(stage), accelerated(stage, knobs=HELD), accelerated(stage, exclude=["dropout"])]
        for stage in (2, 3)
    }
    found["slopes"] = {stage: slopes(stage) for stage in (2, 3)}
    found["skipped"] = run(1, True, wrecked=5, knobs=HELD, schedule=None, guard=None)
    found["dropout at stage 0"] = run(0, False, guard=None)
    found["resumed"] = [
        resumed(folder, stage, bf16, first)
        for stage, bf16, first in [(1, False, "deepspeed"), (2, True, "hdet"), (3, True, "deepspeed")]
    ]
    options: dict[str, Any] = {"exclude": ["dropout"], "rates": "groups", "by_layer": True}
    found["groups"] = {stage: run(stage, False, **options) for stage in (0, 2, 3)}
    found["refused"] = {
        "dropout at stage 1": refusal(1, knobs=[hdet.Dropout()]),
        "dropout at stage 3": refusal(3, knobs=[hdet.Dropout()]),
        "parameters offloaded": refusal(3, zero={"offload_param": {"device": "cpu"}}, guard=None),
        "secondary partitions": refusal(3, zero={"zero_hpz_partition_size": 2}, guard=None),
        "rates by patterns": refusal(1, rates={"head": "3.*"}),
        "tail": refusal(1, tail=hdet.TailAverage()),
        **refused_of_an_optimizer(),
    }
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
