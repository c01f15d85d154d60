import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hdet.errors import ConfigError
from hdet.nn import Dropout, Dropout1d, Dropout2d, Dropout3d
from hdet.nn.dropout import dropout_noise

KINDS = [
    (nn.Dropout, Dropout, (12, 10)),
    (nn.Dropout, Dropout, (120,)),
    (nn.Dropout1d, Dropout1d, (12, 10, 5)),
    (nn.Dropout1d, Dropout1d, (120, 5)),
    (nn.Dropout2d, Dropout2d, (12, 10, 3, 2)),
    (nn.Dropout2d, Dropout2d, (12, 10, 3)),
    (nn.Dropout3d, Dropout3d, (12, 10, 3, 2, 2)),
    (nn.Dropout3d, Dropout3d, (120, 3, 2, 2)),
]
pytestmark = pytest.mark.filterwarnings("ignore:dropout2d")


def run(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and the generator's state after both."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    y = module(x * 1)
    (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, torch.get_rng_state()


@pytest.mark.parametrize(("theirs", "ours", "shape"), KINDS)
@pytest.mark.parametrize("inplace", [False, True])
@given(p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), training=st.booleans())
@settings(max_examples=10)
def test_eager_is_bitwise_pytorch(
    theirs: type, ours: type, shape: tuple[int, ...], inplace: bool, p: float, training: bool
) -> None:
    x = torch.randn(shape)
    expected = run(theirs(p, inplace).train(training), x)
    module = ours(0.3, inplace).train(training)
    module.p = p
    for ours_is, theirs_is in zip(run(module, x), expected, strict=True):
        assert torch.equal(ours_is, theirs_is)


@pytest.mark.parametrize(("theirs", "ours", "shape"), KINDS)
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_drops_what_pytorch_drops(theirs: type, ours: type, shape: tuple[int, ...], inplace: bool) -> None:
    """Whole channels or single elements, kept ones scaled by 1 / (1 - p), the gradient the same mask."""
    module = ours(0.75, inplace)
    module.p = 0.6
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    y, gradient, _ = run(compiled, torch.ones(shape))
    kept = y != 0
    assert torch.allclose(y[kept], torch.tensor(1 / 0.4))
    assert torch.allclose(gradient, y * torch.arange(y.numel()).view_as(y))
    theirs_kept = run(theirs(0.6), torch.ones(shape))[0] != 0
    # 120 numbers are drawn in each case, and what is constant within a channel for PyTorch is so for us.
    assert abs(kept.float().mean().item() - 0.4) < 4 * (0.4 * 0.6 / 120) ** 0.5
    for dim in range(len(shape)):
        theirs_constant = (theirs_kept == theirs_kept.select(dim, 0).unsqueeze(dim)).all()
        assert (kept == kept.select(dim, 0).unsqueeze(dim)).all() == theirs_constant
    assert torch.equal(compiled.eval()(torch.ones(shape)), torch.ones(shape))


@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_noise_has_the_right_rate_and_mean(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n = 200_000
    noise = dropout_noise(torch.empty(n, dtype=dtype), torch.tensor(p))
    assert noise.dtype == dtype
    dropped = (noise == 0).double().mean().item()
    assert abs(dropped - p) < 5 * (p * (1 - p) / n) ** 0.5
    assert noise.max().item() == pytest.approx(1 / (1 - p), rel=4e-3 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_noise_at_the_ends(dtype: torch.dtype) -> None:
    shaped = torch.empty(1000, dtype=dtype)
    assert torch.equal(dropout_noise(shaped, torch.tensor(0.0)), torch.ones(1000, dtype=dtype))
    assert torch.equal(dropout_noise(shaped, torch.tensor(1.0)), torch.zeros(1000, dtype=dtype))


def test_reads_and_prints_like_pytorch() -> None:
    module = Dropout(0.25, inplace=True)
    assert isinstance(module, nn.Dropout)
    assert repr(module) == repr(nn.Dropout(0.25, inplace=True))
    with pytest.raises(ConfigError, match="dropout"):
        module.p = 1.5
    with pytest.raises(ValueError, match="between 0 and 1"):
        Dropout(-0.1)
