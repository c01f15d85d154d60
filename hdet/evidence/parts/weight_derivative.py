"""How a parameter group's weights depend on a knob of the optimizer, followed from step to step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hdet.evidence.parts.preconditioner import decoupled, shrinkage, without_waiting
from hdet.hparams.binding import GroupBinding
from hdet.replicas import tensors

LEAST_ROOT = torch.finfo(torch.float32).tiny ** 0.5

Tensors = list[Tensor] | tuple[Tensor, ...]
States = list[dict[str, Any]]


@dataclass(frozen=True)
class Value:
    """A knob's value at a step, and d value / d coordinate there."""

    value: float
    slope: float


class Trace(ABC):
    """The recursion of one knob in one parameter group.

    Attributes:
        parameters: those that are trained.
        direction: D so far.
        followed: the attributes that hold a tensor for each parameter.
        counted: the attribute that holds what else a window under way needs.
    """

    followed: ClassVar[tuple[str, ...]]
    counted: ClassVar[str]

    def __init__(self, binding: GroupBinding, index: int, parameters: Sequence[nn.Parameter]) -> None:
        self.optimizer = binding.optimizer
        self.index = index
        self.parameters = list(parameters)
        self.direction = [torch.zeros_like(p, dtype=tensors.wide_type(p.dtype)).detach() for p in parameters]

    @abstractmethod
    def open(self, first: Value) -> None:
        """A window opens with the knob at `first`: what the optimizer holds does not depend on it yet."""

    @abstractmethod
    def follow(self, now: Value, following: Value) -> None:
        """The optimizer has made a step with the knob at `now`; the next will have it at `following`."""

    def state_dict(self) -> dict[str, Any]:
        own = {id(parameter) for parameter in self.parameters}
        return {
            "places": [n for n, p in enumerate(self.optimizer.param_groups[self.index]["params"]) if id(p) in own],
            **{name: tensors.clones(getattr(self, name)) for name in self.followed},
            self.counted: copy(getattr(self, self.counted)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        every = self.optimizer.param_groups[self.index]["params"]
        self.parameters = [every[place] for place in state["places"]]
        for name in self.followed:
            held = [h.to(p.device, copy=True) for h, p in zip(state[name], self.parameters, strict=bool(state[name]))]
            setattr(self, name, held)
        setattr(self, self.counted, copy(state[self.counted]))

    def _advance(self, stepped: Sequence[int], change: Tensors) -> None:
        """D after a step of some parameters, of whose updates `change` is the derivative."""
        group = self.optimizer.param_groups[self.index]
        direction = [self.direction[number] for number in stepped]
        lr, decay = without_waiting(group["lr"]), without_waiting(group["weight_decay"])
        if decoupled(self.optimizer, group) and (isinstance(decay, Tensor) or decay != 0.0):
            torch._foreach_mul_(direction, 1.0 - shrinkage({**group, "lr": lr, "weight_decay": decay}))
        if isinstance(lr, Tensor):
            torch._foreach_sub_(direction, torch._foreach_mul(change, lr))
        else:
            torch._foreach_add_(direction, change, alpha=-lr)


class RunningTrace(Trace):
    """Of a knob that governs a running value in the optimizer's state.

    Attributes:
        running: the entry of the state.
        ahead: what the next step's derivative of `running` begins with: all of it that the step before decides.
        counts: the optimizer's step count of each parameter.
    """

    running: ClassVar[str]
    followed = ("ahead", "direction")
    counted = "counts"

    def __init__(self, binding: GroupBinding, index: int, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(binding, index, parameters)
        self.ahead = tensors.clones(self.direction)
        self.counts = [0.0] * len(self.parameters)

    @torch.no_grad()
    def open(self, first: Value) -> None:
        for number, parameter in enumerate(self.parameters):
            state = self.optimizer.state.get(parameter, {})
            held = state.get(self.running)
            self.direction[number].zero_()
            if held is None:
                self.ahead[number].zero_()
            else:
                self.ahead[number].copy_(held).mul_(self._carried(first))
            self.counts[number] = float(state.get("step", 0.0))

    @torch.no_grad()
    def follow(self, now: Value, following: Value) -> None:
        stepped = [number for number, p in enumerate(self.parameters) if self._stepped(number, p)]
        if not stepped:
            return
        states = [self.optimizer.state[self.parameters[number]] for number in stepped]
        running = [tensors.wide(state[self.running]) for state in states]
        derivative = [self.ahead[number] for number in stepped]
        if spent := self._spent(now):
            torch._foreach_add_(derivative, running, alpha=-spent)
        self._advance(stepped, self._change(now, derivative, states, [self.counts[number] for number in stepped]))
        torch._foreach_mul_(derivative, following.value)
        torch._foreach_add_(derivative, running, alpha=self._carried(following))

    def _stepped(self, number: int, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has stepped a parameter, its count taken.

        SGD counts none, and one on an accelerator is not read, which would wait for it: both are assumed to have risen
        by one. So a parameter that has no gradient in some steps is read as if it had been stepped in all.
        """
        state = self.optimizer.state.get(parameter, {})
        if state.get(self.running) is None or not parameter.requires_grad:  # frozen since the window opened
            return False
        step = state.get("step")
        before = self.counts[number]
        unread = step is None or (isinstance(step, Tensor) and step.device.type != "cpu")
        self.counts[number] = before + 1.0 if unread else float(step)
        return self.counts[number] != before

    @abstractmethod
    def _carried(self, value: Value) -> float:
        """How often the running value of the step before enters the derivative."""

    def _spent(self, value: Value) -> float:
        """How often this step's running value is taken off the derivative."""
        return 0.0

    @abstractmethod
    def _change(self, now: Value, derivative: list[Tensor], states: States, counts: list[float]) -> Tensors:
        """The derivative of the update, which the learning rate multiplies."""


class MomentumTrace(RunningTrace):
    """SGD: buf_t = mu buf_{t-1} + (1 - dampening) g_t."""

    running = "momentum_buffer"

    def _carried(self, value: Value) -> float:
        return value.slope

    def _change(self, now: Value, derivative: list[Tensor], states: States, counts: list[float]) -> Tensors:
        if not self.optimizer.param_groups[self.index]["nesterov"]:
            return derivative
        change = torch._foreach_mul(derivative, now.value)
        torch._foreach_add_(change, [tensors.wide(state[self.running]) for state in states], alpha=now.slope)
        return change


class MeanTrace(RunningTrace):
    """Adam's m and v: m_t = beta m_{t-1} + (1 - beta) g_t, so that m_{t-1} - g_t = (m_{t-1} - m_t) / (1 - beta)."""

    def _carried(self, value: Value) -> float:
        return value.slope / (1.0 - value.value)

    def _spent(self, value: Value) -> float:
        return self._carried(value)


class FirstTrace(MeanTrace):
    """Adam's beta1, its bias correction included."""

    running = "exp_avg"

    def _change(self, now: Value, derivative: list[Tensor], states: States, counts: list[float]) -> Tensors:
        group = self.optimizer.param_groups[self.index]
        beta1, beta2 = now.value, float(group["betas"][1])
        left = [1.0 - beta1**t for t in counts]
        change = torch._foreach_div(derivative, left)
        correction = [now.slope * t * beta1 ** (t - 1.0) / c**2 for t, c in zip(counts, left, strict=True)]
        torch._foreach_add_(change, torch._foreach_mul([state[self.running] for state in states], correction))
        scale = torch._foreach_sqrt([state["exp_avg_sq"] for state in states])
        torch._foreach_div_(scale, [(1.0 - beta2**t) ** 0.5 for t in counts])
        torch._foreach_add_(scale, group["eps"])
        torch._foreach_div_(change, scale)
        return change


class SecondTrace(MeanTrace):
    """Adam's beta2, its bias correction included."""

    running = "exp_avg_sq"

    def _change(self, now: Value, derivative: list[Tensor], states: States, counts: list[float]) -> Tensors:
        group = self.optimizer.param_groups[self.index]
        beta1, beta2 = float(group["betas"][0]), now.value
        left = [1.0 - beta2**t for t in counts]
        root = torch._foreach_sqrt([state[self.running] for state in states])
        torch._foreach_clamp_min_(root, LEAST_ROOT)  # where there never was a gradient
        # sqrt(vhat)' = (v' / sqrt(v) + sqrt(v) t beta2^(t-1) beta2' / (1 - beta2^t)) / (2 sqrt(1 - beta2^t))
        change = torch._foreach_div(derivative, root)
        correction = [now.slope * t * beta2 ** (t - 1.0) / c for t, c in zip(counts, left, strict=True)]
        torch._foreach_add_(change, torch._foreach_mul(root, correction))
        torch._foreach_div_(root, [c**0.5 for c in left])
        torch._foreach_add_(root, group["eps"])
        torch._foreach_div_(change, root)
        torch._foreach_div_(change, root)
        torch._foreach_mul_(change, [state["exp_avg"] for state in states])
        factors = [-0.5 / (c**0.5 * (1.0 - beta1**t)) for t, c in zip(counts, left, strict=True)]
        torch._foreach_mul_(change, factors)
        return change
