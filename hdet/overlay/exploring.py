"""What `OneCycleHDET` and `Explored` have in common: an exploration that begins, is saved and is resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hdet.engine.engine import Engine
from hdet.engine.tally import Losses
from hdet.errors import StepError
from hdet.hparams import LearningRate
from hdet.overlay.exploration import KEY, Exploration
from hdet.overlay.surroundings import surroundings
from hdet.user_warning import relayed, warn


class Exploring(LRScheduler):
    """A scheduler with an engine underneath, if there is something to explore.

    A subclass says what is explored, for how long, and what its state is without an exploration.
    """

    _exploration: Exploration | None = None
    _began: int = 0
    _declared: dict[str, Any] | None = None

    def _knobs(self, began: int, alone: bool) -> list[LearningRate]:
        """The knob of each parameter group, where exploration begins at the scheduler's step `began`.

        Alone, with one replica, there is nothing to spread, but what was learned goes on.
        """
        raise NotImplementedError

    def _length(self) -> int | None:
        """The run's length in steps of the scheduler; None for an open end."""
        raise NotImplementedError

    def _own_state(self) -> dict[str, Any]:
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

    def _start(self, began: int) -> None:
        """Begin to explore, at the scheduler's step `began`."""
        declared, length = self._declared, self._length()
        assert declared is not None
        home = surroundings(self.optimizer, declared["model"], declared["replicas"])
        self._exploration = Exploration(
            self.optimizer,
            home,
            self._knobs(began, home.size == 1),
            self._own_state,
            total_steps=None if length is None else length - began,
            **declared["engine"],
        )
        self._began = began

    def _advance(self, step_scheduler: Callable[[], None], losses: Losses | None, may_warn: bool) -> None:
        """Step the scheduler, and what is explored around it."""
        step = partial(relayed, step_scheduler) if may_warn else step_scheduler
        if self._exploration is None:
            step()
        else:
            self._exploration.advance(step, losses)

    def _explored_state(self) -> dict[str, Any]:
        return {} if self._exploration is None else {KEY: {"began": self._began, **self._exploration.state_dict()}}

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
                self._start(began)
                assert self._exploration is not None
                self._exploration.load_state_dict(kept)
                self._exploration.engine.cycle.history = exploration.engine.history
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
        else:
            self._exploration = None
