"""Lightning Fabric: `hdet.fabric.attach(fabric, model, optimizer, probe=...)` after `fabric.setup`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hdet.errors import ConfigError, MissingExtraError
from hdet.overlay import attach as overlay
from hdet.overlay.search import Search
from hdet.signals import Objective, Probe

try:
    from lightning.fabric import Fabric, is_wrapped
    from lightning.fabric.plugins import Precision
    from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy
except ImportError:
    raise MissingExtraError("lightning", "lightning") from None


def attach(
    fabric: Fabric,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    probe: Probe,
    objective: Objective | None = None,
    **options: Any,
) -> Search:
    """Explore hyperparameters in a loop of Fabric's: `hdet.attach`, to what `fabric.setup` has wrapped.

    The loop stays as it is: `model(...)`, `fabric.backward(loss)`, `optimizer.step()`, with `fabric.no_backward_sync`
    and `fabric.clip_gradients` where it has them. It calls the model itself, or a method that Fabric redirects through
    it. `fabric.save` and `fabric.load` take `search.all_ranks` among the objects of their state; a strategy that saves
    in parts (FSDP2) loads modules and optimizers alone, and leaves `search.all_ranks.load_state_dict(state["search"])`
    to the loop.

    Args:
        model, optimizer: what `fabric.setup` returned; compiled before that, if it is.
        probe: held-out loss. What it is given stands for the model: a call is made in Fabric's precision, as in
            training, and attributes are the model's own. Batches lie on the model's device (`fabric.to_device`).
        objective: as `hdet.attach` takes it; judged in Fabric's precision, too.
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
    if not isinstance(fabric, Fabric):
        raise ConfigError(f"fabric must be a lightning.Fabric, got {type(fabric).__name__}")
    if not (is_wrapped(model) and hasattr(type(model), "mark_forward_method")):  # not an optimizer, nor compiled since
        kind = type(model)
        raise ConfigError(
            f"hdet.fabric.attach takes the model that fabric.setup returned (compiled before that, if it is), got a "
            f"{kind.__module__}.{kind.__qualname__}"
        )
    if isinstance(fabric.strategy, DeepSpeedStrategy):
        raise ConfigError("under Fabric's DeepSpeedStrategy hdet is not tried; hdet.deepspeed.attach takes an engine")
    wrapped: Any = model
    inner = wrapped._forward_module  # what Fabric calls: compiled, in DistributedDataParallel or sharded, if it is
    # Fabric redirects some methods through what it has wrapped; where that is the model itself, they are plain.
    converted = wrapped._forward_methods if inner is not wrapped.module else frozenset()
    called = partial(_Called, precision=fabric.strategy.precision, methods=converted)

    def judged(given: Any) -> Any:
        """By the model as Fabric calls it; what is neither probe nor objective is for `hdet.attach` to refuse."""
        if not isinstance(given, Probe | Objective):
            return given
        return replace(given, loss=lambda model, batch: given.loss(called(model), batch))

    return overlay.attach(inner, optimizer, probe=judged(probe), objective=judged(objective), **options)


class _Called:
    """A model that is called as Fabric's wrapper calls it, without its demand for `fabric.backward`."""

    def __init__(self, model: nn.Module, precision: Precision, methods: Collection[str]) -> None:
        self.module, self._precision, self._methods = model, precision, methods

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._converted(self.module, *given, **named)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # those that Python asks for itself
            raise AttributeError(name)
        found = getattr(self.module, name)
        return partial(self._converted, found) if name in self._methods else found

    def _converted(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        given, named = self._precision.convert_input((given, named))
        with self._precision.forward_context():
            output = call(*given, **named)
        return self._precision.convert_output(output)
