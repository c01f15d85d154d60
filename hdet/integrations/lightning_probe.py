"""A probe out of a LightningModule: its own validation loss, on the first batches of a DataLoader."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torchmetrics import Metric

from hdet.errors import ConfigError
from hdet.integrations.dataset_probe import SUB_BATCHES
from hdet.integrations.kept import standing_in, values_kept
from hdet.replicas.generators import numbers_lent
from hdet.replicas.random_numbers import accelerators
from hdet.replicas.tensors import evaluating
from hdet.signals import Probe
from hdet.signals.probe import leading_sizes

OF_A_METRIC = ("_update_count", "_computed", "_forward_cache", "_cache")
"""What a torchmetrics metric holds beside the states that it has declared."""


def judge(trainer: Trainer, module: LightningModule, probe: Probe | Iterable[Any], name: str, seed: int) -> Probe:
    """The probe on this module, on its device and in the Trainer's precision.

    Args:
        probe: given the LightningModule, whatever wraps it; or a DataLoader, for the module's `validation_step`.
        name: under which `validation_step` logs its loss, where it returns none.
        seed: of a shuffling DataLoader.

    Raises:
        ConfigError: the module has no `validation_step`, or the DataLoader too few batches.
    """
    if isinstance(probe, Probe):

        def own(model: nn.Module, batch: Any) -> Tensor:
            with _judging(trainer, module):
                return probe.loss(module, batch)

        return Probe(own, probe.batches, probe.at, probe.stride)
    if not is_overridden("validation_step", module):
        raise ConfigError(
            f"{type(module).__name__} has no validation_step to judge the probe's batches by; define one, or give "
            f"probe=hdet.Probe(loss, batches) with loss(module, batch)"
        )

    def moved(batch: Any) -> Any:
        """As the Trainer's validation does it, by hooks of the module or of its DataModule."""
        batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
        return trainer.strategy.batch_to_device(batch)

    numbers = numbers_lent(f"hdet.probe:{seed}", accelerators(module), *module.modules())
    with numbers, evaluating(module), _validating(trainer):
        batches = [moved(batch) for batch in _first(probe)]

    def validation_loss(model: nn.Module, numbered: tuple[int, Any]) -> Tensor:
        index, batch = numbered
        with _judging(trainer, module) as logged:
            returned = _step(module, batch, index)
        found = returned.get("loss") if isinstance(returned, dict) else returned
        found = logged.get(name) if found is None else found
        if not isinstance(found, Tensor) or found.dim() != 0:
            raise ConfigError(
                f"validation_step returns no loss and logs none as {name!r} (it logs {sorted(logged)}); return the "
                f"loss, give hdet.lightning.Search(loss=...) the name it is logged under, or a "
                f"probe=hdet.Probe(loss, batches)"
            )
        return found

    return Probe(validation_loss, list(enumerate(batches)))


def _step(module: LightningModule, batch: Any, index: int) -> Any:
    """`validation_step` with the numbers that it takes: of the batch, and of a DataLoader where there are several."""
    step = module.validation_step
    numbers = [index] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []
    loader = inspect.signature(step).parameters.get("dataloader_idx")
    if loader is not None and loader.default is loader.empty:
        numbers.append(0)
    return step(batch, *numbers)


def _validating(trainer: Trainer) -> AbstractContextManager[None]:
    """A module may ask the Trainer what it does, as to augment what it trains on alone."""
    return standing_in(trainer.state, stage=RunningStage.VALIDATING)


def _first(loader: Iterable[Any]) -> list[Any]:
    """A loader's first 8 batches, the same on every process; a smaller last one is left out."""
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise ConfigError(
            "the probe's DataLoader has a DistributedSampler, and every process must judge by the same batches; give "
            "one without"
        )
    batches = list(islice(iter(loader), SUB_BATCHES))
    sizes = leading_sizes(batches)
    batches = [batch for batch, size in zip(batches, sizes, strict=True) if size == sizes[0]]
    if len(batches) < 2:
        raise ConfigError(
            f"the probe's DataLoader gives {len(batches)} full batches, and their scatter, of at least 2, is the "
            f"standard error; 8 do well: take a smaller batch_size"
        )
    return batches


@contextmanager
def _judging(trainer: Trainer, module: LightningModule) -> Iterator[dict[str, Any]]:
    """The module computes a held-out loss; what it logs is handed over, and reaches no logger."""
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        logged[name] = value

    def log_dict(dictionary: dict[str, Any], *_: Any, **__: Any) -> None:
        logged.update(dictionary)

    with (
        standing_in(module, log=log, log_dict=log_dict),
        _validating(trainer),
        _as_it_was(module),
        trainer.precision_plugin.val_step_context(),
    ):
        yield logged


@contextmanager
def _as_it_was(module: LightningModule) -> Iterator[None]:
    """Metrics, and containers, numbers and tensors on the module, hold after the block what they held before it."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    states = [
        {name: _copied(value) for name, value in vars(one).items() if name in one._defaults or name in OF_A_METRIC}
        for one in metrics
    ]
    try:
        with values_kept(module, private=False):
            yield
    finally:
        for one, state in zip(metrics, states, strict=True):
            vars(one).update(state)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)
