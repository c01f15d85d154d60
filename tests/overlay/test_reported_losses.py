"""The scale that reported losses are on, told from the held-out loss at the same weights."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from hdet.overlay.reported_losses import FAR, NEAR, ReportedLosses

HELD_OUT = 2.0


def judged(reported: float, passes: int) -> ReportedLosses:
    losses = ReportedLosses()
    for number in range(passes):
        losses.note(number, torch.tensor(reported))
    losses.judge(reported, HELD_OUT, passes)
    return losses


@pytest.mark.parametrize("passes", [2, 4, 32])
@pytest.mark.parametrize("off", [1.0, 0.8, 1.25])
def test_a_loss_is_divided_where_the_number_of_passes_explains_it_and_nothing_else(passes: int, off: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, part = judged(HELD_OUT * off, passes), judged(HELD_OUT * off / passes, passes)
    assert (whole.divided, part.divided) == (False, True)
    for losses in (whole, part):
        given = losses.of(passes, passes)
        assert given is not None
        assert [float(loss) for loss in given] == pytest.approx([HELD_OUT * off] * passes)
        assert (losses.of(passes, passes - 1) is None) == losses.divided


@pytest.mark.filterwarnings("ignore:the first training loss is")
@pytest.mark.parametrize("beyond", [1.02, 1 / 1.02])
def test_a_loss_that_is_only_nearer_to_a_part_is_left_as_it_is(beyond: float) -> None:
    """Beyond `NEAR` a model that has learned its training data by heart is as good an explanation."""
    off = NEAR * beyond if beyond > 1 else beyond / NEAR
    assert not judged(HELD_OUT * off / 4, 4).divided
    inside = NEAR / 1.02 if beyond > 1 else 1.02 / NEAR
    assert judged(HELD_OUT * inside / 4, 4).divided


@pytest.mark.parametrize("off", [0.68, 0.72])
def test_of_two_passes_backward_tells_what_the_loss_alone_does_not(off: float) -> None:
    losses = ReportedLosses()
    for number in range(2):
        reported = torch.tensor(HELD_OUT * off, requires_grad=True) * 1
        losses.note(number, reported)
        (reported / 2).backward()
    losses.judge(HELD_OUT * off, HELD_OUT, 2)
    assert not losses.divided


@pytest.mark.parametrize("first", [math.inf, math.nan])
def test_losses_that_are_not_finite_leave_the_scale_to_the_next_step(first: float) -> None:
    losses = judged(first, 4)
    assert not losses.known
    losses.clear()
    for number in range(4):
        losses.note(number, torch.tensor(HELD_OUT / 4))
    losses.judge(HELD_OUT / 4, HELD_OUT, 4)
    assert (losses.known, losses.divided) == (True, True)


def test_one_pass_is_never_divided() -> None:
    assert not judged(HELD_OUT / 2, 1).divided


def test_another_scale_is_said_beyond_a_factor_that_chance_does_not_make() -> None:
    with pytest.warns(UserWarning, match="the first training loss is"):
        judged(HELD_OUT * FAR * 1.02, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        judged(HELD_OUT * FAR / 1.02, 4)
        judged(float("nan"), 4)
        judged(0.0, 4)


def test_a_loss_that_the_loop_goes_on_with_in_place_is_the_one_that_was_reported() -> None:
    losses, loss = ReportedLosses(), torch.tensor(2.0, requires_grad=True) * 1.0
    losses.note(0, loss)
    loss /= 4
    assert losses.of(1, 1) == [torch.tensor(2.0)]
