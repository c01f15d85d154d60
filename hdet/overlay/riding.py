"""What the hooks of a search do: the engine's cycle under a training loop that knows nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from hdet.engine import snapshot
from hdet.engine.engine import Engine
from hdet.engine.same_probe import require_same_probe
from hdet.errors import ConfigError, HdetError, StepError
from hdet.history import WindowRecord
from hdet.hparams.param_groups import first_trained, parameters_of
from hdet.overlay.hooks import scaler_of_step
from hdet.overlay.lent_bindings import Lending
from hdet.overlay.passes import Passes
from hdet.overlay.rates import Rates
from hdet.overlay.reported_losses import ReportedLosses
from hdet.recipes.recommended import FORWARD
from hdet.record import TURNS
from hdet.replicas import tensors
from hdet.replicas.distributed import refusals
from hdet.replicas.distributed.ranks import Ranks
from hdet.replicas.parallel import world
from hdet.signals import Probe
from hdet.user_warning import warn

Build = Callable[[int, Lending], Engine]
Callback = Callable[[WindowRecord], object]
ODD_STEPS = 5
"""Steps on end with another number of passes than was counted, after which this is said."""
MOST_SKIPPED = 0.1
"""Share of a run's steps that a GradScaler may skip. One that drops more is left before its time."""
SAME = 1e-6
"""Settings that differ by a larger share are others."""
WENT_BACK = {
    "restored": "a loss, a weight or a buffer was not finite",
    "standstill": "training stood still and the held-out loss got worse",
    "wreck": "the held-out loss was far above all that it had been, or not finite",
    "overshoot": "the first steps were far too large",
}
"""Why model and optimizer are those of an earlier step again, by what the fault tells, or by its kind."""
STEPLESS = 10
"""Times on end that gradients were dropped and the weights written, without a step of the optimizer."""


class Riding:
    """Drives an engine by a loop's forward passes and optimizer steps.

    Args:
        given_place: somebody said where the replicas live, and so what other processes have to do with them.

    Attributes:
        engine: the one that is driven. Where micro-batches are counted, another one from the first step on.
        counting: the first step's passes will tell how many micro-batches make a step.
        passes: those since the optimizer's last step.
        lending: what is in force for a pass or a step only.
        losses: what the loop has told of its training loss.
        given: the micro-batches of a step that were told beforehand; None for those of the first step.
        callbacks: called with the record of each window that closes.
        held_by: the search that rides, which so lives as long as its hooks do, whether or not somebody keeps it.
    """

    engine: Engine

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        build: Build,
        rates: Rates,
        micro_batches: int | None,
        *,
        given_place: bool,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.rates = rates
        self.given = micro_batches
        self.counting = micro_batches is None
        self.losses = ReportedLosses()
        self.passes = Passes(model, optimizer, self.losses)
        self.callbacks: list[Callback] = []
        self.held_by: object = None
        self._build = build
        self._warned: set[str] = set()
        self._odd_steps = 0  # on end, with another number of passes than was counted
        self._left_out = 0  # steps of this window of which nothing was learnt about the forward pass
        self._stepping = False  # update knobs are in force for an optimizer's step
        self._writes_seen = -1  # as the last of the passes began, or the optimizer last stepped
        self._written = 0  # times on end that passes led to no step and the weights were written
        self._busy = False  # the engine is at work, and passes are its own
        self._found_alone = world() == 1 and not given_place
        self.take_seats(1 if micro_batches is None else micro_batches)
        self._require_alike(
            float(self.counting),
            "micro_batches= was given on some ranks and not on others; give all of them the same number, or none",
            ConfigError,
        )

    def take_seats(self, micro_batches: int) -> None:
        """Make an engine for that many micro-batches a step. No step may have been made."""
        if hasattr(self, "engine"):
            self.engine.home.observe_no_more()
        self.lending = Lending(lambda: self.engine.step_count if hasattr(self, "engine") else 0, self.rates.split)
        with self._at_work(), self.lending.groups_cut():
            self.engine = self._build(micro_batches, self.lending)
        self.lending.know(self.engine.knobs)
        self.passes.ride(self.engine, self.lending)

    def refuse_at_work(self) -> None:
        """It cannot be detached by what it measures with: what is compared would change meanwhile.

        Raises:
            StepError: the engine is at work.
        """
        if self._busy:
            raise StepError(
                "search.detach() was called while hdet measures, as by the probe's loss, with settings and weights "
                "that it has to take back first: call it in a callback of search.on_window, or between two steps"
            )

    def dismount(self) -> None:
        """Nothing of hdet stays in force."""
        self.passes.give_up()
        self.engine.home.observe_no_more()
        self.lending.take_out_update()
        self.lending.take_out_forward()

    def finish(self, *, only_if_over: bool) -> None:
        """Close the window under way: the loop is over. What was trained stays where it left before its time.

        Args:
            only_if_over: do nothing in that case.
        """
        over = self._made_all_steps()
        if only_if_over and not over:
            return
        with self._at_work(), self.lending.all_in_force():
            record = self.engine.cycle.finish(last_weights=not over)
        self._tell(record)

    def _made_all_steps(self) -> bool:
        """Whether the steps that are missing were skipped by a GradScaler, as far as can be told; on all ranks."""
        total, home = self.engine.total_steps, self.engine.home
        if total is None:
            return False
        skipped = self.passes.lost + (self.passes.begun > 0)
        over = home.scaler is not None and total - self.engine.step_count <= min(skipped, MOST_SKIPPED * total)
        return snapshot.all_agree(self.engine.cycle, over)

    def state_dict(self) -> dict[str, Any]:
        """What the loop has told, besides the engine's state: plain numbers and tensors."""
        scaler = self.engine.home.scaler
        return {
            "peaks": {knob.name: knob.peak for knob in self.engine.knobs},
            "rates": self.rates.state_dict(),
            "losses": self.losses.state_dict(),
            "entered": self.passes.entered,
            "lost": self.passes.lost + self.passes.were_dropped(),  # which is found out in the next pass
            "loss_scale": scaler.get_scale() if isinstance(scaler, GradScaler) else scaler,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        home = self.engine.home
        if not isinstance(home.scaler, GradScaler):
            home.scaler = state.get("loss_scale")
        self.passes.lost = state.get("lost", 0)
        self.losses.load_state_dict(state["losses"])
        self.rates.load_state_dict(state["rates"])
        for knob in self.engine.knobs:
            knob.peak = state["peaks"].get(knob.name, knob.peak)

    def warn(self, message: str) -> None:
        """Once."""
        if message not in self._warned:
            self._warned.add(message)
            warn(message)

    # -- what the hooks say -----------------------------------------------------------------------

    def before_forward(self) -> None:
        """A training pass begins, or goes on: several forwards to one backward are one pass."""
        if self._busy:
            return
        self.passes.end_unended()
        if self.passes.under_way:
            self._notice_untraced()
            return
        self._forget_failed_step()
        refusals.joined(self.model)
        self._refuse_late_ranks()
        self._follow(settled=False)
        self.passes.begin()
        if self.passes.dropped:
            self._notice_written()

    def after_forward(self, output: object) -> None:
        """The model has returned."""
        if not self._busy:
            self.passes.forwarded(output)

    def forward_failed(self) -> None:
        """The model has raised."""
        if not self._busy and not self.passes.under_way:
            self.passes.give_up()

    def before_step(self) -> None:
        """The optimizer is about to step, its gradients complete."""
        if self.passes.begun == 0 and makes_state(self.optimizer, first=self.engine.step_count == 0):
            return
        self.passes.end()
        self.lending.take_out_forward()
        self._forget_failed_step()
        self._follow()
        self._refuse_if_over()
        self._refuse_unseen()
        if self.counting and self.engine.step_count == 0:
            self._count()
        if self.passes.begun == 0 or self.passes.borrowed:
            with self.lending.groups_cut():
                self.engine.cycle.take_first_point()  # else the first pass has done so
        if not skipped(self.optimizer) and self._losses_can_be_judged():
            self._find_scale()
        if not isinstance(self.engine.home.scaler, GradScaler):
            self._find_scaler()
        self.lending.put_in_update()
        self.lending.join_groups()
        self._stepping = True

    def after_step(self) -> None:
        """The optimizer has stepped."""
        if not self._stepping:  # a closure was not called, or no step of training was made
            if self.passes.begun:
                self.warn(
                    f"the {type(self.optimizer).__name__} did not call the closure that its step was given, so hdet "
                    f"takes no part in this step: run forward and backward in the loop, and call step() without it"
                )
            return
        self._stepping = False
        record = None
        try:
            if skipped(self.optimizer):
                self.passes.lost += 1
            elif not self.engine.finished:
                self.lending.refuse_written()
                record = self._advance()
        finally:
            self.lending.take_out_forward()
            self.lending.take_out_update()
            self.passes.begin_step()
            self.passes.dropped = self._written = 0
            self._writes_seen = self._writes()
        self._tell(record)
        self.passes.kept.after_step()

    def before_saving(self) -> None:
        """The optimizer's state is asked for or loaded: where a step raised, hdet's values are still in force."""
        if self._stepping and not self._busy:
            self.lending.take_out_update()

    def after_saving(self) -> None:
        """The optimizer's state was asked for while it steps, as by a hook of the loop's own: the step goes on."""
        if self._stepping and not self._busy:
            self.lending.put_in_update()
            self.lending.join_groups()

    # -- what the search asks for -----------------------------------------------------------------

    @contextmanager
    def engine_alone(self) -> Iterator[None]:
        """Inside the block the engine's state is taken or given, with the groups that it knows."""
        self.before_saving()
        with self._at_work(), self.lending.groups_cut():
            yield

    # -- how a step is made -----------------------------------------------------------------------

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The engine is at work inside the block: what it does with model and optimizer is not the loop's."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def _forget_failed_step(self) -> None:
        """If the step before raised, what was in force for it still is."""
        self._stepping = False
        self.lending.take_out_update()

    def _follow(self, *, settled: bool = True) -> None:
        """The coming step is made with what the optimizer holds now."""
        if self.rates.tell(self.engine.step_count, over=self.engine.finished, settled=settled):
            self.engine.reapply()

    def _find_scaler(self) -> None:
        """See whose step this is; where its scale is not the one that was taken, the passes have told nothing."""
        home, scaler = self.engine.home, scaler_of_step()
        if home.scaler != (None if scaler is None else scaler.get_scale()):
            self.passes.miss()
        home.scaler = scaler

    def _count(self) -> None:
        """The passes of the first step are the micro-batches of each."""
        self.counting = False
        passes = self.passes.begun
        self._require_alike(
            float(passes),
            f"this rank made {passes} training passes in the first step, and another rank made another number; hdet "
            f"counts them there: give hdet.attach micro_batches=",
        )
        if passes > 1:
            self.take_seats(passes)

    def _advance(self) -> WindowRecord | None:
        passes, seats = self.passes, len(self.engine.replicas)
        self._notice_count(seats)
        if not passes.whole:
            passes.miss()
        self.engine.gradients_are_shared()
        complete = passes.entered == passes.begun == seats
        closes = self.engine.cycle.ends_window
        with self._at_work(), self.lending.all_in_force() if closes else self.lending.until_next_step():
            record = self.engine.step(self.losses.of(seats, passes.begun), complete=complete)
        self._left_out += passes.missed or not complete
        passes.missed = False
        if record is not None:
            self._refuse_unlike_parts(record.stop)
            self.rates.forget_before(self.engine.cycle.window.start)
            self._notice_left_out(record)
        return record

    def _losses_can_be_judged(self) -> bool:
        """Whether the first losses are there. On several ranks they are asked for once, in the first step."""
        unsure = self.losses.unsure
        if isinstance(self.engine.home, Ranks):
            if self.engine.step_count or self.losses.known:
                return False
            self._require_alike(
                float(unsure),
                "a training loss was reported on some ranks and not on others; call search.loss(...) on all of them, "
                "or on none",
            )
        return unsure

    def _require_alike(self, fact: float, message: str, kind: type[HdetError] = StepError) -> None:
        """Every rank of a run asks at the same time.

        Raises:
            HdetError: of this kind and with the message, where the ranks differ.
        """
        home = self.engine.home
        if not isinstance(home, Ranks):
            return
        first = next(self.model.parameters())
        found = home.gather(torch.full((len(home.local), 1), fact, device=first.device))
        if (found != fact).any():
            raise kind(message)

    def _refuse_unlike_parts(self, step: int) -> None:
        """The ranks that share a replica step its parts by one setting. Replicas on ranks of their own are compared.

        Raises:
            StepError: on all ranks, where some hold others in their optimizers.
        """
        home = self.engine.home
        held = [value for course in self.rates.courses.values() for value in course.latest]
        if not isinstance(home, Ranks) or home.layout.parts == 1 or not held:
            return
        own = torch.tensor(held, dtype=torch.float64, device=next(self.model.parameters()).device)
        # A gather has the mean over the ranks of a replica, and their scatter is the mean of squares less its square.
        table = home.gather(torch.stack([own, own.square()]).flatten().expand(len(home.local), -1))
        mean, of_squares = table.reshape(len(table), 2, -1).swapaxes(0, 1)
        if (of_squares - mean**2 > (SAME * mean) ** 2).any():
            raise StepError(
                f"the ranks that share a replica hold other learning rates, decays or momenta in their optimizers at "
                f"step {step} (here {sorted(set(held))}), so each steps its part of the model in another way; let all "
                f"ranks write the same"
            )

    def _find_scale(self) -> None:
        """Compare the first losses with the probe's at the same weights, alike in all processes."""
        engine = self.engine
        rows = self.losses.mean().expand(len(engine.replicas), 1)
        probe = engine.plan.signal
        assert isinstance(probe, Probe)
        with self._at_work(), self.lending.all_in_force(), engine.at_base():
            require_same_probe(engine.home, probe)
            held_out = probe.measure(engine.hosts[0][0], 0, self.optimizer).mean()
        table = engine.home.gather(torch.cat([rows, held_out.to(rows.device).expand(len(rows), 1)], dim=1))
        self.losses.judge(float(table[:, 0].mean()), float(table[0, 1]), max(1, self.passes.begun))

    # -- what is said, and refused ----------------------------------------------------------------

    def _writes(self) -> int:
        """How often torch has seen the first trained parameter written."""
        first = first_trained(self.optimizer)
        return 0 if first is None else first._version

    @property
    def _explores_forward(self) -> bool:
        return any(k.spec.acts_on == "forward" and k.spec.spread.width for k in self.engine.knobs)

    def _notice_written(self) -> None:
        """Say it once where something else than the optimizer keeps changing the weights that it trains."""
        before, self._writes_seen = self._writes_seen, self._writes()
        self._written += self._writes_seen != before  # else nothing is trained meanwhile
        if self._written == STEPLESS:
            self.warn(
                f"{STEPLESS} times on end the loop has dropped its gradients, and changed the weights, without a step "
                f"of the {type(self.optimizer).__name__} that hdet.attach was given, so nothing is explored: if the "
                f"loop steps another optimizer, attach to that one, after it is made"
            )

    def _notice_untraced(self) -> None:
        """Say it once where a pass may be another one: the backward of the one before cannot be seen."""
        if self.passes.untraced:
            self.warn(
                f"hdet finds no tensor that requires gradients in what the {type(self.model).__name__} returns, and so "
                f"takes all its passes between two optimizer steps for one; return tensors by themselves, or in "
                f"tuples, lists, mappings or dataclasses"
            )

    def notice_other_seats(self, seats: int) -> None:
        """A state of that many micro-batches a step is loaded: say it where others were told and something is lost."""
        if self.given is not None and self._explores_forward:
            self.warn(
                f"the state is of {seats} micro-batches a step, and this run was told {self.given}: rates and weight "
                f"decay go on, and of dropout and the like nothing more is learned, as from steps that have other "
                f"passes; accumulate {seats}, or begin another search with what this one had found"
            )

    def _notice_count(self, seats: int) -> None:
        """Say it once where steps keep having another number of passes than expected, if anything is lost by it."""
        passes = self.passes.begun
        odd = passes not in (0, seats, self.given)  # of what was told, a state that has others was told of
        self._odd_steps = self._odd_steps + 1 if odd else 0
        if self._odd_steps == ODD_STEPS and (self._explores_forward or self.losses.divided):
            self.warn(
                f"the last {ODD_STEPS} optimizer steps had {passes} training passes each or so, and hdet expects "
                f"{seats}; passes beyond that and steps with fewer teach nothing about dropout and the like: give "
                f"hdet.attach micro_batches={passes}"
            )

    def _notice_left_out(self, record: WindowRecord) -> None:
        """Say it once where most of a window taught nothing about knobs of the forward pass."""
        steps, left_out = record.stop - record.start, self._left_out
        self._left_out = 0
        if self._explores_forward and left_out > steps / 2:
            self.warn(
                "most steps of a window taught nothing about dropout and the like: their passes had several backward "
                "passes, or gradients that were dropped (an adversary's turn), or were of another number than "
                "expected; add up the losses of a pass and call backward() once, freeze the model in the adversary's "
                'turn (requires_grad_(False)), or give hdet.attach exclude=["dropout", "label_smoothing"]'
            )

    def _tell(self, record: WindowRecord | None) -> None:
        if record is None:
            return
        if not self.losses.seen:
            self.warn(
                "hdet was told no training loss: the guard cannot see whether training stands still, nor can the rules "
                "that lower a learning rate there, and that hold it up where nothing is overfitted; return the loss "
                "from the model, or write search.loss(loss).backward()"
            )
        for fault in record.faults:
            if fault["kind"] in TURNS and self.engine.home.is_leader:
                why = WENT_BACK.get(fault.get("because", fault["kind"]), "the guard decided so")
                self.warn(
                    f"at step {record.stop} hdet put the model and the optimizer back to step {fault['step']}: "
                    f"{why}; what else follows training, such as an average of the weights or "
                    f"another optimizer's state, stays as it is"
                )
        for callback in self.callbacks:
            callback(record)

    def _refuse_late_ranks(self) -> None:
        if self._found_alone and world() > 1:
            raise StepError(
                f"the process group of {world()} ranks was made after hdet.attach, which found one process, so each "
                f"rank would go by what it finds alone, and their weights come apart; call init_process_group, and "
                f"wrap the model, before hdet.attach; or, where each rank trains a model of its own, say so by "
                f"replicas=hdet.micro_batches(model, optimizer, n), of n passes a step"
            )

    def _refuse_unseen(self) -> None:
        if self.passes.begun == 0 and self._explores_forward and not self.engine.finished:
            forward = [knob.spec for knob in self.engine.knobs if knob.spec.acts_on == "forward"]
            names = sorted({knob.kind for knob in forward} & set(FORWARD))
            own = sorted({knob.label for knob in forward if knob.kind not in FORWARD})
            ways = [f"exclude={names}"] if names else []
            ways += [f"no {', '.join(own)} in knobs="] if own else []
            raise StepError(
                f"the optimizer is to step, and hdet has seen no training pass since its last step: the loop is to "
                f"call the {type(self.model).__name__} that hdet.attach was given, in train mode and with gradients "
                f"enabled. Attach to the model that the loop calls, wrapped or compiled as it is, before its first "
                f"call (if a compiled function calls it, to the model before torch.compile); if it calls it inside "
                f"torch.utils.checkpoint, give that use_reentrant=False; or, where it "
                f"calls parts of it one by one, run each pass by search.training_pass(run), whose "
                f"run() returns the loss; or leave out what is judged by passes: {' and '.join(ways)}"
            )

    def _refuse_if_over(self) -> None:
        if self.engine.finished and self.rates.driven:
            raise StepError(
                f"the run is over after {self.engine.step_count} steps, and with it the schedule that hdet gave the "
                f"learning rate; give hdet.attach more total_steps, or call search.detach() to train on at the "
                f"optimizer's own rate"
            )


def skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer was told that its gradients are not finite, and so changed nothing.

    Asked only where no device is waited for.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and found.device.type == "cpu" and bool(found.item())


def makes_state(optimizer: Optimizer, *, first: bool) -> bool:
    """Whether a step on gradients of 0 is made for an optimizer to have its state, before that is saved or loaded.

    `torch.distributed.checkpoint.state_dict` makes it at a rate of 0, and again at each save where there is no state,
    as of plain SGD. Others, as torchtnt, make it at the rate as it is, before any step of training (`first`).
    """
    if optimizer.state:
        return False
    gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    if not (first and gradients) and any(float(group["lr"]) != 0.0 for group in optimizer.param_groups):
        return False
    return not any(bool(tensors.local(gradient).any()) for gradient in gradients)
