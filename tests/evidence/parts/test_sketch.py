"""Sketches against the inner products they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet.evidence.parts import gradient_sketch
from hdet.evidence.parts.gradient_sketch import GradientSketch
from hdet.evidence.parts.sketch import Sketch
from hdet.replicas import tensors

CPU = torch.device("cpu")


def of(sketch: Sketch, values: Tensor) -> Tensor:
    found = sketch.zeros()
    sketch.add_(found, values, 0)
    return found


def drawn(count: int, length: int) -> Tensor:
    return torch.randn(count, length, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("length", [1, 63, 64, 500])
def test_up_to_its_size_it_is_the_vector_itself(length: int) -> None:
    values = drawn(1, length)[0]
    assert torch.equal(of(Sketch(length, 500, CPU), values), values)


@pytest.mark.parametrize(("length", "size"), [(501, 500), (20_000, 700), (30_000, 1024)])
def test_inner_products_are_unbiased_with_the_error_that_is_said(length: int, size: int) -> None:
    """Over pairs of vectors: mean 0, and an sd of |a| |b| / sqrt(m) where these are at right angles."""
    sketch = Sketch(length, size, CPU)
    values = drawn(200, length)
    folded = torch.stack([of(sketch, row) for row in values])
    errors = (folded[::2] * folded[1::2]).sum(1) - (values[::2] * values[1::2]).sum(1)
    scaled = errors / values[::2].norm(dim=1) / values[1::2].norm(dim=1) * math.sqrt(sketch.size)
    assert abs(scaled.mean()) < 0.3
    assert scaled.std() < 1.2


@pytest.mark.parametrize("shape", ["ones", "ramp", "waves"])
def test_vectors_with_a_pattern_keep_their_length(shape: str) -> None:
    """Of all elements of one sign, or alike from chunk to chunk: what a plain fold would add up."""
    length, size = 65_536, 1024
    at = torch.arange(length, dtype=torch.float32)
    values = {"ones": torch.ones(length), "ramp": at / length, "waves": torch.cos(at * 2 * math.pi / 1024)}[shape]
    folded = of(Sketch(length, size, CPU), values)
    assert float(folded @ folded) == pytest.approx(float(values @ values), rel=4 * math.sqrt(2 / size))


def test_it_is_linear_and_parts_may_come_in_any_order() -> None:
    sketch = Sketch(10_000, 1024, CPU)
    values = drawn(1, 10_000)[0]
    whole, parts = of(sketch, values), sketch.zeros()
    for start, stop in ((7_000, 10_000), (0, 1_500), (1_500, 7_000)):
        sketch.add_(parts, values[start:stop], start, scale=-2.0)
    torch.testing.assert_close(parts, -2.0 * whole)


def test_signs_are_the_same_for_ever() -> None:
    """A memory that was saved is read by later versions."""
    whole = of(Sketch(4_096, 1_024, CPU), torch.arange(4_096, dtype=torch.float32))
    assert whole[:6].tolist() == [2048.0, 4098.0, 2048.0, -4096.0, 0.0, 6164.0]


def test_no_two_chunks_have_the_same_signs() -> None:
    sketch = Sketch(2**20, 1, CPU)
    assert sketch.size == 1024
    tables = [of(sketch, _chunk(sketch, c)) for c in (0, 1, 2, 511, 512, 1022, 1023)]
    assert len({tuple(table.tolist()) for table in tables}) == 7


def _chunk(sketch: Sketch, number: int) -> Tensor:
    values = torch.zeros(sketch.length)
    values[number * sketch.size : (number + 1) * sketch.size] = 1.0
    return values


# -- gradients ------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(3)
        self.unused = nn.Parameter(torch.ones(2))
        self.foreign = nn.Parameter(torch.ones(2))
        self.empty = nn.Parameter(torch.ones(0))


def net(rates: tuple[Any, Any] = (0.1, 0.5)) -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    model.frozen.requires_grad_(False)
    matrices = [model.tied.weight, model.frozen.weight]
    rest = [model.tied.bias, model.frozen.bias, model.norm.weight, model.norm.bias, model.unused, model.empty]
    groups = [{"params": rest, "lr": rates[0]}, {"params": matrices, "lr": rates[1]}]
    for number, parameter in enumerate(model.parameters()):
        if parameter is not model.unused and parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, number + 1.0)
    return model, torch.optim.SGD(groups)


@pytest.mark.parametrize("tensor", [False, True])
def test_gradients_count_by_their_groups_rate(tensor: bool) -> None:
    """In the order of the groups; what is frozen, or no optimizer's, has no place."""
    rates = (torch.tensor(0.1), torch.tensor(0.5)) if tensor else (0.1, 0.5)
    model, optimizer = net(rates)
    folding = GradientSketch([(model, optimizer)], 1024)
    assert folding.sketch.size == 3 + 3 + 3 + 2 + 9
    found = folding.folded(folding.gradients(0), folding.rates(0))
    parts = [model.tied.bias, model.norm.weight, model.norm.bias, None, model.tied.weight]
    scale = [0.1, 0.1, 0.1, 0.1, 0.5]
    want = [torch.zeros(2) if p is None else p.grad.flatten() * s for p, s in zip(parts, scale, strict=True)]  # type: ignore[union-attr]
    torch.testing.assert_close(found, torch.cat(want))


@pytest.mark.parametrize("rates", [(0.1, 0.7, 1e-3), (0.1, 0.0, 1e-3)])
def test_groups_are_folded_at_once_to_the_same_numbers(rates: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate of 0 leaves out what is not finite. Gradients may have a graph, as by `create_graph=True`."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2))]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    parameters[1].grad[3] = math.inf  # type: ignore[index]  # of the group whose rate may be 0
    for parameter in parameters:
        parameter.grad = (parameter + 1.0).square() * parameter.grad  # type: ignore[operator]
    groups = [{"params": [one], "lr": rate} for one, rate in zip(parameters, rates, strict=True)]
    host = (nn.ParameterList(parameters), torch.optim.SGD(groups))
    found = []
    for small in (gradient_sketch.SMALL, 0):
        monkeypatch.setattr(gradient_sketch, "SMALL", small)
        folding = GradientSketch([host], 1024)
        found.append(folding.folded(folding.gradients(0), folding.rates(0)))
    assert torch.equal(*found)
    assert not any(one.requires_grad for one in found)
    assert bool(found[0].isfinite().all()) == (0.0 in rates)
    assert float(found[0][1]) == pytest.approx(0.1 * parameters[0].grad.flatten()[1].item())  # type: ignore[union-attr]


def test_gradients_as_they_come_make_the_same_sketch() -> None:
    model, optimizer = net()
    folding = GradientSketch([(model, optimizer)], 1024)
    want = folding.folded(folding.gradients(0), folding.rates(0))
    found = folding.sketch.zeros()
    for numbers in ([4, 1], [2, 0]):
        given = [folding.parameters[0][number].grad for number in numbers]
        folding.fold_(found, numbers, given, folding.rates(0))  # type: ignore[arg-type]
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("stretch", [2, 2**22])
def test_values_in_the_models_order_are_put_in_the_groups(stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a large parameter a stretch at a time."""
    monkeypatch.setattr(tensors, "STRETCH", stretch)
    monkeypatch.setattr(gradient_sketch, "TOGETHER", stretch)
    model, optimizer = net()
    folding = GradientSketch([(model, optimizer)], 1024)
    trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
    values = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]

    def value(place: int, elements: slice | None) -> Tensor:
        return values[place] if elements is None else values[place].reshape(-1)[elements]

    assert torch.equal(folding.folded_trained(value), folding.folded(folding.gradients(0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_added_up_in_full(dtype: torch.dtype) -> None:
    """A rate that is a tensor counts as the number does: in float16 their product, 1e-9 here, would be 0."""
    layer = nn.Linear(64, 64).to(dtype)
    for parameter in layer.parameters():
        parameter.grad = torch.full_like(parameter, 1e-5)
    found = []
    for rate in (1e-4, torch.tensor(1e-4)):
        folding = GradientSketch([(layer, torch.optim.SGD(layer.parameters(), lr=rate))], 2**13)
        found.append(folding.folded(folding.gradients(0), folding.rates(0)))
    assert all(own.dtype == torch.float32 for own in found)
    assert bool(found[1].all())
    torch.testing.assert_close(*found, rtol=1e-5, atol=0.0)


def test_freezing_makes_it_outdated() -> None:
    model, optimizer = net()
    folding = GradientSketch([(model, optimizer)], 1024)
    assert not folding.is_outdated()
    model.frozen.requires_grad_(True)
    assert folding.is_outdated()
