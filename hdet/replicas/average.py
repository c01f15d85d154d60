"""Weights averaged over a window: judged by these, a step's progress counts and its noise does not.

Memory: 4 bytes a parameter that training can change (8 in float64) for each model and stride that evidence asks for; of
sharded ones a rank holds its part. On the host that is host memory, and the device holds a piece at a time while a
window is judged; the weights take as much host memory again on their way there. Time: a pass over the weights every
stride-th step; to the host a copy, for which the accelerator's next step waits. The host goes on, and adds what has
come to the mean when the next is to be taken: so it is ahead of the accelerator by a stride at most.

Without a stride given, every max(1, W // 128)-th step of a window of W is taken. In windows of 1,000 steps t then
differs by less than 0.1 (`benchmarks/stride.py`), and a long window costs no more than a short one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from hdet.replicas import tensors
from hdet.replicas.host_memory import OnTheirWay, Then
from hdet.replicas.moving import Moving

ENOUGH = 128
"""Points of a window that a mean without a stride of its own takes at least."""


class RunningMean:
    """The mean of tensors over the steps at which `add` is called, one copy of their size in memory.

    mean_k = mean_{k-1} + (theta_k - mean_{k-1}) / k, held in float32 at least.

    Args:
        current: gives the tensors to follow, detached, as they are now; an optimizer may put new memory in their
            place. As long as it gives the same list, nothing is looked up anew.
        stride: take every stride-th call only; the others cost nothing. It may be set anew before a mean begins.
        device: where the mean lies; `None` beside the tensors, "cpu" to spare device memory.
    """

    def __init__(
        self, current: Callable[[], list[Tensor]], stride: int = 1, device: torch.device | str | None = None
    ) -> None:
        self._current = current
        self.stride = stride
        self.device = device
        self._calls = 0
        self._before = 0
        self.count = 0
        self.values: list[Tensor] = []
        self._layout: list[tuple[object, ...]] = []
        self._joined: list[tuple[Tensor, list[int]]] = []  # a mean in one piece, and whose it is
        self._alone: list[int] = []
        self._alike: tuple[list[Tensor], list[Tensor]] = ([], [])  # means and theirs that one operator can take
        self._unlike: list[tuple[Tensor, Tensor]] = []
        self._followed: list[Tensor] = []
        self._flat: list[list[Tensor]] = []
        self._on_their_way = OnTheirWay()

    def reset(self) -> None:
        """Begin a new mean; this one is what it was before."""
        self._on_their_way.land()
        self._calls, self._before = 0, self.count
        self.count = 0

    def forget(self) -> None:
        """There is no mean, and was none before."""
        self._on_their_way.land()
        self._calls = self._before = self.count = 0

    def add(self) -> None:
        """Take the tensors as they are now into the mean."""
        self._calls += 1
        if self._calls % self.stride:
            return
        self.count += 1
        self._follow(self._current())
        weight = 1.0 / self.count
        travellers: list[tuple[Tensor, Then]] = []
        for (mean, _), own in zip(self._joined, self._flat, strict=True):
            _take(mean, torch.cat(own), weight, travellers)
        if self._alike[0]:
            if weight == 1.0:
                torch._foreach_copy_(*self._alike)
            else:
                torch._foreach_lerp_(*self._alike, weight)
        for mean, alone in self._unlike:
            _take(mean, alone, weight, travellers)
        if travellers:
            self._on_their_way.send(travellers)

    def _follow(self, current: list[Tensor]) -> None:
        """Have memory for the mean of such tensors, and know where they lie."""
        if current is self._followed:
            return
        self._on_their_way.land()
        layout: list[tuple[object, ...]] = [(t.shape, t.dtype, t.device, t.is_contiguous()) for t in current]
        if layout != self._layout:
            self._layout, before = layout, self.values
            self._allocate(current)
            if [one.shape for one in before] == [one.shape for one in current]:  # they lie in another way only
                tensors.copy_(self.values, before)
        self._followed = current
        pairs = [(self.values[number], current[number]) for number in self._alone]
        alike = [mean.device == own.device and mean.dtype == own.dtype for mean, own in pairs]
        self._alike = ([mean for mean, _ in compress(pairs, alike)], [own for _, own in compress(pairs, alike)])
        self._unlike = [pair for pair, joint in zip(pairs, alike, strict=True) if not joint]
        self._flat = [[current[number].view(-1) for number in numbers] for _, numbers in self._joined]

    def _allocate(self, current: Sequence[Tensor]) -> None:
        together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        self._alone = []
        for number, tensor in enumerate(current):
            if tensor.numel() <= tensors.SMALL and tensor.is_contiguous():
                together.setdefault((tensor.dtype, tensor.device), []).append(number)
            else:
                self._alone.append(number)
        held: dict[int, Tensor] = {
            number: torch.zeros_like(
                current[number], dtype=tensors.wide_type(current[number].dtype), device=self.device
            )
            for number in self._alone
        }
        self._joined = []
        for (dtype, device), numbers in together.items():
            counts = [current[number].numel() for number in numbers]
            mean = torch.zeros(sum(counts), dtype=tensors.wide_type(dtype), device=self.device or device)
            self._joined.append((mean, numbers))
            for number, piece in zip(numbers, torch.split(mean, counts), strict=True):
                held[number] = piece.view(current[number].shape)
        self.values = [held[number] for number in range(len(current))]

    def mean(self, *, before: bool = False) -> list[Tensor]:
        """The mean so far, where it lies; the current tensors themselves where nothing was added.

        Args:
            before: where nothing was added since `reset`, what had been the mean until then.
        """
        self._on_their_way.land()
        return self.values if self.count or (before and self._before) else self._current()

    def state_dict(self) -> dict[str, object]:
        self._on_their_way.land()
        values = tensors.clones(self.values) if self.count else []
        return {"calls": self._calls, "count": self.count, "values": values}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._on_their_way.land()
        self._calls = int(state["calls"])  # type: ignore[call-overload]
        self.count = int(state["count"])  # type: ignore[call-overload]
        values = state["values"]
        assert isinstance(values, list)
        if values:
            self._follow(self._current())
            tensors.copy_(self.values, values)


def _take(mean: Tensor, own: Tensor, weight: float, travellers: list[tuple[Tensor, Then]]) -> None:
    """Move a mean towards a tensor: at once where they lie together, else when it has come to the host."""
    if own.device == mean.device or mean.device.type != "cpu":
        towards_(mean, own, weight)
    else:
        travellers.append((own, partial(towards_, mean, weight=weight)))


def towards_(mean: Tensor, own: Tensor, weight: float) -> None:
    """mean + weight (own - mean) in the mean's memory, wherever the other lies."""
    if weight == 1.0:
        mean.copy_(own)
    else:
        # Moved before it is widened: half precision is half the traffic.
        mean.lerp_(own.to(mean.device).to(mean.dtype), weight)


class Averages:
    """The running means that evidence asked for, one for each model and stride, however many ask.

    Args:
        moving: the parameters that are followed.
        device: where the means lie; `None` beside the models, "cpu" to spare device memory.

    Attributes:
        means: by host and stride; the stride is `None` where the window's length decides.
    """

    def __init__(self, moving: Moving, device: torch.device | str | None = None) -> None:
        self._moving = moving
        self.device = device
        self.means: dict[tuple[int, int | None], RunningMean] = {}

    def follow(self, host: int, stride: int | None) -> RunningMean:
        """The mean of a host's parameters over the window under way."""
        if (host, stride) not in self.means:
            current = partial(self._moving.values, host)
            self.means[host, stride] = RunningMean(current, stride or 1, self.device)
        return self.means[host, stride]

    @property
    def strides(self) -> list[int | None]:
        """Of the means of one model, that which takes the most steps first."""
        return sorted((stride for host, stride in self.means if host == 0), key=lambda own: self.means[0, own].stride)

    def reset(self, steps: int) -> None:
        """A window of so many steps opens."""
        for (_, stride), mean in self.means.items():
            mean.reset()
            mean.stride = stride or max(1, steps // ENOUGH)

    def forget(self) -> None:
        """The run goes on from another point: its averages are of where it no longer is."""
        for mean in self.means.values():
            mean.forget()

    def add(self) -> None:
        """A step was made. What a Schedule-Free optimizer evaluates is an average already, and takes no second."""
        if not self._moving.evaluates_average:
            for mean in self.means.values():
                mean.add()

    def state_dict(self) -> dict[str, Any]:
        """Every mean by `host/stride`, or `host/auto`."""
        return {f"{host}/{stride or 'auto'}": mean.state_dict() for (host, stride), mean in self.means.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what is still followed."""
        for (host, stride), mean in self.means.items():
            saved = state.get(f"{host}/{stride or 'auto'}", state.get(f"{host}/{mean.stride}"))
            if saved is not None:
                mean.load_state_dict(saved)
