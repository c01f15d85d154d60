"""Dropout whose probability is a tensor: `nn.Dropout` and its channel-wise kin, safe to compile.

In eager mode these are PyTorch's own operators at the host's float: bit for bit `nn.Dropout`, the stream of
random numbers included. Inside `torch.compile` the probability is read from a 0-dim tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hdet.nn.knob_tensor import KnobAttribute, KnobModule, KnobTensor


def dropout_noise(shaped: Tensor, probability: Tensor) -> Tensor:
    """What dropout multiplies by, of the shape and type of a tensor: 0 with a 0-dim probability p, else 1 / (1 - p).

    The draw is made in float32 whatever the type: bfloat16 has too few values in [0, 1) for small probabilities.
    """
    keep = torch.rand_like(shaped, dtype=torch.float32) >= probability
    # At probability 1 the scale is infinite, but nothing is kept.
    return torch.where(keep, 1.0 / (1.0 - probability), 0.0).to(shaped.dtype)


class _KnobDropout(KnobModule):
    p_knob: KnobTensor
    training: bool
    inplace: bool

    p = KnobAttribute("dropout", default=0.5, low=0.0, high=1.0)

    unbatched_dim: int | None = None
    """The number of dimensions at which the operator takes the first one for channels, not for the batch."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            output: Tensor = super().forward(input)
            return output
        if not self.training or self.p_knob.always_zero:
            return input
        noise = dropout_noise(self._one_per_draw(input), self.p_knob.on(input.device))
        return input.mul_(noise) if self.inplace else input * noise

    def _one_per_draw(self, input: Tensor) -> Tensor:
        """A view of the input with one element for each number to draw, broadcastable to the input."""
        return input


class _ChannelDropout(_KnobDropout):
    def _one_per_draw(self, input: Tensor) -> Tensor:
        leading = 1 if input.dim() == self.unbatched_dim else 2
        return input[(slice(None),) * leading + (slice(0, 1),) * (input.dim() - leading)]


class Dropout(_KnobDropout, nn.Dropout):
    """`nn.Dropout` with a knob: y = x m / (1 - p), each m drawn from Bernoulli(1 - p); identity in eval mode.

    Takes the arguments of `nn.Dropout`. `module.p` reads and writes a float; `module.p_knob` is the
    `KnobTensor` behind it.

    Raises:
        ConfigError: a probability outside [0, 1] is assigned to `p`.

    >>> dropout = Dropout(0.5)
    >>> dropout.p = 0.1
    >>> dropout
    Dropout(p=0.1, inplace=False)
    """


class Dropout1d(_ChannelDropout, nn.Dropout1d):
    """`nn.Dropout1d` with a knob: drops whole channels of `[N, C, L]` or `[C, L]`. See `Dropout`.

    >>> Dropout1d(0.2).eval()(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """

    unbatched_dim = 2


class Dropout2d(_ChannelDropout, nn.Dropout2d):
    """`nn.Dropout2d` with a knob: drops whole channels of `[N, C, H, W]`. See `Dropout`.

    Like PyTorch's, it takes a 3-dimensional input for `[N, C, L]`.

    >>> Dropout2d(0.2).p_knob
    KnobTensor(0.2, role='dropout', device='cpu')
    """


class Dropout3d(_ChannelDropout, nn.Dropout3d):
    """`nn.Dropout3d` with a knob: drops whole channels of `[N, C, D, H, W]` or `[C, D, H, W]`. See `Dropout`.

    >>> isinstance(Dropout3d(), nn.Dropout3d)
    True
    """

    unbatched_dim = 4
