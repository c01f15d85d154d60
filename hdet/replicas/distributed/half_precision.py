"""The mean of tensors that travel in half precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.tensors import as_real, copy_


@torch.no_grad()
def mean_narrow_(
    exchange: Exchange, members: Sequence[Sequence[Tensor]], weights: Sequence[float], dtype: torch.dtype
) -> None:
    """`exchange.mean_`, with what travels in `dtype`: off by a unit in the last place of a tensor's largest element.

    Every tensor is divided by the power of two next to its largest element in any replica that takes part: float16 has
    no numbers below 6e-8 nor above 65504, and what a window changes may lie there. Takes one more small collective.
    """
    members = [list(map(as_real, own)) for own in members]
    rows = exchange.gather(torch.cat([_largest(own) for own in members])).cpu()[
        exchange.layout.table[:, exchange.layout.part]
    ]
    largest = rows.view(len(weights), -1)[torch.tensor(weights, device="cpu") != 0].amax(dim=0)
    exponents = torch.frexp(largest).exponent.clamp(-126, 126).tolist()
    narrow = []
    for own in members:
        torch._foreach_mul_(list(own), [2.0**-exponent for exponent in exponents])
        narrow.append([tensor.to(dtype) for tensor in own])
    exchange.mean_(narrow, weights)
    for own, merged in zip(members, narrow, strict=True):
        copy_(own, merged)
        torch._foreach_mul_(list(own), [2.0**exponent for exponent in exponents])


def _largest(own: Sequence[Tensor]) -> Tensor:
    """[len(own)] largest absolute values; 0 of a tensor without elements, as the shard of a small one may be."""
    return torch.stack(
        [
            t.detach().abs().amax().double() if t.numel() else torch.zeros((), dtype=torch.float64, device=t.device)
            for t in own
        ]
    )
