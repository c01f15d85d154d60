"""Lightning Fabric: `hdet.fabric.attach(fabric, model, optimizer, probe=...)` after `fabric.setup`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ConfigError, MissingExtraError
from hdet.overlay import attach as overlay
from hdet.overlay.search import Search
from hdet.replicas.parallel import unwrapped
from hdet.signals import Probe

try:
    from lightning.fabric import Fabric, is_wrapped
    from lightning.fabric.plugins import Precision
    from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
except ImportError:
    raise MissingExtraError("lightning", "lightning") from None


def attach(fabric: Fabric, model: nn.Module, optimizer: Optimizer, *, probe: Probe, **options: Any) -> Search:
    """Explore hyperparameters in a loop of Fabric's: `hdet.attach`, to what `fabric.setup` has wrapped.

    The loop stays as it is: `model(...)`, `fabric.backward(loss)`, `optimizer.step()`, with `fabric.no_backward_sync`
    and `fabric.clip_gradients` where it has them. `fabric.save` and `fabric.load` take `search.all_ranks` among the
    objects of their state.

    Args:
        model, optimizer: what `fabric.setup` returned.
        probe: held-out loss. The model that it is given is called in Fabric's precision, as training calls it. Batches
            lie on the model's device (`fabric.to_device`).
        options: of `hdet.attach`.

    Raises:
        ConfigError: these are not what `fabric.setup` returned, the strategy is DeepSpeed's; or what `hdet.attach`
            refuses.

    >>> import hdet, lightning, torch
    >>> fabric = lightning.Fabric(accelerator="cpu", devices=1)
    >>> model = torch.nn.Linear(4, 1)
    >>> model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    >>> probe = hdet.Probe(lambda model, x: (model(x) - 1).square().mean(), [torch.randn(8, 4) for _ in range(8)])
    >>> search = hdet.fabric.attach(fabric, model, optimizer, probe=probe, total_steps=30, quiet=True)
    >>> for _ in range(30):
    ...     loss = search.loss((model(torch.randn(8, 4)) - 1).square().mean())
    ...     fabric.backward(loss)
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> search.finished
    True
    """
    wrapped = unwrapped(model)[0]
    if not is_wrapped(wrapped):
        raise ConfigError(
            f"hdet.fabric.attach takes the model that fabric.setup returned, got a {type(wrapped).__name__}"
        )
    if isinstance(fabric.strategy, DeepSpeedStrategy):
        raise ConfigError("under Fabric's DeepSpeedStrategy hdet is not tried; hdet.deepspeed.attach takes an engine")
    inner = next(wrapped.children())  # what Fabric calls: compiled, in DistributedDataParallel or sharded, if it is
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return overlay.attach(inner, optimizer, probe=_in_precision(probe, fabric.strategy.precision), **options)


def _in_precision(probe: Probe, precision: Precision) -> Probe:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return probe.loss(_Called(model, precision), batch)

    return replace(probe, loss=loss) if isinstance(probe, Probe) else probe


class _Called:
    """A model that is called as Fabric's wrapper calls it, without its demand for `fabric.backward`."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self._model, self._precision = model, precision

    def __call__(self, *given: Any, **named: Any) -> Any:
        given, named = self._precision.convert_input((given, named))
        with self._precision.forward_context():
            output = self._model(*given, **named)
        return self._precision.convert_output(output)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
