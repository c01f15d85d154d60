"""The probe: a held-out loss, paired over replicas, in sub-batches that yield its standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ConfigError, StepError
from hdet.replicas.tensors import evaluating


@dataclass(frozen=True)
class Probe:
    """Evaluates every replica on the same held-out batches at a window's end, in eval mode, without gradients.

    Args:
        loss: `loss(model, batch)`, the mean loss of one sub-batch as a 0-dim tensor, or several sub-batches' at
            once as a 1-dim tensor (one forward pass for all is the cheapest). It must be the loss you care
            about, differentiable and the lower the better: no accuracy, no label smoothing, no auxiliary terms.
        batches: batches that make up J >= 2 sub-batches of equal size, or a function from the window's number
            to them (fresh ones each window; it must return the same on every process). Data the model does not
            train on. Eight sub-batches do well; their scatter gives the standard errors.
        at: judge the `last` weights of a window or their `average` over it.
        stride: with `average`, take every stride-th step's weights; by default as many as leave at least 128 in the
            window.

    >>> probe = Probe(lambda model, x: model(x).square().mean(), [torch.ones(4, 2), torch.zeros(4, 2)])
    >>> probe.measure(torch.nn.Linear(2, 1, bias=False).requires_grad_(False), window=0).shape
    torch.Size([2])
    """

    loss: Callable[[Any, Any], Tensor]
    batches: Sequence[Any] | Callable[[int], Iterable[Any]]
    at: Literal["last", "average"] = "last"
    stride: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise ConfigError(f"loss must be callable as loss(model, batch), got {type(self.loss).__name__}")
        if isinstance(self.batches, Iterator):
            raise ConfigError(
                f"a probe's batches are gone through in every window, and a {type(self.batches).__name__} only once; "
                f"give a list of them, or a function from the window's number to them"
            )
        if not callable(self.batches) and not len(self.batches):
            raise ConfigError("a probe needs batches; got none")
        if self.at not in ("last", "average"):
            raise ConfigError(f"at must be 'last' or 'average', got {self.at!r}")
        if self.stride is not None and self.stride < 1:
            raise ConfigError(f"stride must be at least 1, got {self.stride}")

    def draw(self, window: int) -> list[Any]:
        """The batches of a window."""
        return list(self.batches(window) if callable(self.batches) else self.batches)

    @torch.no_grad()
    def measure(
        self, model: nn.Module, window: int, optimizer: Optimizer | None = None, batches: Sequence[Any] | None = None
    ) -> Tensor:
        """[J] losses of the model as it is, float64, on the model's device.

        Raises:
            StepError: the loss is neither 0- nor 1-dimensional, or there are fewer than 2 sub-batches.
        """
        with evaluating(model, optimizer):
            losses = [self.loss(model, batch) for batch in (self.draw(window) if batches is None else batches)]
        return torch.cat(checked(losses)).detach().double()


def checked(losses: Sequence[Tensor]) -> list[Tensor]:
    """The probe's losses, each as a 1-dim tensor; at least 2 numbers in all."""
    found = [flat(value) for value in losses]
    if sum(value.numel() for value in found) < 2:
        raise StepError(
            "the probe has 1 sub-batch and needs at least 2 to know its standard error; split its batch, say in 8"
        )
    return found


def differentiable(loss: Tensor) -> Tensor:
    """The same; it can be differentiated.

    Raises:
        StepError: it cannot.
    """
    if not loss.requires_grad:
        raise StepError(
            "the probe's loss has no gradient, which the evidence of a knob needs: give hdet.Probe a differentiable "
            "loss, the lower the better, and no metric such as accuracy"
        )
    return loss


def flat(value: Tensor) -> Tensor:
    """What the probe's loss returned, one loss or several, as a 1-dim tensor."""
    if not isinstance(value, Tensor) or value.dim() > 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise StepError(f"the probe's loss must return one loss, or a 1-dim tensor of losses; got {shape}")
    return value.reshape(-1)
