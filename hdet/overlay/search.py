"""A search that rides on a training loop of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine import snapshot
from hdet.engine.engine import Engine
from hdet.engine.noise_scale import NoiseScale
from hdet.errors import CheckpointError, StepError
from hdet.history import History, WindowRecord
from hdet.hparams.learned import Shifts
from hdet.overlay.hooks import Hook, Hooks, Output
from hdet.overlay.lent_bindings import kept, put_back
from hdet.overlay.model_weights import state_without_frozen, with_frozen, written_since
from hdet.overlay.rank_states import AllRanks
from hdet.overlay.riding import Riding
from hdet.overlay.told_schedule import Follower
from hdet.record import named
from hdet.replicas import tensors
from hdet.replicas.distributed.ranks import Ranks
from hdet.replicas.parallel import world
from hdet.signals.probe import real

Callback = TypeVar("Callback", bound=Callable[[WindowRecord], object])
FORMAT = 2
KEYS = ("micro_batches", "part", "engine", "written", "peaks", "rates", "losses")


class Search(AbstractContextManager["Search"]):
    """hdet on a training loop that goes on as it was; made by `hdet.attach`.

    As a context manager it detaches at the block's end.
    """

    def __init__(self, riding: Riding) -> None:
        self.model = riding.model
        self.optimizer = riding.optimizer
        self._undo: list[Callable[[], object]] = []
        self.say_left: Callable[[Search], object] | None = None  # where a loop detaches it
        self._riding = riding
        self._riding.held_by = self
        self._hooks: Hooks | None = Hooks(riding, self.model, self.optimizer)
        self._note = Hook(lambda loss: riding.losses.note(riding.passes.number, loss))

    # -- what a person asks -----------------------------------------------------------------------

    def __repr__(self) -> str:
        of = f" of {self.engine.total_steps}" if self.engine.total_steps is not None else ""
        detached = "" if self.attached else ", detached"
        step = self.engine.step_count
        if step:
            told = "; ".join(f"{names} {learned}" for names, learned in self.shifts.lines().items())
        else:
            told = named(self.shifts)  # where a run enters for caution is nothing that it learned
        return f"<Search at step {step}{of}{detached}: {told or 'no knobs'}>"

    @property
    def engine(self) -> Engine:
        """The engine that the loop drives. (Where micro-batches are counted, another one from the first step on.)"""
        return self._riding.engine

    @property
    def history(self) -> History:
        """The windows so far."""
        return self.engine.history

    @property
    def attached(self) -> bool:
        """Whether it still rides on the loop."""
        return self._hooks is not None

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.engine.finished

    @property
    def shifts(self) -> Shifts:
        """What was learned of each hyperparameter: values at the peak of its schedule, and the factor between them.

        A dict of `hdet.hparams.learned.Learned` by name, which prints as a table.
        """
        return self.engine.learned

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The gradient noise scale in the last window that has one: see `hdet.attach(..., noise_scale=True)`."""
        return self.engine.noise_scale

    def on_window(self, callback: Callback) -> Callback:
        """Call `callback(record)` when a window has closed. Returns it, so that this is a decorator too."""
        self._riding.callbacks.append(callback)
        return callback

    def loss(self, loss: Tensor) -> Tensor:
        """Say what the training loss of the pass under way is, and get it back: `search.loss(loss).backward()`.

        Only needed where the model does not return it. It is the mean over the micro-batch, on the probe's scale.

        Raises:
            StepError: it is no tensor of one real number.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise StepError(
                f"search.loss takes the training loss, a tensor of one number, and returns it for backward; got {got}: "
                f"give it the mean over the micro-batch, before .item()"
            )
        self._note(real(loss, "the training loss"))
        return loss

    def training_pass(self, run: Callable[[], Output]) -> Output:
        """Run what is one forward pass of training as a whole, and return what it returns: its loss, best of all.

        Only needed where a pass is not one call of the model, as in a trainer's training step, which may call parts of
        the model one by one.
        """
        return self._hooks.within(run) if self._hooks is not None else run()

    def drop_passes(self) -> None:
        """Say that the passes since the last step led to none, as where a GradScaler skipped it.

        Only needed where their gradients are still there when the next pass begins; else that is seen.
        """
        self._riding.passes.drop()

    def detach(self) -> None:
        """Leave the model and the optimizer as if hdet had never been there; what was trained stays.

        Raises:
            StepError: hdet is measuring, as where the probe's loss calls this.
        """
        self._riding.refuse_at_work()
        attached = self.attached
        self.let_go()
        if attached and self.say_left is not None:
            self.say_left(self)

    def let_go(self) -> None:
        """The same where it is no loop's end: another search takes its place, or something was raised."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
            self._riding.dismount()
            while self._undo:
                self._undo.pop()()

    def finish(self, *, only_if_over: bool = False) -> None:
        """Say that the loop has made its last step, which closes the window under way; on all ranks.

        Leaving the search as a context manager does so, too, and after `total_steps` steps all is done. Steps that a
        GradScaler skips do not count, so a loop over `total_steps` batches then ends a little earlier: the run ends as
        it would have (`tail=`) if no more steps are missing than were skipped, and else with the last weights.

        Args:
            only_if_over: do nothing where more steps are missing, as where training is to be taken up again.
        """
        if self.attached and not self.finished and self.engine.step_count:
            self._riding.finish(only_if_over=only_if_over)

    def agree_on_losses(self, agree: Callable[[Tensor], Tensor]) -> None:
        """Of each pass's loss, detached, take what this returns: the mean over others that train the same model.

        Only needed where torch.distributed does not know of them. It ends as the search is detached.
        """
        losses = self._riding.losses
        losses.agree = agree
        self.undo_when_detached(lambda: setattr(losses, "agree", torch.detach))

    def undo_when_detached(self, undo: Callable[[], object]) -> None:
        """Something was done for this search, and `undo` takes it back."""
        self._undo.append(undo)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.let_go()
            return
        self.finish()
        self.detach()

    # -- what is saved ----------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Search:
        """Of what holds a search, as a trainer does, a copy has one that is detached: the hooks of its model idle."""
        twin = memo[id(self)] = type(self).__new__(type(self))
        vars(twin).update(copy.deepcopy(vars(self) | {"_undo": [], "_hooks": None}, memo))
        return twin

    def __reduce__(self) -> str:
        """Refused.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            "a search holds the model and the loop's hooks, and is not pickled: save search.state_dict(), and keep the "
            "search itself out of what is pickled whole, as a trainer or its callback"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs, as plain numbers and tensors. Take it between two optimizer steps.

        Of the weights that the window opened at, and of others to go back to, it holds what is trained: frozen
        parameters are in the model's own state.
        """
        riding = self._riding
        with riding.engine_alone():
            engine = state_without_frozen(riding.engine.cycle)
            return {
                "format": FORMAT,
                "micro_batches": None if riding.counting else len(riding.engine.replicas),
                "part": self._part,
                "engine": engine,
                "written": written_since(engine, riding.engine.hosts[0][0]),
                **riding.state_dict(),
            }

    @property
    def all_ranks(self) -> AllRanks:
        """The same for trainers that keep rank 0's state only: its `state_dict` is gathered, by all ranks together."""
        home = self.engine.home
        group = home.layout.everyone() if isinstance(home, Ranks) else None
        return AllRanks(self, group, sharded=self._part is not None)

    @property
    def _part(self) -> tuple[int, int] | None:
        """This rank and the number of ranks, where a rank holds a part of the weights or of the optimizer's state."""
        sharded = any(tensors.pieces(parameter) > 1 for parameter in self.model.parameters())
        in_parts = getattr(self.optimizer, "state_in_parts", False) and world() > 1
        return (dist.get_rank(), world()) if sharded or in_parts else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, before or after the model, the optimizer and the scheduler are restored.

        Raises:
            CheckpointError: the state is another search's, which is left as it was; or it is one rank's, taken in
                mid-window, and this is another rank.
        """
        with self._riding.engine_alone():
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        riding = self._riding
        snapshot.refuse_unless_all(riding.engine.cycle, snapshot.attempted(lambda: self._require(state)), "search")
        riding.passes.give_up()
        riding.passes.begin_step()
        before, own = riding.state_dict(), len(riding.engine.replicas)
        seats = state["micro_batches"]
        others = seats not in (None, own)
        counting, riding.counting = riding.counting, seats is None
        try:
            if others:
                riding.take_seats(seats)
            model = riding.engine.hosts[0][0]
            loaded = snapshot.attempted(lambda: riding.load_state_dict(state))
            snapshot.refuse_unless_all(riding.engine.cycle, loaded, "search")
            with _groups_kept(self.optimizer):
                whole = with_frozen(state["engine"], model)
                snapshot.load_state_dict(riding.engine.cycle, whole, lambda: riding.load_state_dict(before))
            model.load_state_dict(state["written"], strict=False)
            if riding.engine.step_count:
                riding.lending.let_rest()
            for replica in riding.engine.replicas[: state.get("entered", 0)]:
                riding.engine.cycle.miss(replica)  # of a step under way, which is made anew, its passes too
        except Exception:
            if others:
                riding.rates.load_state_dict(before["rates"])  # which an engine is made by
                riding.take_seats(own)
            riding.load_state_dict(before)
            riding.counting = counting
            raise
        if len(riding.engine.replicas) != own:  # replicas that were given stay as many
            riding.notice_other_seats(seats)
        self._notice_return(state)

    def _require(self, state: Mapping[str, Any]) -> None:
        """Whether a state can be loaded, as far as that shows beforehand."""
        _require_parts(state, self.model)
        self._riding.rates.require_courses(state["rates"])
        self._require_seats(state["micro_batches"])
        whole = with_frozen(state["engine"], self.engine.hosts[0][0])
        if state["part"] != self._part:
            raise CheckpointError(
                f"the search's state is of {_named(state['part'])}, and this is {_named(self._part)}: save "
                f"search.all_ranks.state_dict(), which all ranks call together, load it by "
                f"search.all_ranks.load_state_dict(), and resume on as many ranks"
            )
        if state["micro_batches"] in (None, len(self.engine.replicas)):  # else an engine is made for it
            snapshot.require(self.engine.cycle, whole)

    def _require_seats(self, saved: int | None) -> None:
        if saved is not None and not (isinstance(saved, int) and saved > 0):
            raise CheckpointError(f"{saved!r} micro-batches a step, as the search's state has, is no number of them")
        own = len(self.engine.replicas)
        if self.engine.step_count and saved not in (None, own):
            raise CheckpointError(
                f"the state is of {saved} micro-batches a step, and this search has made steps of {own}; load it "
                f"before the first step, or attach anew"
            )

    def _notice_return(self, state: Mapping[str, Any]) -> None:
        """Say that the weights are those of the window's opening, where the window could not be taken up."""
        engine, under_way = self.engine, state["engine"]["open"]
        if under_way is None or engine.step_count == under_way["step"]:
            return
        # A state is of all ranks of its run, which may have been one process, or of one of several.
        of_all = "ranks" in state or state["engine"]["size"] == state["micro_batches"]
        if engine.home.size > len(engine.replicas) and not of_all:
            raise CheckpointError(
                f"the search's state was taken at step {under_way['step']}, in mid-window, by one rank, and this run "
                f"has several, each with a part of its own: save search.all_ranks.state_dict(), which all ranks call "
                f"together, and load it by search.all_ranks.load_state_dict(). The model holds the weights of step "
                f"{engine.step_count} now: restore it anew"
            )
        scheduled = isinstance(self._riding.rates.follower, Follower)
        self._riding.warn(
            f"the search could not go on in the window that the state was taken in, at step {under_way['step']}: the "
            f"model holds the weights of step {engine.step_count}, at which the window opened; go on from there"
            + (", the scheduler put back to that step too" if scheduled else "")
        )


def _require_parts(state: Mapping[str, Any], model: nn.Module) -> None:
    """Whether a state has all that is loaded, before anything is.

    Raises:
        CheckpointError: it has not.
    """
    if "format" not in state:
        raise CheckpointError(
            f"this is no state of a search: it has no 'format', but {', '.join(map(repr, list(state)[:4]))}; give what "
            f"search.state_dict() returned"
        )
    if state["format"] != FORMAT:
        raise CheckpointError(f"format {state['format']!r} of a search's state; this version reads {FORMAT}")
    lacking = [key for key in KEYS if key not in state]
    if lacking:
        raise CheckpointError(f"the search's state lacks {', '.join(lacking)}; give what state_dict() returned")
    lacking = [key for key in ("divided", "seen", "known") if key not in state["losses"]]
    if lacking:
        raise CheckpointError(f"the search's state lacks {', '.join(lacking)} of its losses")
    for key in ("entered", "lost"):
        if not isinstance(state.get(key, 0), int):
            raise CheckpointError(f"{state[key]!r} for {key}, as the search's state has, is no number of passes")
    live = model.state_dict()
    for name, value in state["written"].items():
        if name not in live or live[name].shape != value.shape:
            raise CheckpointError(f"the search's state holds {name} of shape {tuple(value.shape)}, not as this model")


def _named(part: tuple[int, int] | None) -> str:
    return "a process that holds whole weights" if part is None else f"rank {part[0]} of {part[1]} that share weights"


@contextmanager
def _groups_kept(optimizer: Optimizer) -> Iterator[None]:
    """What the groups hold is the user's and their scheduler's, whatever the engine restores inside the block."""
    held = [{key: kept(group[key]) for key in group if key != "params"} for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, entries in zip(optimizer.param_groups, held, strict=True):
            for key, entry in entries.items():
                put_back(group, key, entry)
