"""`OneCycleHDET`: HDET as a learning rate scheduler, in place of torch's OneCycleLR."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet.engine.admission import whole, windows
from hdet.engine.tally import Losses
from hdet.errors import ConfigError, StepError
from hdet.hparams import LearningRate
from hdet.overlay.explore import Exploring, HistoryPath
from hdet.recipes import paper
from hdet.replicas import Replicas
from hdet.windows import Windows

OWN = ("_exploration", "_declared", "_began", "_knob_fields", "_warmup")


class OneCycleHDET(Exploring, OneCycleLR):
    """`torch.optim.lr_scheduler.OneCycleLR`, and the paper's exploration of it where there is a spread.

    With `spread` 0, or where there is one replica only, it *is* OneCycleLR: its arguments, defaults, errors,
    attributes, state and rates, bit for bit. Otherwise every parameter group's rate is fanned out over the
    replicas from the first step, the replicas are averaged every `window` steps, and from the first window
    that ends `auto_lr_warmup` steps into the run the paper's controller takes the base over from the cycle,
    holds it within a window and moves it between windows. Momentum goes on cycling. A replica's rates are in force
    while its optimizer steps; between steps the optimizer and `get_last_lr()` hold the cycle's own, and `bases` says
    what was learned.

        loss.backward(); optimizer.step(); scheduler.step(loss)

    `step()` without a loss fans out and converges, and does not control. A state holds the model, the
    optimizer and where replicas have come apart each of them, so that a resume in mid-window is the same run:
    every rank saves its own `state_dict()`. From one rank's state, or with another N, all go on from the last
    converged point: drive the loop from `last_epoch`. A plain OneCycleLR's state starts exploration at its step.

    Under DistributedDataParallel gradients are shared already. Otherwise (replicas in one process, ranks
    without DDP) call `scheduler.engine.share_gradients()` between the backward passes and the optimizers' steps;
    a loop that does not is refused with a StepError.

    Args:
        optimizer, max_lr, ..., last_epoch: torch's, in torch's order.
        spread: the paper's a; the outermost replicas train at (1 -+ a) times the base.
        window: the paper's T.
        auto_lr: whether a controller moves the base.
        auto_lr_warmup: steps before it does; `None` takes the cycle's rise.
        sigma, beta, rate: of the controller (`hdet.estimators.Softmax`, `hdet.controllers.Paper`).
        model: what is merged; without it the optimizer's parameters alone, and no buffers.
        replicas: where the replicas live, by default the processes of `torch.distributed`.
        gradients: "shared", as under DDP, or "local": each replica trains on its own.
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
    >>> seen = []
    >>> for other in scheduler.engine.optimizers:
    ...     _ = other.register_step_pre_hook(lambda stepped, *_: seen.append(round(stepped.param_groups[0]["lr"], 4)))
    ...     other.step()
    >>> seen, round(optimizer.param_groups[0]["lr"], 4)
    ([0.02, 0.022, 0.018], 0.02)
    """

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
        self._knob_fields: dict[str, Any] = {"spread": spread, "auto_lr": auto_lr, "beta": beta, "rate": rate}
        warmup = round(pct_start * self.total_steps) if auto_lr_warmup is None else auto_lr_warmup
        self._warmup = whole("auto_lr_warmup", warmup)
        if self._warmup < 0:
            raise ConfigError(f"auto_lr_warmup must be a number of steps, 0 or more; got {self._warmup!r}")
        # Refused even where there is no spread, or this process is alone, and nothing will use it.
        paper.knob(0, floor=1.0, highest=1.0, warmup=self._warmup, **self._knob_fields)
        windows(window)
        evidence = paper.evidence(sigma)
        if spread == 0.0:
            return
        self._explore(
            self.last_epoch,
            model,
            replicas,
            window=window,
            evidence=evidence,
            merge=paper.merge(),
            gradients=gradients,
            seed=seed,
            history=history,
        )

    def step(self, loss: Losses | None = None, epoch: int | None = None) -> None:  # type: ignore[override]
        """Call after the optimizer's step.

        Args:
            loss: this process's training loss at that step (one for each replica it hosts). An integer is
                torch's deprecated `epoch`.

        Raises:
            ValueError: more than `total_steps` steps, as OneCycleLR.
            StepError: the run is over, a loss is no scalar, gradients were not shared, or a jump to an epoch
                while exploring.
        """
        if isinstance(loss, Integral):
            loss, epoch = None, int(loss)
        if self._exploration is not None and epoch is not None:
            raise StepError(
                f"step({epoch}) jumps, which an exploring scheduler cannot follow; inside a SequentialLR "
                f"explore the whole chain: hdet.explore(sequential)"
            )
        step = super().step
        self._advance(lambda: step(epoch), loss, may_warn=self._step_count == 1 or epoch is not None)

    def _own_state(self) -> dict[str, Any]:
        return {key: value for key, value in OneCycleLR.state_dict(self).items() if key not in OWN}

    def _load_own(self, state: dict[str, Any]) -> None:
        OneCycleLR.load_state_dict(self, state)

    def _length(self) -> int:
        return self.total_steps

    def _knobs(self, began: int, alone: bool) -> list[LearningRate]:
        warmup = max(0, self._warmup - began)
        return [self._knob(index, warmup, alone) for index in range(len(self.optimizer.param_groups))]

    def _knob(self, index: int, warmup: int, alone: bool) -> LearningRate:
        group, declared = self.optimizer.param_groups[index], self._knob_fields
        highest, floor = float(group["max_lr"]), float(group["min_lr"])
        if highest == 0.0:  # a group at rest: no factor moves it
            declared = {**declared, "spread": 0.0, "auto_lr": False}
        elif alone:
            declared = {**declared, "spread": 0.0}
        if declared["auto_lr"] and floor == 0.0:
            raise ConfigError(
                "the cycle ends at a rate of 0, to which the controller cannot decay by factors; give a finite "
                "final_div_factor, or auto_lr=False"
            )
        return paper.knob(index, floor=floor, highest=highest, warmup=warmup, **declared)
