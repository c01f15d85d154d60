"""BatchNorm's statistics at weights that were not trained at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hdet.evidence.parts.batch_statistics import BatchStatistics, Statistics
from hdet.replicas import tensors
from hdet.replicas.batch_norm import keeping


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4))


def batch(seed: int, size: int = 64) -> Tensor:
    return 1.0 + 2.0 * torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def followed(model: nn.Module, inputs: Tensor) -> BatchStatistics:
    with torch.no_grad():
        return BatchStatistics(
            keeping(model), lambda: (model(part) for part in inputs.split(16)), lambda: tensors.evaluating(model)
        )


def trained(model: nn.Module, inputs: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What training over many batches at these weights would have kept."""
    held = keeping(model)
    for layer in held.values():
        layer.reset_running_stats()
        layer.momentum = None
    model.train()
    with torch.no_grad():
        for part in inputs.split(16):
            model(part)
    return {name: (layer.running_mean.clone(), layer.running_var.clone()) for name, layer in held.items()}  # type: ignore[union-attr]


def error(found: Statistics, truth: dict[str, tuple[Tensor, Tensor]]) -> float:
    """Of all means, in standard deviations, and of the logarithms of variances: the root mean square."""
    parts = []
    for name, (mean, variance) in truth.items():
        own_mean, own_variance = found.layers[name]
        parts += [(own_mean - mean) / variance.sqrt(), (own_variance / variance).log()]
    return float(torch.cat(parts).square().mean().sqrt())


def test_they_are_those_of_training_there_but_for_little() -> None:
    """Nearer than those of the last weights, and than the held-out batch's own."""
    model = network()
    trained(model, batch(1, size=2048))
    told = followed(model, batch(2))
    last = told.last
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter) * parameter.std().nan_to_num())
    found = told.limited()
    own = followed(model, batch(2))._seen
    truth = trained(model, batch(1, size=2048))
    assert error(found, truth) < 0.5 * error(own, truth)
    assert error(found, truth) < 0.3 * error(last, truth)


def test_at_the_last_weights_they_are_what_they_were() -> None:
    model = network()
    trained(model, batch(1))
    told = followed(model, batch(2))
    for name, pair in told.limited().layers.items():
        for one, other in zip(pair, told.last.layers[name], strict=True):
            assert torch.allclose(one, other)


def test_of_last_weights_that_are_not_finite_they_are_the_batchs_own() -> None:
    model = network()
    good = tensors.clones(list(model.parameters()))
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    model.train()(batch(1))
    told = followed(model, batch(2))
    tensors.copy_(list(model.parameters()), good)
    found = told.limited()
    for name, pair in followed(model, batch(2))._seen.layers.items():
        assert all(map(torch.equal, found.layers[name], pair))


def test_a_layer_may_have_its_input_by_name() -> None:
    class Named(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(input=x)
            return out

    model, other = network(), network()
    other[1] = Named(other[1])
    one, two = followed(model, batch(2)), followed(other, batch(2))
    for pair, same in zip(one._seen.layers.values(), two._seen.layers.values(), strict=True):
        assert all(map(torch.equal, pair, same))


def test_an_error_in_the_users_loss_leaves_nothing_behind() -> None:
    model = network().train()
    layers = keeping(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def fails() -> Iterator[Tensor]:
        yield model(batch(2))
        raise KeyError("a batch without labels")

    with pytest.raises(KeyError):
        BatchStatistics(layers, fails, lambda: tensors.evaluating(model))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(layer.training and layer.momentum == 0.1 and not layer._forward_pre_hooks for layer in layers.values())


@pytest.mark.parametrize("far", [1e2, 1e4, 1e8])
def test_last_weights_that_went_far_in_a_step_do_not_spoil_them(far: float) -> None:
    """What is kept is of the weights before; a batch's own is right but for chance."""
    model = network()
    trained(model, batch(1, size=2048))
    good = tensors.clones(list(model.parameters()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(far)
    told = followed(model, batch(2))
    tensors.copy_(list(model.parameters()), good)
    assert error(told.limited(), trained(model, batch(1, size=2048))) < 0.3


def test_of_a_channel_that_was_dead_they_are_the_batchs_own_but_for_chance() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.BatchNorm1d(3))
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model[0].bias[0] = -100.0
    trained(model, inputs)
    told = followed(model, inputs)
    with torch.no_grad():
        model[0].bias[0] = 0.0
    found = told.limited()
    assert error(found, trained(model, inputs)) < 0.5


def test_a_layer_that_is_not_made_yet_has_none() -> None:
    assert keeping(nn.Sequential(nn.LazyBatchNorm1d())) == {}


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm1d(3), nn.Linear(3, 3)])
def test_layers_that_keep_none_have_none(layer: nn.Module) -> None:
    assert keeping(nn.Sequential(layer)) == {}


class Twice(nn.Module):
    """One layer that normalises two inputs that are nothing alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(dim=(2, 3))
        both: Tensor = self.norm(self.first(x)) + self.norm(self.first(3.0 - 0.2 * x))
        return both


def test_of_a_layer_that_is_called_twice_they_are_the_mean_of_its_calls() -> None:
    model = Twice()
    told = followed(model, batch(2))
    with torch.no_grad():
        seen = [model.first(x) for part in batch(2).split(16) for x in (part.mean((2, 3)), 3 - 0.2 * part.mean((2, 3)))]
    mean, _ = told._seen.layers["norm"]
    assert torch.allclose(mean, torch.stack([x.mean(dim=0) for x in seen]).mean(dim=0), atol=1e-5)


class Wrapped(nn.BatchNorm1d):
    """Takes its input in a list, as layers of sparse tensors take theirs in an object."""

    def forward(self, holder: list[Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(holder[0])


def test_a_layer_whose_input_is_no_tensor_keeps_its_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Wrapped(3)

        def forward(self, x: Tensor) -> Tensor:
            normed: Tensor = self.norm([x.mean(dim=(2, 3))])
            return normed

    model = Net()
    trained(model, batch(1))
    told = followed(model, batch(2))
    found = told.limited()
    assert all(torch.equal(*pair) for pair in zip(found.layers["norm"], told.last.layers["norm"], strict=True))
