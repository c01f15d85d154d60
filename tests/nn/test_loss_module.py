import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdet.errors import ConfigError
from hdet.nn import CrossEntropyLoss

CLASSES = 5
CASES = list(
    itertools.product(["mean", "sum", "none"], [False, True], ["index", "ignored", "probability", "image", "unbatched"])
)


def problem(kind: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    if kind == "image":
        return torch.randn(3, CLASSES, 2, 4), torch.randint(CLASSES, (3, 2, 4))
    if kind == "unbatched":
        return torch.randn(CLASSES), torch.tensor(2)
    logits, target = torch.randn(6, CLASSES), torch.randint(CLASSES, (6,))
    if kind == "ignored":
        target[::2] = 3
    if kind == "probability":
        return logits, torch.rand(6, CLASSES).softmax(dim=1)
    return logits, target


def value_and_gradient(loss: nn.Module, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    value = loss(logits, target)
    value.sum().backward()
    assert logits.grad is not None
    return value.detach(), logits.grad


@pytest.mark.parametrize(("reduction", "weighted", "kind"), CASES)
def test_agrees_with_pytorch_eager_bitwise_and_compiled_closely(reduction: str, weighted: bool, kind: str) -> None:
    logits, target = problem(kind)
    arguments = {
        "weight": torch.rand(CLASSES) + 0.1 if weighted else None,
        "reduction": reduction,
        "ignore_index": 3 if kind == "ignored" else -100,
    }
    ours = CrossEntropyLoss(**arguments)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    for smoothing in (0.0, 0.1, 0.7, 1.0, 0.0):
        ours.label_smoothing = smoothing
        theirs = nn.CrossEntropyLoss(**arguments, label_smoothing=smoothing)
        expected = value_and_gradient(theirs, logits, target)
        for got, wanted in zip(value_and_gradient(ours, logits, target), expected, strict=True):
            assert torch.equal(got, wanted)
        for got, wanted in zip(value_and_gradient(compiled, logits, target), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_compiled_it_is_of_the_dtype_that_it_has_in_eager_mode(dtype: torch.dtype) -> None:
    logits, target = problem("index")
    compiled = torch.compile(CrossEntropyLoss(label_smoothing=0.1), backend="eager", fullgraph=True)
    assert compiled(logits.to(dtype), target).dtype == dtype


def test_never_smoothed_stays_finite_with_forbidden_classes() -> None:
    """loss(1) is infinite when a class has probability 0; it must not be touched then."""
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    value = torch.compile(CrossEntropyLoss(), backend="eager")(logits, torch.tensor([0]))
    assert torch.equal(value, F.cross_entropy(logits, torch.tensor([0])))


def test_takes_the_arguments_of_pytorch_and_bounds_the_smoothing() -> None:
    loss = CrossEntropyLoss(torch.ones(3), label_smoothing=0.2)
    assert isinstance(loss, nn.CrossEntropyLoss)
    assert loss.label_smoothing == 0.2
    assert list(loss.state_dict()) == list(nn.CrossEntropyLoss(torch.ones(3)).state_dict())
    with pytest.raises(ConfigError, match="label_smoothing"):
        loss.label_smoothing = -0.1
    with pytest.raises(ValueError):
        CrossEntropyLoss(label_smoothing=1.1)
