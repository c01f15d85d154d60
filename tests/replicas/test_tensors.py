"""Arithmetic on lists of tensors: exact where it must be, and in a precision that suffices."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hdet
from hdet.errors import ConfigError
from hdet.replicas import tensors
from hdet.replicas.distributed import fully_sharded

numbers = st.floats(-1e3, 1e3, width=32)


def fresh(members: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[torch.full_like(t, 7.0) for t in member] for member in members]


@settings(max_examples=60)
@given(values=st.lists(st.lists(numbers, min_size=1, max_size=5), min_size=1, max_size=3), n=st.integers(1, 9))
def test_the_mean_of_identical_members_is_that_member_bit_for_bit(values: list[list[float]], n: int) -> None:
    """Whatever their number, the sign of zeros included."""
    values[0][0] = -0.0
    members = [[torch.tensor(row) for row in values] for _ in range(n)]
    targets = fresh(members)
    tensors.mean_(members, targets)
    for target in targets:
        for got, want in zip(target, members[0], strict=True):
            assert torch.equal(got.view(torch.int32), want.view(torch.int32))


@settings(max_examples=60)
@given(rows=st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=1, max_size=6))
def test_the_mean_is_the_mean(rows: list[list[float]]) -> None:
    members = [[torch.tensor(row[:1]), torch.tensor(row[1:]).reshape(3, 1)] for row in rows]
    targets = fresh(members[:1])
    tensors.mean_(members, targets)
    want = torch.tensor(rows, dtype=torch.float64).mean(dim=0)
    got = torch.cat([t.flatten() for t in targets[0]]).double()
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_reduced_in_single_precision(dtype: torch.dtype) -> None:
    """A running sum in float16 would overflow; in bfloat16 256 + 1 is 256."""
    values = [30000.0] * 8 if dtype == torch.float16 else [256.0, 1.0, 1.0, 1.0]
    members = [[torch.tensor([value], dtype=dtype)] for value in values]
    tensors.mean_(members, members)
    want = torch.tensor([sum(values) / len(values)]).to(dtype)
    assert all(torch.equal(member[0], want) and member[0].dtype == dtype for member in members)


def test_doubles_stay_doubles() -> None:
    members = [[torch.tensor([1.0 + k * 1e-12], dtype=torch.float64)] for k in range(3)]
    tensors.mean_(members, members)
    assert members[0][0].item() == pytest.approx(1.0 + 1e-12, abs=1e-15)


def test_nothing_has_no_mean() -> None:
    tensors.mean_([], [])
    tensors.mean_([[], []], [[], []])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_one_element_that_is_not_finite_is_found(bad: float, dtype: torch.dtype) -> None:
    sound = [torch.zeros(3, dtype=dtype), torch.full((50, 50), 60000.0, dtype=dtype), torch.ones(2)]
    assert tensors.all_finite(sound)
    sound[1][17, 3] = bad
    assert not tensors.all_finite(sound)
    assert tensors.finite(sound).tolist() == [True, False, True]


def test_the_largest_value_is_the_infinity_norm_to_the_last_bit() -> None:
    drawn = [torch.randn(7, 9, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    want = torch.stack(list(torch._foreach_norm(drawn, math.inf)))
    assert torch.equal(tensors.largest(drawn), want)


def test_what_has_no_numbers_is_finite() -> None:
    assert tensors.all_finite([])
    assert tensors.all_finite([torch.tensor([1, 2]), torch.tensor([True])])


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.same = self.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("none", None)
        self.register_buffer("void", torch.zeros(0))


def test_which_tensors_there_are() -> None:
    model = Odd()
    assert [t.shape[0] for t in tensors.parameters(model)] == [2, 3]
    assert [t.shape[0] for t in tensors.trained(model)] == [2]
    assert tensors.with_mean(model) == [True, False, False, False]
    tensors.parameters(model)[0].fill_(5.0)
    assert model.weight.tolist() == [5.0, 5.0]
    assert tensors.with_mean(nn.Linear(2, 2)) == []


def test_substituted_weights_come_back_even_after_an_error() -> None:
    weights = [torch.ones(2), torch.ones(3)]
    pointers = [t.data_ptr() for t in weights]

    def fail() -> None:
        with tensors.substituted(weights, [torch.zeros(2), torch.full((3,), 2.0)]):
            assert weights[1].tolist() == [2.0] * 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [t.tolist() for t in weights] == [[1.0] * 2, [1.0] * 3]
    assert [t.data_ptr() for t in weights] == pointers


def test_evaluating_restores_modes_however_mixed() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout(), nn.Dropout()).eval())
    model[1][1].train()
    before = [module.training for module in model.modules()]

    def fail() -> None:
        with tensors.evaluating(model):
            assert not any(module.training for module in model.modules())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [module.training for module in model.modules()] == before == [True, True, False, False, True]


class Folding(nn.Module):
    """In eval mode its adapter is folded into its weight, as in loralib; what it works out there goes in training."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.adapter = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.folded = False
        self.known: Tensor | None = None

    def train(self, mode: bool = True) -> Folding:
        super().train(mode)
        if self.folded is mode:
            self.weight.data += self.adapter.data * (-1.0 if mode else 1.0)
            self.folded = not mode
        self.known = None if mode else self.known
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x * (self.weight + self.adapter)
        self.known = self.weight.detach().clone() if self.known is None else self.known
        return x * self.known


@pytest.mark.parametrize("frozen", [False, True])
def test_modules_are_switched_by_their_own_train(frozen: bool) -> None:
    """Back from eval mode, what it folded is taken out again, and what it kept there is of later weights."""
    model = nn.Sequential(Folding(), nn.Sequential(Folding()))
    model[1].train(not frozen)
    folded = [(fold, fold.folded, fold.weight.tolist()) for fold in (model[0], model[1][0])]
    for scale in (1.0, 2.0):
        with torch.no_grad():
            model[0].adapter.fill_(scale)
        with tensors.evaluating(model):
            assert model[0](torch.ones(2)).tolist() == [1.0 + scale] * 2
            assert model[1][0].folded
        assert [(fold, fold.folded, fold.weight.tolist()) for fold, _, _ in folded] == folded
    model.eval()
    with tensors.training(model):
        assert not any(fold.folded for fold, _, _ in folded)
    assert all(fold.folded for fold, _, _ in folded)
    assert not any(module.training for module in model.modules())


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x


class Swapping(nn.Module):
    """In eval mode it has another head, which is no module of its in training."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = (nn.Identity(), Counts())
        self.head: nn.Module = nn.Identity()

    def train(self, mode: bool = True) -> Swapping:
        self.head = self.heads[not mode]
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(x)
        return found


def test_what_a_model_takes_for_evaluation_is_put_back_too() -> None:
    model = Swapping().train()
    with tensors.evaluating(model):
        model(torch.ones(2))
        assert model.head.seen == 1.0
    assert model.heads[1].seen == 0.0


def test_a_module_in_two_others_has_its_own_mode() -> None:
    fold = Folding()
    model = nn.Sequential(nn.Sequential(fold), nn.Sequential(fold).eval())
    fold.train()
    with tensors.evaluating(model):
        assert fold.folded
    assert (fold.folded, fold.weight.tolist()) == (False, [1.0, 1.0])
    assert [module.training for module in model.modules()] == [True, True, True, False]


def test_modes_come_back_that_an_evaluation_of_the_users_own_has_changed() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    model[1].eval()  # frozen statistics
    with tensors.evaluating(model):
        model.train()
    assert [module.training for module in model.modules()] == [True, True, False]


def test_an_optimizer_with_modes_is_switched_and_its_weights_come_back_exactly() -> None:
    """Schedule-Free's own way back is right only up to rounding."""
    import schedulefree

    torch.manual_seed(0)
    model = nn.Linear(50, 50)
    optimizer: Any = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    for _ in range(5):
        model(torch.randn(8, 50)).square().mean().backward()
        optimizer.step()
    before = model.weight.detach().clone()
    with tensors.evaluating(model, optimizer):
        assert not optimizer.param_groups[0]["train_mode"]
        assert not torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["train_mode"]
    assert torch.equal(model.weight, before)
    optimizer.eval()
    with tensors.evaluating(model, optimizer):
        assert not optimizer.param_groups[0]["train_mode"]
    assert not optimizer.param_groups[0]["train_mode"]


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    for replica in replicas.local:
        replica.model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match="dense gradients only"):
        replicas.share_gradients()


@pytest.mark.parametrize("newest", [True, False], ids=["newer", "torch 2.11"])
def test_copies_share_no_memory_and_no_graph(newest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not newest:
        monkeypatch.delattr(torch, "_foreach_clone", raising=False)
    held = [nn.Parameter(torch.ones(2)), torch.tensor([True, False]), torch.tensor(3)]
    copies = tensors.clones(held)
    with torch.no_grad():
        held[0].zero_()
    assert [copy.tolist() for copy in copies] == [[1.0, 1.0], [True, False], 3]
    assert not any(copy.requires_grad for copy in copies)
    assert tensors.clones([]) == []


@pytest.mark.parametrize("layout", [{"_fsdp_param_groups": ["group"]}, {"_fsdp_param_group": "group"}])
def test_the_groups_of_fully_shard_are_found_in_both_places(layout: dict[str, Any]) -> None:
    assert list(fully_sharded._of(SimpleNamespace(**layout))) == ["group"]


def test_weights_that_are_worked_out_once_for_a_block_are_worked_out_anew_for_an_evaluation_inside_it() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with nn.utils.parametrize.cached():
        weight = model.weight
        with tensors.evaluating(model):
            assert model.weight is not weight
        assert model.weight is weight
