"""The sum of a window's losses, and what it tells of those that were not finite."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import hdet
from hdet.engine.tally import CHUNK, Tally
from hdet.errors import StepError


@pytest.fixture
def tally(problem: Any) -> Tally:
    model = problem.model()
    return Tally(hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=3))


def test_means_and_the_step_of_the_first_bad_loss(tally: Tally) -> None:
    tally.add([1.0, 1.0, 1.0])
    tally.add([2.0, math.nan, 2.0])
    tally.add([3.0, 1.0, 3.0])
    tally.add([6.0, 1.0, -math.inf])
    rows = tally.rows()
    assert rows.shape == (3, 11)
    assert rows[:, -1].tolist() == [1.0] * 3
    assert rows[0, :6].tolist() == [3.0, 0.0, 4.0, 1.0, 1.0, 1.0]
    assert math.isnan(rows[1, 0])
    assert rows[1, 1] == 3
    assert rows[2, 0] == -math.inf
    assert rows[2, 1] == 1


def test_a_replica_of_which_nothing_was_gathered_is_absent(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    tally.add([1.0, 2.0, math.nan])
    gathered = tally.rows().double().numpy()
    gathered[0] = math.nan
    monkeypatch.setattr(tally._replicas, "gather", lambda rows: gathered)
    reading = tally.read(7)
    assert reading.valid.tolist() == [False, True, False]
    assert reading.faults == [
        {"kind": "absent", "replica": 0, "step": 6},
        {"kind": "non_finite", "replica": 2, "step": 6, "where": "loss"},
    ]


def test_infinities_that_cancel_do_not_hide(tally: Tally) -> None:
    for loss in (math.inf, -math.inf, 1.0):
        tally.add([loss] * 3)
    assert not tally.rows()[0, 0].isfinite()
    assert tally.rows()[0, 1] == 3


def test_steps_without_losses_do_not_dilute_the_mean(tally: Tally) -> None:
    tally.add([2.0] * 3)
    tally.add(None)
    tally.add([4.0] * 3)
    assert tally.steps == 3
    assert tally.rows()[0, :6].tolist() == [3.0, 0.0, 2.0, 1.0, 1.0, 1.0]


def test_many_steps_are_added_up_in_double_precision(tally: Tally) -> None:
    """More than are noted at a time; in single precision a sum of 16777216 takes no 1 any more."""
    for step in range(3 * CHUNK + 5):
        loss = 2.0**24 if step == 0 else 1.0
        tally.add([loss, math.nan if step in (CHUNK + 3, 2 * CHUNK + 1) else 1.0, 1.0])
    steps = 3 * CHUNK + 5
    rows = tally.rows()
    assert rows[0, :6].tolist() == [(2.0**24 + steps - 1) / steps, 0.0, steps, 1.0, 1.0, 1.0]
    assert rows[1, 1] == steps - (CHUNK + 3)
    assert rows[2, :6].tolist() == [1.0, 0.0, steps, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("at", [CHUNK - 1, CHUNK, CHUNK + 2])
def test_a_restored_tally_goes_on_to_the_same_numbers(tally: Tally, problem: Any, at: int) -> None:
    given = torch.rand(2 * CHUNK, 3, generator=torch.Generator().manual_seed(0))
    model = problem.model()
    other = Tally(hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=3))
    other.add([math.nan] * 3)
    for step, losses in enumerate(given):
        if step == at:
            other.load_state_dict(tally.state_dict())
        tally.add(losses)
        if step >= at:
            other.add(losses)
    assert torch.equal(tally.rows(), other.rows())


def test_of_a_state_without_the_first_loss_it_is_unknown(tally: Tally) -> None:
    """As before it was kept; no number stands for it."""
    for _ in range(CHUNK + 1):
        tally.add([1.0, 2.0, 3.0])
    assert tally.read(CHUNK + 1).first == 2.0
    state = tally.state_dict()
    del state["first"]
    tally.load_state_dict(state)
    assert math.isnan(tally.read(CHUNK + 1).first)


def test_a_loss_that_is_changed_later_was_noted_as_it_was(tally: Tally) -> None:
    """A captured graph writes every step's loss to the same place."""
    losses = [torch.ones((), requires_grad=True).clone() for _ in range(3)]
    tally.add(losses)
    with torch.no_grad():
        losses[0].fill_(7.0)
    assert tally.rows()[:, 0].tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_loss_that_is_read_at_once_counts_as_one_that_is_copied(problem: Any, dtype: torch.dtype) -> None:
    """One loss on the CPU is read, in whatever order with losses that are told otherwise, and saved at any step."""

    def made() -> Tally:
        model = problem.model()
        return Tally(hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=1))

    drawn = torch.randn(2 * CHUNK + 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64).exp().to(dtype)
    drawn[-5] = math.inf
    read, copied, resumed = made(), made(), made()
    for step, loss in enumerate(drawn.unbind()):
        others: list[Any] = [[loss.item()], loss, None]
        read.add([loss] if step % 7 else others[step % 3])
        copied.add(loss.reshape(1) if step % 7 else others[step % 3])
        if step == CHUNK + 3:
            resumed.load_state_dict(read.state_dict())
        elif step > CHUNK + 3:
            resumed.add([loss] if step % 7 else others[step % 3])
        assert torch.equal(read.rows(), copied.rows()) or step % 5
    assert torch.equal(read.rows(), copied.rows())
    assert torch.equal(resumed.rows(), copied.rows())
    assert read.rows()[0, 1] == 5
    read.reset()
    read.add([drawn[0]])
    assert read.rows()[0, 0] == drawn[0].float()
    with pytest.raises(StepError, match=r"has shape \(3,\); a loss is a scalar"):
        read.add([drawn[:3]])


def test_reset_forgets_all(tally: Tally) -> None:
    tally.add([math.nan] * 3)
    tally.reset()
    tally.add([1.0] * 3)
    assert tally.rows()[0, :6].tolist() == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]


def test_its_state_is_a_copy_that_restores_it(tally: Tally) -> None:
    tally.add([1.0, math.nan, 3.0])
    tally.add(None)
    state = tally.state_dict()
    before = tally.rows()
    tally.add([5.0] * 3)
    tally.load_state_dict(state)
    assert torch.equal(tally.rows().nan_to_num(-1), before.nan_to_num(-1))
    assert tally.steps == 2


def test_half_precision_losses_are_summed_in_single(tally: Tally) -> None:
    """In float16 the sum would stop at 2048."""
    for _ in range(3000):
        tally.add(torch.ones(3, dtype=torch.float16))
    assert tally.rows()[:, 0].tolist() == [1.0] * 3


def test_seats_of_one_model_have_losses_of_their_own(problem: Any) -> None:
    model = problem.model()
    tally = Tally(hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=0.1), n=4))
    tally.add([1.0, 2.0, 3.0, 4.0])
    assert tally.rows()[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    assert tally.rows()[:, 3:6].tolist() == [[0.0, 1.0, 1.0]] * 4


@pytest.mark.parametrize("losses", [{"a": 1.0, "b": 2.0, "c": 3.0}, {1.0, 2.0, 3.0}])
def test_losses_without_an_order_are_refused(tally: Tally, losses: Any) -> None:
    with pytest.raises(StepError, match=r"given a (dict|set), whose entries are in no order.*a list of 0-dim"):
        tally.add(losses)


@pytest.mark.parametrize("loss", [0.5, np.float64(0.5), np.float32(0.5), np.float16(0.5), np.int64(2), True], ids=repr)
def test_one_loss_may_be_a_number_of_any_kind(problem: Any, loss: Any) -> None:
    """A mean that NumPy worked out in single precision is no Python float."""
    model = problem.model()
    tally = Tally(hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=1))
    for given in (loss, [loss], torch.tensor(float(loss))):
        tally.add(given)
    assert tally.rows()[0, 0] == float(loss)


@pytest.mark.parametrize("losses", [np.array(0.5), ..., 1j], ids=repr)
def test_what_is_no_loss_is_refused(problem: Any, losses: Any) -> None:
    model = problem.model()
    tally = Tally(hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=1))
    with pytest.raises(StepError, match=f"the loss of replica 0 is a {type(losses).__name__}; give a 0-dim tensor"):
        tally.add(losses)
