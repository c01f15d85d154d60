"""Losses of the probe that are not finite."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from hdet.evidence.parts.unusable import WINDOWS, Unusable

SOUND = np.ones((4, 3))


def at(*places: tuple[int, int]) -> np.ndarray:
    """Losses of four points by three sub-batches, NaN at some places."""
    losses = SOUND.copy()
    for place in places:
        losses[place] = np.nan
    return losses


def test_a_sub_batch_that_is_finite_nowhere_is_told_at_once() -> None:
    with pytest.warns(UserWarning, match=r"the probe's loss is not finite on sub-batches \[1\] of 3, at any weights"):
        Unusable().look(0, at(*((point, 1) for point in range(4))), 2)


def test_a_sub_batch_that_is_finite_nowhere_is_not_one_that_is_finite_at_some_points() -> None:
    own = Unusable()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for window in range(WINDOWS):
            own.look(window, at(*((point, 1) for point in range(4))), 2)
    assert ["at any weights" in str(warning.message) for warning in caught] == [True] * WINDOWS


@pytest.mark.parametrize("looked", [True, False])
def test_along_its_gradient_a_sub_batch_is_told_of_once_and_not_after_what_it_is_at_all_points(looked: bool) -> None:
    own = Unusable()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if looked:
            own.look(0, at(*((point, 1) for point in range(4))), 2)
        for window in range(2):
            own.look_along(window, torch.tensor([1.0, torch.nan, 1.0]), "contrast")
    assert [("at any weights" in str(one.message)) for one in caught] == [looked]


def test_points_that_are_not_finite_in_several_windows_on_end_are_told_once() -> None:
    own = Unusable()
    for window in range(WINDOWS - 1):
        own.look(window, at((1, 0)), 2)
        own.look(window, SOUND, 2)  # of other evidence
        own.look(window, at((1, 0)), 2)
    with pytest.warns(UserWarning, match=r"on sub-batches \[0, 2\] of 3 at some .* now where replicas \[1\] of 2 "):
        own.look(WINDOWS - 1, at((1, 0), (3, 2)), 2)
    for window in range(WINDOWS, 2 * WINDOWS):
        own.look(window, at((1, 0)), 2)


def test_a_window_in_which_all_is_finite_begins_the_count_anew() -> None:
    own = Unusable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for window in range(4 * WINDOWS):
            own.look(window, SOUND if window % WINDOWS == 0 else at((0, 0)), 2)
