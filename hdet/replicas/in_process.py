"""Replicas in one process: N copies of a model, or one model shared by N micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import compress
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.hparams.param_groups import parameters_of
from hdet.replicas import copies, optimizer_states, tensors, weighting
from hdet.replicas.deep_copies import memo_of_sparse
from hdet.replicas.dense import can_be_written, resized
from hdet.replicas.held_optimizer import HeldOptimizer
from hdet.replicas.parallel import require_alone, require_whole
from hdet.replicas.replica import Replica
from hdet.replicas.replicas import Replicas
from hdet.replicas.shared_buffers import require_same
from hdet.replicas.shared_parameters import SharedParameters
from hdet.replicas.walk import Walk

MOST_HERE = 2**16
"""Replicas of one process, each of them an object, at the most; a number beyond that is a mistake."""


class InProcess(Replicas):
    """All replicas are in this process."""

    def gather(self, rows: Tensor) -> NDArray[np.float64]:
        return rows.detach().cpu().double().numpy()


class Copies(InProcess):
    """N copies of a model with their optimizers, side by side in this process."""

    diverge = True

    def __init__(self, hosts: Sequence[tuple[nn.Module, Optimizer]]) -> None:
        self.hosts = list(hosts)
        self.size = len(self.hosts)
        self._shared = SharedParameters([model for model, _ in self.hosts])
        self.shares_on_call = self.size > 1
        self.local = [Replica(model, optimizer, i, i) for i, (model, optimizer) in enumerate(self.hosts)]

    @torch.no_grad()
    def share_gradients(self) -> None:
        if self.size == 1:
            return
        _, owned = self._shared.trained()
        # A parameter unused in some replica's forward has no gradient there: it counts as zero, as in DDP.
        used = [i for i in range(len(owned[0])) if any(own[i].grad is not None for own in owned)]
        gradients = [[tensors.gradient(own[i]) for i in used] for own in owned]
        tensors.mean_(gradients, gradients)

    def mean(self, valid: Sequence[bool], optimizer_state: str, weights: NDArray[np.float64] | None = None) -> None:
        shares = weighting.shares(valid, weights)
        failed = [host for host, ok in zip(self.hosts, valid, strict=True) if not ok]
        source_optimizer = self.hosts[list(valid).index(True)][1]
        rest: list[Any] = [tensors.parameters(model) for model, _ in self.hosts]
        if weights is not None and weights.ndim == 2:
            moving = [tensors.moving(*host) for host in self.hosts]
            for part, own in weighting.runs(weights):
                _mean([parameters[part] for parameters in moving], own)
            rest = [tensors.frozen(*host, Walk(host[0])) for host in self.hosts]
        every = _can_be_written(rest)
        self._merge(every, [tensors.is_inexact(own) for own in every[0]], shares)
        self._mean_buffers(shares)
        if failed:
            held = HeldOptimizer(source_optimizer)
            held.take()
            for _, optimizer in failed:
                held.put_back(optimizer)
        if optimizer_state == "average":
            optimizers = [optimizer for _, optimizer in self.hosts]
            optimizer_states.average(list(compress(optimizers, shares)), optimizers, [s for s in shares if s])
        elif optimizer_state == "reset":
            for _, optimizer in self.hosts:
                optimizer.state.clear()

    @torch.no_grad()
    def copy(self, sources: Sequence[int]) -> None:
        for target, source in copies.ordered(sources):
            transplant(self.hosts[source], self.hosts[target])

    def mean_buffers(self, valid: Sequence[bool]) -> None:
        self._mean_buffers(weighting.shares(valid, None))

    def _mean_buffers(self, shares: Sequence[float]) -> None:
        require_same([model for model, _ in self.hosts])
        sound = [tensors.with_mean(model) for (model, _), share in zip(self.hosts, shares, strict=True) if share]
        averaged = [all(flags) for flags in zip(*sound, strict=True)]
        members = [list(model.buffers()) for model, _ in self.hosts]
        # A cache that grows with each replica's data is each one's own, and so is what cannot be written over.
        fits = [
            len({(one.shape, one.dtype) for one in each}) == 1 and all(map(can_be_written, each))
            for each in zip(*members, strict=True)
        ]
        self._merge([list(compress(own, fits)) for own in members], list(compress(averaged, fits)), shares)

    @staticmethod
    def _merge(members: Sequence[Sequence[Tensor]], averaged: Sequence[bool], shares: Sequence[float]) -> None:
        """Overwrite all members by the mean of those that have a share; what has no mean by the first of them."""
        _mean([list(compress(own, averaged)) for own in members], shares)
        others = [list(compress(own, [not yes for yes in averaged])) for own in members]
        source = next(own for own, share in zip(others, shares, strict=True) if share)
        for own in others:
            if own is not source:
                tensors.copy_(own, source)

    @torch.no_grad()
    def combine(self, weights: NDArray[np.float64], which: Sequence[bool] | None = None) -> list[Tensor]:
        total: list[Tensor] = []
        for (model, _), weight in zip(self.hosts, weights.tolist(), strict=True):
            if weight == 0.0:
                continue
            part = torch._foreach_mul([tensors.wide(t) for t in tensors.parameters(model, which)], weight)
            total = list(torch._foreach_add(total, part)) if total else list(part)
        return total


class Seats(InProcess):
    """One model and optimizer; the replicas are the micro-batches whose gradients it accumulates."""

    diverge = False

    def __init__(self, model: nn.Module, optimizer: Optimizer, n: int) -> None:
        self.hosts = [(model, optimizer)]
        self._shared = SharedParameters([model])
        self.size = n
        self.shares_on_call = n > 1
        self.local = [Replica(model, optimizer, i, 0) for i in range(n)]

    def leave_to_loop(self) -> None:
        super().leave_to_loop()
        self.shares_on_call = False

    @torch.no_grad()
    def share_gradients(self) -> None:
        if self.left_to_loop or self.size == 1:
            return
        _, (own,) = self._shared.trained()
        gradients = [gradient for gradient in (parameter.grad for parameter in own) if gradient is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.size)

    def mean(self, valid: Sequence[bool], optimizer_state: str, weights: NDArray[np.float64] | None = None) -> None:
        """Nothing: seats share one model."""

    def copy(self, sources: Sequence[int]) -> None:
        """Nothing: seats share one model."""

    def mean_buffers(self, valid: Sequence[bool]) -> None:
        """Nothing: seats share one model."""

    def combine(self, weights: NDArray[np.float64], which: Sequence[bool] | None = None) -> list[Tensor]:
        return tensors.parameters(self.hosts[0][0], which)


def replicate(model: nn.Module, optimizer: Optimizer, n: int) -> Copies:
    """N replicas in this process: the given model and optimizer, and n - 1 deep copies of them.

    Replica 0 *is* the given pair, so the given model holds the merged result when training ends. Memory and
    compute are n times one model's.

    Raises:
        ConfigError: `n < 1`, the optimizer holds a parameter that is not the model's, or other ranks train the model
            too (DistributedDataParallel, `fully_shard`, tensor parallelism): `hdet.distribute` is for these.

    >>> import torch, hdet
    >>> model = torch.nn.Linear(2, 1)
    >>> replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=4)
    >>> replicas.size, replicas.local[0].model is model
    (4, True)
    """
    check_pair(model, optimizer, n)
    require_alone(model, "hdet.replicate")
    return Copies([(model, optimizer), *(twin(model, optimizer) for _ in range(n - 1))])


def micro_batches(model: nn.Module, optimizer: Optimizer, n: int) -> Seats:
    """One model whose n accumulated micro-batches each run at knob values of their own. No copies are made.

    For evidence that does not need replicas to diverge. Call `backward()` on each micro-batch's mean loss
    undivided; `engine.share_gradients()` turns the sum of gradients into their mean.

    Raises:
        ConfigError: `n < 1`, the optimizer holds a parameter that is not the model's, or other ranks train the model
            too (DistributedDataParallel, `fully_shard`, tensor parallelism): `hdet.distribute` is for these.
    """
    check_pair(model, optimizer, n)
    require_alone(model, "hdet.micro_batches")
    return Seats(model, optimizer, n)


def transplant(source: tuple[nn.Module, Optimizer], target: tuple[nn.Module, Optimizer]) -> None:
    """Overwrite one model and its optimizer's state by another's; settings in parameter groups stay."""
    models = (target[0], source[0])
    require_same(models)
    tensors.copy_(*_can_be_written([tensors.parameters(model) for model in models]))
    buffers = _can_be_written([[tensors.local(buffer) for buffer in model.buffers()] for model in models])
    tensors.copy_([resized(old, new.shape) for old, new in zip(*buffers, strict=True)], buffers[1])
    held = HeldOptimizer(source[1])
    held.take()
    held.put_back(target[1])


def _can_be_written(members: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Of each member's tensors those that can be written over in all: others, as sparse ones, nothing trains."""
    both = [all(map(can_be_written, each)) for each in zip(*members, strict=True)]
    return [list(compress(own, both)) for own in members]


def _mean(members: Sequence[Sequence[Tensor]], shares: Sequence[float]) -> None:
    """Overwrite all members by the mean of those that have a share."""
    tensors.mean_(list(compress(members, shares)), members, [share for share in shares if share])


def check_pair(model: nn.Module, optimizer: Optimizer, n: int) -> None:
    if not isinstance(n, Integral) or isinstance(n, bool):
        raise ConfigError(f"n, the number of replicas, is a whole number, got {n!r}")
    if n < 1:
        raise ConfigError(f"n must be at least 1, got {n}")
    if n > MOST_HERE:
        raise ConfigError(f"one process holds {MOST_HERE} replicas, or micro-batches of a step, at most, got {n}")
    require_whole(optimizer)
    tensors.reshard(model)  # a look at the model before it trains leaves it gathered
    own = set(model.parameters())
    foreign = [parameter for parameter in parameters_of(optimizer) if parameter not in own]
    if foreign:
        raise ConfigError(
            f"the optimizer holds {len(foreign)} parameters that are not the model's (shapes "
            f"{[tuple(p.shape) for p in foreign[:3]]}); make the optimizer from this model's parameters, or, where it "
            f"trains a loss or a second model too, give one module that holds both, as nn.ModuleList([model, loss])"
        )


def twin(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """A deep copy of both; one memo keeps the copied optimizer on the copied parameters.

    Raises:
        ConfigError: the model holds what has no copy.
    """
    plain = (value for module in model.modules() for value in vars(module).values())
    memo = memo_of_sparse([*model.parameters(), *model.buffers(), *plain])
    try:
        copied, other = copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
    except RuntimeError as error:
        raise ConfigError(
            f"the model cannot be copied ({error}); what torch.nn.utils.weight_norm and spectral_norm compute is such, "
            f"once the model was called: take those of torch.nn.utils.parametrizations"
        ) from error
    # Torch copies an optimizer's groups and state only. Some keep more (Prodigy its `d0`); what is callable may be
    # a method wrapped by a scheduler, bound to the original.
    for name, value in vars(optimizer).items():
        if name not in vars(other) and not callable(value):
            setattr(other, name, copy.deepcopy(value, memo))
    return copied, other
