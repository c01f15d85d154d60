"""Lightning: `Trainer(callbacks=[hdet.lightning.Search(probe=...)])`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hdet.errors import CheckpointError, ConfigError, MissingExtraError
from hdet.integrations.dataset_probe import PROBE_TRAINS
from hdet.integrations.loggers import metrics
from hdet.overlay import search as overlay
from hdet.overlay.attach import attach
from hdet.recipes.recommended import FORWARD, excluding
from hdet.record import WindowRecord
from hdet.signals import Probe
from hdet.user_warning import warn

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        BackboneFinetuning,
        GradientAccumulationScheduler,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.utilities.types import LRSchedulerConfig
except ImportError:
    raise MissingExtraError("lightning", "lightning") from None

from hdet.hparams.param_groups import ids_of
from hdet.integrations.kept import standing_in
from hdet.integrations.lightning_probe import judge

OPTIONS = frozenset(inspect.signature(attach).parameters) - {"model", "optimizer", "probe"}
FIRST = 5
"""Optimizer steps by which a module that accumulates by hand is known."""


class Search(Callback):
    """Explores hyperparameters while a Lightning Trainer trains; one changed line of a script.

    Optimizer, scheduler, accumulation, precision and the run's length are the Trainer's, and are found. Checkpoints of
    the Trainer hold the search, so `ckpt_path=` goes on with it. Each window's outcome is logged under `hdet/...`.

    Args:
        probe: held-out loss. A DataLoader stands for its first 8 batches, judged by the module's own `validation_step`;
            an `hdet.Probe` is given the LightningModule.
        optimizer: which one, where `configure_optimizers` returns several.
        loss: the name under which `validation_step` logs its loss, where it returns none.
        total_steps: the run's length in optimizer steps, where the Trainer does not know it.
        options: those of `hdet.attach`: `knobs`, `exclude`, `window`, `guard`, `schedule`, `history`, `quiet`, ...;
            `scheduler`, the function of the step that a module writes its rates by itself.

    Attributes:
        search: the `hdet.Search` under way or the last; None before training starts, and where a strategy
            trains in processes of its own (`ddp_notebook`, `ddp_spawn`): there give `history=path`.

    Raises:
        ConfigError: what was given cannot be; the message names it and the way out. What depends on the Trainer is
            found when training starts.

    >>> import hdet, lightning, torch
    >>> class Regression(lightning.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = torch.nn.Linear(4, 1)
    ...     def loss(self, batch):
    ...         return (self.layer(batch[0]) - batch[1]).square().mean()
    ...     def training_step(self, batch, index):
    ...         return self.loss(batch)
    ...     def validation_step(self, batch, index):
    ...         return self.loss(batch)
    ...     def configure_optimizers(self):
    ...         return torch.optim.AdamW(self.parameters(), lr=1e-3)
    >>> inputs = torch.randn(64, 4)
    >>> data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    >>> loader = torch.utils.data.DataLoader(data, batch_size=8)
    >>> explored = hdet.lightning.Search(probe=loader, quiet=True)
    >>> trainer = lightning.Trainer(
    ...     max_epochs=3, callbacks=[explored], accelerator="cpu", logger=False, barebones=False,
    ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ... )
    >>> trainer.fit(Regression(), loader)
    >>> explored.search.finished, sorted(explored.search.shifts)
    (True, ['learning_rate', 'weight_decay'])
    """

    def __init__(
        self,
        *,
        probe: Probe | DataLoader | Iterable[Any],  # type: ignore[type-arg]  # as LightningCLI can make it
        optimizer: int | None = None,
        loss: str = "val_loss",
        total_steps: int | None = None,
        **options: Any,
    ) -> None:
        if unknown := sorted(options.keys() - OPTIONS):
            raise ConfigError(f"no such option: {unknown}; there are {sorted(OPTIONS - {'total_steps'})}")
        if not isinstance(probe, Probe) and not isinstance(probe, Iterable):
            raise ConfigError(f"probe is an hdet.Probe or a DataLoader, got {type(probe).__name__}")
        self.search: overlay.Search | None = None
        self._probe = probe
        self._optimizer = optimizer
        self._loss = loss
        self._total_steps = total_steps
        self._options = options
        self._began_at = 0
        self._restored: dict[str, Any] | None = None
        self._closed: list[WindowRecord] = []
        self._stepped = False
        self._steps = 0  # since training started
        self._batches = 0  # since the first of them
        self._of_epoch = math.inf  # steps that the length was worked out from
        self._epoch_began_at: int | None = None  # unknown of one that a resume goes on with

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the search of an earlier `fit`, and say where this one's outcome will be."""
        if stage != "fit":
            return
        self.search = None
        apart = "_MultiProcessingLauncher" in [kind.__name__ for kind in type(trainer.strategy.launcher).__mro__]
        if apart and trainer.is_global_zero and self._options.get("history") is None:
            warn(
                "this strategy trains in processes of its own, as it does in a notebook, and the search stays there: "
                "in the process that called fit, search of the callback hdet.lightning.Search is None afterwards; give "
                "hdet.lightning.Search(history=path), and read hdet.History(path)"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget what the `ckpt_path` of an evaluation has brought."""
        if stage != "fit":
            self._restored = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: models are wrapped, optimizers are made and restored."""
        _refuse(trainer)
        restored, self._restored = self._restored, None
        if restored is not None and restored.keys() != {"began_at", "search"}:
            raise CheckpointError(
                f"the checkpoint's {self.state_key} holds no search of this version of hdet; resume from another one, "
                f"or by the version that saved it"
            )
        self._batches = self._steps = 0
        self._stepped = False
        self._closed.clear()  # of a training that was interrupted
        self._began_at = restored["began_at"] if restored is not None else _passed(trainer)
        self._of_epoch, self._epoch_began_at = _steps_of_epoch(trainer), None
        index = self._index(trainer)
        optimizer = trainer.optimizers[index]
        _refuse_growing(trainer, pl_module, optimizer)
        options = _found(trainer, optimizer, follows=not {"schedule", "scheduler"} & self._options.keys())
        options.update(self._options)
        options["quiet"] = options.get("quiet", False) or not trainer.is_global_zero
        _refuse_averaging(trainer, options)
        if self._probe is trainer.train_dataloader:
            warn(PROBE_TRAINS)
        if not pl_module.automatic_optimization:
            # Where a pass ends is the module's own affair, so that no gradient can be told to be a micro-batch's.
            options["exclude"] = excluding(options.get("exclude", ()), *FORWARD)
        self.search = attach(
            _searched(trainer, pl_module, optimizer),
            optimizer,
            probe=judge(trainer, pl_module, self._probe, self._loss, int(options.get("seed", 0))),
            total_steps=self._length(trainer, options),
            **options,
        )
        if restored is not None:
            self.search.all_ranks.load_state_dict(restored["search"])
        self.search.on_window(self._closed.append)
        self._ride_on(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """An epoch begins, which is not said of one that is gone on with."""
        self._epoch_began_at = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it, once, where an epoch had another number of steps than the run's length was worked out from."""
        if self._epoch_began_at is None or trainer.should_stop:
            return
        if not pl_module.automatic_optimization or not self._by_epochs(trainer):
            return
        made = trainer.global_step - self._epoch_began_at
        if math.isfinite(self._of_epoch) and made != self._of_epoch:
            warn(
                f"epoch {trainer.current_epoch} made {made} optimizer steps, and the run's length was worked out from "
                f"{self._of_epoch} an epoch, so the search takes the run for another length than it has; give "
                f"hdet.lightning.Search(total_steps=...), in optimizer steps"
            )
            self._of_epoch = math.inf  # said

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """A step is due; a GradScaler may skip it."""
        self._stepped = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what has closed."""
        self._batches += self._steps > 0
        if self._stepped and self.search is not None:
            self.search.drop_passes()
            self._steps += 1
            self._notice_accumulation(trainer, pl_module)
        self._stepped = False
        for told in self._log_closed(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped):
            for name, value in told.items():
                pl_module.log(name, value, on_step=True, on_epoch=False, batch_size=1, logger=False)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Hear the loss of a module that steps its optimizer itself; of several optimizers nobody knows whose it is."""
        if self.search is not None and not pl_module.automatic_optimization and len(trainer.optimizers) == 1:
            self.search.loss(loss)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End a run that has made all its steps, and leave model, optimizer and Trainer as they were."""
        if self.search is not None:
            self.search.finish(only_if_over=True)
        self._log_closed(trainer, trainer.fit_loop.epoch_loop._batches_that_stepped - 1)  # that of the last batch
        self._leave(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same, where training ended early."""
        if self.search is not None:
            self.search.let_go()
        self._leave(trainer)

    @property
    def state_key(self) -> str:
        """Names the state in a checkpoint; one for each optimizer that is searched."""
        return "hdet.lightning.Search" if self._optimizer is None else f"hdet.lightning.Search[{self._optimizer}]"

    def state_dict(self) -> dict[str, Any]:
        """The search, as plain numbers and tensors. All ranks call it together, as they save checkpoints together."""
        if self.search is None:
            return self._restored or {}
        return {"began_at": self._began_at, "search": self.search.all_ranks.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts: now there is no optimizer yet."""
        self._restored = state_dict or None

    def _index(self, trainer: Trainer) -> int:
        count = len(trainer.optimizers)
        if count == 0 or type(trainer.optimizers[0]).__name__ == "_MockOptimizer":
            raise ConfigError("configure_optimizers returns no optimizer, and hdet searches one's hyperparameters")
        if self._optimizer is None and count == 1:
            return 0
        kinds = ", ".join(f"{index}: {type(one).__name__}" for index, one in enumerate(trainer.optimizers))
        if self._optimizer is None:
            raise ConfigError(
                f"configure_optimizers returns {count} optimizers ({kinds}); say which one is searched, as in "
                f"hdet.lightning.Search(optimizer=0, ...), or give one callback for each"
            )
        if not 0 <= self._optimizer < count:
            raise ConfigError(f"optimizer={self._optimizer}, and configure_optimizers returns {count} ({kinds})")
        return self._optimizer

    def _length(self, trainer: Trainer, options: dict[str, Any]) -> int | None:
        """Optimizer steps from where the search began."""
        if self._total_steps is not None:
            return self._total_steps
        if len(trainer.optimizers) > 1:
            raise ConfigError(
                "how often each of several optimizers steps is known to training_step alone; give "
                "hdet.lightning.Search(total_steps=...), in steps of the one that is searched"
            )
        if len(_accumulated(trainer)) > 1:
            raise ConfigError(
                "GradientAccumulationScheduler changes how many batches a step takes, and the Trainer counts steps as "
                "if it stayed as it is; give hdet.lightning.Search(total_steps=...), the steps of all epochs"
            )
        steps = _estimated(trainer)
        normed = any(isinstance(module, _BatchNorm) for module in trainer.lightning_module.modules())
        if _averages(trainer) and normed and steps != trainer.max_steps:  # by epochs
            raise ConfigError(
                "StochasticWeightAveraging adds an epoch without steps for BatchNorm's statistics, and the Trainer "
                "counts it as one with steps; give hdet.lightning.Search(total_steps=...), the steps of all the others"
            )
        if math.isfinite(steps) and steps > 0:
            return int(steps) - self._began_at
        if "schedule" in options and options["schedule"] is None:
            return None
        raise ConfigError(
            "the Trainer does not know its length (no max_steps, and no end of epochs); give Trainer(max_steps=...) or "
            "hdet.lightning.Search(total_steps=...)"
        )

    def _by_epochs(self, trainer: Trainer) -> bool:
        """Whether the run's length is that of its epochs."""
        return self._total_steps is None and trainer.max_steps < 0

    def _notice_accumulation(self, trainer: Trainer, module: LightningModule) -> None:
        """Say it, after the first steps, where they are fewer than the run's length was worked out from."""
        counted = self._by_epochs(trainer) or (module.automatic_optimization and self._total_steps is None)
        each = trainer.accumulate_grad_batches if module.automatic_optimization else 1
        made = self._steps - 1  # since the first, before which a module may wait
        if counted and self._steps == FIRST and self._batches >= 2 * made * each:
            warn(
                f"{made} optimizer steps were made in {self._batches} batches, and the Trainer counts its steps as if "
                f"each {'batch' if each == 1 else f'{each} batches'} had one, so the search takes the run for longer "
                f"than it is; give hdet.lightning.Search(total_steps=...), in optimizer steps"
            )

    def _log_closed(self, trainer: Trainer, step: int) -> list[dict[str, float]]:
        """Tell the loggers of each window, whatever `log_every_n_steps` is; returns what was told."""
        told = [metrics(record) for record in self._closed]
        self._closed.clear()
        for window, logger in product(told, trainer.loggers):
            logger.log_metrics(window, step=step)
        return told

    def _ride_on(self, trainer: Trainer) -> None:
        """A training step is a pass: it may call parts of the module one by one, and never the module itself."""
        strategy: Any = trainer.strategy
        inner, search = strategy.training_step, self.search
        assert search is not None

        def training_step(*arguments: Any, **keywords: Any) -> Any:
            return search.training_pass(lambda: inner(*arguments, **keywords))

        strategy.training_step = training_step

    def _leave(self, trainer: Trainer) -> None:
        vars(trainer.strategy).pop("training_step", None)
        if self.search is not None:
            self.search.detach()


def _accumulated(trainer: Trainer) -> list[int]:
    """Batches of a step, first of the coming epoch. A callback's the Trainer is told only as an epoch begins."""
    made: Any = trainer  # its callbacks are put on it from elsewhere
    said = [one for one in made.callbacks if isinstance(one, GradientAccumulationScheduler)]
    if not said:
        return [trainer.accumulate_grad_batches]
    first: int = said[-1].get_accumulate_grad_batches(trainer.current_epoch)
    return [first, *sorted(set(said[-1].scheduling.values()) - {first})]


def _estimated(trainer: Trainer) -> float:
    """The Trainer's own count of its steps, by the accumulation that it is told of as an epoch begins."""
    with standing_in(trainer, accumulate_grad_batches=_accumulated(trainer)[0]):
        return trainer.estimated_stepping_batches


def _steps_of_epoch(trainer: Trainer) -> float:
    """As the Trainer counts them; of a stream nobody can."""
    batches = trainer.num_training_batches
    return math.ceil(batches / _accumulated(trainer)[0]) if math.isfinite(batches) else math.inf


def _passed(trainer: Trainer) -> int:
    """Of the Trainer's own count of its steps, those that are over. It counts as if all epochs were of these data."""
    each, epochs = _steps_of_epoch(trainer), trainer.max_epochs
    if not math.isfinite(each) or epochs is None or epochs < 0:
        return trainer.global_step
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current  # a subclass of what Lightning declares
    within = progress.processed if trainer.fit_loop.restarted_mid_epoch else 0
    left = each * (epochs - trainer.current_epoch) - within // _accumulated(trainer)[0]
    if trainer.max_steps >= 0:
        left = min(left, trainer.max_steps - trainer.global_step)
    return int(_estimated(trainer) - left)


def _averages(trainer: Trainer) -> bool:
    made: Any = trainer  # its callbacks are put on it from elsewhere
    return any(isinstance(one, StochasticWeightAveraging) for one in made.callbacks)


def _refuse_averaging(trainer: Trainer, options: Mapping[str, Any]) -> None:
    """Lightning's averaging of weights, which writes learning rates of its own, beside a schedule that hdet knows."""
    follows = "schedule" in options and options["schedule"] is None
    if _averages(trainer) and not follows:
        raise ConfigError(
            "StochasticWeightAveraging writes the learning rates as it begins, in mid-run; give "
            "hdet.lightning.Search(schedule=None), which follows whatever comes, or leave it out: hdet ends with "
            "averaged weights where the probe finds them better"
        )


def _refuse_growing(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
    """Lightning's callback that gives the optimizer a group more in mid-run. Epochs of a stream nobody can count."""
    made: Any = trainer  # its callbacks are put on it from elsewhere
    searched: Any = module
    for one in made.callbacks:
        if not isinstance(one, BackboneFinetuning) or not math.isfinite(trainer.num_training_batches):
            continue
        epoch = one.unfreeze_backbone_at_epoch
        begins = epoch * math.ceil(trainer.num_training_batches / _accumulated(trainer)[0])
        grows = not {id(parameter) for parameter in searched.backbone.parameters()} <= ids_of(optimizer)
        if grows and trainer.current_epoch <= epoch and begins < _estimated(trainer):
            raise ConfigError(
                f"BackboneFinetuning gives the optimizer a group of parameters more in epoch {epoch}, and knobs go by "
                f"the number of a group; give the optimizer all parameters from the start, as AdamW(self.parameters()) "
                f"in configure_optimizers, of which it then freezes and trains the backbone's, and "
                f"hdet.lightning.Search(schedule=None), since it writes the learning rates of each epoch"
            )


def _refuse(trainer: Trainer) -> None:
    """Strategies that cut up what a search reads and writes."""
    strategy = type(trainer.strategy).__name__
    if strategy == "DeepSpeedStrategy":
        raise ConfigError(
            "Lightning's DeepSpeedStrategy steps master weights that DeepSpeed holds in parts on each rank; give the "
            "Trainer ModelParallelStrategy or DDPStrategy, or train by DeepSpeed's own loop, or by Accelerate, with "
            "hdet.deepspeed.attach(engine, probe=...)"
        )
    if strategy == "FSDPStrategy":
        raise ConfigError(
            "Lightning's FSDPStrategy wraps the model in FullyShardedDataParallel (FSDP1), whose flat parameters "
            "belong to no module; give the Trainer ModelParallelStrategy, which shards by fully_shard (FSDP2)"
        )


def _found(trainer: Trainer, optimizer: Optimizer, *, follows: bool) -> dict[str, Any]:
    """What the Trainer says of accumulation, and of the schedule to follow, as options of `hdet.attach`."""
    configs = [config for config in trainer.lr_scheduler_configs if config.scheduler.optimizer is optimizer]
    automatic = trainer.lightning_module.automatic_optimization
    options: dict[str, Any] = {"micro_batches": _accumulated(trainer)[0] if automatic else 1}
    if not follows or not configs:
        return options
    if not automatic:
        options["schedule"] = None  # when its scheduler steps is the module's own affair
        return options
    every = _optimizer_steps(trainer, configs[0]) if len(configs) == 1 else None
    if every is None:
        options["schedule"] = None  # nobody knows where it goes, or where several do
    else:
        options.update(scheduler=configs[0].scheduler, scheduler_every=every)
    return options


def _optimizer_steps(trainer: Trainer, config: LRSchedulerConfig) -> int | None:
    """Those between two of a scheduler's; None of one that waits for a metric, or where their number is not known."""
    batches = trainer.num_training_batches
    if config.reduce_on_plateau or not isinstance(config.scheduler, LRScheduler):
        return None
    if config.interval == "step":
        # Of a frequency the Trainer counts batches, anew in each epoch.
        if config.frequency > 1 and any(batches % math.lcm(config.frequency, count) for count in _accumulated(trainer)):
            return None
        every = {math.lcm(config.frequency, count) // count for count in _accumulated(trainer)}
    elif math.isfinite(batches):
        every = {math.ceil(batches / count) * config.frequency for count in _accumulated(trainer)}
    else:
        return None  # epochs of a stream
    return every.pop() if len(every) == 1 else None


def _searched(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> nn.Module:
    """The model as it is wrapped; of several optimizers' the smallest part that holds all that this one trains."""
    if len(trainer.optimizers) == 1:
        assert trainer.strategy.model is not None
        return trainer.strategy.model
    if trainer.world_size > 1:
        raise ConfigError(
            f"there are {len(trainer.optimizers)} optimizers and {trainer.world_size} processes; several optimizers "
            f"are searched in one process only"
        )
    trained = ids_of(optimizer)
    holding = [part for part in module.modules() if trained <= {id(p) for p in part.parameters()}]
    return min(holding, key=lambda part: sum(1 for _ in part.parameters()), default=module)
