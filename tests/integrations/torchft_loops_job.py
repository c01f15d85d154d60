"""One of two replica groups in loops of torchft's own, and in the same with hdet: started by test_torchft.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import Tensor, nn
from torchft.local_sgd import DiLoCo, LocalSGD

import hdet
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

sys.path.insert(0, str(Path(hdet.__file__).parent.parent / "examples"))

from torchft_replicas import batch, loss_of, made

STEPS, WINDOW = 40, 10
HELD = [hdet.LearningRate(controller=Hold()), hdet.WeightDecay(controller=Hold())]


class Groups:
    """This group, and the managers that it makes, one after the other."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    @contextmanager
    def manager(self, name: str, **options: Any) -> Iterator[torchft.Manager]:
        """Of both groups; it lets nobody go on alone."""
        given: dict[str, Any] = {"load_state_dict": None, "state_dict": None, **options}
        manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=30)),
            min_replica_size=2,
            use_async_quorum=False,
            replica_id=f"{name}_{self.group}",
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=self.store.port,
            lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
            timeout=timedelta(seconds=60),
            quorum_timeout=timedelta(seconds=60),
            **given,
        )
        try:
            yield manager
        finally:
            manager.shutdown(wait=False)

    def diloco(self) -> list[list[Tensor]]:
        """The anchors: the weights that each window opens with."""
        torch.manual_seed(0)
        model = made()
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        anchors = []
        with self.manager("diloco", init_sync=False) as manager:
            with DiLoCo(manager, [model], inner, outer, sync_every=WINDOW):
                for step in range(STEPS):
                    self._train(model, inner, step)
                    if (step + 1) % WINDOW == 0:
                        anchors.append(copied(model))
            assert manager.current_step() == STEPS // WINDOW
        return anchors

    def local_sgd(self) -> list[Tensor]:
        """The weights after torchft's own averages every `WINDOW` steps."""
        torch.manual_seed(0)
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            self.manager("plain", init_sync=False) as manager,
            LocalSGD(manager, model, optimizer, sync_every=WINDOW),
        ):
            for step in range(STEPS):
                self._train(model, optimizer, step)
        return copied(model)

    def held_replicas(self) -> list[Tensor]:
        """The same with replicas of hdet's, at equal rates that are held."""
        torch.manual_seed(0)
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with self.manager("held") as manager:
            engine = hdet.Engine(
                hdet.torchft.distribute(manager, model, optimizer, group=self.group, groups=2),
                [hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold())],
                window=WINDOW,
                gradients="local",
                signal=hdet.Probe(loss_of, [batch(10**6, shard) for shard in range(8)]),
                evidence=hdet.evidence.Divergent(estimator=hdet.estimators.LeastSquares()),
                total_steps=STEPS,
            )
            run = hdet.torchft.ManagedEngine(engine)
            for step in range(STEPS):
                with engine.replicas[0]:
                    loss = loss_of(model, batch(step, self.group))
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
        return copied(model)

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        loss_of(model, batch(step, self.group)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Shared:
    """A loop as torchft's README has it: gradients averaged by its DistributedDataParallel at every step."""

    def __init__(
        self, groups: Groups, name: str, searched: dict[str, Any] | None = None, probed: Any = loss_of
    ) -> None:
        torch.manual_seed(groups.group)  # the weights of the first group are everybody's
        self.group = groups.group
        self.bare = made()
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-3, weight_decay=0.1)
        self._managed = groups.manager(name, load_state_dict=self._load, state_dict=self._state)
        self.manager = self._managed.__enter__()
        self.model = torchft.DistributedDataParallel(self.manager, self.bare)
        self.stepped = torchft.Optimizer(self.manager, self.optimizer)
        self.search: hdet.Search | None = None
        if searched is not None:
            self.attach(searched, probed)

    def attach(self, searched: dict[str, Any], probed: Any = loss_of) -> None:
        probe = hdet.Probe(probed, [batch(10**6, shard) for shard in range(8)])
        options = {"total_steps": STEPS, "window": WINDOW, "quiet": True, **searched}
        self.search = hdet.torchft.attach(self.manager, self.model, self.stepped, probe=probe, **options)

    def detach(self) -> hdet.Search:
        """The loop goes on without the search."""
        assert self.search is not None
        search, self.search = self.search, None
        search.detach()
        return search

    def train(self, stop: int, lost: Sequence[int] = ()) -> Shared:
        """Steps up to `stop`; of those that are lost the first attempt fails in this group."""
        failing = set(lost)
        while self.manager.current_step() < stop:
            self.stepped.zero_grad()
            loss = loss_of(self.model, batch(self.manager.current_step(), self.group))
            (loss if self.search is None else self.search.loss(loss)).backward()
            if self.manager.current_step() in failing:
                failing.remove(self.manager.current_step())
                self.manager.report_error(RuntimeError("a failure that the test makes"))
            self.stepped.step()
        return self

    def leave(self) -> dict[str, Any]:
        """What training leaves; the manager is shut down."""
        self._managed.__exit__(None, None, None)
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        found: dict[str, Any] = {"left": [*copied(self.bare), *moments]}
        if self.search is not None:
            found["shifts"] = {name: learned.factor for name, learned in self.search.shifts.items()}
            found["windows"] = [(record.start, record.stop, record.loss) for record in self.search.history]
            found["moved"] = {k.name: k.shift - k.spec.initial_shift for k in self.search.engine.knobs}
            told = ("bases", "course", "losses", "estimates", "moves", "learned", "reasons")
            found["history"] = [{key: line[key] for key in told} for line in map(written, self.search.history)]
        return found

    def _load(self, state: dict[str, Any]) -> None:
        self.bare.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _state(self) -> dict[str, Any]:
        return {"model": self.bare.state_dict(), "optimizer": self.optimizer.state_dict()}


def came_back(groups: Groups) -> dict[str, Any]:
    """One step fails in both groups, one in the second, which loses all it has in mid-window later, and joins anew."""
    run = Shared(groups, "first", {})
    if groups.group == 0:
        return run.train(STEPS, lost=[7]).leave()
    run.train(WINDOW + 3, lost=[5, 7]).leave()
    return Shared(groups, "again", {}).train(STEPS).leave()


def attached_anew(groups: Groups) -> dict[str, Any]:
    """A search, steps without it in the same loop, and another; between them a loss is told to the one that was."""
    run = Shared(groups, "anew", {}).train(WINDOW + 3)
    earlier = run.detach()
    run.train(WINDOW + 5)
    served = run.manager._user_state_dicts["hdet"]()
    heard = earlier._riding.losses
    heard.note(0, torch.tensor(1.0 + groups.group))
    run.attach({"total_steps": 2 * WINDOW})
    found = run.train(3 * WINDOW + 5).leave()
    return {**found, "served": served, "own_loss": 1.0 + groups.group, "heard_after_detach": float(heard.mean())}


def untold(groups: Groups) -> str:
    """What is said of a loop that tells no loss."""
    run = Shared(groups, "untold", {})
    silent, run.search = run.search, None
    try:
        run.train(1)
    except hdet.errors.StepError as error:
        return str(error)
    finally:
        run.search = silent
        run.leave()
    return ""


def mislabelled(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    """A probe that training makes worse."""
    return loss_of(model, (given[0], 3 - given[1]))


def written(record: hdet.history.WindowRecord) -> dict[str, Any]:
    """As in a file, where an infinite error is null."""
    line: dict[str, Any] = json.loads(record.to_json())
    return line


def copied(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def main(group: int, folder: Path) -> None:
    groups = Groups(group)
    found = {
        "anchors": groups.diloco(),
        "local sgd": groups.local_sgd(),
        "held replicas": groups.held_replicas(),
        "plain": Shared(groups, "alone").train(STEPS).leave(),
        "held": Shared(groups, "kept", {"knobs": HELD, "schedule": None}).train(STEPS).leave(),
        "searched": Shared(groups, "searched", {}).train(STEPS).leave(),
        "came back": came_back(groups),
        "anew": attached_anew(groups),
        "untold": untold(groups),
        "apart": Shared(groups, "apart", {}, probed=[loss_of, mislabelled][group]).train(STEPS).leave(),
    }
    torch.save(found, folder / f"loops{group}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
