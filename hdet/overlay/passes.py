"""The training passes between two optimizer steps, and which of them are a replica's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import unserializable_hook

from hdet.engine.engine import Engine
from hdet.errors import StepError
from hdet.hparams.param_groups import parameters_of
from hdet.overlay.backward import accumulates, leaf_below, tells_no_end
from hdet.overlay.hooks import Hook, loss_in, requiring_grad
from hdet.overlay.kept_gradients import KeptGradients
from hdet.overlay.lent_bindings import Lending
from hdet.overlay.reported_losses import ReportedLosses
from hdet.replicas import Replica, tensors
from hdet.replicas.distributed import fully_sharded


@dataclass(eq=False)
class Pass:
    """A forward of the model in training, or several, and the backward that follows.

    Attributes:
        number: its place in the step.
        replica: whose it is; None beyond the replicas, at the bases.
        forwarded: it has run forward.
        traced: backward through what it returned can be seen.
        backward: autograd's number of the backward that it had.
        unended: nothing will tell when that is through.
        differentiated: its gradients were asked for by `torch.autograd.grad`.
    """

    number: int
    replica: Replica | None
    forwarded: bool = False
    traced: bool = False
    backward: int | None = None
    unended: bool = False
    differentiated: bool = False


class Passes:
    """Follows the passes of a loop: enters a replica where one begins, and leaves it where its backward is through.

    Attributes:
        begun: passes since the optimizer's last step.
        entered: how many of them were a replica's.
        whole: each has had one backward at most.
        missed: something that this step's passes would teach was left out.
        borrowed: the run's first pass had other parameters in the places of the model's (`torch.func`).
        dropped: how often passes have led to no step since the optimizer's last.
        lost: how often they have in all, as where a GradScaler skipped the step.
        kept: whether the loop clears its gradients.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, losses: ReportedLosses) -> None:
        self.model = model
        self.losses = losses
        self.kept = KeptGradients(optimizer)
        self._optimizer = optimizer
        self.begun = self.entered = 0
        self.whole = True
        self.missed = self.borrowed = False
        self.dropped = self.lost = 0
        self._current: Pass | None = None
        self._seen: tuple[Tensor, int] | None = None  # a gradient, and its version, when a backward was last through

    def ride(self, engine: Engine, lending: Lending) -> None:
        """From now on passes are those of an engine's replicas."""
        self._engine, self._lending = engine, lending
        self.entered = 0

    @property
    def under_way(self) -> bool:
        """Whether a pass waits for its backward, so that another forward is part of it."""
        return self._current is not None and self._current.forwarded

    @property
    def untraced(self) -> bool:
        """Whether the backward of the pass that waits for it cannot be seen."""
        return self._current is not None and self._current.forwarded and not self._current.traced

    @property
    def number(self) -> int:
        """Of the pass that was begun last."""
        return max(0, self.begun - 1)

    def begin(self) -> None:
        """A pass begins."""
        self.give_up()  # one whose forward failed
        if self.were_dropped():
            self.drop()
        replicas = self._engine.replicas
        beyond = self._engine.finished or self.begun >= len(replicas)
        self._current = current = Pass(self.begun, None if beyond else replicas[self.begun])
        self.begun += 1
        try:
            if current.replica is None:
                self._lending.put_in_forward(at_base=True)
            else:
                self._enter(current.replica)
        except BaseException:
            self.give_up()
            raise

    def forwarded(self, output: Any) -> None:
        """The pass has run forward."""
        current = self._current
        if current is None:
            return  # the step was made within what was called one pass
        current.forwarded = True
        loss = loss_in(output)
        if loss is not None:
            self.losses.note(current.number, loss)
        for tensor in requiring_grad(output):
            current.traced = True
            heard = Hook(partial(self._heard_backward, current, leaf_below(tensor)))
            tensor.register_hook(unserializable_hook(heard))

    def end(self) -> None:
        """The optimizer is about to step: a pass that waits is over, or was none."""
        self.end_unended()
        current = self._current
        if current is None:
            return
        # One without a backward, beside others that had theirs, was a look at the model, as for a metric.
        if current.forwarded and (not current.traced or current.differentiated or self.begun == 1):
            self._leave(heard=True)
        else:
            self.give_up(keeps_loss=not current.forwarded)  # the step is made within it

    def end_unended(self) -> None:
        """Autograd is at rest: a backward that nothing tells the end of is through."""
        if self._current is not None and self._current.unended:
            self._after_backward(self._current)

    def give_up(self, *, keeps_loss: bool = False) -> None:
        """The pass under way is none: its forward failed, or nothing came back through it."""
        current = self._current
        if current is None:
            return
        self._leave(heard=False)
        self.begun -= 1
        self.entered -= current.replica is not None
        if not keeps_loss:
            self.losses.drop(current.number)

    def drop(self) -> None:
        """The passes since the last step, if there were any, lead to none."""
        if not self.begun:
            return
        if self._current is not None:
            self._leave(heard=False)
        self.miss()
        self.begin_step()
        self.dropped += 1
        self.lost += 1

    def miss(self) -> None:
        """What the passes of this step would teach is left out."""
        self.missed = self.missed or self.entered > 0
        for replica in self._engine.replicas[: self.entered]:
            self._engine.cycle.miss(replica)

    def begin_step(self) -> None:
        """The step is over."""
        self.begun = self.entered = 0
        self.whole, self.borrowed = True, False
        self._seen = None
        self.losses.clear()

    def _enter(self, replica: Replica) -> None:
        self.entered += 1
        if self._engine.step_count == 0 and self.entered == 1:
            self.borrowed = tensors.borrowed(self.model)
        try:
            if self._engine.cycle.reads_on_entry or self._engine.step_count == 0:
                self._lending.put_in_update()  # the first pass also holds the first point
            replica.__enter__()
            self._lending.put_in_forward()
        finally:
            self._lending.take_out_update()

    def _leave(self, *, heard: bool) -> None:
        """The pass is over; its gradient counts if it was heard."""
        current = self._current
        assert current is not None
        try:
            if heard and self._engine.cycle.observes_passes:
                self._lending.put_in_update()
            self._current = None  # not before: where that was interrupted, the pass is still to be left
            if current.replica is None:
                pass
            elif heard:
                current.replica.__exit__(None, None, None)
            else:
                current.replica.__exit__(StepError, StepError("the pass was given up"), None)
        finally:
            self._lending.take_out_update()
            self._lending.take_out_forward()

    def _heard_backward(self, heard: Pass, leaf: Any, gradient: Tensor) -> None:
        """Autograd has reached what the model returned. When it is through the pass is over, before anything clips."""
        if not accumulates(leaf):
            heard.differentiated = True  # a penalty on a gradient; the pass's own backward is still to come
            return
        task = torch._C._current_graph_task_id()
        if heard.backward is None:
            if heard.number and self.were_dropped():
                self._drop_before(heard)
            self.kept.before_backward()
            heard.backward, heard.unended = task, tells_no_end()
            torch.autograd.Variable._execution_engine.queue_callback(Hook(partial(self._after_backward, heard)))
        elif heard.backward != task:
            # A second one adds to gradients that were looked at: what the step would teach is left out.
            self.whole = False

    def _drop_before(self, heard: Pass) -> None:
        """Gradients were dropped between a pass's forward and its backward: the passes before it lead to no step.

        It becomes the first, and teaches nothing of its own: it ran forward as another one's replica.
        """
        for replica in self._engine.replicas[: self.entered]:
            if replica is not heard.replica:
                self._engine.cycle.miss(replica)
        self.losses.keep_as_first(heard.number)
        heard.number, self.begun, self.entered = 0, 1, int(heard.replica is not None)
        self.whole, self.missed = False, True
        self.dropped += 1
        self.lost += 1

    def _after_backward(self, heard: Pass) -> None:
        if self._current is heard:
            self._leave(heard=True)
        self.kept.after_backward()
        first = next((p.grad for p in parameters_of(self._optimizer) if p.grad is not None), None)
        self._seen = (first, first._version) if first is not None else None

    def were_dropped(self) -> bool:
        """Whether the gradients of the passes so far are gone, as where a GradScaler skipped their step.

        Those of what the optimizer trains: in the turn of another one of the same model others stay.
        """
        if not self.begun or self._gradients_elsewhere():
            return False
        gradients = [p.grad for p in parameters_of(self._optimizer) if p.grad is not None]
        if not gradients:
            return self._seen is not None or all(p.grad is None for p in self.model.parameters())
        if self._seen is None or (self._seen[0] is gradients[0] and self._seen[1] == gradients[0]._version):
            return False
        # Something has written them since: they may have been set to zero. Only here is a device waited for.
        dense = all(tensors.local(g) is g and g.layout == torch.strided for g in gradients)
        return dense and not any(bool(g.any()) for g in gradients)

    def _gradients_elsewhere(self) -> bool:
        """Whether gradients are not in `.grad`: fully sharded parameters gather them until the last micro-batch."""
        return getattr(self._engine.hosts[0][1], "gradients_elsewhere", False) or fully_sharded.used(self.model)
