"""What goes to the host, and is handed on there; on a GPU without a wait for each tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hdet.replicas import host_memory
from hdet.replicas.anchor import Anchor
from hdet.replicas.average import RunningMean
from hdet.replicas.host_memory import OnTheirWay

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_what_is_under_way_lands_once_in_order_before_more_is_sent() -> None:
    landed: list[tuple[str, list[float]]] = []
    way = OnTheirWay()
    first, second = torch.ones(2), torch.ones(3)
    way.send(
        [(first, lambda t: landed.append(("a", t.tolist()))), (second, lambda t: landed.append(("b", t.tolist())))]
    )
    first.zero_()  # as the next step does
    assert landed == []
    held = [t.data_ptr() for t in way._memory]
    way.send(
        [(first, lambda t: landed.append(("c", t.tolist()))), (second, lambda t: landed.append(("d", t.tolist())))]
    )
    assert landed == [("a", [1.0, 1.0]), ("b", [1.0, 1.0, 1.0])]
    way.land()
    way.land()
    assert landed[2:] == [("c", [0.0, 0.0]), ("d", [1.0, 1.0, 1.0])]
    assert [t.data_ptr() for t in way._memory] == held
    assert way.bytes_held == 20


def test_other_shapes_and_dtypes_take_other_memory() -> None:
    landed: list[Tensor] = []
    way = OnTheirWay()
    for value in (torch.ones(2), torch.ones(3), torch.ones(3, dtype=torch.bfloat16)):
        way.send([(value, lambda t: landed.append(t.clone()))])
    way.land()
    assert [(t.shape, t.dtype) for t in landed] == [
        ((2,), torch.float32),
        ((3,), torch.float32),
        ((3,), torch.bfloat16),
    ]
    assert len(way._memory) == 1


class Blocking(TorchDispatchMode):
    """Notes whether copies wait."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = args[2:] or (kwargs or {}).get("non_blocking", False)
        if "copy_" in str(func):
            self.found.append(not (own[0] if isinstance(own, tuple) else own))
        return func(*args, **(kwargs or {}))


def test_only_a_copy_that_is_waited_for_later_does_not_wait_itself() -> None:
    """On CUDA alone there is a stream to wait for: one from mps to the host would be read before it is there."""
    value, copy, way = torch.ones(2), torch.zeros(2), OnTheirWay()
    with Blocking() as blocking:
        host_memory.copy_([copy], [value])
        way.send([(value, lambda own: None)])
        way.land()
    assert blocking.found == [True, True]


def test_a_copy_is_in_memory_of_its_own() -> None:
    value = torch.ones(2)
    copy = host_memory.copied(value, "cpu")
    host_memory.wait([value])
    value.zero_()
    assert copy.tolist() == [1.0, 1.0]
    host_memory.copy_([copy], [value])
    assert copy.tolist() == [0.0, 0.0]


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 3])
def test_on_a_gpu_a_mean_on_the_host_is_that_beside_the_weights(dtype: torch.dtype, stride: int) -> None:
    """Small tensors that are joined, and large ones; whatever is written over the weights at once after."""
    weights = [torch.zeros(n, dtype=dtype, device="cuda") for n in (3, 2**20, 5)]
    means = [RunningMean(lambda: weights, stride, device) for device in ("cpu", None)]
    for step in range(10):
        for number, weight in enumerate(weights):
            weight.copy_(torch.sin(torch.arange(weight.numel(), device="cuda") * (step + number + 1.0)))
        for mean in means:
            mean.add()
        for weight in weights:
            weight.fill_(torch.nan)
    on_host, beside = (mean.mean() for mean in means)
    for one, other in zip(on_host, beside, strict=True):
        assert one.device.type == "cpu"
        torch.testing.assert_close(one, other.cpu())


@gpu
@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}], ids=["plain", "capturable", "fused"])
def test_on_a_gpu_an_anchor_on_the_host_is_pinned_and_whole(options: Any) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01, device="cuda"), **options)
    anchors = [Anchor(model, optimizer, device) for device in ("cpu", None)]
    for step in range(3):
        model(torch.randn(8, 300, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for anchor in anchors:
            anchor.take(step)
        on_host, beside = (anchor.held for anchor in anchors)
        assert all(t.is_pinned() for t in on_host)
        assert all(torch.equal(one, other.cpu()) for one, other in zip(on_host, beside, strict=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    anchors[0].restore(model, optimizer)
    live = [*model.parameters(), *model.buffers()]
    assert all(torch.equal(one, other) for one, other in zip(anchors[1].held, live, strict=True))
