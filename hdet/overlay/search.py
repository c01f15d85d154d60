"""A search that rides on a training loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine.engine import Engine
from hdet.errors import CheckpointError, StepError
from hdet.history import History, WindowRecord
from hdet.hparams.learned import Learned
from hdet.overlay.hooks import Hooks, Output, differentiable, loss_in
from hdet.overlay.lent_bindings import Lending, kept, put_back
from hdet.overlay.rank_states import AllRanks
from hdet.overlay.rates import Rates
from hdet.overlay.reported_losses import ReportedLosses
from hdet.replicas import Replica
from hdet.replicas.distributed import fully_sharded
from hdet.replicas.distributed.ranks import Ranks
from hdet.user_warning import warn

Callback = TypeVar("Callback", bound=Callable[[WindowRecord], object])
FORMAT = 1
ODD_STEPS = 5


class Search(AbstractContextManager["Search"]):
    """hdet on a training loop that goes on as it was; made by `hdet.attach`.

    As a context manager it detaches at the block's end.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        build: Callable[[int, Lending], Engine],
        rates: Rates,
        micro_batches: int | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._build = build
        self._rates = rates
        self._counting = micro_batches is None
        self._callbacks: list[Callable[[WindowRecord], object]] = []
        self._passes = self._entered = 0  # since the optimizer's last step: begun, and as a replica's
        self._open: Replica | None = None
        self._forward_done = False
        self._backward: int | None = None  # the one that the pass has had
        self._whole = True  # the step's passes had one each
        self._losses = ReportedLosses()
        self._odd_steps = 0  # on end, with another number of passes than was counted
        self._warned: set[str] = set()
        self._missed = False  # something of this step's passes was left out
        self._left_out = 0  # steps of this window of which nothing was learnt about the forward pass
        self._stepping = False  # update knobs are in force for an optimizer's step
        self._busy = False  # the engine is at work, and passes are its own
        self._take_seats(micro_batches or 1)
        self._hooks: Hooks | None = Hooks(self, model, optimizer)

    # -- what a person asks -----------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine that the loop drives. (Where micro-batches are counted, another one from the first step on.)"""
        return self._engine

    @property
    def history(self) -> History:
        """The windows so far."""
        return self._engine.history

    @property
    def attached(self) -> bool:
        """Whether it still rides on the loop."""
        return self._hooks is not None

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self._engine.finished

    @property
    def shifts(self) -> dict[str, Learned]:
        """What was learned of each hyperparameter: values at the peak of its schedule, and the factor between them."""
        return self._engine.learned

    def on_window(self, callback: Callback) -> Callback:
        """Call `callback(record)` when a window has closed. Returns it, so that this is a decorator too."""
        self._callbacks.append(callback)
        return callback

    def loss(self, loss: Tensor) -> Tensor:
        """Say what the training loss of the pass under way is, and get it back: `search.loss(loss).backward()`.

        Only needed where the model does not return it. It is the mean over the micro-batch, on the probe's scale.
        """
        self._losses.note(max(0, self._passes - 1), loss)
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
        if self._open is not None:
            self._leave(heard=False)
        self._miss()
        self._begin_step()

    def detach(self) -> None:
        """Leave the model and the optimizer as if hdet had never been there; what was trained stays."""
        if self._hooks is None:
            return
        self._hooks.remove()
        self._hooks = None
        if self._open is not None:
            self._leave(heard=False)
        self._engine.home.observe_no_more()
        self._lending.take_out_update()
        self._lending.take_out_forward()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hooks is not None and kind is None and not self._engine.finished and self._engine.step_count:
            with self._lending.all_in_force():
                record = self._engine.finish()
            self._tell(record)
        self.detach()

    # -- what is saved ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs, as plain numbers and tensors. Take it between two optimizer steps."""
        return {
            "format": FORMAT,
            "micro_batches": None if self._counting else len(self._engine.replicas),
            "engine": self._engine.state_dict(),
            "peaks": {knob.name: knob.peak for knob in self._engine.knobs},
            "rates": self._rates.state_dict(),
            "losses": self._losses.state_dict(),
        }

    @property
    def all_ranks(self) -> AllRanks:
        """The same for trainers that keep rank 0's state only: its `state_dict` is gathered, by all ranks together."""
        return AllRanks(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, before or after the model, the optimizer and the scheduler are restored.

        Raises:
            CheckpointError: the state is another search's, which is left as it was; or it is one rank's, taken in
                mid-window, and this is another rank.
        """
        if state.get("format") != FORMAT:
            raise CheckpointError(f"format {state.get('format')!r} of a search's state; this version reads {FORMAT}")
        if self._open is not None:
            self._leave(heard=False)
        self._passes = 0
        self._losses.clear()
        seats = state["micro_batches"]
        if seats is not None and seats != len(self._engine.replicas):
            self._take_seats(seats)
        counting, self._counting = self._counting, seats is None
        before, peaks = self._rates.state_dict(), [knob.peak for knob in self._engine.knobs]
        try:
            self._rates.load_state_dict(state["rates"])
            for knob in self._engine.knobs:
                knob.peak = state["peaks"].get(knob.name, knob.peak)
            with _groups_kept(self.optimizer):
                self._engine.load_state_dict(state["engine"])
            self._losses.load_state_dict(state["losses"])
        except Exception:
            self._rates.load_state_dict(before)
            self._counting = counting
            for knob, peak in zip(self._engine.knobs, peaks, strict=True):
                knob.peak = peak
            raise
        self._notice_return(state["engine"]["open"])

    def _notice_return(self, under_way: dict[str, Any] | None) -> None:
        """Say that the weights are those of the window's opening, where the window could not be taken up."""
        engine = self._engine
        if under_way is None or engine.step_count == under_way["step"]:
            return
        if engine.home.size > len(engine.replicas):
            raise CheckpointError(
                f"the search's state was taken at step {under_way['step']}, in mid-window, by one rank, and this run "
                f"has several, each with a part of its own: save search.all_ranks.state_dict(), which all ranks call "
                f"together, and load it by search.all_ranks.load_state_dict(). The model holds the weights of step "
                f"{engine.step_count} now: restore it anew"
            )
        self._warn(
            f"the search could not go on in the window that the state was taken in, at step {under_way['step']}: the "
            f"model holds the weights of step {engine.step_count}, at which the window opened; go on from there"
        )

    # -- what the hooks say -----------------------------------------------------------------------

    def before_forward(self) -> None:
        """A training pass begins."""
        if self._busy:
            return
        if self._open is not None:
            if self._forward_done and self._backward is None:
                return  # several forwards to one backward are one pass
            self._leave(heard=self._forward_done)
        if self._passes and not self._gradients_wait():
            self.drop_passes()
        self._follow()
        if self._engine.finished or self._passes >= len(self._engine.replicas):
            self._lending.put_in_forward(at_base=True)
        else:
            self._enter(self._engine.replicas[self._passes])
        self._passes += 1
        self._forward_done, self._backward = False, None

    def after_forward(self, output: Any) -> None:
        """The pass has run forward."""
        if self._busy or not self._passes:
            return  # or the step was made within what was called one pass
        self._forward_done = True
        loss = loss_in(output)
        if loss is not None:
            self._losses.note(self._passes - 1, loss)
        for tensor in differentiable(output):
            tensor.register_hook(self._heard_backward)  # type: ignore[no-untyped-call]

    def before_step(self) -> None:
        """The optimizer is about to step, its gradients complete."""
        if self._open is not None:
            self._leave(heard=True)
        self._lending.take_out_forward()
        self._lending.take_out_update()  # if the step before raised
        self._follow()
        self._refuse_if_over()
        self._refuse_unseen()
        if self._counting and self._engine.step_count == 0:
            self._counting = False
            self._require_alike(
                float(self._passes),
                f"this rank made {self._passes} training passes in the first step, and another rank made another "
                f"number; hdet counts them there: give hdet.attach micro_batches=",
            )
            if self._passes > 1:
                self._take_seats(self._passes)
                self._entered = 0
        if not _skipped(self.optimizer) and self._losses_can_be_judged():
            self._find_scale()
        self._lending.put_in_update()
        self._stepping = True

    def after_step(self) -> None:
        """The optimizer has stepped."""
        if not self._stepping:
            return  # it was given a closure, and did not call it
        self._stepping = False
        record = None
        try:
            if not self._engine.finished and not _skipped(self.optimizer):
                record = self._advance()
        finally:
            self._lending.take_out_forward()
            self._lending.take_out_update()
            self._begin_step()
        self._tell(record)

    # -- how it is done ---------------------------------------------------------------------------

    def _take_seats(self, micro_batches: int) -> None:
        """An engine for that many micro-batches a step. No step may have been made."""
        self._lending = Lending(lambda: self._engine.step_count if hasattr(self, "_engine") else 0)
        self._busy = True
        try:
            self._engine = self._build(micro_batches, self._lending)
        finally:
            self._busy = False
        self._lending.rest_at_bases(self._engine.knobs)

    def _follow(self) -> None:
        """The coming step is made with what the optimizer holds now."""
        if self._rates.tell(self._engine.step_count):
            self._engine.reapply()

    def _enter(self, replica: Replica) -> None:
        self._entered += 1
        self._lending.put_in_update()
        try:
            replica.__enter__()
            self._open = replica
            self._lending.put_in_forward()
        finally:
            self._lending.take_out_update()

    def _leave(self, *, heard: bool) -> None:
        """The pass is over; its gradient counts if it was heard."""
        replica, self._open = self._open, None
        assert replica is not None
        self._lending.put_in_update()
        try:
            if heard:
                replica.__exit__(None, None, None)
            else:
                replica.__exit__(StepError, StepError("the pass was given up"), None)
        finally:
            self._lending.take_out_update()
            self._lending.take_out_forward()

    def _advance(self) -> WindowRecord | None:
        seats = len(self._engine.replicas)
        self._notice_count(seats)
        if not self._whole:
            self._miss()
        self._engine.gradients_are_shared()
        self._busy = True
        try:
            with self._lending.all_in_force():
                complete = self._entered == self._passes == seats
                record = self._engine.step(self._losses.of(seats), complete=complete)
        finally:
            self._busy = False
        self._left_out += self._missed or not complete
        self._missed = False
        if record is not None:
            self._rates.forget_before(self._engine.cycle.window.start)
            self._notice_left_out(record)
        return record

    def _notice_left_out(self, record: WindowRecord) -> None:
        """Say it once where most of a window taught nothing about knobs of the forward pass."""
        steps, left_out = record.stop - record.start, self._left_out
        self._left_out = 0
        if self._explores_forward and left_out > steps / 2:
            self._warn(
                "most steps of a window taught nothing about dropout and the like: their passes had several backward "
                "passes, or gradients that were dropped (an adversary's turn), or were of another number than "
                "expected; add up the losses of a pass and call backward() once, or give hdet.attach "
                'exclude=["dropout", "label_smoothing"]'
            )

    def _miss(self) -> None:
        """What the passes of this step would teach is left out."""
        self._missed = self._missed or self._entered > 0
        for replica in self._engine.replicas[: self._entered]:
            self._engine.cycle.miss(replica)

    def _begin_step(self) -> None:
        self._passes = self._entered = 0
        self._whole = True
        self._losses.clear()

    def _losses_can_be_judged(self) -> bool:
        """Whether the first losses are there. On several ranks they are asked for once, in the first step."""
        unsure = self._losses.unsure
        if isinstance(self._engine.home, Ranks):
            if self._engine.step_count or self._losses.known:
                return False
            self._require_alike(
                float(unsure),
                "a training loss was reported on some ranks and not on others; call search.loss(...) on all of them, "
                "or on none",
            )
        return unsure

    def _require_alike(self, fact: float, message: str) -> None:
        """Every rank of a run asks at the same time.

        Raises:
            StepError: with the message, where the ranks differ.
        """
        home = self._engine.home
        if not isinstance(home, Ranks):
            return
        first = next(self.model.parameters())
        found = home.gather(torch.full((len(home.local), 1), fact, device=first.device))
        if (found != fact).any():
            raise StepError(message)

    def _find_scale(self) -> None:
        """Compare the first losses with the probe's at the same weights, alike in all processes."""
        engine = self._engine
        rows = self._losses.mean().expand(len(engine.replicas), 1)
        self._busy = True
        try:
            with self._lending.all_in_force(), engine.at_base():
                held_out = engine.plan.signal.measure(engine.hosts[0][0], 0, self.optimizer).mean()  # type: ignore[union-attr]
        finally:
            self._busy = False
        table = engine.home.gather(torch.cat([rows, held_out.to(rows.device).expand(len(rows), 1)], dim=1))
        self._losses.judge(float(table[:, 0].mean()), float(table[0, 1]), self._passes)

    def _notice_count(self, seats: int) -> None:
        """Say it once where steps keep having another number of passes than they were expected to."""
        self._odd_steps = self._odd_steps + 1 if self._passes and self._passes != seats else 0
        if self._odd_steps == ODD_STEPS:
            self._warn(
                f"the last {ODD_STEPS} optimizer steps had {self._passes} training passes each or so, and hdet expects "
                f"{seats}; passes beyond that and steps with fewer teach nothing about dropout and the like: give "
                f"hdet.attach micro_batches={self._passes}"
            )

    def _tell(self, record: WindowRecord | None) -> None:
        if record is None:
            return
        if not self._losses.seen:
            self._warn(
                "hdet was told no training loss: the guard cannot see whether training stands still, nor can the rule "
                "that lowers a learning rate there; return the loss from the model, or write "
                "search.loss(loss).backward()"
            )
        for callback in self._callbacks:
            callback(record)

    def _heard_backward(self, gradient: Tensor) -> None:
        """Backward has reached what the model returned. When it is through the pass is over, before anything clips."""
        task = torch._C._current_graph_task_id()
        if self._backward is not None:
            # A second one adds to gradients that were looked at: what the step would teach is left out.
            self._whole = self._whole and task == self._backward
        else:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        if self._open is not None:
            self._leave(heard=True)

    def _gradients_wait(self) -> bool:
        """Whether gradients of earlier passes are there: else they were dropped, as by a GradScaler that skipped."""
        # Fully sharded parameters gather theirs elsewhere until the last micro-batch.
        return fully_sharded.used(self.model) or any(p.grad is not None for p in self.model.parameters())

    def _warn(self, message: str) -> None:
        """Once."""
        if message not in self._warned:
            self._warned.add(message)
            warn(message)

    @property
    def _explores_forward(self) -> bool:
        return any(k.spec.acts_on == "forward" and k.spec.spread.width for k in self._engine.knobs)

    def _refuse_unseen(self) -> None:
        if self._passes == 0 and self._explores_forward and not self._engine.finished:
            raise StepError(
                f"the optimizer is to step, and hdet has seen no training pass since its last step: the loop is to "
                f"call the {type(self.model).__name__} that hdet.attach was given, in train mode and with gradients "
                f"enabled. Attach to the model that the loop calls, wrapped or compiled as it is, before its first call"
            )

    def _refuse_if_over(self) -> None:
        if self._engine.finished and self._rates.driven:
            raise StepError(
                f"the run is over after {self._engine.step_count} steps, and with it the schedule that hdet gave the "
                f"learning rate; give hdet.attach more total_steps, or call search.detach() to train on at the "
                f"optimizer's own rate"
            )


@contextmanager
def _groups_kept(optimizer: Optimizer) -> Iterator[None]:
    """What the groups hold is the user's and their scheduler's, whatever the engine restores inside the block."""
    held = [{key: kept(entry) for key, entry in group.items() if key != "params"} for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, entries in zip(optimizer.param_groups, held, strict=True):
            for key, entry in entries.items():
                put_back(group, key, entry)


def _skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer was told that its gradients are not finite, and so changed nothing.

    Asked only where no device is waited for.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())
