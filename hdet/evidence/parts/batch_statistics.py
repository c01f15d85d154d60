"""Batch statistics of weights that were not trained at, such as a mean of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from hdet.replicas import tensors
from hdet.replicas.batch_norm import keeping
from hdet.signals import Probe

CHANCE = 2.0
"""Standard errors by which a held-out batch's statistics may differ from those of training by chance."""


@dataclass(frozen=True)
class Statistics:
    """By name of a BatchNorm layer its running mean and variance, [channels] each."""

    layers: Mapping[str, tuple[Tensor, Tensor]]

    @torch.no_grad()
    def put(self, model: nn.Module) -> None:
        """Into a model's layers."""
        held = keeping(model)
        for name, values in self.layers.items():
            tensors.copy_(_running(held[name]), values)


def statistics_of(model: nn.Module) -> list[Tensor]:
    """All that the layers that keep some hold."""
    return [value for layer in keeping(model).values() for value in _running(layer)]


class BatchStatistics:
    """The running means and variances that BatchNorm layers would have, had the model been trained at other weights.

    A mean of weights has activations of less variance than the weights had, so that the mean of their statistics is
    not its own. A held-out batch has its own there, but for what it has by chance; and that shows at the last weights,
    whose statistics are known. So (`limited`) a layer's mean is the batch's, plus by how much the kept one lies above
    the batch's at the last weights, and its variance the batch's, times their ratio there. Differences of more than
    `CHANCE` standard errors, of as many values as the batch has examples, count as that: kept statistics lag behind,
    and are of other weights where momentum is small or the last steps went far.
    (Izmailov et al. 2018, arXiv 1803.05407, section 3.2, take a pass over the training data.)

    Args:
        layers: of the model, which holds the last weights and their statistics now.
        passes: the model's forward passes over a batch, one each time that it is asked for the next.
        evaluating: a context in which the model evaluates and its buffers are put back after.
    """

    def __init__(
        self,
        layers: Mapping[str, _BatchNorm],
        passes: Callable[[], Iterable[object]],
        evaluating: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._layers, self._passes, self._evaluating = layers, passes, evaluating
        self._examples = dict.fromkeys(layers, 0)
        self.last = Statistics({name: _clones(layer) for name, layer in layers.items()})
        self._seen = self._look()

    @classmethod
    def by_probe(
        cls,
        layers: Mapping[str, _BatchNorm],
        probe: Probe,
        host: tuple[nn.Module, Optimizer],
        window: int,
        batches: Sequence[Any],
    ) -> BatchStatistics:
        """By what a window's probe batches show the layers of a model, which holds the last weights now."""
        model, optimizer = host
        passes = lambda: (probe.loss(model, batch) for batch in batches)  # noqa: E731
        return cls(layers, passes, lambda: probe.evaluated(model, window, optimizer, kept_statistics=True))

    def limited(self) -> Statistics:
        """For the weights that the model holds now, within the limits of chance."""
        now, found = self._look(), {}
        for name, (mean, variance) in self.last.layers.items():
            (mean_then, variance_then), (mean_now, variance_now) = self._seen.layers[name], now.layers[name]
            widest = CHANCE / max(1.0, self._examples[name]) ** 0.5
            shift = ((mean - mean_then) / variance_then.sqrt()).nan_to_num(0.0).clamp(-widest, widest)
            factor = (variance / variance_then).log().nan_to_num(0.0).clamp(-(2**0.5) * widest, 2**0.5 * widest).exp()
            found[name] = (mean_now + shift * variance_now.sqrt(), variance_now * factor)
        return Statistics(found)

    @torch.no_grad()
    def _look(self) -> Statistics:
        """The batch's own: the mean over what each layer sees of it in each call, normalising by that, else as usual.

        A layer that sees one value a channel evaluates, since that has no variance. One that sees nothing else, or is
        not called, has what it had before.
        """
        if not self._layers:
            return self.last
        layers = self._layers.values()
        held = [(layer.momentum, layer.training) for layer in layers]
        self._examples = dict.fromkeys(self._layers, 0)
        found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self._layers}
        hooks = [
            hook
            for name, layer in self._layers.items()
            for hook in (
                layer.register_forward_pre_hook(partial(self._enters, name), with_kwargs=True),
                layer.register_forward_hook(partial(_leaves, found[name])),
            )
        ]
        buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        try:
            # Compiled, the hooks would make a graph of each batch.
            with tensors.put_aside(buffers), self._evaluating(), torch.compiler.set_stance("force_eager"):
                for layer in layers:
                    layer.momentum, layer.training = 1.0, True
                    for value in _running(layer):
                        value.nan_to_num_()  # a share of 0 of NaN is NaN
                for _ in self._passes():
                    pass
        finally:
            for hook in hooks:
                hook.remove()
            for layer, (momentum, training) in zip(layers, held, strict=True):
                layer.momentum, layer.training = momentum, training
        return Statistics({name: _mean(own) if own else self.last.layers[name] for name, own in found.items()})

    def _enters(self, name: str, layer: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        values = next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
        layer.training = values is not None and values.numel() > values.shape[1]
        self._examples[name] += len(values) if values is not None else 0


@dataclass
class WindowStatistics:
    """What is known of them in one window.

    Attributes:
        at_last: a look at the last weights, once one was needed.
        averaged: those of averaged weights, by the stride of the average.
    """

    at_last: BatchStatistics | None = None
    averaged: dict[int | None, Statistics] = field(default_factory=dict)


def _leaves(found: list[tuple[Tensor, Tensor]], layer: nn.Module, inputs: object, output: object) -> None:
    if layer.training:
        assert isinstance(layer, _BatchNorm)
        found.append(_clones(layer))


def _clones(layer: _BatchNorm) -> tuple[Tensor, Tensor]:
    mean, variance = tensors.clones(_running(layer))
    return mean, variance


def _mean(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    means, variances = zip(*pairs, strict=True)
    return torch.stack(means).mean(dim=0), torch.stack(variances).mean(dim=0)


def _running(layer: _BatchNorm) -> tuple[Tensor, Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return tensors.local(layer.running_mean), tensors.local(layer.running_var)
