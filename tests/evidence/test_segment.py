"""The line between two lists of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdet.evidence.line import Segment
from hdet.replicas import tensors

SHAPES = [(3,), (2, 5), (7,), ()]


def weights(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("moves", [[True] * 4, [False] * 4, [True, False, True, False]])
@pytest.mark.parametrize("begins", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 6, 2**18])
def test_a_point_is_the_interpolation_bit_for_bit(
    moves: list[bool], held: torch.dtype, begins: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is on the line, also between weights of another dtype, of which parts are converted at a time."""
    monkeypatch.setattr(tensors, "PASSING", elements)
    start, end, live = weights(1, begins), weights(2), weights(3, held)
    want = [
        (torch.lerp(a, b.to(begins), 1.3) if moving else b).to(held)
        for a, b, moving in zip(start, end, moves, strict=True)
    ]
    line = Segment(start, end, moves)
    for _ in range(2):  # the second time over a point
        line.at(1.3)(live)
        assert all(torch.equal(own, value) for own, value in zip(live, want, strict=True))


def test_a_large_tensor_is_worked_on_a_stretch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "STRETCH", 64)
    start, end, live = (
        [torch.randn(10, 20, generator=torch.Generator().manual_seed(seed)).to(dtype), torch.ones(64)]
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.bfloat16))
    )
    Segment(start, end, [True] * 2).at(1.3)(live)
    want = [torch.lerp(a, b.float(), 1.3).to(own.dtype) for a, b, own in zip(start, end, live, strict=True)]
    assert all(torch.equal(own, value) for own, value in zip(live, want, strict=True))


def test_memory_of_another_model_may_be_written_next() -> None:
    """As where copies on several devices share the points out."""
    line = Segment(weights(1), weights(2), [True] * 4)
    for dtype in (torch.float32, torch.float64, torch.float32):
        live = weights(3, dtype)
        line.at(1.0)(live)
        assert all(torch.equal(own, b.to(dtype)) for own, b in zip(live, weights(2), strict=True))


def test_the_end_may_be_the_weights_themselves() -> None:
    """As an average is to which nothing was added."""
    start, live, end = weights(1), weights(2), weights(2)
    line = Segment(start, live, [True] * 4)
    for x in (0.7, 1.3):
        line.at(x)(live)
        want = [torch.lerp(a, b, x) for a, b in zip(start, end, strict=True)]
        assert all(torch.equal(own, value) for own, value in zip(live, want, strict=True))


def test_nothing_of_the_size_of_the_weights_is_allocated() -> None:
    start, end, live = ([torch.zeros(100)] * 3 for _ in range(3))
    with torch.profiler.profile(profile_memory=True) as profile:
        Segment(start, end, [True] * 3).at(0.5)(live)
    assert sum(max(0, event.self_cpu_memory_usage) for event in profile.events()) < 400
    assert tensors.all_finite(live)
