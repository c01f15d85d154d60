"""Weights averaged over a window: judged by these, a step's progress counts and its noise does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas import tensors


class RunningMean:
    """The mean of tensors over the steps at which `add` is called, one copy of their size in memory.

    mean_k = mean_{k-1} + (theta_k - mean_{k-1}) / k, held in float32 at least.

    Args:
        current: gives the tensors to follow, as they are now; an optimizer may put new memory in their place.
        stride: take every stride-th call only; the others cost nothing.
    """

    def __init__(self, current: Callable[[], Sequence[Tensor]], stride: int = 1) -> None:
        self._current = current
        self._stride = stride
        self._calls = 0
        self.count = 0
        self.values: list[Tensor] = []

    def reset(self) -> None:
        """Forget what was added."""
        self._calls = 0
        self.count = 0

    @torch.no_grad()
    def add(self) -> None:
        """Take the tensors as they are now into the mean."""
        self._calls += 1
        if self._calls % self._stride:
            return
        self.count += 1
        current = list(self._current())
        if not self.values:
            self.values = [torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in current]
        if self.count == 1:
            tensors.copy_(self.values, current)
        else:
            wide = [t if t.dtype == v.dtype else t.to(v.dtype) for t, v in zip(current, self.values, strict=True)]
            torch._foreach_lerp_(self.values, wide, 1.0 / self.count)

    def mean(self) -> list[Tensor]:
        """The mean so far; the current tensors where nothing was added."""
        return self.values if self.count else list(self._current())

    def state_dict(self) -> dict[str, object]:
        values = tensors.clones(self.values) if self.count else []
        return {"calls": self._calls, "count": self.count, "values": values}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._calls = int(state["calls"])  # type: ignore[call-overload]
        self.count = int(state["count"])  # type: ignore[call-overload]
        values = state["values"]
        assert isinstance(values, list)
        self.values = [value.to(t.device, copy=True) for value, t in zip(values, self._current(), strict=False)]


class Averages:
    """The running means that evidence asked for, one for each model and stride, however many ask."""

    def __init__(self, hosts: Sequence[tuple[nn.Module, Optimizer]]) -> None:
        self._hosts = hosts
        self._means: dict[tuple[int, int], RunningMean] = {}

    def follow(self, host: int, stride: int) -> RunningMean:
        """The mean of a host's parameters over the window under way."""
        if (host, stride) not in self._means:
            self._means[host, stride] = RunningMean(partial(tensors.parameters, self._hosts[host][0]), stride)
        return self._means[host, stride]

    def reset(self) -> None:
        """A window opens."""
        for mean in self._means.values():
            mean.reset()

    def add(self) -> None:
        """A step was made."""
        for mean in self._means.values():
            mean.add()

    def state_dict(self) -> dict[str, Any]:
        """Every mean by `host/stride`."""
        return {f"{host}/{stride}": mean.state_dict() for (host, stride), mean in self._means.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what is still followed."""
        for (host, stride), mean in self._means.items():
            saved = state.get(f"{host}/{stride}")
            if saved is not None:
                mean.load_state_dict(saved)
