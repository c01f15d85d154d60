"""Sketches of gradients: what an optimizer moves, laid out as one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.evidence.parts.sketch import Sketch
from hdet.hparams.param_groups import parameters_of
from hdet.replicas import tensors
from hdet.replicas.anchor import refuse_gone

TOGETHER = 2**16
"""Elements up to which small tensors are joined before they are folded."""

SMALL = 2**20
"""Elements up to which gradients of all groups are folded together."""

Rate = float | Tensor


@dataclass(frozen=True)
class _Run:
    """Consecutive parameters of one group, small ones together or a large one alone."""

    first: int
    stop: int
    position: int
    group: int


class GradientSketch:
    """Folds gradients of the parameters that an optimizer moves, at each group's rate.

    The vector's order is that of the optimizer's groups, which is the same for all copies of a model and on all ranks.

    Args:
        hosts: copies of one model with their optimizers.
        size: most numbers that a sketch keeps.

    Attributes:
        sketch: the linear map.
        flags: by parameter that the optimizer holds whether it is trained.

    Raises:
        ConfigError: a parameter is complex.
    """

    def __init__(self, hosts: Sequence[tuple[nn.Module, Optimizer]], size: int) -> None:
        self._hosts = hosts
        moved = [_moved(model, optimizer) for model, optimizer in hosts]
        self.parameters = [[parameter for _, parameter in own] for own in moved]
        self._every = [parameters_of(optimizer) for _, optimizer in hosts]
        self.flags = self._trained(0)
        groups = [group for group, _ in moved[0]]
        own = self.parameters[0]
        if any(parameter.is_complex() for parameter in own):
            raise ConfigError(
                "the model has complex parameters, whose gradients Contrast cannot sketch; leave knobs of the forward "
                'pass out, as by exclude=["dropout", "label_smoothing"]'
            )
        counts = [tensors.local(parameter.detach()).numel() for parameter in own]
        positions = [0, *accumulate(counts)]
        self.sketch = Sketch(positions[-1], size, own[0].device if own else torch.device("cpu"))
        self._counts = counts
        self._positions = positions
        self._groups = groups
        self._kinds = [(group, parameter.device) for group, parameter in zip(groups, own, strict=True)]
        self._runs = self._joined()
        ends = [*(run.position for run in self._runs[1:]), positions[-1]]
        self._lengths = [end - run.position for run, end in zip(self._runs, ends, strict=True)]
        # Where the sketch is the vector itself, and another one as large is no matter.
        exact = positions[-1] == self.sketch.size <= SMALL
        self._joins = len(self._runs) > 1 and exact and {parameter.device for parameter in own} == {self.sketch.device}

    @classmethod
    def as_trained(
        cls, hosts: Sequence[tuple[nn.Module, Optimizer]], size: int, flags: Sequence[bool]
    ) -> GradientSketch:
        """That of another time, at which by these flags other parameters were trained; no parameter stays changed."""
        every = [parameters_of(optimizer) for _, optimizer in hosts]
        before = [[parameter.requires_grad for parameter in own] for own in every]
        try:
            for own in every:
                _freeze(own, flags)
            return cls(hosts, size)
        finally:
            for own, now in zip(every, before, strict=True):
                _freeze(own, now)

    def _joined(self) -> list[_Run]:
        runs: list[_Run] = []
        first = 0
        for number in range(1, len(self._counts) + 1):
            ended = number == len(self._counts) or self._kinds[number] != self._kinds[first]
            if ended or self._positions[number + 1] - self._positions[first] > TOGETHER:
                runs.append(_Run(first, number, self._positions[first], self._groups[first]))
                first = number
        return runs

    def is_outdated(self) -> bool:
        """Whether other parameters are trained than when this was made."""
        return any(self._trained(host) != self.flags for host in range(len(self._hosts)))

    def _trained(self, host: int) -> list[bool]:
        return [parameter.requires_grad for parameter in self._every[host]]

    def rates(self, host: int) -> list[Rate]:
        """Each group's learning rate; a rate that is a tensor stays where it is."""
        return [group["lr"] for group in self._hosts[host][1].param_groups]

    def gradients(self, host: int) -> list[Tensor | None]:
        """What the parameters of a host hold now."""
        return [parameter.grad for parameter in self.parameters[host]]

    @torch.no_grad()  # gradients may have a graph of their own
    def folded(self, gradients: Sequence[Tensor | None], rates: Sequence[Rate] | None = None) -> Tensor:
        """[sketch.size] The sketch of gradients times their rates, one for each of `parameters`; `None` is zero."""
        of_runs = [1.0 if rates is None else rates[run.group] for run in self._runs]
        if (whole := self._at_once(gradients, of_runs)) is not None:
            return whole
        target = self.sketch.zeros()
        for run, rate in zip(self._runs, of_runs, strict=True):
            self._fold(target, run, gradients[run.first : run.stop], rate)
        return target

    def _at_once(self, gradients: Sequence[Tensor | None], rates: Sequence[Rate]) -> Tensor | None:
        """`folded` in a few calls for all groups, the same numbers; None where they would not be.

        Args:
            rates: of each run.
        """
        numbers = [rate for rate in rates if not isinstance(rate, Tensor) and rate != 0.0]
        if not self._joins or len(numbers) < len(rates):
            return None
        present = [own for own in gradients if type(own) is Tensor and own.dtype == torch.float32]
        if len(present) < len(gradients) or any(own.layout != torch.strided for own in present):
            return None
        whole: Tensor = _flatten_dense_tensors(present)
        self._refuse_grown(whole, present, 0)
        torch._foreach_mul_(whole.split(self._lengths), numbers)
        return whole

    def folded_trained(self, value: Callable[[int, slice | None], Tensor]) -> Tensor:
        """[sketch.size] The sketch of values, each given when it is needed.

        Args:
            value: from a place among `tensors.trained`; of some elements, as of a vector, or of all.
        """
        target = self.sketch.zeros()
        numbers = {id(parameter): number for number, parameter in enumerate(tensors.trained(self._hosts[0][0]))}
        places = [numbers.get(id(parameter)) for parameter in self.parameters[0]]  # None: frozen since
        for run in self._runs:
            own, count = places[run.first : run.stop], self._counts[run.first]
            if len(own) > 1 or count <= tensors.STRETCH:
                self._fold(target, run, [None if place is None else value(place, None) for place in own], 1.0)
                continue
            if (place := own[0]) is None:
                continue
            for first in range(0, count, tensors.STRETCH):
                part = value(place, slice(first, min(first + tensors.STRETCH, count)))
                self._add(target, part, run.position + first, 1.0)
        return target

    def _fold(self, target: Tensor, run: _Run, gradients: Sequence[Tensor | None], rate: Rate) -> None:
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return
        if len(present) < len(gradients):
            own = self.parameters[0][run.first : run.stop]
            pairs = zip(gradients, own, strict=True)
            present = [torch.zeros_like(p) if gradient is None else gradient for gradient, p in pairs]
        flat = _flat(present)
        self._refuse_grown(flat, present, run.first)
        self._add(target, flat, run.position, rate)

    @torch.no_grad()
    def fold_(self, target: Tensor, numbers: Sequence[int], gradients: Sequence[Tensor], rates: Sequence[Rate]) -> None:
        """Add the sketch of some parameters' gradients, in any order; `numbers` are their places in `parameters`."""
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        first = 0
        for place in range(1, len(order) + 1):
            number = numbers[order[place - 1]]
            follows = place < len(order) and numbers[order[place]] == number + 1
            if not follows or self._kinds[number + 1] != self._kinds[number]:
                joined = [gradients[i] for i in order[first:place]]
                begun = numbers[order[first]]
                flat = _flat(joined)
                self._refuse_grown(flat, joined, begun)
                self._add(target, flat, self._positions[begun], rates[self._groups[number]])
                first = place

    def _refuse_grown(self, flat: Tensor, gradients: Sequence[Tensor], first: int) -> None:
        """Go on with a vector of consecutive parameters' gradients, from the number `first` on.

        Raises:
            StepError: some are longer or shorter than their parameters were.
        """
        stop = first + len(gradients)
        if flat.numel() != self._positions[stop] - self._positions[first]:
            pairs = zip(gradients, self._counts[first:stop], strict=True)
            refuse_gone([gradient for gradient, count in pairs if tensors.local(gradient).numel() != count])

    def _add(self, target: Tensor, flat: Tensor, position: int, rate: Rate) -> None:
        if isinstance(rate, Tensor):
            self.sketch.add_(target, tensors.wide(flat) * rate, position)  # in float16 the product would vanish
        elif rate != 0.0:
            self.sketch.add_(target, flat, position, rate)


def _freeze(parameters: Sequence[nn.Parameter], flags: Sequence[bool]) -> None:
    for parameter, trained in zip(parameters, flags, strict=True):
        parameter.requires_grad_(trained)


def _moved(model: nn.Module, optimizer: Optimizer) -> list[tuple[int, nn.Parameter]]:
    """The trained parameters that the optimizer holds, each with its group's number."""
    trained = {id(parameter) for parameter in tensors.trained(model)}
    groups = enumerate(optimizer.param_groups)
    return [
        (number, parameter) for number, group in groups for parameter in group["params"] if id(parameter) in trained
    ]


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    """One vector; of sharded gradients this rank's parts."""
    own = [tensors.local(gradient.detach()) if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    dense = [gradient if gradient.layout == torch.strided else gradient.to_dense() for gradient in own]
    return dense[0].detach().reshape(-1) if len(dense) == 1 else _flatten_dense_tensors(dense)
