"""`OneCycleHDET`: HDET as a learning rate scheduler, in place of torch's OneCycleLR."""

from __future__ import annotations

import os
from numbers import Integral
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet import paper
from hdet.engine import Engine
from hdet.errors import CheckpointError, ConfigError, StepError
from hdet.exploration import KEY, Exploration, rates, running_engine, surroundings
from hdet.history import History
from hdet.hparams import LearningRate
from hdet.replicas import Replicas
from hdet.tally import Losses
from hdet.windows import Windows

HistoryPath = str | os.PathLike[str] | History | None

OWN = ("_exploration", "_declared", "_began")


class OneCycleHDET(OneCycleLR):
    """`torch.optim.lr_scheduler.OneCycleLR`, and the paper's exploration of it where there is a spread.

    With `spread` 0, or where there is one replica only, it *is* OneCycleLR: its arguments, defaults, errors,
    attributes, state and rates, bit for bit. Otherwise every parameter group's rate is fanned out over the
    replicas from the first step, the replicas are averaged every `window` steps, and from the first window
    that ends `auto_lr_warmup` steps into the run the paper's controller takes the base over from the cycle,
    holds it within a window and moves it between windows. Momentum goes on cycling.

        loss.backward(); optimizer.step(); scheduler.step(loss)

    `step()` without a loss fans out and converges, and does not control. A state holds the model, the
    optimizer and where replicas have come apart each of them, so that a resume in mid-window is the same run;
    a plain OneCycleLR's state starts exploration at its step.

    Args:
        optimizer, max_lr, ..., last_epoch: torch's, in torch's order.
        spread: the paper's a; the outermost replicas train at (1 -+ a) times the base.
        window: the paper's T.
        auto_lr: whether a controller moves the base.
        auto_lr_warmup: steps before it does; `None` takes the cycle's rise.
        sigma, beta, rate: of the controller (`hdet.Softmax`, `hdet.Paper`).
        model: what is merged; without it the optimizer's parameters alone, and no buffers.
        replicas: where the replicas live, by default the processes of `torch.distributed`.
        gradients: whether the replicas share gradients, as under DDP.
        seed: of the permutations.
        history: as for `hdet.Engine`.

    Raises:
        ValueError, TypeError, KeyError: as OneCycleLR.
        ConfigError: the exploration cannot be as declared.

    >>> import torch, hdet
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    >>> replicas = hdet.replicate(model, optimizer, n=3)
    >>> scheduler = hdet.OneCycleHDET(optimizer, 0.5, total_steps=100, spread=0.1, replicas=replicas)
    >>> [round(other.param_groups[0]["lr"], 4) for other in scheduler.engine.optimizers]
    [0.02, 0.022, 0.018]
    """

    _exploration: Exploration | None
    _declared: dict[str, Any]
    _began: int

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: Any,
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        *,
        spread: float = 0.0,
        window: int | Windows = paper.WINDOW,
        auto_lr: bool = True,
        auto_lr_warmup: int | None = None,
        sigma: float = paper.SIGMA,
        beta: float = paper.BETA,
        rate: float = paper.RATE,
        model: nn.Module | None = None,
        replicas: Replicas | None = None,
        gradients: Literal["shared", "local"] = "shared",
        seed: int = 0,
        history: HistoryPath = None,
    ) -> None:
        super().__init__(
            optimizer,
            max_lr,
            total_steps=total_steps,
            epochs=epochs,
            steps_per_epoch=steps_per_epoch,
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            three_phase=three_phase,
            last_epoch=last_epoch,
        )
        if spread == 0.0:
            return
        self._declared = {
            "home": surroundings(optimizer, model, replicas),
            "knob": {"spread": spread, "auto_lr": auto_lr, "beta": beta, "rate": rate},
            "warmup": round(pct_start * self.total_steps) if auto_lr_warmup is None else auto_lr_warmup,
            "engine": {
                "window": window,
                "evidence": paper.evidence(sigma),
                "merge": paper.merge(),
                "gradients": gradients,
                "seed": seed,
                "history": history,
            },
        }
        self._check_knobs()
        if self._declared["home"].size > 1:
            self._exploration = self._explore(self.last_epoch)
            self._last_lr = rates(self.optimizer)

    @property
    def engine(self) -> Engine:
        """The engine at work.

        Raises:
            StepError: nothing is explored, and there is none.
        """
        return running_engine(self.__dict__.get("_exploration"))

    @property
    def bases(self) -> dict[str, float]:
        """The base of each parameter group's rate at the coming step, by its knob's name."""
        return self.engine.bases

    def step(self, loss: Losses | None = None, epoch: int | None = None) -> None:  # type: ignore[override]
        """Call after the optimizer's step.

        Args:
            loss: this process's training loss at that step (one for each replica it hosts). An integer is
                torch's deprecated `epoch`.

        Raises:
            ValueError: more than `total_steps` steps, as OneCycleLR.
            StepError: the run is over, a loss is no scalar, or a jump to an epoch while exploring.
        """
        if isinstance(loss, Integral):
            loss, epoch = None, int(loss)
        # None yet while the constructor makes torch's initial step.
        exploration = self.__dict__.get("_exploration")
        if exploration is None:
            super().step(epoch)
            return
        if epoch is not None:
            raise StepError(
                f"step({epoch}) jumps, which an exploring scheduler cannot follow; inside a SequentialLR "
                f"explore the whole chain: hdet.explore(sequential)"
            )
        exploration.advance(super().step, loss)
        self._last_lr = rates(self.optimizer)

    def finish(self) -> None:
        """End the run before `total_steps`: merges the window under way. At `total_steps` it has happened."""
        if self.__dict__.get("_exploration") is not None:
            self.engine.finish()

    def state_dict(self) -> dict[str, Any]:
        """torch's state, and while exploring under `"hdet"` everything a resume needs, the model included."""
        state = self._torch_state()
        exploration = self.__dict__.get("_exploration")
        return state if exploration is None else {**state, KEY: {"began": self._began, **exploration.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of this class, of any number of replicas, or of OneCycleLR.

        Raises:
            CheckpointError: the state explores, and this scheduler was not told to.
        """
        own = {key: value for key, value in state_dict.items() if key != KEY}
        explored = state_dict.get(KEY)
        super().load_state_dict(own)
        if explored is None:
            if self.__dict__.get("_exploration") is not None:
                self._exploration = self._explore(self.last_epoch)
            return
        if "_declared" not in self.__dict__:
            raise CheckpointError(
                "the state is an exploring scheduler's, and this one has spread=0; declare the spread it was "
                "written with to take its bases over"
            )
        if self.__dict__.get("_exploration") is None or self._began != explored["began"]:
            # With one replica there is nothing to spread, but what was learned goes on.
            self._exploration = self._explore(explored["began"])
        assert self._exploration is not None
        back = self._exploration.load_state_dict(explored)
        if back is not None:
            super().load_state_dict(back)
        self._last_lr = rates(self.optimizer)

    def __getstate__(self) -> dict[str, Any]:
        if self.__dict__.get("_exploration") is not None:
            raise TypeError("an exploring scheduler holds live replicas and cannot be pickled; save its state_dict()")
        return self.__dict__

    def _torch_state(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key not in OWN}

    def _knobs(self, began: int, single: bool = False) -> list[LearningRate]:
        declared = {**self._declared["knob"], **({"spread": 0.0} if single else {})}
        return [
            paper.knob(
                index,
                floor=float(group["min_lr"]),
                highest=float(group["max_lr"]),
                warmup=max(0, self._declared["warmup"] - began),
                **declared,
            )
            for index, group in enumerate(self.optimizer.param_groups)
        ]

    def _check_knobs(self) -> None:
        """Refuse a declaration that cannot be even where this process is alone and will not use it."""
        if not isinstance(self._declared["warmup"], int) or self._declared["warmup"] < 0:
            raise ConfigError(f"auto_lr_warmup must be a number of steps, 0 or more; got {self._declared['warmup']!r}")
        self._knobs(began=0)

    def _explore(self, began: int) -> Exploration:
        """An exploration whose first step is the cycle's step `began`."""
        self._began = began
        home = self._declared["home"]
        return Exploration(
            self.optimizer,
            home,
            self._knobs(began, single=home.size == 1),
            self._torch_state,
            total_steps=self.total_steps - began,
            **self._declared["engine"],
        )
