"""The cycle: a window opens, is trained, compared, merged and judged; the only file that knows this order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from torch import Tensor

from hdet.controllers import Context, Estimate
from hdet.engine import begun_anew, recording, recovery
from hdet.engine.declaration import declaration
from hdet.engine.guard import Watch
from hdet.engine.noise_scale import NoiseMeter, NoiseScale
from hdet.engine.plan import Plan
from hdet.engine.probe_size import ProbeSize
from hdet.engine.same_probe import require_same_probe
from hdet.engine.standstill import Standstill
from hdet.engine.tail import FollowedTail, possible
from hdet.engine.tally import Losses, Tally, WindowLosses
from hdet.errors import ConfigError, DivergedError
from hdet.evidence import Collector, Harvest, Scene, Window
from hdet.evidence.collector import at_work, told_by
from hdet.history import History, WindowRecord
from hdet.hparams import WeightDecay
from hdet.merging import Merger
from hdet.replicas import Replica, Terms, tensors
from hdet.replicas.alike import require_alike
from hdet.replicas.anchor import Anchor
from hdet.replicas.average import Averages
from hdet.replicas.chained_optimizer import chained
from hdet.replicas.distributed.lost_rank import translated
from hdet.replicas.held_optimizer import OF_GRADIENTS
from hdet.replicas.moving import Moving
from hdet.signals import Probe

MAX_RESTORES = 3


class Cycle:
    """The windows of one run, from the first step to the last.

    Attributes:
        step_count: optimizer steps done.
        window: the one under way.
        anchor: the point it opened at.
        noise_scale: of the gradients in the last window that has one.
        restores: windows on end in which all replicas became non-finite.
        watches_entry, watches_exit: `enter` and `exit` have something to do where a pass begins and ends.
        met: all replicas have been made one since the run began, or began anew. Before that a warm noisy start
            (`hdet.perturb`) may have set them apart.
        run: a name that the run's checkpoints share, given by the first of them.
    """

    def __init__(self, plan: Plan, history: History) -> None:
        self.plan = plan
        self.home = plan.replicas
        self.hosts = plan.replicas.hosts
        self.knobs = plan.knobs
        self.history = history
        self.anchor = Anchor(*self.hosts[0], device="cpu" if plan.anchor == "host" else None)
        self.moving = Moving(self.hosts)
        self.averages = Averages(self.moving, device="cpu" if plan.averages == "host" else None)
        self.scene = scene = Scene(
            self.home,
            plan.signal,
            plan.gradients,
            plan.seed,
            self.anchor,
            self.moving,
            self.averages,
            self.at_base,
            plan.apart,
            plan.objective,
            plan.outer,
            sets_apart=plan.sets_apart,
        )
        self.collectors: list[Collector] = [at_work(source, scene, plan.judged_by(source)) for source in plan.evidence]
        self._observers = [collector for collector in self.collectors if _has(collector, "exit")]
        self.watch: Watch | None = plan.guard.watch(scene) if plan.guard is not None else None
        tail = possible(plan.tail, self.hosts[0][1], plan.total_steps)
        self.tail = tail.follow(scene, plan.total_steps) if tail is not None and plan.total_steps is not None else None
        merger: object = plan.merge.at_work(scene)
        if not isinstance(merger, Merger):
            raise ConfigError(
                f"{type(plan.merge).__name__}.at_work returned {merger!r}; it returns a hdet.merges.Merger"
            )
        self.merger = merger
        self.noise_scale: NoiseScale | None = None
        self.tally = Tally(self.home, stay_alike=not plan.apart)
        self.standstill = Standstill(scene)
        self._probe_size = ProbeSize(self.knobs, plan.signal, plan.gradients)
        self.home.begin(
            Terms(
                gradients=plan.gradients,
                explored=plan.explored or plan.counterfactual,
                apart=plan.apart,
                observed=bool(self._observers),
                anchor=self.anchor,
                merge=plan.merge.to_dict(),
                declaration=declaration(plan),
            )
        )
        # After ranks were compared, of which some may have been told to read it and others not.
        self.noise = NoiseMeter(self.home, paired=plan.paired) if plan.noise_scale else None
        self.run: str | None = None
        self.step_count = 0
        self.finished = False
        self.restores = 0
        self._last_step = plan.total_steps
        self._last_weights = False  # the run ends with these, whatever the tail has
        self._begun = False
        self._whole = False
        self._sound = np.ones(self.home.size, dtype=bool)  # of the window that has closed
        self.met = False
        self._seats_share_models = len(self.home.local) > len(self.hosts)
        self._after_update = [own.after_update for own in self.collectors if _has(own, "after_update")]
        self._overlaps = self.home.overlaps
        self.watches_entry = True  # the first one begins the run
        self.watches_exit = bool(self._observers) or self.noise is not None
        self._places = [replica.index for replica in self.home.first_of_hosts]
        self._clock = time.perf_counter()
        self.window = self.open_window(0)

    # -- what a step is made of -------------------------------------------------------------------

    @property
    def observes_passes(self) -> bool:
        """Whether some evidence looks at gradients of the coming step's passes, and at the rates they are taken at."""
        return any(collector.watches for collector in self._observers)

    @property
    def reads_on_entry(self) -> bool:
        """Whether some evidence looks at the optimizer as a pass begins."""
        return any(collector.reads_on_entry for collector in self._observers)

    @property
    def ends_window(self) -> bool:
        """Whether the coming step is the last one of the window."""
        return self.step_count + 1 >= self.window.stop

    def enter(self, replica: Replica) -> None:
        """A replica is about to run forward."""
        if not self._begun:
            # Not when the engine is made: a checkpoint that goes on from that history may be loaded in between.
            self.history.expect(self.window.index)
            self._begun = True
            self.take_first_point()
            if not self.met:
                self._open_apart()
            self.watches_entry = self._seats_share_models or any(_has(own, "enter") for own in self.collectors)
        if self._seats_share_models:
            for knob in self.knobs:
                knob.write(replica.host, knob.values(self.step_count, [replica.index])[0])
        for collector in self.collectors:
            collector.enter(replica, self.step_count)

    def loaded(self) -> None:
        """A state was loaded, and with it the models' weights."""
        for anchor in (self.anchor, *(self.watch.points if self.watch is not None else ())):
            anchor.loaded()

    def take_first_point(self) -> None:
        """Before step 0: weights may have been loaded since the engine was made.

        Replicas of their own set out from where they were alike, noise on each (`hdet.perturb`) aside. Where others
        stand in the places of the model's parameters (`torch.func`), there is no point to take.
        """
        if self.step_count or tensors.borrowed(self.hosts[0][0]):
            return
        if not self.home.diverge:
            self.anchor.take(0, self._lent())
        if self.watch is not None:
            self.watch.begin()

    def exit(self, replica: Replica) -> None:
        """A replica has run backward; its gradient is not yet shared."""
        for collector in self.collectors:
            collector.exit(replica, self.step_count)
        if self.noise is not None:
            self.noise.exit(replica)

    def miss(self, replica: Replica) -> None:
        """A replica has no pass in this step."""
        for collector in self.collectors:
            collector.miss(replica, self.step_count)
        if self.noise is not None:
            self.noise.miss()

    def step(self, losses: Losses | None) -> WindowRecord | None:
        """The optimizers have made a step. Returns the window's record when this step ends one."""
        if self.tally.steps == 0:
            self.history.expect(self.window.index)
        self.tally.add(losses)
        if self._follows:
            self._follow()
        step = self.step_count + 1
        if self._last_step is not None and step > self._last_step:
            step = self._last_step  # closing the last window was interrupted
        self.step_count = step
        if step < self.window.stop:
            for knob in self.knobs:  # `apply`, without a call for a knob that stays as it is
                if step < knob.stays_until:
                    for owner, key, value in knob.held:
                        if owner[key] is not value:
                            break
                    else:
                        continue
                knob.put_in_force(step, self._places)
            return None
        with translated("closing a window"):
            return self.close_window()

    def _follow(self) -> None:
        """Do what not every run does after an update."""
        self.averages.add()
        if self.noise is not None:
            self.noise.end_step()
        for after_update in self._after_update:
            after_update(self.window, self.step_count)
        if self._overlaps:
            self.home.advance()

    def apply(self) -> None:
        """Put the coming step's values in force."""
        for knob in self.knobs:
            knob.put_in_force(self.step_count, self._places)

    def look_anew(self) -> None:
        """An optimizer holds other objects than before: look in these whether the values are still in force."""
        for knob in self.knobs:
            knob.stays_until = 0

    def reapply(self) -> None:
        """The same, after something else wrote or loaded a model or an optimizer."""
        self._forget_values()
        self.apply()

    @contextmanager
    def at_base(self) -> Iterator[None]:
        """Every knob at its base inside the block."""
        for knob in self.knobs:
            base = knob.base(self.step_count)
            for host in range(len(self.hosts)):
                knob.write(host, base)
        try:
            yield
        finally:
            self.apply()

    # -- what a window is made of -----------------------------------------------------------------

    def open_window(self, index: int) -> Window:
        """All replicas are alike: anchor the point, draw the designs, put the values in force."""
        start = self.step_count
        stop = start + self.plan.windows.at(start)
        if self._last_step is not None:
            stop = min(stop, self._last_step)
        self.window = Window(index, start, stop, self._last_step)
        for knob in self.knobs:
            knob.rest()
        self.apply()  # so that the anchored optimizer holds the bases, not the first replica's levels
        self.moving.open()
        self.anchor.take(start, self._lent())
        self.tally.reset()
        if not self.met:
            self._open_apart()
        self.averages.reset(stop - start)
        if self.noise is not None:
            self.noise.begin()
        for collector in self.collectors:
            collector.open(self.window)
        # In each step only what has something to do is called.
        self._follows = bool(self.averages.means or self.noise or self._after_update or self._overlaps)
        self.apply()
        self._clock = time.perf_counter()
        return self.window

    def _open_apart(self) -> None:
        """Nothing has made the replicas alike yet."""
        self.tally.open_apart()
        if self.tally.steps == 0:  # a state of within the window says itself how it opened
            self.merger.open_apart()

    def keep_optimizer_state(self) -> None:
        """Anchor the optimizer's state at every window's opening from now on, whatever else is held."""
        self._whole = True
        if self.tally.steps == 0:
            self.anchor.keep_optimizer_state()

    def _lent(self) -> Anchor | None:
        """The point whose optimizer state the anchor does without, where all replicas stay alike.

        Then a run wants the state only if all became non-finite, to go on from the weights of the window's opening:
        that of the point which the guard keeps will do, whatever window it is of. It is not for export: a state taken
        within the window gives the live moments with those weights.
        """
        of_gradients = all(type(each) in OF_GRADIENTS for each in chained(self.hosts[0][1]))
        light = of_gradients and not (self._whole or self.plan.apart)
        return self.watch.point if light and self.watch is not None else None

    def close_window(self) -> WindowRecord:
        """Gather, judge, merge, move; then open the next window, or end the run.

        Raises:
            DivergedError: all replicas became non-finite in several windows on end.
        """
        began = time.perf_counter()
        self.home.advance(now=True)
        window = Window(self.window.index, self.window.start, self.step_count, self._last_step)
        closed = self.tally.read(self.step_count)
        if closed.apart:
            require_alike(self.home, closed.valid, self.anchor, self.step_count)
        self.standstill.look(window, trained=self._begun)
        if window.index == 0:
            begun_anew.look((optimizer for _, optimizer in self.home.hosts), self.knobs, window)
            if isinstance(self.plan.signal, Probe):  # later a process may have come back alone
                require_same_probe(self.home, self.plan.signal)
        record = recording.trained(window, self.knobs, self.collectors, closed)
        bases = record.bases
        estimates: dict[str, Estimate] = {}
        moves = {knob.name: 0.0 for knob in self.knobs}
        reasons: dict[str, dict[str, str]] = {}
        merged, faults = False, list(closed.faults)
        ended: dict[str, Any] = {}
        self._sound = closed.valid
        if closed.valid.any():
            self.restores = 0
            harvest = Harvest(window, closed.losses, closed.valid)
            with self._evaluated(), self.home.lent_buffers(closed.valid.tolist()):
                for collector in self.collectors:
                    estimates.update(told_by(collector, harvest))
            merged, of_merge = self._converge(closed, harvest)
            estimates.update(of_merge)
            context = self._context(window, harvest.loss)
            for knob in self.knobs:
                moves[knob.name] = knob.judge(estimates[knob.name], context)
                if knob.reasons:
                    reasons[knob.name] = knob.reasons
            went_back = self._guard(harvest, bases, estimates, moves, context)
            if went_back is not None:
                faults.append(went_back.fault)
                reasons = _with_guard(reasons, went_back.moves, went_back.fault["kind"])
                moves = {name: move + went_back.moves[name] for name, move in moves.items()}
            elif self.tail is not None and self.tail.covers(window.start):
                ended = self._follow_tail(self.tail, harvest)
        else:
            self.restores += 1
            faults.append(fault := recovery.restore(self.plan, self.anchor))
            self._tell_of_copies(self.merger.restored())
            self._forget_weights()
            self._sound = np.ones_like(closed.valid)
            if self.tail is not None and self.step_count == self._last_step:
                ended = self._settle(self.tail, window.index)
            if self.watch is not None and not (self.restores == 1 and _by_buffers(closed.faults)):
                moves = recovery.retreat(self.knobs, bases, self._context(window, None))
                reasons = _with_guard(reasons, moves, fault["kind"])
        noise = self.noise.read() if self.noise is not None else None
        self.noise_scale = noise or self.noise_scale
        now = time.perf_counter()
        record = replace(
            record,
            estimates={name: estimate.to_dict() for name, estimate in estimates.items()},
            moves=moves,
            merged=merged,
            faults=faults,
            seconds=now - self._clock,
            closing=now - began,
            learned={k.name: {**record.learned[k.name], "closed": k.learned.value} for k in self.knobs},
            reasons=reasons,
            powers={knob.name: knob.bend.power for knob in self.knobs if knob.bend.power != 1.0},
            noise_scale=asdict(noise) if noise is not None else {},
            best_schedule=self._best_schedule() if self.step_count == self._last_step else {},
            tail=ended,
        )
        record.hints.extend(self._probe_size.look(self.history.latest, record))
        if self.step_count == self._last_step:
            self.end()
        else:
            self.open_window(window.index + 1)
        recording.append(self.history, record)
        self._refuse_to_go_on(record)
        return record

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """All models hold the window-averaged weights: of the window under way, or of the last before its first step.

        Raises:
            ConfigError: no evidence averages weights.
        """
        strides = self.averages.strides
        if not (strides or self.moving.evaluates_average):
            raise ConfigError(
                "nothing here averages weights over a window; take evidence that does (Line, Analytic), or a probe "
                "with at='average'"
            )
        with self.at_base(), self._evaluated(), ExitStack() as stack:
            sound = self._sound
            if self.scene.apart and self.tally.steps and not self.finished:
                sound = self.tally.read(self.step_count).valid
            mean: list[Tensor] = []
            if strides and sound.any():
                mean = self.scene.averaged(sound, strides[0], before=True)
            elif self.scene.apart and sound.any():
                mean = self.scene.weights(sound)
            for host in range(len(self.hosts) if mean else 0):
                stack.enter_context(tensors.substituted(self.moving.values(host), mean))
            yield

    def _forget_averages(self) -> None:
        """The models were put to another point."""
        self.averages.forget()
        self._sound = np.ones(self.home.size, dtype=bool)

    @contextmanager
    def _evaluated(self) -> Iterator[None]:
        """All models hold the weights that their optimizers evaluate, and evidence reads."""
        with ExitStack() as stack:
            for host in self.hosts:
                stack.enter_context(tensors.evaluated_weights(*host))
            yield

    def _tell_of_copies(self, sources: list[int] | None) -> None:
        if sources is not None:
            for collector in self.collectors:
                collector.copied(sources)

    def _best_schedule(self) -> dict[str, list[float]]:
        by_member = (collector for collector in self.collectors if collector.by_member)
        return {name: values for collector in by_member for name, values in collector.best_schedule().items()}

    def _context(self, window: Window, loss: float | None) -> Context:
        """Where the run stands between two windows."""
        left = None if self._last_step is None else self.plan.windows.count(self.step_count, self._last_step)
        return Context(
            step=self.step_count,
            total_steps=self.plan.total_steps,
            window=window.index,
            windows_left=left,
            length=window.stop - window.start,
            loss=loss,
            decay_shift=max(
                (abs(knob.shift) for knob in self.knobs if isinstance(knob.spec, WeightDecay)), default=0.0
            ),
        )

    def _converge(self, closed: WindowLosses, harvest: Harvest) -> tuple[bool, dict[str, Estimate]]:
        """Merge, unless nothing can have come apart. Returns whether, and estimates of the merge's own knobs."""
        valid = closed.valid
        apart = (
            self.plan.apart
            or closed.apart
            or not self.met
            or not valid.all()
            or any(map(tensors.is_inexact, self.hosts[0][0].buffers()))
        )
        if not self.home.diverge:
            self.home.mean_buffers(valid.tolist())
        self.met = True
        if not (self.merger.moves_alike or (self.home.diverge and apart)):
            return False, {}
        self._tell_of_copies(self.merger.merge(harvest))
        self._forget_values()  # a failed replica took over another's optimizer, knob values included
        estimates: dict[str, Estimate] = {}
        if self.merger.steps:
            with self._evaluated():
                for collector in self.collectors:
                    estimates.update(collector.close_merged(harvest, self.merger))
            self.apply()  # whoever has looked: the step is made at the bases of the step that follows
            self.merger.step()
        return True, estimates

    def _forget_values(self) -> None:
        for knob in self.knobs:
            knob.forget()

    def _guard(
        self,
        harvest: Harvest,
        bases: dict[str, float],
        estimates: dict[str, Estimate],
        moves: dict[str, float],
        context: Context,
    ) -> recovery.Recovery | None:
        if self.watch is None:
            return None
        too_late = self.step_count == self._last_step  # to begin anew
        told_ahead = {k.name for k in self.knobs if k.name in estimates and k.ahead(estimates[k.name]) > 0}
        # What one of several rates did alone is no matter of how large the first steps were.
        ahead = {} if too_late else {k.name: moves[k.name] - k.alone for k in self.knobs if k.name in told_ahead}
        went_back = recovery.guarded(self.plan, self.watch, harvest, bases, ahead, estimates.values(), context)
        if went_back is not None:
            self.met = went_back.alike
            self.merger.forget()
            self._forget_weights()
            if self.tail is not None:
                self.tail.forget()
        return went_back

    def _follow_tail(self, tail: FollowedTail, harvest: Harvest) -> dict[str, Any]:
        """Take the window into the tail; after the run's last step, what it ends with."""
        with self.home.lent_buffers(harvest.valid.tolist()):
            tail.add(harvest)
        return self._settle(tail, harvest.window.index) if self.step_count == self._last_step else {}

    def _settle(self, tail: FollowedTail, window: int) -> dict[str, Any]:
        """The run is over: let the models hold what it ends with, and return what is recorded of that."""
        if self._last_weights:
            tail.forget()
            return {}
        self.home.advance(now=True)
        with self.home.lent_buffers(self._sound.tolist()):
            mixture, told = tail.best(window)
        if mixture is not None:
            tail.put(mixture)
        tail.forget()
        return told

    def _forget_weights(self) -> None:
        """The weights are earlier ones again: nothing is kept of those since."""
        self._forget_averages()
        self._forget_values()
        for collector in self.collectors:
            collector.forget()

    def _refuse_to_go_on(self, record: WindowRecord) -> None:
        if self.restores > MAX_RESTORES:
            first = record.faults[0]
            held = "the models hold the last converged point. Start from lower values"
            if self.restores > record.window and (first["step"], first.get("where")) == (record.start, "loss"):
                held = (
                    "with the weights that the run began with the loss is not finite, before any update, so lower "
                    "values would not help. Look at the data, the model's weights and the loss"
                )
            if _by_buffers(record.faults):
                held = (
                    "buffers alone were not finite first, as where a batch that is not goes through BatchNorm while it "
                    "trains: test a batch before the forward pass. Where it is activations that overflow, start from "
                    "lower values"
                )
            if not self.anchor.is_finite():
                held = (
                    "the models were put back to the point they set out from, which is not finite itself. Start from "
                    "other weights, or from an optimizer without its state"
                )
            raise DivergedError(
                f"all {self.home.size} replicas became non-finite in {self.restores} windows on end, the last at step "
                f"{first['step']}; {held}; the bases were {record.bases}"
            )

    # -- how a run ends, and goes on --------------------------------------------------------------

    def finish(self, *, last_weights: bool = False) -> WindowRecord | None:
        """End the run now: closes and merges a window under way.

        Args:
            last_weights: end with these, whatever the tail has.
        """
        if self.finished:
            return None
        self._last_step = self.step_count
        self._last_weights = last_weights
        if self.tally.steps:
            return self.close_window()
        last = self.window.index - 1
        told: dict[str, Any] = {}
        sources = self.merger.end()
        if sources is not None:
            self._tell_of_copies(sources)
            self._forget_values()
            told["best_schedule"] = self._best_schedule()
        if self.tail is not None and self.tail.parts:
            told["tail"] = self._settle(self.tail, last)
        self.end()
        if any(told.values()):
            recording.amend(self.history, last, told)
        return None

    def end(self) -> None:
        """The last step is made: every knob is at its base, and the anchor is let go."""
        self.finished = True
        if self.watch is not None:
            self.watch.forget()
        self.home.advance(now=True)
        for knob in self.knobs:
            knob.rest()
        self.apply()
        if self.restores <= MAX_RESTORES:  # else it is still to be asked what was wrong
            self.anchor.release()

    def resume(self, window: int, finished: bool, met: bool) -> None:
        """Take up a run at `step_count`: open a window, or be at the end."""
        self._last_step, self._last_weights = self.plan.total_steps, False
        self._forget_averages()
        self.met = met
        self.home.restored(merged=self.met)
        self.finished = finished
        self._forget_values()
        if finished:
            self.window = Window(window, self.step_count, self.step_count, self._last_step)
            self.end()
        else:
            self.open_window(window)


def _has(collector: Collector, hook: str) -> bool:
    """Whether a collector does something in a hook that may be left out."""
    return getattr(type(collector), hook) is not getattr(Collector, hook)


def _by_buffers(faults: Iterable[Mapping[str, Any]]) -> bool:
    """Whether only buffers were not finite, which a batch makes so more often than a step: losses and weights were."""
    return {fault["where"] for fault in faults if "where" in fault} == {"buffers"}


def _with_guard(reasons: dict[str, dict[str, str]], moves: dict[str, float], turn: str) -> dict[str, dict[str, str]]:
    """Reasons by knob, with the turn of the run by which the guard moved a base too."""
    return reasons | {name: {**reasons.get(name, {}), "guard": turn} for name, move in moves.items() if move}
