"""A loop as Fabric's documentation writes it; each run a pure function of its arguments."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
from classified import HELD, PARTS, STEPS, batch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import hdet


def loss_of(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def in_parts(model: nn.Module, mesh: Any) -> nn.Module:
    """As Fabric's documentation shards a model by FSDP2."""
    return fully_shard(model, mesh=mesh["data_parallel"])


class Job:
    """What a script makes and sets up."""

    def __init__(
        self,
        *,
        knobs: Any = None,
        precision: Any = "32-true",
        strategy: Any = "auto",
        compiled: bool = False,
        objective: hdet.Objective | None = None,
    ) -> None:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.fabric = Fabric(accelerator="cpu", devices=ranks, precision=precision, strategy=strategy)
        self.fabric.launch()
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
        if compiled:
            model = torch.compile(model, backend="eager")  # type: ignore[assignment]
        if isinstance(strategy, ModelParallelStrategy):  # the optimizer holds what is sharded
            self.model: Any = self.fabric.setup_module(model)
            self.optimizer: Any = self.fabric.setup_optimizers(torch.optim.AdamW(self.model.parameters(), lr=3e-3))
        else:
            made = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
            self.model, self.optimizer = self.fabric.setup(model, made)
        self.scheduler = CosineAnnealingLR(self.optimizer, STEPS)
        self.search: hdet.Search | None = None
        if knobs is not None:
            self.search = hdet.fabric.attach(
                self.fabric,
                self.model,
                self.optimizer,
                probe=hdet.Probe(loss_of, [batch(-1 - part) for part in range(8)]),
                total_steps=STEPS,
                scheduler=self.scheduler,
                knobs=knobs,
                objective=objective,
                micro_batches=PARTS,
                window=5,
                guard=None,
                tail=None,
                quiet=True,
            )

    def train(self, start: int = 0, stop: int = STEPS) -> Job:
        """Optimizer steps from `start` to `stop`."""
        for micro in range(start * PARTS, stop * PARTS):
            torch.manual_seed(micro)
            last = micro % PARTS == PARTS - 1
            with self.fabric.no_backward_sync(self.model, enabled=not last):
                loss = loss_of(self.model, batch(100 * micro + self.fabric.global_rank))
                if self.search is not None:
                    self.search.loss(loss)
                self.fabric.backward(loss / PARTS)
            if last:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, Any]:
        """What `fabric.save` and `fabric.load` are given."""
        search = {} if self.search is None else {"search": self.search.all_ranks}
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, **search}

    def left(self) -> list[Any]:
        """What training leaves; of what is sharded all of it."""
        states = [self.model.state_dict(), self.optimizer.optimizer.state_dict(), self.scheduler.state_dict()]
        return copy.deepcopy(torch.utils._pytree.tree_map(_whole, states))


def _whole(held: Any) -> Any:
    return held.full_tensor() if hasattr(held, "full_tensor") else held


def held(strategy: Any, knobs: Any) -> tuple[list[Any], list[Any]]:
    """What training leaves without a search and with one that is held."""
    job = Job(knobs=knobs, strategy=strategy()).train()
    assert job.search is not None
    assert job.search.finished
    return Job(strategy=strategy()).train().left(), job.left()


def resumed(folder: Path, strategy: Any = lambda: "auto", knobs: Any = ()) -> dict[str, Any]:
    """A run in one go, and the same from Fabric's own checkpoint in mid-window."""
    whole = Job(knobs=knobs, strategy=strategy()).train(stop=8)
    whole.fabric.save(folder / "state.ckpt", whole.state())
    whole.train(8)
    again = Job(knobs=knobs, strategy=strategy())
    state = again.state()
    again.fabric.load(folder / "state.ckpt", state)
    for name, held in {"scheduler": again.scheduler, "search": state["search"]}.items():
        if isinstance(state[name], dict):  # of a checkpoint in parts Fabric loads modules and optimizers alone
            (again.search.all_ranks if name == "search" else held).load_state_dict(state[name])
    again.train(8)
    assert whole.search is not None
    assert again.search is not None
    return {
        "left": whole.left(),
        "again": again.left(),
        "shifts": [str(whole.search.shifts), str(again.search.shifts)],
        "moved": whole.search.shifts["learning_rate"].factor,
    }


class Scored(nn.Sequential):
    """A model whose loss is a method's."""

    def score(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(self.forward, given)


def methods() -> tuple[list[float], list[float]]:
    """The losses of a method that Fabric redirects, as the loop has them and as the probe has."""
    fabric = Fabric(accelerator="cpu", devices=2, precision="bf16-mixed", strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    made = Scored(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    model, optimizer = fabric.setup(made, torch.optim.AdamW(made.parameters(), lr=3e-3))
    model.mark_forward_method("score")
    batches = [batch(-1 - part) for part in range(8)]
    probe = hdet.Probe(lambda model, given: model.score(given), batches)
    search = hdet.fabric.attach(fabric, model, optimizer, probe=probe, total_steps=STEPS, micro_batches=1, quiet=True)
    model.eval()
    with torch.no_grad():
        expected = [model.score(given).item() for given in batches]
    return expected, search.engine.plan.signal.measure(made, window=0).tolist()


def sharded() -> ModelParallelStrategy:
    return ModelParallelStrategy(in_parts, data_parallel_size=2, tensor_parallel_size=1)


def main(folder: Path) -> None:
    """Of each of two ranks."""
    found = {
        "ddp": held(lambda: "ddp", HELD),
        "sharded": held(sharded, HELD[:2]),
        "resumed": resumed(folder, lambda: "ddp"),
        "resumed in parts": resumed(folder / "parts", sharded),
        "methods": methods(),
    }
    torch.save(found, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
