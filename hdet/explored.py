"""`explore`: HDET around any torch learning rate scheduler."""

from __future__ import annotations

import os
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from hdet import paper
from hdet.controllers import Momentum
from hdet.engine import Engine
from hdet.errors import CheckpointError, ConfigError
from hdet.evidence import Evidence
from hdet.exploration import KEY, Exploration, rates, running_engine, surroundings
from hdet.history import History
from hdet.hparams import LearningRate, Relative, Symmetric
from hdet.merging import Merge
from hdet.replicas import Replicas
from hdet.signals import Signal
from hdet.tally import Losses
from hdet.windows import Windows

Rate = float | Tensor
HistoryPath = str | os.PathLike[str] | History | None


class Explored(LRScheduler):
    """What `explore` returns: the face of a torch scheduler, another's rates as bases, an engine underneath.

    Attributes:
        scheduler: the one that was given; do not step it yourself.
        engine: the engine at work.
    """

    def __init__(self, scheduler: LRScheduler, exploration: Exploration | None) -> None:
        # Not torch's constructor: it would make a second initial step.
        self.scheduler = scheduler
        self.optimizer = scheduler.optimizer
        self._exploration = exploration

    @property
    def engine(self) -> Engine:
        """The engine at work.

        Raises:
            StepError: there is one process only, so nothing is explored.
        """
        return running_engine(self._exploration)

    @property
    def bases(self) -> dict[str, float]:
        """The base of each parameter group's rate at the coming step, by its knob's name."""
        return self.engine.bases

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """The steps the scheduler has made."""
        return self.scheduler.last_epoch

    def step(self, loss: Losses | None = None, *arguments: Any, **keywords: Any) -> None:  # type: ignore[override]
        """Call after the optimizer's step with this process's training loss; the rest goes to the scheduler.

        ReduceLROnPlateau, for instance, takes its metric as `step(loss, metric)`.
        """
        if self._exploration is None:
            self.scheduler.step(*arguments, **keywords)
        else:
            self._exploration.advance(lambda: self.scheduler.step(*arguments, **keywords), loss)

    def finish(self) -> None:
        """End the run: merges the window under way; every replica then holds the result at the bases."""
        if self._exploration is not None:
            self._exploration.engine.finish()

    def get_last_lr(self) -> list[Rate]:
        """The rates in force in this process."""
        return rates(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and under `"hdet"` everything a resume needs, the model included."""
        own = {"scheduler": self.scheduler.state_dict()}
        return own if self._exploration is None else {**own, KEY: self._exploration.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that `explore` wrote, of any number of replicas above one.

        Raises:
            CheckpointError: the state explores and this process is alone, or the reverse.
        """
        explored = state_dict.get(KEY)
        if (explored is None) != (self._exploration is None):
            raise CheckpointError(
                "the state was written by several replicas and this process is alone, or the reverse; resume "
                "with two replicas or more, or load the scheduler's own state: state['scheduler']"
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        if self._exploration is not None and explored is not None:
            back = self._exploration.load_state_dict(explored)
            if back is not None:
                self.scheduler.load_state_dict(back)


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
    is learned is a factor on top of it. With one process it only steps the scheduler.

    Args:
        scheduler: any of torch's, chains and ReduceLROnPlateau included; already made for its optimizer.
        knob: space, spread, controller and bounds of every parameter group's rate; by default the paper's
            spread with momentum on the softmax displacement. Its `schedule`, `groups` and `name` are filled
            in.
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
    >>> [round(other.param_groups[0]["lr"], 4) for other in scheduler.engine.optimizers]
    [0.1, 0.1111, 0.0889]
    """
    if not isinstance(scheduler, LRScheduler):
        raise ConfigError(f"explore takes a torch LR scheduler, got {type(scheduler).__name__}")
    given = knob if knob is not None else _FACTOR
    if given.schedule is not None or given.groups is not None or given.name is not None:
        raise ConfigError("explore fills in the knob's schedule, groups and name; leave them out")
    home = surroundings(scheduler.optimizer, model, replicas)
    if home.size == 1:
        return Explored(scheduler, None)
    exploration = Exploration(
        scheduler.optimizer,
        home,
        [given] * len(scheduler.optimizer.param_groups),
        scheduler.state_dict,
        window=window,
        signal=signal,
        evidence=evidence if evidence is not None else paper.evidence(paper.SIGMA),
        merge=merge if merge is not None else paper.merge(),
        gradients=gradients,
        seed=seed,
        total_steps=total_steps,
        history=history,
    )
    return Explored(scheduler, exploration)


_FACTOR = LearningRate(space=Relative(), spread=Symmetric(paper.SPREAD), controller=Momentum())
