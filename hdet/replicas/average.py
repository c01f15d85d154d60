"""Weights averaged over a window: judged by these, a step's progress counts and its noise does not.

Memory: 4 bytes a parameter (8 in float64) for each model and stride that evidence asks for, frozen parameters included;
of sharded ones a rank holds its part. On the host that is host memory, and the device holds a copy only while a window
is judged. Time: a pass over the weights every stride-th step; to the host a copy, for which the step waits.
"""

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
        device: where the mean lies; `None` beside the tensors, "cpu" to spare device memory.
    """

    def __init__(
        self, current: Callable[[], Sequence[Tensor]], stride: int = 1, device: torch.device | str | None = None
    ) -> None:
        self._current = current
        self._stride = stride
        self.device = device
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
            self.values = [
                torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32), device=self.device)
                for t in current
            ]
        if self.count == 1:
            tensors.copy_(self.values, current)
        else:
            # Moved before they are widened: half precision is half the traffic.
            wide = [t.to(v.device).to(v.dtype) for t, v in zip(current, self.values, strict=True)]
            torch._foreach_lerp_(self.values, wide, 1.0 / self.count)

    def mean(self) -> list[Tensor]:
        """The mean so far, on the device of the current tensors; these themselves where nothing was added."""
        current = list(self._current())
        return [v.to(t.device) for v, t in zip(self.values, current, strict=True)] if self.count else current

    def state_dict(self) -> dict[str, object]:
        values = tensors.clones(self.values) if self.count else []
        return {"calls": self._calls, "count": self.count, "values": values}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._calls = int(state["calls"])  # type: ignore[call-overload]
        self.count = int(state["count"])  # type: ignore[call-overload]
        values = state["values"]
        assert isinstance(values, list)
        self.values = [
            value.to(t.device if self.device is None else self.device, copy=True)
            for value, t in zip(values, self._current(), strict=False)
        ]


class Averages:
    """The running means that evidence asked for, one for each model and stride, however many ask.

    Args:
        hosts: the models and their optimizers.
        device: where the means lie; `None` beside the models, "cpu" to spare device memory.
    """

    def __init__(self, hosts: Sequence[tuple[nn.Module, Optimizer]], device: torch.device | str | None = None) -> None:
        self._hosts = hosts
        self.device = device
        self._means: dict[tuple[int, int], RunningMean] = {}

    def follow(self, host: int, stride: int) -> RunningMean:
        """The mean of a host's parameters over the window under way."""
        if (host, stride) not in self._means:
            current = partial(tensors.parameters, self._hosts[host][0])
            self._means[host, stride] = RunningMean(current, stride, self.device)
        return self._means[host, stride]

    @property
    def finest_stride(self) -> int | None:
        """The smallest stride at which weights are averaged; None where nothing is."""
        return min((stride for _, stride in self._means), default=None)

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
