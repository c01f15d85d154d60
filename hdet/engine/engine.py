"""The engine: the cycle of fan out, train, compare, merge, move; the only file that knows its order."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer

from hdet.controllers import Estimate
from hdet.engine import admission, snapshot
from hdet.engine.defaults import complete
from hdet.engine.guard import Guard, Watch
from hdet.engine.probe_size import ProbeSize
from hdet.engine.tally import Losses, Tally
from hdet.errors import ConfigError, DivergedError, StepError
from hdet.evidence import Collector, Contrast, Evidence, Harvest, Scene, Window
from hdet.history import History, WindowRecord
from hdet.hparams.bound import BoundKnob
from hdet.hparams.knob import Knob
from hdet.hparams.learned import Learned
from hdet.replicas import Replica, Replicas, Terms
from hdet.replicas.anchor import Anchor
from hdet.replicas.average import Averages
from hdet.replicas.distributed.lost_rank import translated
from hdet.replicas.merge import Mean, Merge
from hdet.replicas.random_numbers import CommonNumbers
from hdet.signals import Objective, Probe, Signal, TrainingLoss
from hdet.windows import FixedWindow, Windows

MAX_RESTORES = 3


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
        history: a path for one JSON line a window, or a `History`.
        anchor: where the last converged point is kept: beside the model, or on the host.
        averages: where window-averaged weights are kept; see `hdet.replicas.average`.
        guard: goes back where training went wrong, such as `hdet.Rewind()`; needs a probe.
        objective: the training loss and training batches, for evidence that evaluates them by itself
            (`MixedDifference`).

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
        objective: Objective | None = None,
    ) -> None:
        if gradients not in ("shared", "local"):
            raise ConfigError(f"gradients must be 'shared' or 'local', got {gradients!r}")
        if anchor not in ("device", "host"):
            raise ConfigError(f"anchor must be 'device' or 'host', got {anchor!r}")
        if averages not in ("device", "host"):
            raise ConfigError(f"averages must be 'device' or 'host', got {averages!r}")
        admission.declared("replicas", replicas, Replicas)
        admission.declared("window", window, int, Windows)
        admission.declared("signal", signal, TrainingLoss, Probe, type(None))
        admission.declared("evidence", evidence, Evidence, type(None))
        admission.declared("merge", merge, Merge, type(None))
        admission.declared("objective", objective, Objective, type(None))
        for given in knobs:
            admission.declared("a knob", given, Knob)
        admission.unique_names(knobs)
        self._home = replicas
        self.hosts = replicas.hosts
        self.gradients = gradients
        self.merge = merge if merge is not None else Mean()
        self.signal: Signal = signal if signal is not None else TrainingLoss()
        self.windows = FixedWindow(window) if isinstance(window, int) else window
        self.seed = seed
        self.knobs = [
            BoundKnob(knob, [knob.bind(model, optimizer) for model, optimizer in replicas.hosts], replicas.size)
            for knob in (complete(knob, evidence, replicas.diverge) for knob in knobs)
        ]
        admission.separate_targets(self.knobs)
        chosen = [knob.evidence for knob in self.knobs]
        for knob, source in zip(self.knobs, chosen, strict=True):
            admission.identifiable(knob, source, replicas, self.signal, gradients)
            admission.has_objective(knob, source, objective)
        self._paired = admission.paired(self.knobs, replicas)
        self.total_steps = admission.common_total(self.knobs, total_steps)
        self._last_step = self.total_steps

        self.anchor = Anchor(*replicas.hosts[0], device="cpu" if anchor == "host" else None)
        self.averages = Averages(replicas.hosts, device="cpu" if averages == "host" else None)
        explored = any(own.diverges and knob.spec.spread.width for knob, own in zip(self.knobs, chosen, strict=True))
        self._apart = replicas.diverge and (gradients == "local" or explored)
        self._shared_host = len(replicas.local) > len(replicas.hosts)
        scene = Scene(
            replicas, self.signal, gradients, seed, self.anchor, self.averages, self.at_base, self._apart, objective
        )
        self.collectors: list[Collector] = []
        self.evidence = list(dict.fromkeys(chosen))
        for source in self.evidence:
            assert isinstance(source, Evidence)  # each that can be declared is one
            judged = [knob for knob, own in zip(self.knobs, chosen, strict=True) if own == source]
            self.collectors.append(source.collect(scene, judged))
        admission.guarded(guard, self.signal)
        self.watch: Watch | None = guard.watch(scene) if guard is not None else None
        self._probe_size = ProbeSize(self.knobs, self.signal, gradients)
        replicas.begin(
            Terms(
                gradients=gradients,
                explored=explored or not all(own.diverges for own in chosen),
                apart=self._apart,
                observed=any(type(collector).exit is not Collector.exit for collector in self.collectors),
                anchor=self.anchor,
                merge=self.merge.to_dict(),
                declaration=admission.declaration(self),
            )
        )
        self._numbers = CommonNumbers(seed, [model for model, _ in replicas.hosts])
        # With nothing to compare this is training as it is, the global RNG's numbers included.
        self._numbered = self._paired and any(
            knob.spec.spread.width for knob in self.knobs if isinstance(knob.evidence, Contrast)
        )
        for replica in replicas.local:
            replica.data_index = replica.index // 2 if self._paired else replica.index
            replica.random = self._random
            replica.on_enter[:] = [self._enter]
            replica.on_exit[:] = [self._exit]

        self.history = history if isinstance(history, History) else History(history if replicas.is_leader else None)
        self.run: str | None = None  # a name that its checkpoints share, given by the first of them
        self.step_count = 0
        self.finished = False
        self._shared = self._entered = self._begun = False
        self._met = False  # a warm noisy start (`hdet.perturb`) may have set the replicas apart
        self.tally = Tally(replicas)
        self.restores = 0
        self._places = self._hosted_indices()
        self._clock = time.perf_counter()
        self.window = self.open_window(0)

    # -- the face a training loop sees ------------------------------------------------------------

    @property
    def replicas(self) -> Sequence[Replica]:
        """The replicas this process hosts. Run forward and backward of each inside `with replica:`."""
        return self._home.local

    @property
    def home(self) -> Replicas:
        """Where the replicas of all processes live."""
        return self._home

    @property
    def size(self) -> int:
        """N, the number of replicas over all processes."""
        return self._home.size

    @property
    def data_shards(self) -> int:
        """How many parts a step's data come in: one a replica, or one a pair (`Contrast(paired=True)`).

        A replica takes part `replica.data_index`.
        """
        return self.size // 2 if self._paired else self.size

    @property
    def optimizers(self) -> list[Optimizer]:
        """The distinct optimizers this process steps."""
        return [optimizer for _, optimizer in self._home.hosts]

    @property
    def bases(self) -> dict[str, float]:
        """Each knob's base at the coming step: its schedule's value there, moved by what was learned."""
        return {knob.name: knob.base(self.step_count) for knob in self.knobs}

    @property
    def learned(self) -> dict[str, Learned]:
        """What each knob was set to, what it has been moved to, and the factor between them: its schedule aside."""
        return {knob.name: knob.learned for knob in self.knobs}

    def share_gradients(self) -> None:
        """Call after the last backward of a step, before clipping: gives all replicas the mean gradient.

        Does nothing where gradients are local or where data parallelism has shared them already.
        """
        self._shared = True
        if self.gradients == "shared" or not self._home.diverge:
            self._home.share_gradients()

    def gradients_are_shared(self) -> None:
        """Say that this step's gradients were given their mean by other means than `share_gradients`."""
        self._shared = True

    def step(self, losses: Losses | None = None) -> WindowRecord | None:
        """Call after the optimizers' steps. Returns the window's record when this step ends one.

        Args:
            losses: one 0-dim tensor for each replica of this process (or a [local] tensor). They stay on the
                device until the window ends. Each is the mean over its replica's batch, on the scale of the probe's
                loss: some controllers compare the two. Without any in a window the training loss cannot judge it:
                replicas still converge, and no base is moved by it.

        Raises:
            StepError: the run is over, or a loss is not a scalar.
            DivergedError: all replicas became non-finite in several windows on end.
        """
        self._refuse_if_over()
        self._refuse_unshared()
        if self.tally.steps == 0:
            self.history.expect(self.window.index)
        self.tally.add(losses)
        self.averages.add()
        for collector in self.collectors:
            collector.after_update(self.window, self.step_count)
        self.step_count += 1
        self._home.advance()
        if self.step_count < self.window.stop:
            self._apply()
            return None
        with translated("closing a window"):
            return self._close_window()

    def reapply(self) -> None:
        """Put the coming step's knob values in force again, after something else wrote or loaded an optimizer."""
        for knob in self.knobs:
            knob.forget()
        self._apply()

    def _apply(self) -> None:
        for knob in self.knobs:
            for host, value in enumerate(knob.values(self.step_count, self._places)):
                knob.write(host, value)

    @contextmanager
    def at_base(self) -> Iterator[None]:
        """Every knob at its base inside the block, to evaluate or save a model in mid-window."""
        for knob in self.knobs:
            base = knob.base(self.step_count)
            for host in range(len(self.hosts)):
                knob.write(host, base)
        try:
            yield
        finally:
            self._apply()

    def finish(self) -> WindowRecord | None:
        """End the run now: closes and merges a window under way. Every replica then holds the result."""
        if self.finished:
            return None
        self._last_step = self.step_count
        if self.tally.steps:
            return self._close_window()
        self._end()
        return None

    def state_dict(self) -> dict[str, Any]:
        """Everything a resume needs, as plain numbers and tensors; see `hdet.engine.snapshot`."""
        self._home.settle()
        return snapshot.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state. With another N, the converged model, bases and controllers carry over.

        Raises:
            CheckpointError: the state is another engine's.
        """
        snapshot.load_state_dict(self, state)

    def resume(self, window: int, finished: bool) -> None:
        """Take up a run at `step_count`, where all replicas are alike: open a window, or be at the end."""
        self._last_step = self.total_steps
        self._met = window > 0
        self._home.restored(merged=self._met)
        self.finished = finished
        for knob in self.knobs:
            knob.forget()
        if finished:
            self._end()
        else:
            self.open_window(window)

    @property
    def in_flight(self) -> bool:
        """Whether the replicas' models do not show the last merge yet."""
        return self._home.in_flight

    def settle(self) -> None:
        """Let the anchor hold the last merge, before it is saved."""
        self._home.settle()

    def all_agree(self, fact: bool) -> bool:
        """Whether a fact holds in every process; each asks at the same time."""
        row = torch.full((len(self._home.local), 1), float(fact), device=self.tally.sums.device)
        return bool((self._home.gather(row) == 1.0).all())

    # -- the cycle --------------------------------------------------------------------------------

    def open_window(self, index: int) -> Window:
        """All replicas are alike: anchor the point, draw the designs, put the values in force."""
        start = self.step_count
        stop = start + self.windows.length(start)
        if self._last_step is not None:
            stop = min(stop, self._last_step)
        self.window = Window(index, start, stop, self._last_step)
        for knob in self.knobs:
            knob.rest()
        self._apply()  # so that the anchored optimizer holds the bases, not the first replica's levels
        self.anchor.take(start)
        self.tally.reset()
        self.averages.reset()
        for collector in self.collectors:
            collector.open(self.window)
        self._apply()
        self._clock = time.perf_counter()
        return self.window

    def _close_window(self) -> WindowRecord:
        began = time.perf_counter()
        self._home.advance(now=True)
        window = Window(self.window.index, self.window.start, self.step_count, self._last_step)
        table = self._home.gather(self.tally.rows())
        valid = np.isfinite(table[:, 0]) & (table[:, 2] == 1.0)
        losses = np.where(valid & (table[:, 3] > 0), table[:, 0], np.nan)
        faults = self._faults(table, valid)
        last = window.stop - 1
        bases = {knob.name: knob.base(last) for knob in self.knobs}
        values = {knob.name: knob.values(last, range(self.size)) for knob in self.knobs}

        opened = {knob.name: knob.learned for knob in self.knobs}

        estimates: dict[str, Estimate] = {}
        moves = {knob.name: 0.0 for knob in self.knobs}
        merged = False
        if valid.any():
            self.restores = 0
            harvest = Harvest(window, losses, valid)
            for collector in self.collectors:
                estimates.update(collector.close(harvest))
            merged = self._converge(valid)
            remaining = self._windows_left()
            for knob in self.knobs:
                moves[knob.name] = knob.judge(
                    estimates[knob.name],
                    self.step_count,
                    self.total_steps,
                    window.index,
                    remaining,
                    window.stop - window.start,
                    harvest.loss,
                )
            if self.watch is not None:
                ahead = {name: moves[name] for name, estimate in estimates.items() if estimate.offset > 0}
                over = self.step_count == self._last_step  # too late to begin anew
                self._guard(self.watch, harvest, bases, {} if over else ahead, faults, moves)
        else:
            self._restore(faults)
            if self.watch is not None:
                self._retreat(bases, moves)
        now = time.perf_counter()
        record = WindowRecord(
            window=window.index,
            start=window.start,
            stop=window.stop,
            bases=bases,
            values=values,
            losses=[float(loss) if np.isfinite(loss) else None for loss in losses],
            estimates={name: estimate.to_dict() for name, estimate in estimates.items()},
            moves=moves,
            merged=merged,
            faults=faults,
            seconds=now - self._clock,
            closing=now - began,
            learned={
                knob.name: {
                    "start": knob.learned.start,
                    "opened": opened[knob.name].value,
                    "closed": knob.learned.value,
                }
                for knob in self.knobs
            },
        )
        record.hints.extend(self._probe_size.look(self.history.windows, record))
        self.history.append(record)
        if self.step_count == self._last_step:
            self._end()
        else:
            self.open_window(window.index + 1)
        if self.restores > MAX_RESTORES:
            raise DivergedError(
                f"all {self.size} replicas became non-finite in {self.restores} windows on end, the last at step "
                f"{faults[0]['step']}; the models hold the last converged point. Start from lower values; the bases "
                f"were {bases}"
            )
        return record

    def _converge(self, valid: np.ndarray[Any, np.dtype[np.bool_]]) -> bool:
        """Merge, unless nothing can have come apart."""
        apart = (
            self._apart
            or not self._met
            or not valid.all()
            or any(buffer.is_floating_point() for buffer in self._home.hosts[0][0].buffers())
        )
        if not self._home.diverge:
            self._home.mean_buffers(valid.tolist())
        self._met = True
        if not (self._home.diverge and apart):
            return False
        self.merge(self._home, valid.tolist())
        for knob in self.knobs:
            knob.forget()  # a failed replica took over another's optimizer, knob values included
        return True

    def _restore(self, faults: list[dict[str, Any]]) -> None:
        for model, optimizer in self._home.hosts:
            self.anchor.restore(model, optimizer)
        for knob in self.knobs:
            knob.forget()
        self.restores += 1
        faults.append({"kind": "restored", "step": self.anchor.step})

    def _guard(
        self,
        watch: Watch,
        harvest: Harvest,
        bases: Mapping[str, float],
        ahead: Mapping[str, float],
        faults: list[dict[str, Any]],
        moves: dict[str, float],
    ) -> None:
        """Let the guard see the merged point; go back to an earlier one where it says so."""
        self._home.advance(now=True)
        turn = watch.look(harvest, bases, ahead)
        if turn is None:
            return
        faults.append({"kind": turn, "step": watch.go_back(turn, self.step_count)})
        self._met = turn == "rewound"
        for collector in self.collectors:
            collector.forget()
        self._retreat(watch.bases if turn == "rewound" else None, moves)

    def _retreat(self, worked: Mapping[str, float] | None, moves: dict[str, float]) -> None:
        """Training went wrong after the bases were these: every controller may keep away from what did it.

        Args:
            worked: None where the run begins anew.
        """
        at = self.step_count, self.total_steps, self.window.index
        for knob in self.knobs:
            knob.forget()
            moves[knob.name] += knob.restart(*at) if worked is None else knob.retreat(worked[knob.name], *at)

    def _faults(
        self, table: np.ndarray[Any, np.dtype[np.float64]], valid: np.ndarray[Any, np.dtype[np.bool_]]
    ) -> list[dict[str, Any]]:
        faults: list[dict[str, Any]] = []
        for index in np.flatnonzero(~valid).tolist():
            since = math.ceil(table[index, 1])
            # A loss that stayed finite leaves the last update to blame.
            faults.append({"kind": "non_finite", "replica": index, "step": self.step_count - max(1, since)})
        return faults

    def _windows_left(self) -> int | None:
        return None if self._last_step is None else self.windows.count(self.step_count, self._last_step)

    def _end(self) -> None:
        self.finished = True
        self._home.advance(now=True)
        for knob in self.knobs:
            knob.rest()
        self._apply()

    def _refuse_if_over(self) -> None:
        if self.finished:
            raise StepError(
                f"the run is over after {self.step_count} steps (total_steps={self.total_steps}); give the engine and "
                f"its schedules more total_steps, or stop the loop"
            )

    def _refuse_unshared(self) -> None:
        needed = self.gradients == "shared" or not self._home.diverge
        if needed and self._home.shares_on_call and self._entered and not self._shared:
            raise StepError(
                f"engine.share_gradients() was not called in step {self.step_count}: between the backward passes and "
                f"the optimizers' steps it gives the {self.size} replicas their mean gradient; call it there, or "
                f"declare gradients='local'"
            )
        self._shared = self._entered = False

    def _enter(self, replica: Replica) -> None:
        self._refuse_if_over()
        if not self._begun:
            self._begun = True
            if self.watch is not None and self.step_count == 0:
                self.watch.begin()
        self._entered = True
        if self._shared_host:
            for knob in self.knobs:
                knob.write(replica.host, knob.values(self.step_count, [replica.index])[0])
        for collector in self.collectors:
            collector.enter(replica, self.step_count)

    def _random(self, replica: Replica) -> AbstractContextManager[None]:
        if not self._numbered:
            return nullcontext()
        together = any(collector.pairs for collector in self.collectors)
        return self._numbers.of(replica, self.step_count, together=together)

    def _exit(self, replica: Replica) -> None:
        for collector in self.collectors:
            collector.exit(replica, self.step_count)

    def _hosted_indices(self) -> list[int]:
        """The replica whose values each host holds at rest: its first."""
        first: dict[int, int] = {}
        for replica in self._home.local:
            first.setdefault(replica.host, replica.index)
        return [first[host] for host in range(len(self._home.hosts))]
