"""The gradient noise scale, read off the micro-batches that a step accumulates anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet.errors import ConfigError
from hdet.replicas import Replica, Replicas, tensors
from hdet.replicas.in_process import Seats

TOGETHER = 64
"""Steps whose norms are put into one tensor: a small one of each step takes more memory than it holds."""


@dataclass(frozen=True)
class NoiseScale:
    """What the gradients of a window's steps say of the batch size (McCandlish et al. 2018, arXiv 1812.06162).

    With G the gradient of the expected loss and S the trace of the covariance of one micro-batch's gradient, the scale
    is S / |G|^2: the number of micro-batches at which noise and gradient are of one size. A step of as many takes about
    twice the fewest steps, and twice the fewest examples, that the loss could be reached with. Far fewer a step save
    few examples more, far more a step save few steps more.

    Attributes:
        scale: in micro-batches; `None` where |G|^2 is not told from 0 by two standard errors.
        stderr: of the scale, from the scatter over steps; `None` with it.
        gradient: the mean estimate of |G|^2, without bias, so it can be below 0.
        gradient_stderr: of that.
        noise: the mean estimate of S.
        steps: how many steps were read.

    >>> print(NoiseScale(scale=6.0, stderr=0.5, gradient=2.0, gradient_stderr=0.1, noise=12.0, steps=50))
    6.0 +- 0.5 micro-batches (50 steps)
    """

    scale: float | None
    stderr: float | None
    gradient: float
    gradient_stderr: float
    noise: float
    steps: int

    def __str__(self) -> str:
        if self.scale is None or self.stderr is None:
            return f"not told from noise in {self.steps} steps: more micro-batches than could be read"
        return f"{self.scale:.1f} +- {self.stderr:.1f} micro-batches ({self.steps} steps)"


class NoiseMeter:
    """Reads two squared norms a step: of the first micro-batch's gradient, and of the sum of all n.

    With q_1 and q_n these,  E q_k = k^2 |G|^2 + k S,  and so

        S = (n^2 q_1 - q_n) / (n^2 - n),    |G|^2 = q_1 - S

    are without bias. Nothing is copied, and no step waits for the device.

    Raises:
        ConfigError: the replicas are no micro-batches of one model, only one, or pairs that take the same data.
    """

    def __init__(self, home: Replicas, *, paired: bool = False) -> None:
        if not isinstance(home, Seats):
            raise ConfigError(
                "noise_scale=True compares the micro-batches of one model in one process: copies have gradients of "
                "their own, and ranks average theirs within the backward pass; leave it out, or measure it in a short "
                "run of one process with hdet.micro_batches"
            )
        if home.size < 2:
            raise ConfigError(
                "noise_scale=True compares at least 2 micro-batches of a step, and there is 1; accumulate gradients "
                "over more of them, or leave it out"
            )
        if paired:
            raise ConfigError(
                "noise_scale=True compares micro-batches of different data, and Contrast(paired=True) has two of them "
                "take the same; leave one of the two out"
            )
        self._home = home
        self.begin()

    def begin(self) -> None:
        """A window opens."""
        self._parameters = tensors.trained(self._home.hosts[0][0])
        self._norms: Tensor | None = None
        self._rows: list[Tensor] = []
        self._first: Tensor | None = None
        self._all: Tensor | None = None
        self._left_out = False

    def exit(self, replica: Replica) -> None:
        """A micro-batch has run backward, and its gradient is in the sum."""
        if replica.index == 0:
            self._first = self._norm()
        elif replica.index == self._home.size - 1:
            self._all = self._norm()

    def miss(self) -> None:
        """A micro-batch of this step was left out."""
        self._left_out = True

    def end_step(self) -> None:
        """The step is made."""
        if self._first is not None and self._all is not None and not self._left_out:
            self._rows.append(torch.stack([self._first, self._all]))
            if len(self._rows) == TOGETHER:
                self._norms, self._rows = self._so_far(), []
        self._first = self._all = None
        self._left_out = False

    def read(self) -> NoiseScale | None:
        """What the window's steps say; `None` with fewer than two that are finite."""
        norms = self._so_far()
        if norms is None:
            return None
        squares = norms.double().cpu().numpy() ** 2
        return scale_of(squares[np.isfinite(squares).all(axis=1)], self._home.size)

    def state_dict(self) -> dict[str, Any]:
        """What the window's steps have told so far."""
        return {"norms": self._so_far()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._norms, self._rows = state["norms"], []

    def _so_far(self) -> Tensor | None:
        """[T, 2] norms of the steps that were read."""
        if self._norms is None or not self._rows:
            return torch.stack(self._rows) if self._rows else self._norms
        rows = torch.stack(self._rows)
        return torch.cat([self._norms.to(rows), rows])

    @torch.no_grad()
    def _norm(self) -> Tensor:
        """Of the gradients as they are; a norm, since a square may be too large for the device's numbers."""
        own = [p.grad for p in self._parameters if p.grad is not None]
        found = [g.coalesce().values() if g.is_sparse else g for g in own]
        if not found:
            return torch.full((), math.nan, device=self._parameters[0].device)
        norms: Tensor = torch.linalg.vector_norm(torch.stack(tensors.lengths(found)).float())
        return self._home.unscaled(norms)


def scale_of(squares: NDArray[np.float64], n: int) -> NoiseScale | None:
    """The noise scale from [T, 2] squared norms: of one micro-batch's gradient, and of the sum of n.

    >>> found = scale_of(np.array([[3.0, 8.0], [3.0, 8.0]]), n=2)  # |G|^2 = 1, S = 2
    >>> found.scale, found.gradient, found.noise
    (2.0, 1.0, 2.0)
    """
    steps = len(squares)
    if steps < 2:
        return None
    noise = (n**2 * squares[:, 0] - squares[:, 1]) / (n**2 - n)
    gradient = squares[:, 0] - noise
    mean_noise, mean_gradient = float(noise.mean()), float(gradient.mean())
    covariance = np.cov(noise, gradient) / steps
    error = math.sqrt(covariance[1, 1])
    if mean_gradient <= 2.0 * error:
        return NoiseScale(None, None, mean_gradient, error, mean_noise, steps)
    scale = mean_noise / mean_gradient
    slopes = np.array([1.0, -scale]) / mean_gradient  # of the ratio, in noise and gradient
    return NoiseScale(scale, math.sqrt(float(slopes @ covariance @ slopes)), mean_gradient, error, mean_noise, steps)
