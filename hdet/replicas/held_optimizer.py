"""An optimizer's state as it was, to be put back without touching what the user or a scheduler wrote since."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop

from hdet.hparams.param_groups import ids_of, parameters_of
from hdet.nested import mapped
from hdet.replicas import host_memory, schedule_free, tensors
from hdet.replicas.chained_optimizer import chained
from hdet.replicas.optimizer_numbers import kept_as_attributes, kept_in_groups

State = dict[str, Any]

WRAPPED = "__bnb_optimizer_quant_state__"
"""Under which bitsandbytes wraps some of a parameter's state in its `state_dict`."""

OF_GRADIENTS = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Adafactor, Muon)
"""Optimizers whose state is of gradients alone, and so goes with weights of a somewhat later step too."""


class HeldOptimizer:
    """A copy of an optimizer's state, in memory that persists from one `take` to the next.

    Args:
        optimizer: whose state is copied.
        device: where copies lie; `None` beside the originals.
    """

    def __init__(self, optimizer: Optimizer, device: str | None = None) -> None:
        self._optimizer = optimizer
        self._device = device
        self._own: list[State] = []
        self._lent: HeldOptimizer | None = None
        self._others: dict[Hashable, Any] = {}
        self._groups: list[State] = []
        self._attributes: list[State] = []

    @property
    def lends(self) -> bool:
        """Whether the parameters' state is another copy's."""
        return self._lent is not None

    @property
    def _states(self) -> list[State]:
        return self._own if self._lent is None else self._lent._states

    @property
    def averages(self) -> bool:
        """Whether the optimizer evaluates an average of the weights (`averaged`)."""
        # D-Adaptation and FTRL keep a z of their own.
        return schedule_free.is_schedule_free(self._optimizer) and any("z" in state for state in self._states)

    @torch.no_grad()
    def take(self, lent: HeldOptimizer | None = None) -> None:
        """Copy the state as it is now.

        Args:
            lent: a copy whose state of the parameters will do; it is referred to as it is whenever it is asked for.
        """
        live = self._optimizer.state
        known = ids_of(self._optimizer)
        self._lent = lent
        self._take(self._live() if lent is None else [])
        self._take_rest({key: live[key] for key in live if id(key) not in known}, self._optimizer.param_groups)
        self._attributes = [kept_as_attributes(each) for each in chained(self._optimizer)]
        self._wait()

    def _live(self) -> list[State]:
        """The state that the optimizer has of each parameter now."""
        return [self._optimizer.state.get(parameter, {}) for parameter in parameters_of(self._optimizer)]

    def _take(self, states: list[State]) -> None:
        self._own = refilled(self._own if len(self._own) == len(states) else [{}] * len(states), states, self._device)

    def _take_rest(self, others: Mapping[Any, Any], groups: Sequence[State]) -> None:
        """What is of no parameter."""
        self._others = {key: _copied(value, self._device) for key, value in others.items()}
        own = ({key: value for key, value in group.items() if key != "params"} for group in groups)
        self._groups = [{key: _copied(value, self._device) for key, value in group.items()} for group in own]

    def _wait(self) -> None:
        """What was copied to the host is there."""
        if self._device is not None:
            host_memory.wait(parameters_of(self._optimizer))

    def release(self) -> None:
        """Hold no state of parameters."""
        self._own, self._others, self._lent = [], {}, None

    def keep(self) -> None:
        """Hold the parameters' state itself from now on; no step has been made since `take`."""
        if self._lent is not None:
            self._lent = None
            self._take(self._live())
            self._wait()

    @torch.no_grad()
    def put_back(self, optimizer: Optimizer) -> None:
        """Give the state to an optimizer of the same groups, in the memory that its own state has.

        Tensors of the state stay the same objects, so that captured graphs and references see the values put back. Of
        the parameter groups only what the optimizer keeps there as state is written.
        """
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for (parameter, group), held in zip(_with_groups(optimizer), self._states, strict=True):
            if not held:
                optimizer.state.pop(parameter, None)
                continue
            live = optimizer.state[parameter]
            for key in [key for key in live if key not in held]:
                del live[key]
            for key, value in held.items():
                if _fits(live.get(key), value):
                    targets.append(tensors.local(live[key]))
                    sources.append(tensors.local(value))
                else:
                    live[key] = _beside(parameter, group, key, value)
        tensors.copy_(targets, sources)
        known = ids_of(optimizer)
        for other in [key for key in optimizer.state if id(key) not in known and key not in self._others]:
            del optimizer.state[other]
        optimizer.state.update({key: _copied(value, None) for key, value in self._others.items()})  # type: ignore[misc]
        for each, numbers in zip(chained(optimizer), self._attributes, strict=False):  # none of a state that was loaded
            vars(each).update(numbers)
        for index, key in kept_in_groups(optimizer):
            if key in self._groups[index]:
                _write(optimizer.param_groups[index], key, self._groups[index][key])
            elif key == "step":  # made by one since; what else is new there is the user's
                del optimizer.param_groups[index][key]

    def averaged(self, parameters: Sequence[nn.Parameter], y: Sequence[Tensor], *, now: bool = False) -> list[Tensor]:
        """The average that a Schedule-Free optimizer evaluates, of the time of the held state; y of any other.

        Args:
            parameters: some of the optimizer's.
            y: their values at that time.
            now: where the average would be now, had z stood still since.
        """
        if not self.averages:
            return list(y)
        states = iter(self._states)
        zs: dict[int, tuple[Tensor, State, State]] = {}
        for then, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            for parameter, state in zip(group["params"], states, strict=False):
                if "z" in state:
                    zs[id(parameter)] = tensors.local(state["z"]), then, group

        def of(parameter: nn.Parameter, value: Tensor) -> Tensor:
            if id(parameter) not in zs:
                return value
            z, then, group = zs[id(parameter)]
            kept = then["weight_sum"] / group["weight_sum"] if now and group["weight_sum"] else 1.0
            return schedule_free.average(self._optimizer, then, value, z, kept)

        return [of(*pair) for pair in zip(parameters, y, strict=True)]

    def state_dict(self, *, live: bool = False) -> dict[str, Any]:
        """The state as the optimizer's `state_dict` would have given it, groups included; held tensors, not copies.

        Args:
            live: with the parameters' state that the optimizer itself has.
        """
        with self._substituted(live):
            return unwrapped(self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what an optimizer's `state_dict` gave."""
        packed, self._lent, self._attributes = state["state"], None, []
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        self._take([packed.get(number, {}) for number in numbers])
        self._take_rest({key: packed[key] for key in packed if key not in set(numbers)}, state["param_groups"])
        self._wait()

    @contextmanager
    def _substituted(self, live: bool) -> Iterator[None]:
        """The held state in place of the optimizer's own inside the block; nothing is copied."""
        state, groups = self._optimizer.state, self._optimizer.param_groups
        states_before, groups_before = dict(state), [dict(group) for group in groups]
        held: dict[Tensor, Any] = {
            parameter: own for parameter, own in zip(parameters_of(self._optimizer), self._states, strict=True) if own
        }
        try:
            if not live:
                state.clear()
                state.update(held)
            state.update(self._others)  # type: ignore[arg-type]
            for group, own in zip(groups, self._groups, strict=True):
                group.update(own)
            yield
        finally:
            state.clear()
            state.update(states_before)
            for group, before in zip(groups, groups_before, strict=True):
                group.clear()
                group.update(before)


@torch.no_grad()
def refilled(before: Sequence[Mapping[Any, Any]], live: Sequence[Mapping[Any, Any]], device: str | None) -> list[Any]:
    """Copies of what lives, in the memory of those taken before wherever a tensor fits; `wait` before they are read."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    found: list[dict[Any, Any]] = []
    for held, entries in zip(before, live, strict=True):
        found.append({})
        for key, value in entries.items():
            if _fits(held.get(key), value) and held[key].dtype == value.dtype:
                found[-1][key] = held[key]
                targets.append(tensors.local(held[key]))
                sources.append(tensors.local(value))
            else:
                found[-1][key] = _copied(value, device)
    host_memory.copy_(targets, sources)
    return found


def unwrapped(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's `state_dict`, each parameter's state as it is: bitsandbytes wraps its own, and loads both."""
    found = optimizer.state_dict()
    wrapped = {number for number, own in found["state"].items() if isinstance(own, Mapping) and WRAPPED in own}
    if not wrapped:
        return found
    numbers = [number for group in found["param_groups"] for number in group["params"]]
    pairs = zip(numbers, parameters_of(optimizer), strict=True)
    return {**found, "state": {**found["state"], **{n: dict(optimizer.state[p]) for n, p in pairs if n in wrapped}}}


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """`optimizer.load_state_dict`, in the memory of the state it has: tensors that fit stay the same objects."""
    states = [dict(optimizer.state.get(parameter, {})) for parameter in parameters_of(optimizer)]
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(copy.deepcopy(state))
    for parameter, before in zip(parameters_of(optimizer), states, strict=True):
        own = optimizer.state.get(parameter, {})
        own.update({key: tensors.at_home(value, parameter) for key, value in own.items() if isinstance(value, Tensor)})
        if before:
            _keep(optimizer.state[parameter], before)
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        _keep(group, before)


@torch.no_grad()
def _keep(loaded: State, before: State) -> None:
    """Put the tensors of before in place of the loaded ones, with these one's values."""
    for key, value in loaded.items():
        if _fits(before.get(key), value) and before[key].dtype == value.dtype:
            tensors.local(before[key]).copy_(tensors.local(value))
            loaded[key] = before[key]


def _write(entries: State, key: str, value: Any) -> None:
    if _fits(entries.get(key), value):
        entries[key].copy_(value)
    else:
        entries[key] = _copied(value, None)


def _fits(held: Any, value: Any) -> bool:
    """Whether a tensor's values can be copied into the memory of another."""
    return isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape


def _beside(parameter: nn.Parameter, group: State, key: str, value: Any) -> Any:
    """A copy where torch keeps such a state."""
    return _copied(value, home_of(parameter, group, key))


def home_of(parameter: nn.Parameter, group: State, key: str) -> torch.device:
    """Where torch keeps an entry of a state: beside its parameter, and a step count on the host unless it is fused."""
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.device("cpu") if on_host else parameter.device


def _copied(value: Any, device: torch.device | str | None) -> Any:
    """A copy of nested state; tensors go to `device`."""

    def copied(one: Any) -> Any:
        return host_memory.copied(one.detach(), device) if isinstance(one, Tensor) else copy.deepcopy(one)

    return mapped(value, copied)


def _with_groups(optimizer: Optimizer) -> list[tuple[nn.Parameter, State]]:
    return [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
