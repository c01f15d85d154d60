"""Copies side by side, and seats at one model."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import prodigyopt
import pytest
import torch
from torch import nn

import hdet
from hdet.errors import ConfigError, StepError
from hdet.replicas import Replicas
from hdet.replicas.in_process import transplant


def copies(problem: Any, n: int = 3, *middle: nn.Module) -> Replicas:
    model = problem.model(*middle)
    return hdet.replicate(model, torch.optim.AdamW(model.parameters(), lr=0.1), n=n)


def backward(problem: Any, replicas: Replicas, indices: Any = None) -> None:
    for replica in replicas.local:
        if indices is None or replica.index in indices:
            problem.loss(replica.model, problem.batch(0, replica.index)).backward()


def test_the_first_replica_is_the_users_own_and_the_others_are_whole_copies(problem: Any) -> None:
    model = problem.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    problem.loss(model, problem.batch(0, 0)).backward()
    optimizer.step()
    replicas = hdet.replicate(model, optimizer, n=3)
    assert replicas.local[0].model is model
    assert replicas.local[0].optimizer is optimizer
    assert [replica.index for replica in replicas.local] == [0, 1, 2]
    for replica in replicas.local[1:]:
        own = list(replica.model.parameters())
        held = [p for group in replica.optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(own, held, strict=True))
        assert all(a is not b and torch.equal(a, b) for a, b in zip(own, model.parameters(), strict=True))
        assert torch.equal(replica.optimizer.state[own[0]]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_what_an_optimizer_keeps_outside_its_groups_is_copied(problem: Any) -> None:
    """Torch's own way of copying forgets it, and Prodigy then cannot step."""
    model = problem.model()
    replicas = hdet.replicate(model, prodigyopt.Prodigy(model.parameters(), d0=1e-5), n=2)
    assert replicas.local[1].optimizer.d0 == 1e-5
    backward(problem, replicas)
    replicas.local[1].optimizer.step()


def test_a_scheduler_on_the_optimizer_does_not_steer_the_copies(problem: Any) -> None:
    """A scheduler puts a wrapped `step` on its optimizer, bound to it."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    replicas = hdet.replicate(model, optimizer, n=2)
    before = [replica.model[0].weight.detach().clone() for replica in replicas.local]
    backward(problem, replicas)
    replicas.local[1].optimizer.step()
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(replicas.local[1].model[0].weight, before[1])


def test_shared_gradients_are_the_mean(problem: Any) -> None:
    replicas = copies(problem)
    backward(problem, replicas)
    own = [[p.grad.clone() for p in replica.model.parameters()] for replica in replicas.local]
    replicas.share_gradients()
    for replica in replicas.local:
        for k, p in enumerate(replica.model.parameters()):
            torch.testing.assert_close(p.grad, torch.stack([grads[k] for grads in own]).mean(dim=0))
    first = next(iter(replicas.local[0].model.parameters())).grad
    assert all(torch.equal(next(iter(replica.model.parameters())).grad, first) for replica in replicas.local)


def test_a_missing_gradient_counts_as_zero(problem: Any) -> None:
    replicas = copies(problem)
    backward(problem, replicas, indices=[1])
    own = replicas.local[1].model[0].weight.grad.clone()
    replicas.share_gradients()
    for replica in replicas.local:
        torch.testing.assert_close(replica.model[0].weight.grad, own / 3)


def test_a_layer_that_is_frozen_in_all_replicas_is_supported(problem: Any) -> None:
    replicas = copies(problem)
    for model, _ in replicas.hosts:
        model[0].requires_grad_(False)
    backward(problem, replicas)
    own = [model[2].weight.grad.clone() for model, _ in replicas.hosts]
    replicas.share_gradients()
    for model, _ in replicas.hosts:
        assert model[0].weight.grad is None
        torch.testing.assert_close(model[2].weight.grad, torch.stack(own).mean(dim=0))


def test_a_layer_that_is_frozen_in_some_replicas_is_named(problem: Any) -> None:
    """And layers of one shape are never taken for each other."""
    replicas = copies(problem)
    for number, (model, _) in enumerate(replicas.hosts):
        model[0].weight.requires_grad_(number == 0)
        model[2].bias.requires_grad_(number != 0)
    backward(problem, replicas)
    with pytest.raises(StepError, match=r"'0.weight', '2.bias' took gradients in some replicas and not in others"):
        replicas.share_gradients()


def test_no_gradients_at_all_are_left_alone(problem: Any) -> None:
    replicas = copies(problem)
    replicas.share_gradients()
    assert all(p.grad is None for replica in replicas.local for p in replica.model.parameters())


def test_a_nan_gradient_is_not_swallowed(problem: Any) -> None:
    replicas = copies(problem)
    backward(problem, replicas)
    replicas.local[2].model[0].weight.grad[0, 0] = math.nan
    replicas.share_gradients()
    assert all(replica.model[0].weight.grad[0, 0].isnan() for replica in replicas.local)


def set_apart(replicas: Replicas) -> list[torch.Tensor]:
    with torch.no_grad():
        for replica in replicas.local:
            replica.model[0].weight += replica.index + 1.0
    return [replica.model[0].weight.detach().clone() for replica in replicas.local]


def test_the_mean_is_over_valid_replicas_and_goes_to_all(problem: Any) -> None:
    replicas = copies(problem)
    weights = set_apart(replicas)
    with torch.no_grad():
        replicas.local[1].model[0].weight.fill_(math.nan)
    replicas.mean([True, False, True], "keep")
    for replica in replicas.local:
        torch.testing.assert_close(replica.model[0].weight, (weights[0] + weights[2]) / 2)


def test_one_valid_replica_is_copied_bit_for_bit(problem: Any) -> None:
    replicas = copies(problem)
    weights = set_apart(replicas)
    replicas.mean([False, False, True], "average")
    assert all(torch.equal(replica.model[0].weight, weights[2]) for replica in replicas.local)


def test_combine_weighs_parameters_and_leaves_weight_0_out(problem: Any) -> None:
    replicas = copies(problem)
    weights = set_apart(replicas)
    with torch.no_grad():
        replicas.local[1].model[0].weight.fill_(math.nan)
    combined = replicas.combine(np.array([0.25, 0.0, -1.5]))
    torch.testing.assert_close(combined[0], 0.25 * weights[0] - 1.5 * weights[2])
    assert combined[0].dtype == torch.float32
    assert torch.equal(replicas.local[0].model[0].weight, weights[0])


def test_a_model_that_has_no_copy_is_told_of() -> None:
    model = nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(2, 2)))
    model(torch.ones(1, 2))
    with pytest.raises(ConfigError, match=r"the model cannot be copied .*torch\.nn\.utils\.parametrizations"):
        hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)


@pytest.mark.filterwarnings("ignore:.*beta state.*")
def test_a_compressed_tensor_that_is_a_plain_attribute_is_copied() -> None:
    """And one that is a buffer too, or of two modules, is one in the copy."""
    model = nn.Sequential(nn.Linear(3, 1), nn.Identity())
    model.register_buffer("held", torch.eye(3).to_sparse_csr())
    model[1].held, model[1].plain = model.held, torch.eye(3).to_sparse_csc()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    other: Any = replicas.hosts[1][0]
    assert other[1].held is other.held
    assert other[1].plain is not model[1].plain
    assert torch.equal(other[1].plain.to_dense(), torch.eye(3))


@pytest.mark.filterwarnings("ignore:.*prototype.*")
def test_a_nested_tensor_without_a_shape_is_told_of() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    with pytest.raises(ConfigError, match=r"holds a nested tensor of the layout torch\.strided, which has no shape"):
        hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)


def test_combine_of_some_parameters_reads_no_other(problem: Any) -> None:
    replicas = copies(problem)
    weights = set_apart(replicas)
    every = replicas.combine(np.full(3, 1 / 3))
    which = [number == 0 for number in range(len(every))]
    (combined,) = replicas.combine(np.full(3, 1 / 3), which)
    assert torch.equal(combined, every[0])
    assert combined.shape == weights[0].shape


def test_integers_among_the_parameters_are_taken_over_and_not_averaged(problem: Any) -> None:
    """Of packed weights a mean in float32 would lose bits."""
    packed = torch.tensor([2**24 + 1, 2**30 + 7, 2**31 - 1], dtype=torch.int32)
    model = problem.model()
    model.register_parameter("packed", nn.Parameter(packed.clone(), requires_grad=False))
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=3)
    with torch.no_grad():
        replicas.local[1].model.packed.add_(-5)
    for valid, want in (([True] * 3, packed), ([False, True, True], packed - 5)):
        with torch.no_grad():
            replicas.local[0].model.packed.copy_(packed)
            replicas.local[1].model.packed.copy_(packed - 5)
        replicas.mean(valid, "keep")
        assert all(torch.equal(replica.model.packed, want) for replica in replicas.local)


def test_by_weights_of_its_own_for_each_parameter_what_is_frozen_is_merged_too(problem: Any) -> None:
    """As a teacher that a forward pass moves, and one that is not finite."""
    model = problem.model()
    model.register_parameter("teacher", nn.Parameter(torch.zeros(2), requires_grad=False))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    replicas = hdet.replicate(model, torch.optim.SGD(trained, lr=0.1), n=3)
    with torch.no_grad():
        replicas.local[1].model.teacher.fill_(4.0)
        replicas.local[2].model.teacher.fill_(math.nan)
    weights = np.outer([1.0, 3.0, 0.0], np.ones(len(trained)))
    replicas.mean([True, True, False], "keep", weights)
    assert [replica.model.teacher.tolist() for replica in replicas.local] == [[3.0, 3.0]] * 3


def test_combine_of_half_precision_is_in_single(problem: Any) -> None:
    replicas = copies(problem)
    for replica in replicas.local:
        replica.model.bfloat16()
    assert replicas.combine(np.full(3, 1 / 3))[0].dtype == torch.float32


class Turns(nn.Module):
    """Parameters of other kinds than float32."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.tensor([1.0 + 2.0j, -3.0j]))
        self.fine = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))


def turned() -> Replicas:
    model = Turns()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    with torch.no_grad():
        replicas.local[1].model.turns.mul_(3.0j)
        replicas.local[1].model.fine.add_(2e-12)
    return replicas


@pytest.mark.parametrize("merge", [hdet.merges.Mean("keep"), hdet.merges.Outer(1.0, options={})])
def test_complex_parameters_are_merged_whole(merge: hdet.merges.Merge) -> None:
    replicas = turned()
    engine = hdet.Engine(replicas, [], window=1, total_steps=1, gradients="local", merge=merge)
    engine.step([torch.tensor(0.0)] * 2)
    for replica in replicas.local:
        assert replica.model.turns.tolist() == [-2.5 + 2.5j, 4.5 - 1.5j]


def test_combine_keeps_complex_and_double_precision() -> None:
    turns, fine = turned().combine(np.array([0.5, 0.5]))
    assert turns.tolist() == [-2.5 + 2.5j, 4.5 - 1.5j]
    assert fine.item() == pytest.approx(1.0 + 1e-12, abs=1e-15)


def test_buffers_are_averaged_counters_and_masks_taken_over(problem: Any) -> None:
    replicas = copies(problem, 3, nn.BatchNorm1d(6))
    for replica in replicas.local:
        norm = replica.model[2]
        norm.running_mean.fill_(float(replica.index))
        norm.num_batches_tracked.fill_(10 * replica.index)
        norm.register_buffer("mask", torch.tensor([-math.inf, float(replica.index)]))
        norm.register_buffer("phases", torch.tensor([replica.index * (1.0 - 2.0j)]))
    replicas.mean_buffers([False, True, True])
    for _ in range(2):  # twice does no more than once
        for replica in replicas.local:
            norm = replica.model[2]
            assert norm.running_mean.tolist() == [1.5] * 6
            assert norm.num_batches_tracked == 10
            assert norm.mask.tolist() == [-math.inf, 1.0]
            assert norm.phases.tolist() == [1.5 - 3.0j]
        replicas.mean_buffers([False, True, True])


def test_gather_is_in_double_precision(problem: Any) -> None:
    rows = torch.tensor([[1.0, math.nan], [2.0, 3.0], [4.0, 5.0]], requires_grad=True)
    table = copies(problem).gather(rows)
    assert table.dtype == np.float64
    assert table.shape == (3, 2)
    assert np.isnan(table[0, 1])


def test_seats_share_one_model_and_average_what_they_accumulate(problem: Any) -> None:
    model = problem.model()
    reference = copy.deepcopy(model)
    replicas = hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=0.1), n=3)
    assert replicas.size == 3
    assert len(replicas.hosts) == 1
    assert not replicas.diverge
    assert all(replica.model is model for replica in replicas.local)
    backward(problem, replicas)
    replicas.share_gradients()
    whole = [torch.cat(parts) for parts in zip(*[problem.batch(0, index) for index in range(3)], strict=True)]
    problem.loss(reference, whole).backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_parameters_of_another_model_are_refused(problem: Any) -> None:
    model, other = problem.model(), problem.model()
    for make in (hdet.replicate, hdet.micro_batches):
        with pytest.raises(ConfigError, match=r"2 parameters that are not the model's.*from this model's parameters"):
            make(model, torch.optim.SGD([*model.parameters(), *other[0].parameters()], lr=0.1), n=2)
        with pytest.raises(ConfigError, match="n must be at least 1, got -1"):
            make(model, torch.optim.SGD(model.parameters(), lr=0.1), n=-1)


def test_a_cache_that_grows_with_a_replicas_data_stays_its_own(problem: Any) -> None:
    replicas = copies(problem, 3, nn.BatchNorm1d(6))
    for number, (model, _) in enumerate(replicas.hosts):
        model.register_buffer("cache", torch.full((number,), float(number)), persistent=False)
        model[2].running_mean.fill_(float(number))  # type: ignore[index]
    replicas.mean([True, True, True], "keep")
    for number, (model, _) in enumerate(replicas.hosts):
        assert model.cache.tolist() == [float(number)] * number  # type: ignore[operator]
        assert model[2].running_mean.tolist() == [1.0] * 6  # type: ignore[index]


@pytest.mark.parametrize("act", [lambda own: own.mean([True] * 3, "keep"), lambda own: own.copy([2, 1, 2])])
def test_a_buffer_that_one_copy_alone_has_is_named(act: Any, problem: Any) -> None:
    replicas = copies(problem, 3, nn.BatchNorm1d(6))
    replicas.hosts[2][0].register_buffer("cache", torch.ones(1))
    with pytest.raises(StepError, match=r"do not hold the same buffers \('cache'\)"):
        act(replicas)


def test_whoever_takes_a_replicas_place_has_its_cache(problem: Any) -> None:
    (first, *_), (second, *_) = hosts = copies(problem, 2).hosts
    first.register_buffer("cache", torch.ones(3))
    second.register_buffer("cache", torch.zeros(1))
    transplant(*hosts)
    assert second.cache.tolist() == [1.0, 1.0, 1.0]  # type: ignore[operator]


def jagged() -> nn.Parameter:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return nn.Parameter(rows, requires_grad=False)


@torch.inference_mode()
def cached() -> torch.Tensor:
    """As a cache is that an evaluation has filled."""
    return torch.ones(3)


@pytest.mark.filterwarnings("ignore:.*beta state.*")
@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: nn.Parameter(torch.eye(3).to_sparse_csr(), requires_grad=False),
        jagged,
        lambda: torch.full((1, 3), 0.3).expand(3, 3),
        lambda: nn.Parameter(torch.full((1, 3), 0.3).expand(3, 3), requires_grad=False),
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
        lambda: torch.ones(3, device="meta"),
        cached,
    ],
    ids=[
        "sparse",
        "compressed",
        "compressed and frozen",
        "jagged and frozen",
        "expanded",
        "expanded and frozen",
        "float8",
        "meta",
        "made in inference",
    ],
)
def test_what_has_no_mean_or_cannot_be_written_over_stays_each_replicas_own(made: Any, problem: Any) -> None:
    """As the adjacency matrix of a graph network, which is often sparse."""
    model, odd = problem.model(), made()
    if isinstance(odd, nn.Parameter):
        model.odd = odd
    else:
        model.register_buffer("odd", odd)
    replicas = hdet.replicate(model, torch.optim.AdamW(model[0].parameters(), lr=0.1), n=2)
    other = replicas.hosts[1][0]
    with torch.no_grad():
        other[0].weight.add_(1.0)  # type: ignore[operator, index]
    expected = (model[0].weight + other[0].weight).detach() / 2  # type: ignore[index]
    replicas.mean([True, True], "average")
    assert torch.allclose(model[0].weight, expected)
    with torch.no_grad():
        other[0].weight.add_(1.0)  # type: ignore[operator, index]
    replicas.copy([1, 1])
    assert torch.equal(model[0].weight, other[0].weight)  # type: ignore[index]
