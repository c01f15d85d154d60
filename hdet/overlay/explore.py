"""`explore`: HDET around any torch learning rate scheduler, and what `OneCycleHDET` has in common with it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from hdet.controllers import HeavyBall
from hdet.engine.admission import counted, declared, windows
from hdet.engine.engine import Engine
from hdet.engine.tally import Losses
from hdet.errors import CheckpointError, ConfigError, StepError
from hdet.evidence import Evidence
from hdet.history import History
from hdet.hparams import LearningRate, Relative, Symmetric
from hdet.merging import Merge
from hdet.overlay.exploration import KEY, Exploration, peak
from hdet.overlay.surroundings import how_many, surroundings
from hdet.recipes import paper
from hdet.replicas import Replicas
from hdet.signals import Signal
from hdet.user_warning import relayed, warn
from hdet.windows import Windows

HistoryPath = str | os.PathLike[str] | History | None


class Exploring(LRScheduler):
    """A scheduler with an engine underneath, if there is something to explore.

    A subclass says what is explored, for how long, and what its state is without an exploration.
    """

    _exploration: Exploration | None = None
    _began: int = 0
    _declared: tuple[nn.Module | None, Replicas | None, dict[str, Any]] | None = None

    def _explore(self, began: int, model: nn.Module | None, replicas: Replicas | None, **options: Any) -> None:
        """Keep what is declared, for states to come, and begin where there are several replicas.

        Args:
            options: of `hdet.Engine`.
        """
        self._declared = model, replicas, options
        if how_many(model, replicas) > 1:
            self._start(began)

    def _knobs(self, began: int, alone: bool) -> list[LearningRate]:
        """The knob of each parameter group, where exploration begins at the scheduler's step `began`.

        Alone, with one replica, there is nothing to spread, but what was learned goes on.
        """
        raise NotImplementedError

    def _length(self) -> int | None:
        """The run's length in steps of the scheduler; None for an open end."""
        raise NotImplementedError

    def _own_state(self) -> dict[str, Any]:
        """The state without the exploration's."""
        raise NotImplementedError

    def _load_own(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    @property
    def engine(self) -> Engine:
        """The engine at work.

        Raises:
            StepError: nothing is explored, and there is none.
        """
        if self._exploration is None:
            raise StepError(
                "this scheduler does not explore, so it has no engine: give it a spread and run it in several "
                "processes, or pass replicas=hdet.replicate(...)"
            )
        return self._exploration.engine

    @property
    def bases(self) -> dict[str, float]:
        """The base of each parameter group's rate at the coming step, by its knob's name."""
        return self.engine.bases

    def finish(self) -> None:
        """End the run: merges the window under way; every replica then holds the result.

        At the run's last step, where `total_steps` is known, it has happened.
        """
        if self._exploration is not None:
            self._exploration.finish()

    def _start(self, began: int, **others: Any) -> None:
        """Begin to explore, at the scheduler's step `began`.

        Args:
            others: options in place of those that were declared.
        """
        assert self._declared is not None
        model, replicas, options = self._declared
        home, length = surroundings(self.optimizer, model, replicas), self._length()
        total_steps = None if length is None else length - began
        knobs = self._knobs(began, home.size == 1)
        self._exploration = Exploration(
            self.optimizer, home, knobs, self._own_state, total_steps=total_steps, **options | others
        )
        self._began = began

    def _advance(self, step_scheduler: Callable[[], None], losses: Losses | None, may_warn: bool) -> None:
        """Step the scheduler, and what is explored around it."""
        step = partial(relayed, step_scheduler) if may_warn else step_scheduler
        if self._exploration is None:
            step()
        else:
            self._exploration.advance(step, losses)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and while exploring under `"hdet"` everything a resume needs, the model included.

        Every rank saves its own for a resume in mid-window; one rank's resumes all of them at the last converged
        point.
        """
        exploration = self._exploration
        explored = {KEY: {"began": self._began, **exploration.state_dict()}} if exploration is not None else {}
        return {**self._own_state(), **explored}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of this class, of any number of replicas, or of torch's scheduler. Load the model's first.

        One replica keeps the bases that several have learned. A state without exploration starts it at its step.
        Where the state is of another number of replicas or of another rank, a warning says to which step, that of
        the last converged point, the run has gone back; go on from `last_epoch`.

        Raises:
            CheckpointError: the state explores and this scheduler was not told to, was told to otherwise, or has
                another model; or ranks load states of different moments. The scheduler is as it was.
            HdetError: another exploration would begin, and the file of this one (`history`) holds windows. The
                scheduler is as it was then, too.
        """
        explored = state_dict.get(KEY)
        if explored is not None and self._declared is None:
            raise CheckpointError(
                "the state is an exploring scheduler's, and this one has spread=0; declare the spread it was "
                "written with to take its bases over"
            )
        self._resume(copy.deepcopy({key: value for key, value in state_dict.items() if key != KEY}), explored)

    def _resume(self, own: dict[str, Any], explored: dict[str, Any] | None) -> None:
        """Load the scheduler's own state and what was explored. Where that is refused nothing has changed."""
        before = copy.deepcopy(self._own_state())
        exploration, began = self._exploration, self._began
        anew = exploration is not None if explored is None else exploration is None or began != explored["began"]
        kept = exploration.state_dict() if exploration is not None and anew else None
        back = None
        try:
            self._load_own(own)
            if anew:
                self._replace(explored)
            if explored is not None and self._exploration is not None:
                back = self._exploration.load_state_dict(explored)
        except Exception:
            self._load_own(before)
            if exploration is not None and kept is not None:
                self._start(began, history=exploration.engine.history)
                assert self._exploration is not None
                self._exploration.load_state_dict(kept)
            elif exploration is None:
                if self._exploration is not None:
                    self._exploration.close()
                self._exploration = None
            raise
        if back is not None:
            written = self.last_epoch
            self._load_own(back)
            warn(
                f"the run goes on from step {self.last_epoch}, its last converged point, and not from step {written}: "
                f"the state is not of every replica here, or their number, spreads or windows have changed. Drive the "
                f"loop from scheduler.last_epoch. To resume in mid-window every rank saves and loads its own "
                f"scheduler.state_dict()"
            )

    def _replace(self, explored: dict[str, Any] | None) -> None:
        """Begin anew: where the state's exploration began, or, for a state without one, at its step."""
        if self._exploration is not None:
            self._exploration.close()
        if explored is not None:
            self._start(explored["began"])
        elif self._exploration is not None and self._exploration.replicas.size > 1:
            self._exploration.alike(self.get_last_lr())
            self._start(self.last_epoch)
            self._exploration.engine.history.expect(0)
        else:
            self._exploration = None


class Explored(Exploring):
    """What `explore` returns: the face of a torch scheduler, another's rates as bases, an engine underneath.

    What is not its own is the scheduler's: `base_lrs`, `_step_count`, `T_max` and so on are read from it.

    Attributes:
        scheduler: the one that was given; do not step it yourself.
        engine: the engine at work.
    """

    def __init__(self, scheduler: LRScheduler, knob: LearningRate, total_steps: int | None) -> None:
        # Not torch's constructor: it would make a second initial step.
        self.scheduler = scheduler
        self.optimizer = scheduler.optimizer
        self._knob = knob
        self._total_steps = total_steps
        self._stepped = False

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not there yet, as while unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """The steps the scheduler has made."""
        return self.scheduler.last_epoch

    def step(self, loss: Losses | None = None, *arguments: Any, **keywords: Any) -> None:  # type: ignore[override]
        """Call after the optimizer's step with this process's training loss; the rest goes to the scheduler.

        ReduceLROnPlateau, for instance, takes its metric as `step(loss, metric)`, at every step.

        Raises:
            StepError: the run is over, a loss is no scalar, or gradients were not shared.
        """
        self._advance(lambda: self.scheduler.step(*arguments, **keywords), loss, may_warn=not self._stepped)
        self._stepped = True

    def get_last_lr(self) -> list[Any]:
        """The scheduler's own rates, which the optimizer holds between steps; `bases` says what was learned."""
        return self.scheduler.get_last_lr()

    def _own_state(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict()}

    def _load_own(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state.get("scheduler", state))

    def _length(self) -> int | None:
        return self._total_steps

    def _knobs(self, began: int, alone: bool) -> list[LearningRate]:
        knob = self._knob if not alone else self._knob.replace(spread=self._knob.spread.replace(width=0.0))
        if knob.bounds != LearningRate.model_fields["bounds"].default:
            return [knob] * len(self.optimizer.param_groups)
        low, high = knob.bounds
        return [knob.replace(bounds=(low, max(high, 10 * peak(group)))) for group in self.optimizer.param_groups]


def explore(
    scheduler: LRScheduler,
    *,
    knob: LearningRate | None = None,
    window: int | Windows = paper.WINDOW,
    model: nn.Module | None = None,
    replicas: Replicas | None = None,
    signal: Signal | None = None,
    evidence: Evidence | None = None,
    merge: Merge | None = None,
    gradients: Literal["shared", "local"] = "shared",
    seed: int = 0,
    total_steps: int | None = None,
    history: HistoryPath = None,
) -> Explored:
    """Explore around any torch scheduler: its rates are the bases, replicas fan out from them and converge.

        scheduler = hdet.explore(CosineAnnealingLR(optimizer, 1000), window=50)
        ...
        loss.backward(); optimizer.step(); scheduler.step(loss)

    Unlike `OneCycleHDET`, whose controller takes the base over, the scheduler stays in charge here and what
    is learned is a factor on top of it, in force while an optimizer steps. With one process it only steps the
    scheduler. Where gradients are not shared by DistributedDataParallel, call `scheduler.engine.share_gradients()`
    after the last backward of a step.

    Args:
        scheduler: any of torch's, chains and ReduceLROnPlateau included; already made for its optimizer.
        knob: space, spread, controller and bounds of every parameter group's rate; by default the paper's
            spread with momentum on the softmax displacement. Its `schedule`, `groups` and `name` are filled
            in, and bounds that were left at their default are widened where a group starts above them.
        window, signal, evidence, merge, gradients, seed, history: as for `hdet.Engine`; the evidence is by
            default the paper's.
        total_steps: the run's length; without it call `finish()` after the last step.
        model, replicas: as for `OneCycleHDET`.

    Raises:
        ConfigError: the exploration cannot be as declared.

    >>> import torch, hdet
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    >>> scheduler = hdet.explore(cosine, window=10, replicas=hdet.replicate(model, optimizer, n=3))
    >>> seen = []
    >>> for other in scheduler.engine.optimizers:
    ...     _ = other.register_step_pre_hook(lambda stepped, *_: seen.append(round(stepped.param_groups[0]["lr"], 4)))
    ...     other.step()
    >>> seen, optimizer.param_groups[0]["lr"]
    ([0.1, 0.1111, 0.0889], 0.1)
    """
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(f"explore takes a torch LR scheduler, got {type(scheduler).__name__}")
    given = knob if knob is not None else _FACTOR
    declared("knob", given, LearningRate)
    windows(window)
    if total_steps is not None:
        total_steps = counted("total_steps", total_steps)
    if given.schedule is not None or given.groups is not None or given.name is not None:
        raise ConfigError("explore fills in the knob's schedule, groups and name; leave them out")
    explored = Explored(scheduler, given, total_steps)
    explored._explore(
        0,
        model,
        replicas,
        window=window,
        signal=signal,
        evidence=evidence if evidence is not None else paper.evidence(paper.SIGMA),
        merge=merge if merge is not None else paper.merge(),
        gradients=gradients,
        seed=seed,
        history=history,
    )
    return explored


_FACTOR = LearningRate(space=Relative(), spread=Symmetric(paper.SPREAD), controller=HeavyBall())
