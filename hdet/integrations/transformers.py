"""hdet in the Trainer of Hugging Face Transformers: one callback."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hdet.checkpoints.leader import led
from hdet.engine.admission import counted
from hdet.errors import CheckpointError, ConfigError, MissingExtraError
from hdet.files import replaced
from hdet.history import WindowRecord
from hdet.integrations import deepspeed
from hdet.integrations.dataset_probe import PROBE_TRAINS, Sample
from hdet.integrations.kept import put_in, standing_in, values_kept
from hdet.integrations.loggers import metrics
from hdet.overlay import search as overlay
from hdet.overlay.attach import attach
from hdet.overlay.hooks import Hook
from hdet.signals import Objective, Probe
from hdet.user_warning import warn

try:
    from accelerate.data_loader import IterableDatasetShard
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError:
    raise MissingExtraError("transformers", "transformers") from None

FILE = "hdet.pt"
"""What the search's state is called in a checkpoint folder."""
OPTIONS = frozenset(inspect.signature(attach).parameters) - {"model", "optimizer", "probe", "total_steps"}


class Search(TrainerCallback):
    """Explores hyperparameters in a run of `transformers.Trainer`, which stays as it is.

    The Trainer's scheduler goes on writing the learning rate and its logs go on showing what it wrote; hdet multiplies
    in what it has learned just before each step of the optimizer. What the search holds lies beside the model in the
    Trainer's checkpoints, and `resume_from_checkpoint` finds it there. Each window is logged under names that begin
    with `hdet/`.

    Args:
        probe: held-out data, as the Trainer's `eval_dataset` is: collated and judged as the Trainer does it, without
            label smoothing, about as many examples a window as one optimizer step trains on. Or an `hdet.Probe`.
        sub_batch_size: how many examples each of its 8 sub-batches holds, and the objective's; by default an eighth of
            what one optimizer step trains on. A loss that compares the examples of a batch, as contrastive ones do,
            and a network with BatchNorm need the training batch's.
        options: of `hdet.attach`. `objective` may be training data, as the Trainer's `train_dataset` is: by these,
            dropouts are judged where the model is sharded.

    Attributes:
        search: what `hdet.attach` returned, once training has begun.

    >>> trainer.add_callback(hdet.transformers.Search(probe=eval_dataset))  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    """

    def __init__(self, probe: Any, *, sub_batch_size: int | None = None, **options: Any) -> None:
        if unknown := sorted(options.keys() - OPTIONS):
            raise ConfigError(f"no such option: {unknown}; there are {sorted(OPTIONS)}")
        if sub_batch_size is not None:
            sub_batch_size = counted("sub_batch_size", sub_batch_size)
            if isinstance(probe, Probe):
                raise ConfigError("an hdet.Probe brings its own batches; leave sub_batch_size out, or give the data")
        self.search: overlay.Search | None = None
        self._probe = probe
        self._sub_batch_size = sub_batch_size
        self._options = options
        self._begun_at = 0
        self._saved_at: int | None = None
        self._unlogged: list[WindowRecord] = []
        self._undo: list[Callable[[], None]] = []
        self._trainer: Trainer | None = None
        self._training = False  # the Trainer is in its training_step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer has everything ready, resumed if it resumes."""
        self._end()
        self.search = None
        trainer, folder = _calling()
        _refuse(trainer)
        if state.global_step >= state.max_steps > 0:
            return  # it is over, and resumed all the same, as by a job that is queued anew
        # Rank 0 wrote it, maybe to a disk of its own, and reads it for all: none begins anew beside others that go on.
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        saved = led(group, lambda: self._saved(args, state, folder)) if state.global_step else None
        self._begun_at = saved["begun_at"] if saved is not None else state.global_step
        self._saved_at = None
        self._trainer = trainer
        probe, size = self._probe, self._sub_batch_size
        given = {
            "probe": probe if isinstance(probe, Probe) else probe_of(trainer, probe, size),
            "total_steps": state.max_steps - self._begun_at,
            **_found(trainer, self._options),
            **self._options,
            **self._objective(trainer),
            **({"quiet": True} if saved is not None else {}),
        }
        if trainer.is_deepspeed_enabled:
            self.search = deepspeed.attach(trainer.model_wrapped, **given)
        else:
            assert trainer.optimizer is not None  # made by now
            self.search = attach(trainer.model_wrapped, trainer.optimizer, **given)
        if saved is not None:
            self.search.all_ranks.load_state_dict(saved["search"])
        self.search.on_window(self._unlogged.append)
        self._report_losses(trainer, self.search)
        self._save_beside(trainer)
        hook = trainer.model_wrapped.register_forward_pre_hook(Hook(self._end_if_left), prepend=True)
        self._undo.append(hook.remove)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log what windows have closed. (Inside the step the Trainer has not counted it yet.)"""
        if self.search is not None and state.global_step >= state.max_steps:
            self.search.finish()  # which steps were skipped the Trainer does not know
        records, self._unlogged[:] = list(self._unlogged), []
        for record in records:
            assert self._trainer is not None
            due = control.should_log  # a log ends the Trainer's own that is due
            # A subclass's would hand over here, and empty, the training metrics that it has gathered.
            Trainer.log(self._trainer, metrics(record))
            control.should_log = due

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put the search beside a checkpoint that a Trainer has written by code of its own."""
        if self._saved_at != state.global_step:  # known alike to all ranks, as a file is not
            self._save(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the Trainer's model, which may be its best one by now, and its optimizer alone."""
        self._end(raised=False)

    def _objective(self, trainer: Trainer) -> dict[str, Any]:
        given = self._options.get("objective")
        if given is None or isinstance(given, Objective):
            return {}
        return {"objective": objective_of(trainer, given, self._sub_batch_size)}

    def _report_losses(self, trainer: Trainer, search: overlay.Search) -> None:
        """Have each micro-batch's loss said to the search.

        What `training_step` returns is divided such that it adds up to the step's loss over the micro-batches, by
        tokens or by their number, whoever computed it; the search takes means over them.
        """
        inner: Any = trainer.training_step

        def training_step(*arguments: Any, **keywords: Any) -> Tensor:
            self._training = True
            try:
                loss: Tensor = inner(*arguments, **keywords)
            except BaseException:  # an interrupt, too: the Trainer tells callbacks nothing of it
                self._end()
                raise
            finally:
                self._training = False
            search.loss(loss * trainer.current_gradient_accumulation_steps)
            return loss

        self._undo.append(put_in(trainer, training_step=training_step))

    def _save_beside(self, trainer: Trainer) -> None:
        """Have the search put beside each checkpoint's model and optimizer, whoever asks for the checkpoint.

        Callbacks are told by `on_save` of those of the Trainer's own loop alone, and not of one made at a SIGTERM.
        """
        inner: Any = trainer._save_checkpoint

        def save_checkpoint(*arguments: Any, **keywords: Any) -> None:
            inner(*arguments, **keywords)
            self._save(trainer.args, trainer.state)
            self._saved_at = trainer.state.global_step

        self._undo.append(put_in(trainer, _save_checkpoint=save_checkpoint))

    def _save(self, args: TrainingArguments, state: TrainerState) -> None:
        if self.search is None or not self.search.attached or args.save_only_model:
            return
        state_dict = self.search.all_ranks.state_dict()
        if not args.should_save:
            return
        folder = _output(args) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        with replaced(folder / FILE) as part:
            torch.save({"step": state.global_step, "begun_at": self._begun_at, "search": state_dict}, part)

    def _end_if_left(self, module: nn.Module, inputs: Any) -> None:
        """An exception has ended the training that the search belongs to, and the model trains elsewhere."""
        trains = module.training and torch.is_grad_enabled() and not self._training
        if trains and _of_stack()[0] is not self._trainer:
            self._end()

    def _end(self, *, raised: bool = True) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self.search is not None:
            (self.search.let_go if raised else self.search.detach)()
        self._unlogged.clear()

    def _saved(self, args: TrainingArguments, state: TrainerState, folder: str | None) -> dict[str, Any] | None:
        path = (Path(folder) if folder is not None else _output(args)) / FILE
        if not path.exists():
            warn(
                f"{path} does not exist, so the search begins at step {state.global_step} with nothing learned; this "
                f"is right if the run was begun without hdet, else give the folder of a whole checkpoint"
            )
            return None
        try:
            saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # as torch has it, by what the bytes happen to be
            told = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path} cannot be read: {told}; resume from another checkpoint folder") from error
        if not isinstance(saved, dict) or saved.keys() != {"step", "begun_at", "search"}:
            raise CheckpointError(f"{path} holds no search of the Trainer's; resume from another checkpoint folder")
        if saved["step"] != state.global_step:
            raise CheckpointError(
                f"{path} holds the search after step {saved['step']}, and the Trainer goes on from step "
                f"{state.global_step}; resume from a checkpoint folder that nothing has changed"
            )
        return saved


def _output(args: TrainingArguments) -> Path:
    assert args.output_dir is not None  # filled in by its own class
    return Path(args.output_dir)


def probe_of(trainer: Trainer, data: Any, sub_batch_size: int | None = None) -> Probe:
    """A probe of held-out data, by the Trainer's own collator and loss.

    Raises:
        ConfigError: there are none, or the Trainer makes no batch of them; or its loss does not judge a model.
    """
    if data is None:
        raise ConfigError("a search judges by held-out data; give hdet.transformers.Search(probe=eval_dataset)")
    sample, loss = _judged(trainer, data, sub_batch_size, "probe")

    def without_smoothing(model: nn.Module, batch: Any) -> Tensor:
        with standing_in(trainer, label_smoother=None):  # smoothed labels train; settings are judged without them
            return loss(model, batch)

    return Probe(without_smoothing, sample)


def objective_of(trainer: Trainer, data: Any, sub_batch_size: int | None = None) -> Objective:
    """The training loss on training data, by the Trainer's own collator.

    Raises:
        ConfigError: as for the probe.
    """
    sample, loss = _judged(trainer, data, sub_batch_size, "objective")
    return Objective(loss, sample)


def _judged(
    trainer: Trainer, data: Any, sub_batch_size: int | None, name: str
) -> tuple[Sample, Callable[[nn.Module, Any], Tensor]]:
    """What each window draws of the data, and the Trainer's loss.

    Raises:
        ConfigError: the Trainer has no evaluation data of that name, or makes no batch of the data; or its loss does
            not judge a model.
    """
    if hasattr(trainer, "reward_funcs"):
        raise ConfigError(
            f"{type(trainer).__name__} learns from rewards of what the model generates, and its loss does not fall as "
            f"the model gets better; give an hdet.Probe whose loss does, or train without hdet"
        )
    if getattr(trainer.args, "loss_type", None) == "dft":  # TRL's
        raise ConfigError(
            f"loss_type='dft' weighs each token by its own probability, so that the loss of {type(trainer).__name__} "
            f"rises while a model that knows little gets better; give an hdet.Probe whose loss falls, as "
            f"model(**batch).loss does, or take loss_type='nll'"
        )
    if isinstance(data, str):
        there = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {}
        if data not in there:
            raise ConfigError(f"the Trainer's eval_dataset has no data called {data!r}; there are {sorted(there)}")
        data = there[data]
    if name == "probe" and data is trainer.train_dataset:
        warn(PROBE_TRAINS)
    args = trainer.args
    examples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    try:
        # Not the evaluation's loader, which the Trainer would keep and evaluate on.
        loader = trainer.get_test_dataloader(data)
        taken: Any = loader.dataset
        if isinstance(taken, IterableDatasetShard):
            taken = taken.dataset  # a process's share of it: what is judged by is the same in all
        sample = Sample(taken, examples, loader.collate_fn, sub_batch_size)
        sample(0)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the Trainer cannot make a batch of the {name}'s data ({type(error).__name__}: {error}); give them as its "
            f"own data sets hold them, where a trainer that prepares its data itself, as TRL's do, has what it made of "
            f"them (docs/integrations.md)"
        ) from error

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs = trainer._prepare_inputs(batch)
        # A subclass may gather metrics there, as TRL's do.
        with (
            values_kept(trainer, private=True),
            # Items are counted in this process alone: all of them judge by the same ones, each when it comes to it.
            standing_in(trainer.args, average_tokens_across_devices=False),
            standing_in(trainer, log=lambda *_, **__: None),  # what a loss logs is of training
            trainer.compute_loss_context_manager(),
        ):
            items = trainer._get_num_items_in_batch([inputs], trainer.args.device) if _divides(trainer) else None
            found = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        return found[0] if isinstance(found, tuple) else found

    return sample, loss


def _divides(trainer: Trainer) -> bool:
    """Whether somebody's own loss may divide by a batch's items itself; a model's is their mean if told no number."""
    method = getattr(trainer.compute_loss, "__func__", None)  # what is set on the instance need not be one
    return trainer.compute_loss_func is not None or method is not Trainer.compute_loss


def _calling() -> tuple[Trainer, str | None]:
    """The Trainer that calls, and the folder from which it resumes. A callback is handed neither."""
    trainer, folder = _of_stack()
    if trainer is None:
        raise ConfigError(
            "hdet.transformers.Search is a callback of transformers.Trainer, called by its train(); for a "
            "loop of your own there is hdet.attach"
        )
    return trainer, folder


def _of_stack() -> tuple[Trainer | None, str | None]:
    """The Trainer whose `train` is under way, and the folder from which it resumes; None where there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and "resume_from_checkpoint" in frame.f_locals:
            return caller, frame.f_locals["resume_from_checkpoint"]
        frame = frame.f_back
    return None, None


def _refuse(trainer: Trainer) -> None:
    if trainer.state.is_hyper_param_search:
        raise ConfigError(
            "the Trainer runs hyperparameter_search, which keeps each trial's checkpoints in a folder that callbacks "
            "are not told; leave hdet.transformers.Search out of it, or call train()"
        )
    if trainer.args.n_gpu > 1:
        raise ConfigError(
            f"the Trainer copies the model to {trainer.args.n_gpu} devices by DataParallel in each step, and what runs "
            f"on a copy is not seen; start one process a device, by torchrun or accelerate launch"
        )


def _found(trainer: Trainer, options: dict[str, Any]) -> dict[str, Any]:
    """What the Trainer says of accumulation and schedule, as options of `hdet.attach`."""
    found: dict[str, Any] = {"quiet": not trainer.is_world_process_zero()}
    if not trainer.is_deepspeed_enabled:  # whose engine says itself what it accumulates
        found["micro_batches"] = trainer.args.gradient_accumulation_steps
    if not {"scheduler", "schedule"} & options.keys():
        scheduler = trainer.lr_scheduler
        if trainer.is_deepspeed_enabled:
            foreseen = deepspeed.foreseeable(scheduler, trainer.model_wrapped)
        else:
            foreseen = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau)
        found.update({"scheduler": scheduler} if foreseen else {"schedule": None})
    return found
