"""Cross entropy whose label smoothing is a tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.nn.knob_tensor import KnobAttribute, KnobModule, KnobTensor


class CrossEntropyLoss(KnobModule, nn.CrossEntropyLoss):
    """`nn.CrossEntropyLoss` with a knob: the target is (1 - s) y + s / classes, s the label smoothing.

    Takes the arguments of `nn.CrossEntropyLoss`. `module.label_smoothing` reads and writes a float;
    `module.label_smoothing_knob` is the `KnobTensor` behind it. In eager mode it is PyTorch's own loss, bit
    for bit. The loss is affine in s for every kind of target, weight and reduction, so compiled it is

        loss(s) = loss(0) + s (loss(1) - loss(0)).

    Smoothing is a way to train: judge a model by the loss without it.

    Raises:
        ConfigError: a smoothing outside [0, 1] is assigned to `label_smoothing`.

    >>> loss = CrossEntropyLoss(label_smoothing=0.1)
    >>> loss.label_smoothing = 1.0
    >>> loss(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    tensor(1.3863)
    """

    label_smoothing_knob: KnobTensor
    label_smoothing = KnobAttribute("label_smoothing", default=0.0, low=0.0, high=1.0)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(input, target)
        plain = self._at(0.0, input, target)
        if self.label_smoothing_knob.always_zero:
            return plain
        smoothing = self.label_smoothing_knob.on(input.device)
        # Beside a loss of no dimensions the float32 scalar would widen half precision, which it does not in eager mode.
        return (plain + smoothing * (self._at(1.0, input, target) - plain)).to(plain.dtype)

    def _at(self, smoothing: float, input: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=smoothing,
        )
