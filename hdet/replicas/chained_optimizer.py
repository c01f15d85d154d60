"""Several optimizers of one model as one, for whatever takes one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hdet.errors import ConfigError


class ChainedOptimizer(Optimizer):
    """Optimizers of one model, each with its own parameters, stepped as one.

    For Muon, which takes matrices alone, with AdamW for everything else, say. It has their parameter groups, one after
    the other, and their state, and both are the same objects: what a scheduler or hdet writes into a group here is what
    the optimizer steps by. `state_dict` holds all of them; schedulers, `GradScaler`, checkpoints and trainers see one
    optimizer. Optimizers may have made steps before they are chained.

    Args:
        optimizers: two or more that share no parameter. Later groups of parameters need a new chain.

    Attributes:
        optimizers: those that it steps, in this order. Do not step them yourself.

    Raises:
        ConfigError: one of them is no optimizer, or evaluates other weights than it trains (Schedule-Free); or two hold
            the same parameter.

    >>> import torch, hdet
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    >>> first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    >>> optimizer = hdet.ChainedOptimizer(first, torch.optim.AdamW(model[1].parameters(), lr=1e-3))
    >>> scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
    >>> [group["lr"] for group in optimizer.param_groups], first.param_groups[0]["lr"]
    ([0.05, 0.0005], 0.05)
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            _require(optimizer)
        self.optimizers = optimizers
        self._steps: dict[nn.Parameter, int] = {}
        for number, optimizer in enumerate(optimizers):
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if self._steps.setdefault(parameter, number) != number:
                    raise ConfigError(
                        f"{type(optimizers[self._steps[parameter]]).__name__} and {type(optimizer).__name__} hold the "
                        f"same parameter, of shape {list(parameter.shape)}; give each parameter to one of them"
                    )
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of each.

        Args:
            closure: evaluated once, before the first.

        Raises:
            ConfigError: parameters were added since the optimizers were chained.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._share()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def that_steps(self, parameter: nn.Parameter) -> Optimizer:
        """The one of the optimizers that steps a parameter."""
        return self.optimizers[self._steps[parameter]]

    def _share(self) -> None:
        """Groups and state of each are those of the chain, which may have been cut or loaded."""
        own: list[list[dict[str, Any]]] = [[] for _ in self.optimizers]
        for group in (group for optimizer in (self, *self.optimizers) for group in optimizer.param_groups):
            if any(parameter not in self._steps for parameter in group["params"]):
                raise ConfigError(
                    "parameters were added to an optimizer after it was chained; chain the optimizers anew, with all "
                    "their groups, by hdet.ChainedOptimizer"
                )
        for group in self.param_groups:
            if group["params"]:
                own[self._steps[group["params"][0]]].append(group)
        for optimizer, groups in zip(self.optimizers, own, strict=True):
            optimizer.param_groups, optimizer.state = groups, self.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers, "_steps": self._steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Torch comes here to load a state dict, to copy and to unpickle."""
        super().__setstate__(state)
        self._share()


def _require(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"hdet.ChainedOptimizer chains torch optimizers, one an argument, got {type(optimizer).__name__}"
        )
    if hasattr(optimizer, "eval"):
        raise ConfigError(
            f"{type(optimizer).__name__} evaluates other weights than it trains, which a chain of optimizers would not "
            f"switch; give it all parameters, or chain optimizers without modes"
        )


def steps_by(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """The optimizer that steps a parameter group: the one in a chain, else the one that holds it."""
    if isinstance(optimizer, ChainedOptimizer) and group["params"]:
        return optimizer.that_steps(group["params"][0])
    return optimizer


def chained(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that an optimizer steps: those of a chain, or itself alone."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
