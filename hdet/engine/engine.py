"""The engine: the face of a search that a training loop sees."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from hdet.engine import admission, snapshot
from hdet.engine.cycle import Cycle
from hdet.engine.driver import Driver
from hdet.engine.guard import Guard
from hdet.engine.loop_checks import LoopChecks, PlainDropouts
from hdet.engine.noise_scale import NoiseScale
from hdet.engine.plan import Bind, Plan
from hdet.engine.tail import Tail
from hdet.engine.tally import Losses
from hdet.errors import StepError
from hdet.evidence import Evidence
from hdet.history import History, WindowRecord
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import Knob
from hdet.hparams.learned import Shifts
from hdet.merging import Merge
from hdet.record import named
from hdet.replicas import Replica, Replicas
from hdet.replicas.random_numbers import CommonNumbers
from hdet.signals import Objective, Signal
from hdet.windows import Windows


class Engine:
    """Explores knobs inside one training run.

    A window opens with all replicas alike. Each trains at knob values of its own; at the window's end the
    evidence is read, the replicas are merged, and each knob's controller moves its base. Then the next opens.

    Args:
        replicas: from `hdet.replicate`, `hdet.micro_batches` or `hdet.distribute`.
        knobs: what is explored; names and the scalars they write must be distinct.
        window: steps between two converges, or a rule for them.
        signal: what replicas are compared by.
        evidence: where the comparisons of knobs that name no evidence of their own come from; by default
            `Divergent` where replicas can come apart, else what suits each knob without (`Line`, `Analytic`,
            `Recursion`, `Contrast`).
        merge: how diverged replicas become one.
        gradients: "shared", every replica applies the mean gradient (data parallel, the paper), or "local",
            each its own (local SGD).
        seed: of the designs. The global RNG is never touched. (`Contrast(paired=True)` lends passes one of its own.)
        total_steps: the run's length; by default its schedules'. Without one the run is open-ended and
            `finish` must be called.
        history: a path for one JSON line a window; `hdet.History(path)` for a run that may go on with an old file. Of
            several ranks the first one's is written, and no other's.
        anchor: where the last converged point is kept: beside the model, or on the host.
        averages: where window-averaged weights are kept; see `hdet.replicas.average`.
        guard: goes back where training went wrong, such as `hdet.Rewind()`; needs a probe.
        tail: which weights the run ends with, such as `hdet.TailAverage()`; needs a probe. None keeps the last ones.
        objective: the training loss and training batches, for evidence that evaluates them by itself
            (`MixedDifference`).
        noise_scale: read the gradient noise scale off each step's micro-batches (`hdet.micro_batches`, at least 2):
            `engine.noise_scale`, and each window's record.
        bind: how a knob is bound to a model and its optimizer, instead of `knob.bind(model, optimizer)`.

    Raises:
        ConfigError: the declaration cannot be; the message names the knob and the way out.

    >>> import torch, hdet
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> engine = hdet.Engine(hdet.replicate(model, optimizer, n=4), [hdet.LearningRate()], window=5, total_steps=10)
    >>> for step in range(10):
    ...     losses = []
    ...     for replica in engine.replicas:
    ...         with replica:
    ...             loss = replica.model(torch.ones(8, 2)).square().mean()
    ...             loss.backward()
    ...         losses.append(loss)
    ...     engine.share_gradients()
    ...     for optimizer in engine.optimizers:
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     record = engine.step(losses)
    >>> len(engine.history), engine.finished
    (2, True)
    """

    def __init__(
        self,
        replicas: Replicas,
        knobs: Sequence[Knob],
        *,
        window: int | Windows = 50,
        signal: Signal | None = None,
        evidence: Evidence | None = None,
        merge: Merge | None = None,
        gradients: Literal["shared", "local"] = "shared",
        seed: int = 0,
        total_steps: int | None = None,
        history: str | os.PathLike[str] | History | None = None,
        anchor: Literal["device", "host"] = "device",
        averages: Literal["device", "host"] = "device",
        guard: Guard | None = None,
        tail: Tail | None = None,
        objective: Objective | None = None,
        noise_scale: bool = False,
        bind: Bind | None = None,
    ) -> None:
        admission.declared("replicas", replicas, Replicas)  # before it is asked who writes the history
        admission.can_be_trained_later()
        held = History.given(history, writes=replicas.is_leader)
        self.plan = Plan(
            replicas,
            knobs,
            window=window,
            signal=signal,
            evidence=evidence,
            merge=merge,
            gradients=gradients,
            seed=seed,
            total_steps=total_steps,
            anchor=anchor,
            averages=averages,
            guard=guard,
            tail=tail,
            objective=objective,
            bind=bind,
            noise_scale=noise_scale,
        )
        self.cycle = Cycle(self.plan, held)
        self._checks = LoopChecks(replicas)
        plain_dropouts = PlainDropouts(self.plan.knobs)
        self._plain_dropouts = plain_dropouts if plain_dropouts.are_there else None
        self._driver = Driver(replicas)
        # What a step asks is looked up here: between two of training a call takes several times as long as alone.
        to_share = self.plan.gradients == "shared" or not replicas.diverge
        self._shares_on_call = to_share and replicas.shares_on_call
        self._needs_passes = self._why_passes()
        self._numbers = CommonNumbers(seed, [model for model, _ in replicas.hosts])
        self._shared = self._entered = False
        watched = (self._plain_dropouts, self._needs_passes) != (None, None) or self.cycle.watches_exit
        for replica in replicas.local:
            replica.data_index = replica.index // 2 if self.plan.paired else replica.index
            # With nothing to compare this is training as it is, the global RNG's numbers included.
            replica.random = self._random if self.plan.numbered else None
            replica.on_enter[:] = [self._enter]
            replica.on_exit[:] = [self._exit] if watched else []

    # -- where the run stands ---------------------------------------------------------------------

    def __repr__(self) -> str:
        of = f" of {self.total_steps}" if self.total_steps is not None else ""
        replicas = f"{self.size} replica{'s' * (self.size != 1)}"
        knobs = named(knob.name for knob in self.knobs)
        return f"<Engine at step {self.step_count}{of}, {replicas}: {knobs or 'no knobs'}>"

    @property
    def replicas(self) -> Sequence[Replica]:
        """The replicas this process hosts. Run forward and backward of each inside `with replica:`."""
        return self.cycle.home.local

    @property
    def home(self) -> Replicas:
        """Where the replicas of all processes live."""
        return self.cycle.home

    @property
    def size(self) -> int:
        """N, the number of replicas over all processes."""
        return self.cycle.home.size

    @property
    def data_shards(self) -> int:
        """How many parts a step's data come in: one a replica, or one a pair (`Contrast(paired=True)`).

        A replica takes part `replica.data_index`.
        """
        return self.size // 2 if self.plan.paired else self.size

    @property
    def optimizers(self) -> list[Optimizer]:
        """The distinct optimizers this process steps."""
        return [optimizer for _, optimizer in self.cycle.home.hosts]

    @property
    def bases(self) -> dict[str, float]:
        """Each knob's base at the coming step: its schedule's value there, moved by what was learned."""
        return {knob.name: knob.base(self.step_count) for knob in self.knobs}

    @property
    def learned(self) -> Shifts:
        """What each knob was set to, what it has been moved to, and the factor between them: its schedule aside."""
        return Shifts({knob.name: knob.learned for knob in self.knobs}, self.step_count, self.total_steps)

    @property
    def hosts(self) -> Sequence[tuple[nn.Module, Optimizer]]:
        """This process's distinct models with their optimizers."""
        return self.home.hosts

    @property
    def knobs(self) -> Sequence[BoundKnob]:
        """The knobs at work."""
        return self.plan.knobs

    @property
    def history(self) -> History:
        """The windows so far. Give another before the first step, or before a state is loaded, to go on in that one.

        Raises:
            ConfigError: what is given is no `hdet.History`.
            StepError: steps are done.
        """
        return self.cycle.history

    @history.setter
    def history(self, history: History) -> None:
        admission.declared("history", history, History)
        if self.step_count:
            raise StepError(
                f"a run takes another history before its first step only, and {self.step_count} are done, whose "
                f"windows the one it has holds; give Engine(history=...), or set it before a state is loaded"
            )
        self.cycle.history = History.given(history, writes=self.cycle.home.is_leader)

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The gradient noise scale in the last window that has one; `None` before, or without `noise_scale=True`."""
        return self.cycle.noise_scale

    @property
    def total_steps(self) -> int | None:
        """The run's length; None for an open end."""
        return self.plan.total_steps

    @property
    def step_count(self) -> int:
        """Optimizer steps done."""
        return self.cycle.step_count

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self.cycle.finished

    # -- what a training loop calls ---------------------------------------------------------------

    def share_gradients(self) -> None:
        """Call after the last backward of a step, before clipping: gives all replicas the mean gradient.

        Does nothing where gradients are local or where data parallelism has shared them already.
        """
        self._shared = True
        if self._shares_on_call:
            self.cycle.home.share_gradients()

    def gradients_are_shared(self) -> None:
        """Say that this step's gradients were given their mean by other means than `share_gradients`."""
        self._shared = True

    def step(self, losses: Losses | None = None, *, complete: bool = True) -> WindowRecord | None:
        """Call after the optimizers' steps. Returns the window's record when this step ends one.

        Args:
            losses: one 0-dim tensor for each replica of this process (or a [local] tensor). They stay on the
                device until the window ends. Each is the mean over its replica's batch, on the scale of the probe's
                loss: some controllers compare the two. Without any in a window the training loss cannot judge it:
                replicas still converge, and no base is moved by it.
            complete: whether every replica had its pass. A short last accumulation is not: evidence that looks at
                passes then leaves the step out.

        Raises:
            StepError: the run is over, a loss is not a scalar, gradients were not shared, a replica whose pass has to
                be seen was not entered, or an optimizer's parameter groups are others than they were.
            DivergedError: all replicas became non-finite in several windows on end.
        """
        cycle = self.cycle
        if cycle.finished:
            self._refuse_as_over()
        if self._driver.is_lost:
            self._driver.refuse()
        if not self._checks.same_groups(cycle.step_count):
            cycle.look_anew()
        if self._shares_on_call and self._entered and not self._shared:
            self._refuse_unshared()
        self._shared = self._entered = False
        self._checks.told()
        if self._needs_passes is not None:
            for replica in self._checks.missed(cycle.step_count, self._needs_passes, complete=complete):
                cycle.miss(replica)
            self._checks.begin_step()
        record = cycle.step(losses)
        if record is not None:
            self._checks.same_modules(cycle.knobs)
        return record

    def reapply(self) -> None:
        """Put the coming step's knob values in force again, after something else wrote or loaded an optimizer."""
        self.cycle.reapply()

    def at_base(self) -> AbstractContextManager[None]:
        """Every knob at its base inside the block, to evaluate or save a model in mid-window."""
        return self.cycle.at_base()

    def averaged(self) -> AbstractContextManager[None]:
        """Every model at its window-averaged weights inside the block, and every knob at its base: for evaluation.

        These are the averages that evidence keeps (`Line`, `Analytic`, a probe with `at="average"`); no second copy is
        held. They are of the window under way, or, before its first step that is averaged (`stride`), of the window
        before. Where there is none (the run has just begun, was taken up or went back) the weights are as they are.
        With a Schedule-Free optimizer they are its own average. Buffers are not averaged. What a run has ended with
        (`hdet.TailAverage`) is another mean, and is in the models already. Where replicas come apart it
        is the mean over those that are finite, and a collective.

        Raises:
            ConfigError: nothing here averages weights.
        """
        return self.cycle.averaged()

    def finish(self) -> WindowRecord | None:
        """End the run now: closes and merges a window under way. Every replica then holds the result.

        With a tail (`hdet.TailAverage`) that is its mean where that is better, as after the run's last step.
        """
        return self.cycle.finish()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs, as plain numbers and tensors; see `hdet.engine.snapshot`.

        Raises:
            CheckpointError: the engine is that of `hdet.attach`, which is saved with its search.
        """
        snapshot.refuse_of_a_search(self.cycle)
        return snapshot.state_dict(self.cycle)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. With another N, the converged model, bases and controllers carry over.

        Raises:
            CheckpointError: the state is another engine's, or this engine is that of `hdet.attach`.
        """
        snapshot.refuse_of_a_search(self.cycle, loads=True)
        snapshot.load_state_dict(self.cycle, state)

    # -- what a pass brings -----------------------------------------------------------------------

    def _enter(self, replica: Replica) -> None:
        if self.cycle.finished:
            self._refuse_as_over()
        self._entered = True
        self._checks.entered(replica)
        if self.cycle.watches_entry:
            self.cycle.enter(replica)
        if self._plain_dropouts is not None:
            self._plain_dropouts.begin()

    def _why_passes(self) -> str | None:
        """Why each replica has to be entered in every step; `None` where a loop may leave it."""
        reasons = (collector.needs_passes for collector in self.cycle.collectors)
        noise = "the gradient noise scale is read there" if self.plan.noise_scale else None
        return next((reason for reason in (*reasons, noise, self.home.needs_passes) if reason is not None), None)

    def _random(self, replica: Replica) -> AbstractContextManager[None]:
        together = any(collector.pairs for collector in self.cycle.collectors)
        return self._numbers.of(replica, self.step_count, together=together)

    def _exit(self, replica: Replica) -> None:
        if self._plain_dropouts is not None:
            looked, self._plain_dropouts = self._plain_dropouts, None
            looked.end()
        if self.cycle.watches_exit:
            self.cycle.exit(replica)
        if self._needs_passes is not None:
            self._checks.passed(replica)

    def _refuse_as_over(self) -> None:
        raise StepError(
            f"the run is over after {self.step_count} steps (total_steps={self.total_steps}); give the engine and "
            f"its schedules more total_steps, or stop the loop"
        )

    def _refuse_unshared(self) -> None:
        raise StepError(
            f"engine.share_gradients() was not called in step {self.step_count}: between the backward passes and "
            f"the optimizers' steps it gives the {self.size} replicas their mean gradient; call it there, or "
            f"declare gradients='local'"
        )
