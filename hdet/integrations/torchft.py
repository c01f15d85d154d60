"""torchft: managed replica groups as replicas, which may be killed and come back while the run goes on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine.declaration import declaration
from hdet.engine.engine import Engine
from hdet.engine.tally import Losses
from hdet.errors import CheckpointError, ConfigError, LostRankError, MissingExtraError
from hdet.evidence import Divergent
from hdet.merging.exploit import Exploit
from hdet.record import WindowRecord
from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.distributed.layout import Group, Layout
from hdet.replicas.distributed.ranks import Ranks
from hdet.replicas.in_process import check_pair
from hdet.replicas.tensors import copy_

try:
    from torchft import Manager
    from torchft.process_group import ManagedProcessGroup
except ImportError:
    raise MissingExtraError("torchft", "torchft") from None

SUM = dist.ReduceOp.SUM


def distribute(manager: Manager, model: nn.Module, optimizer: Optimizer, *, group: int, groups: int) -> Ranks:
    """The replicas of a run whose replica groups torchft manages, of which this process is one.

    Groups meet at the ends of windows only, so the engine takes `gradients="local"`, and `ManagedEngine` steps it.

    Args:
        manager: made with `use_async_quorum=False`; without state functions of its own for model and optimizer.
        model: plain, on this process alone.
        group: this group's number, `0 <= group < groups`; the same after a restart.
        groups: N. A group that is not there is a replica without a loss: it enters no merge and no estimate.

    Raises:
        ConfigError: the number is none of the groups', the manager's quorum is asynchronous, or a group is of several
            processes.
    """
    check_pair(model, optimizer, 1)
    if not 0 <= group < groups:
        raise ConfigError(f"group= is the number of this replica group, from 0 to {groups - 1}; got {group}")
    if manager._use_async_quorum:  # as torchft's own DiLoCo asks
        raise ConfigError(
            "a group that comes back takes over weights and bases before it trains; give torchft's Manager "
            "use_async_quorum=False"
        )
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"this replica group is of {dist.get_world_size()} processes, and a managed replica is one process; start "
            f"each as a group of its own"
        )
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    exchange = ManagedExchange(manager, group, groups, device)
    return Ranks([(model, optimizer)], [model], exchange, seats=0, reduces=None)


class ManagedExchange(Exchange):
    """Collectives by a torchft Manager, over the groups of its quorum.

    Between meetings nobody else is there: all replicas are taken to be as this one is.

    Attributes:
        meeting: whether the groups are at the end of a window together.
    """

    def __init__(self, manager: Manager, group: int, groups: int, device: torch.device) -> None:
        self.manager = manager
        self.meeting = False
        self._group = ManagedProcessGroup(manager)  # a layout holds it weakly
        table = np.arange(groups, dtype=np.int64).reshape(groups, 1)
        everyone = Group(self._group)
        super().__init__(Layout(everyone, everyone, table, group, 0, tuple(range(groups))), device, exact=False)

    def reduce(self, sources: Any, targets: Any, weights: Any, *, mean: bool) -> None:
        if self.meeting:
            super().reduce(sources, targets, weights, mean=mean)
            return
        scale = 1.0 if mean else float(sum(weights))
        copy_(list(targets), [source * scale for source in sources])

    def begin_sum(self, flat: Tensor) -> Callable[[], object]:
        work = self.manager.allreduce(flat, reduce_op=SUM)
        return partial(self._finish, work)

    def _finish(self, work: dist.Work) -> None:
        """Wait for a sum.

        Raises:
            LostRankError: it failed. The manager reports no error of a collective to who waits for it.
        """
        work.wait()
        error = self.manager.errored()
        if error is not None:
            raise LostRankError(f"a replica group was lost while the groups met at a window's end: {error}")

    def send(self, flat: Tensor, place: int) -> None:
        if not self.meeting:
            return
        if self.layout.place != place:
            flat.zero_()
        self.begin_sum(flat.view(torch.uint8))()

    def gather(self, row: Tensor) -> Tensor:
        """[M] of each group -> [N, M]; of groups that are not there NaN, or 0 where numbers are whole.

        Raises:
            ConfigError: two groups have one number.
        """
        row = row.to(self.device).contiguous()
        if not self.meeting:
            return row.expand(self.layout.places, -1).clone()
        # As bytes, of which all others' are 0: what is gathered stays the same to the bit.
        own = row.view(torch.uint8)
        flat = torch.zeros(self.layout.places, len(own) + 1, dtype=torch.uint8, device=self.device)
        flat[self.layout.place, :-1] = own
        flat[self.layout.place, -1] = 1
        self.begin_sum(flat)()
        there = flat[:, -1].tolist()
        if max(there) > 1:
            raise ConfigError(
                f"{max(there)} replica groups have the number {there.index(max(there))}; give each its own group="
            )
        self.present = [bool(count) for count in there]
        rows = flat[:, :-1].contiguous().view(row.dtype)
        if rows.is_floating_point():
            rows[~torch.tensor(self.present, device=rows.device)] = torch.nan
        return rows

    def gather_objects(self, own: Any) -> list[Any]:
        if not self.meeting:
            return [own] * self.layout.places
        held = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(torch.tensor([len(held)]))[:, 0]]
        rows = self.gather(nn.functional.pad(held, (0, max(lengths) - len(held)))).cpu()
        return [
            pickle.loads(bytes(row[:length].tolist())) if length else None
            for row, length in zip(rows, lengths, strict=True)
        ]

    def broadcast_object(self, own: Any, place: int) -> Any:
        return self.gather_objects(own)[place]


class ManagedEngine:
    """An engine whose replicas are torchft's replica groups.

    A window is torchft's step. At its end the groups that are there are judged and merged. A group that was killed
    within it is a replica without a loss. One that is killed while the others meet makes them throw the window away:
    they go back to its opening and train it again. At each opening a group that comes back takes over weights,
    optimizer, bases, controllers and history from one that was there.

    Costs a copy of weights and optimizer state, and two of torchft's quorums a window. Draw data by
    `engine.step_count` and `replica.data_index`: steps of a window that was thrown away are made again.

    Args:
        engine: on replicas from `hdet.torchft.distribute`, with `gradients="local"` and `Divergent` evidence.

    Raises:
        ConfigError: the engine cannot be judged or merged without some of its replicas; the message says by what.
        CheckpointError: the group whose state this one takes over declares another run. (With a manager of
            `init_sync=False` none is taken over at the start, and groups are not compared.)
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        _refuse(engine)
        home = engine.home
        assert isinstance(home, Ranks)
        assert isinstance(home.exchange, ManagedExchange)
        self._declaration = declaration(engine.plan)  # now: a loop's scheduler may write into the optimizer later
        self._exchange = home.exchange
        self._manager = home.exchange.manager
        self._kept = engine.state_dict()
        self._manager.register_state_dict_fn("hdet", self._take_over, self._state)
        self._open()

    def step(self, losses: Losses | None = None) -> WindowRecord | None:
        """`Engine.step`. At a window's end the groups meet; None where the window was thrown away."""
        engine = self.engine
        if engine.finished or engine.step_count + 1 < engine.cycle.window.stop:
            return engine.step(losses)
        return self._close(partial(engine.step, losses))

    def finish(self) -> WindowRecord | None:
        """`Engine.finish`; None where the window was thrown away, to be trained again."""
        return self._close(self.engine.finish)

    def _close(self, close: Callable[[], WindowRecord | None]) -> WindowRecord | None:
        self._manager.start_quorum(allow_heal=False, shrink_only=True)
        self._exchange.meeting = True
        record = None
        try:
            record = close()
        except LostRankError:
            pass  # which the manager knows, and so does not commit
        finally:
            self._exchange.meeting = False
        if not self._manager.should_commit():
            record = None
            self.engine.load_state_dict(self._kept)
        if not self.engine.finished:
            self._open()
        return record

    def _open(self) -> None:
        """Meet all groups that are there; those behind take over the state of one that is not."""
        self._kept = self.engine.state_dict()
        self._manager.start_quorum()
        while self._manager.errored() is not None:
            self._manager.should_commit()  # it cannot, and asks for new connections
            self._manager.start_quorum()

    def _state(self) -> dict[str, Any]:
        return {
            "declaration": self._declaration,
            "engine": self._kept,
            "windows": [record.to_json() for record in self.engine.history.windows],
            "looked": self.engine.cycle.standstill.done,
        }

    def _take_over(self, state: dict[str, Any]) -> None:
        own, others = self._declaration, state["declaration"]
        differing = sorted(field for field in {*own, *others} if own.get(field) != others.get(field))
        if differing:
            field = differing[0]
            raise CheckpointError(
                f"the replica groups disagree on {', '.join(differing)}: {field} is {own.get(field)} here and "
                f"{others.get(field)} in the group to take over from; declare the same run in every group"
            )
        if state["windows"]:
            self.engine.history.take_over([WindowRecord.from_json(line) for line in state["windows"]])
        self.engine.load_state_dict(state["engine"])
        self.engine.cycle.standstill.done = state["looked"]  # else it would meet the others once more for that
        self._kept = state["engine"]


def _refuse(engine: Engine) -> None:
    """What cannot do without some of the replicas.

    Raises:
        ConfigError: the engine has it.
    """
    home, plan = engine.home, engine.plan
    if not (isinstance(home, Ranks) and isinstance(home.exchange, ManagedExchange)):
        raise ConfigError("a managed engine needs replicas of hdet.torchft.distribute(manager, model, optimizer, ...)")
    if plan.gradients != "local":
        raise ConfigError(
            "managed replica groups meet at the ends of windows only, and gradients are shared at every step; give the "
            "engine gradients='local'"
        )
    for evidence in plan.evidence:
        if not isinstance(evidence, Divergent) or evidence.tilt is not None:
            raise ConfigError(
                f"{evidence.kind} evidence needs numbers of every replica, and a managed group may be gone; take "
                f"Divergent without a tilt"
            )
    if plan.guard is not None:
        raise ConfigError("a guard goes by the first replica, whose managed group may be gone; leave guard= out")
    if isinstance(plan.merge, Exploit):
        raise ConfigError(
            "Exploit copies single replicas to others, which torchft's Manager cannot; take another merge"
        )
