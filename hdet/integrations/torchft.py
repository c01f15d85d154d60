"""torchft: replica groups that may be killed and come back while the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hdet.engine.declaration import declaration
from hdet.engine.engine import Engine
from hdet.engine.tally import Losses
from hdet.errors import CheckpointError, ConfigError, LostRankError, MissingExtraError
from hdet.evidence import Divergent
from hdet.integrations.managed_search import Agreed, require_managed, require_shareable
from hdet.integrations.managed_state import Carried
from hdet.merging.exploit import Exploit
from hdet.overlay import attach as overlay
from hdet.overlay.search import Search
from hdet.recipes.recommended import FORWARD, excluding
from hdet.record import WindowRecord
from hdet.replicas import micro_batches
from hdet.replicas.distributed.ranks import Ranks
from hdet.replicas.in_process import check_pair
from hdet.replicas.parallel import unwrapped
from hdet.signals import Probe

try:
    from torchft import Manager
except ImportError:
    raise MissingExtraError("torchft", "torchft") from None

from hdet.integrations.managed_exchange import ManagedExchange


def attach(manager: Manager, model: nn.Module, optimizer: Any, *, probe: Probe, **options: Any) -> Search:
    """Explore learning rate and weight decay where torchft averages gradients over replica groups at every step.

    The loop stays as it is. All groups hold the same weights and read the same probe, so each makes the search by
    itself. Groups on other hardware differ in last bits, so they go by means over the groups that are there: of a
    pass's training loss, and of the shifts in a window's first step. All steps are so made at equal values. Between a
    window's end and the next step a group's shifts are its own. A step that torchft does not commit is none. A group
    that comes back takes over the search with the weights, at whatever step.

    Costs one more all-reduce a pass, of some numbers.

    Args:
        manager: made with `use_async_quorum=False`. Its own state functions hold model, optimizer and scheduler.
        model: in torchft's DistributedDataParallel, as the loop calls it.
        optimizer: torchft's, or the one in it.
        probe: held-out loss, the same in all groups.
        options: of `hdet.attach`, without `guard`, `tail`, `noise_scale` and `replicas`. `micro_batches` is 1 by
            default, and the loop calls `search.loss(...)` in each pass, in all groups. `history` is another path in
            each group.

    Raises:
        ConfigError: the manager's quorum is asynchronous, a group is of several processes, an option or a knob cannot
            be had, the manager carries another search; or what `hdet.attach` refuses.
        StepError: in the loop, a window's first step was told no loss.

    >>> search = hdet.torchft.attach(manager, model, optimizer, probe=probe, total_steps=1000)  # doctest: +SKIP
    """
    require_shareable(options)
    require_managed(manager)
    bare_optimizer: Optimizer = getattr(optimizer, "optim", optimizer)
    agreed = Agreed(manager, bare_optimizer)
    options["exclude"] = excluding(options.get("exclude", ()), *FORWARD)
    options["guard"] = options["tail"] = None
    seats = options.pop("micro_batches", 1)
    with ExitStack() as undo:
        undo.callback(bare_optimizer.register_step_pre_hook(agreed.take_mean).remove)  # before the search's own
        place = micro_batches(unwrapped(model)[0], bare_optimizer, seats)
        search = overlay.attach(model, bare_optimizer, probe=probe, replicas=place, **options)
        search.undo_when_detached(undo.pop_all().close)
    try:
        agreed.ride(search)
    except BaseException:
        search.detach()
        raise
    return search


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
    require_managed(manager)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    exchange = ManagedExchange(manager, group, groups, device)
    return Ranks([(model, optimizer)], [model], exchange, seats=0, reduces=None)


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
        Carried.by(self._manager).take(self)
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

    def state(self) -> dict[str, Any]:
        """What a group that comes back takes over."""
        return {
            "declaration": self._declaration,
            "engine": self._kept,
            "windows": [record.to_json() for record in self.engine.history.windows],
            "looked": self.engine.cycle.standstill.done,
        }

    def take_over(self, state: dict[str, Any]) -> None:
        """Go on where another group is, by its `state`.

        Raises:
            CheckpointError: the group declares another run.
        """
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
    """What cannot do without some of the replicas."""
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
    if plan.tail is not None:
        raise ConfigError("a tail is judged at the first replica, whose managed group may be gone; leave tail= out")
    if isinstance(plan.merge, Exploit):
        raise ConfigError(
            "Exploit copies single replicas to others, which torchft's Manager cannot; take another merge"
        )
