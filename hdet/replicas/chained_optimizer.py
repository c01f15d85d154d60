"""Several optimizers of one model as one, for whatever takes one optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.hparams.clipping import ENTRY as CLIPPED
from hdet.hparams.param_groups import parameters_of

OWNER = "chained"
"""Entry of a parameter group: the place in its chain of the optimizer that steps it."""

Group = dict[str, Any]


class ChainedOptimizer(Optimizer):
    """Optimizers of one model, each with its own parameters, stepped as one.

    For Muon, which takes matrices alone, with AdamW for everything else, say. It has their parameter groups, one
    optimizer's after the other's, and each parameter's state, and both are the same objects: what a scheduler or hdet
    writes into a group here is what the optimizer steps by. `state_dict` holds all of them; schedulers, `GradScaler`,
    checkpoints and trainers see one optimizer. Optimizers may have made steps before they are chained.

    Args:
        optimizers: two or more that share no parameter. The optimizers of a chain among them are taken one by one.

    Attributes:
        optimizers: those that it steps, in this order. Do not step, load or change them yourself.
        stepping: whether they are being stepped.

    Raises:
        ConfigError: there are fewer than two; one of them is no optimizer, evaluates other weights than it trains
            (Schedule-Free) or clips gradients by itself (`hdet.clip_gradients`).
        ValueError: two hold the same parameter.

    >>> import torch, hdet
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
    >>> first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    >>> optimizer = hdet.ChainedOptimizer(first, torch.optim.AdamW(model[1].parameters(), lr=1e-3))
    >>> scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5)
    >>> [group["lr"] for group in optimizer.param_groups], first.param_groups[0]["lr"]
    ([0.05, 0.0005], 0.05)
    """

    stepping: bool = False

    def __init__(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            _require(optimizer)
        self.optimizers = tuple(part for optimizer in optimizers for part in chained(optimizer))
        if len(self.optimizers) < 2:
            raise ConfigError(f"hdet.ChainedOptimizer chains two optimizers or more, got {len(self.optimizers)}")
        for place, part in enumerate(self.optimizers):
            for group in part.param_groups:
                group[OWNER] = place
        common = set.intersection(*(set(part.defaults) for part in self.optimizers))
        defaults = {name: value for name, value in self.optimizers[0].defaults.items() if name in common}
        super().__init__([group for part in self.optimizers for group in part.param_groups], defaults)
        self._take()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of each.

        Args:
            closure: evaluated once, before the first.

        Raises:
            ConfigError: one of the optimizers was loaded or given other parameters by itself since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.hand_out()
        self.stepping = True
        try:
            for part in self.optimizers:
                part.step()
        finally:
            self.stepping = False
        self._take()
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """Refused after construction, since nothing tells which optimizer is to step it.

        Raises:
            ConfigError: always then.
        """
        if OWNER not in param_group:
            raise ConfigError(
                "nothing tells which optimizer of the chain is to step these parameters; add them to it, and then "
                "chain the optimizers anew by hdet.ChainedOptimizer"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have each optimizer load its part, in its own way.

        Raises:
            ConfigError: the state is not that of a chain with as many groups of each optimizer.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        saved, states = state_dict["param_groups"], state_dict["state"]
        owners = [group[OWNER] for group in self.param_groups]
        if [group.get(OWNER) for group in saved] != owners:
            raise ConfigError(
                f"the state is not of these optimizers chained in this order: its parameter groups are of "
                f"{[group.get(OWNER) for group in saved]}, this chain's of {owners}; load the state of an optimizer "
                f"that was not chained into that one, before it is chained"
            )
        counts, own_counts = ([len(group["params"]) for group in groups] for groups in (saved, self.param_groups))
        if counts != own_counts:  # before the first of them has loaded its part
            raise ConfigError(
                f"the state's parameter groups have {counts} parameters, this chain's {own_counts}; build the model "
                f"and its optimizers as they were"
            )
        self.hand_out()
        for place, part in enumerate(self.optimizers):
            own = [group for group in saved if group[OWNER] == place]
            numbers = [number for group in own for number in group["params"]]
            part.load_state_dict({"state": {n: states[n] for n in numbers if n in states}, "param_groups": own})
        loaded = [iter(part.param_groups) for part in self.optimizers]
        self.param_groups = [next(loaded[owner]) for owner in owners]
        self.state.clear()
        self._take()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _take(self) -> None:
        """The state that the optimizers have of parameters is the chain's."""
        for part in self.optimizers:
            alone = [key for key in part.state if not isinstance(key, Tensor)]
            if alone:
                raise ConfigError(
                    f"{type(part).__name__} keeps a state of no parameter ({', '.join(map(repr, alone))}), which a "
                    f"chain does not save; give it all parameters"
                )
            self.state.update(part.state)
        self._given = [list(part.param_groups) for part in self.optimizers]

    def hand_out(self) -> None:
        """Groups and state of each are those of the chain, which may have been cut, cleared or put back."""
        for place, (part, given) in enumerate(zip(self.optimizers, self._given, strict=True)):
            if list(map(id, part.param_groups)) != list(map(id, given)):
                raise ConfigError(
                    f"{type(part).__name__} was loaded or given other parameter groups after it was chained; load the "
                    f"chain's state, or chain the optimizers anew by hdet.ChainedOptimizer"
                )
            part.param_groups = [group for group in self.param_groups if group[OWNER] == place]
            own = (parameter for parameter in parameters_of(part) if parameter in self.state)
            part.state = defaultdict(dict, {each: self.state[each] for each in own})
        self._given = [list(part.param_groups) for part in self.optimizers]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers, "_given": self._given}


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
    if any(CLIPPED in group for group in optimizer.param_groups):
        raise ConfigError(
            f"hdet.clip_gradients clips the gradients of {type(optimizer).__name__} alone; remove that, and call it "
            f"with the chain"
        )


def steps_by(optimizer: Optimizer, group: Group) -> Optimizer:
    """The optimizer that steps a parameter group: the one in a chain, else the one that holds it."""
    return optimizer.optimizers[group[OWNER]] if isinstance(optimizer, ChainedOptimizer) else optimizer


def chained(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that an optimizer steps: those of a chain, or itself alone."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
