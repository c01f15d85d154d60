"""A loop as Accelerate's documentation writes it; each run a pure function of its arguments."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from classified import HELD, PARTS, STEPS, batch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._pytree import tree_map

import hdet


def loss_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = (tensor.to(next(model.parameters()).device) for tensor in given)
    return F.cross_entropy(model(inputs).float(), labels)


class Job:
    """What a script makes and prepares."""

    def __init__(
        self,
        *,
        knobs: Any = None,
        raw: bool = False,
        precision: str = "no",
        overflowing: Sequence[int] = (),
        cpu: bool = True,
        sharded: bool = False,
        chained: bool = False,
    ) -> None:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state() if state is not PartialState else PartialState._shared_state.clear()
        if dist.is_initialized():
            rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
            os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        self.accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=PARTS, mixed_precision=precision)
        if sharded:  # which Accelerate leaves out on a CPU
            self.accelerator.state.distributed_type = DistributedType.FSDP
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
            AcceleratorState._shared_state["fsdp_plugin"] = plugin
        self.overflowing = overflowing
        if overflowing:  # float16 and its scaler, which Accelerate leaves out on a CPU
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.half = torch.autocast("cpu", torch.float16, enabled=bool(overflowing))
        self.skipped: list[int] = []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        if chained:
            first, *rest = model.parameters()
            of_first = torch.optim.SGD([first], lr=0.05, momentum=0.9, weight_decay=1e-3)
            optimizer = hdet.ChainedOptimizer(of_first, torch.optim.AdamW(rest, lr=3e-3))
        # Accelerate makes as many steps of a scheduler at a time as there are processes.
        scheduler = CosineAnnealingLR(optimizer, STEPS * self.accelerator.num_processes)
        prepared = self.accelerator.prepare(model, optimizer, scheduler)
        self.model, self.optimizer, self.scheduler = prepared
        self.search: hdet.Search | None = None
        if knobs is not None:
            self.search = hdet.attach(
                self.model,
                optimizer if raw else self.optimizer,
                probe=hdet.Probe(self.half(loss_of), [batch(-1 - part) for part in range(8)]),
                total_steps=STEPS,
                scheduler=self.scheduler,
                knobs=knobs,
                micro_batches=PARTS,
                window=5,
                guard=None,
                tail=None,
                quiet=True,
            )
            self.accelerator.register_for_checkpointing(self.search.all_ranks)

    def train(self, start: int = 0, stop: int = STEPS) -> Job:
        """Optimizer steps from `start` to `stop`."""
        place = self.accelerator.process_index
        for micro in range(start * PARTS, stop * PARTS):
            torch.manual_seed(micro)
            with self.accelerator.accumulate(self.model):
                with self.half:
                    loss = loss_of(self.model, batch(100 * micro + place))
                if self.search is not None:
                    self.search.loss(loss)
                self.accelerator.backward(loss)
                if micro in self.overflowing:
                    next(self.model.parameters()).grad[0, 0] = torch.inf
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                if self.accelerator.sync_gradients and self.accelerator.optimizer_step_was_skipped:
                    self.skipped.append(micro)
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    def left(self) -> list[Any]:
        """What training leaves; of what is sharded this rank's."""
        bare = self.accelerator.unwrap_model(self.model)
        return copy.deepcopy([bare.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()])

    def shifts(self) -> dict[str, float | None]:
        """The factors learned."""
        assert self.search is not None
        return {name: learned.factor for name, learned in self.search.shifts.items()}


def held() -> list[tuple[list[Any], list[Any], bool]]:
    """What training leaves without a search and with one that is held, and whether the schedule was foreseen.

    Once in DistributedDataParallel, and sharded by FSDP2, where hdet finds no gradient of a single pass and Accelerate
    puts other parameters into the optimizer: one, and two chained.
    """
    found = []
    for sharded, chained in ((False, False), (True, False), (True, True)):
        plain = Job(sharded=sharded, chained=chained).train()
        assert isinstance(plain.model, FSDPModule) is sharded
        job = Job(knobs=HELD[:2] if sharded else HELD, sharded=sharded, chained=chained).train()
        assert job.search is not None
        assert job.search.finished
        course = job.search._riding.rates.courses["lr", None]
        found.append((_local(plain.left()), _local(job.left()), course.foreseen(STEPS * course.steps_each)[0] < 1e-12))
    return found


def _local(left: Any) -> Any:
    """Plain tensors in place of shards."""
    return tree_map(lambda held: held.to_local() if isinstance(held, DTensor) else held, left)


def resumed(folder: Path) -> dict[str, Any]:
    """A run in one go, and the same from Accelerate's own checkpoint in mid-window."""
    whole = Job(knobs=[]).train(stop=8)
    whole.accelerator.save_state(str(folder / "state"))
    whole.train(8)
    again = Job(knobs=[])
    again.accelerator.load_state(str(folder / "state"))
    again.train(8)
    return {"left": whole.left(), "again": again.left(), "shifts": [whole.shifts(), again.shifts()]}
