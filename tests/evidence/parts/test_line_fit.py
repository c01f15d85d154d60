"""Slope and curvature from losses at points of a line."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from hdet.controllers import Estimate
from hdet.errors import ConfigError
from hdet.evidence import Analytic, Evidence, OuterLine, Recursion
from hdet.evidence.parts.line_fit import along, bottom_in_value

X = np.array([-0.3, 0.0, 0.3])
PARABOLA = np.stack([(X - 1.0) ** 2, (X - 1.0) ** 2 + 0.1 * X], axis=1)


@pytest.mark.parametrize("kind", [Analytic, OuterLine, Recursion])
def test_points_that_tell_no_slope_are_refused(kind: Callable[..., Evidence]) -> None:
    for points in ((), (1.0,), (1.0, 1.0)):
        with pytest.raises(ConfigError, match="a slope needs at least 2 distinct points"):
            kind(points=points)
    kind(points=(-1.0, 1.0))


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("places", [(0, 0), (2, 1), (slice(None), 1)])
def test_a_loss_that_is_not_finite_tells_nothing(places: tuple[int | slice, int], loss: float) -> None:
    losses = PARABOLA.copy()
    losses[places] = loss
    assert along(X.tolist(), losses) == Estimate.nothing()
    assert bottom_in_value(X.tolist(), losses) is None


def test_losses_that_are_the_same_at_all_points_leave_no_rounding() -> None:
    """It would be shared by all sub-batches, and so look certain."""
    told = along(X.tolist(), np.tile([0.1, 1 / 3, 1e5 / 7], (3, 1)))
    assert (told.slope, told.stderr, told.curvature, told.curvature_stderr) == (0.0, 0.0, 0.0, 0.0)
    assert bottom_in_value(X.tolist(), np.ones((3, 2))) is None


def test_two_points_tell_no_curvature_and_no_bottom() -> None:
    two, ends = [-0.3, 0.3], PARABOLA[[0, 2]]
    assert along(two, ends).curvature is None
    assert bottom_in_value(two, ends) is None


@pytest.mark.parametrize("curvature", [2.0, 0.1])
def test_sub_batches_that_are_all_the_same_prove_a_bottom_however_flat(curvature: float) -> None:
    losses = np.stack([curvature * (np.exp(X) - 1.2) ** 2 / 2] * 2, axis=1)
    assert bottom_in_value(X.tolist(), losses) == pytest.approx(math.log(1.2))


@pytest.mark.parametrize(("sub_batches", "least"), [(8, 3.0), (4, 4.64), (2, 56.5)])
def test_a_curvature_of_few_standard_errors_proves_no_bottom(sub_batches: int, least: float) -> None:
    """Of fewer sub-batches more are asked for: so many as chance goes beyond as rarely as beyond 3 of eight."""
    s = np.exp(X)
    for share, proven in ((0.97, False), (1.03, True)):
        scatter = 2.0 * math.sqrt(sub_batches - 1) / (share * least)  # half of them above 2, half below
        curvatures = [2.0 + way * scatter for way in (-1, 1) * (sub_batches // 2)]
        losses = np.stack([own * (s - 1.2) ** 2 / 2 for own in curvatures], axis=1)
        found = bottom_in_value(X.tolist(), losses)
        assert found == (pytest.approx(math.log(1.2)) if proven else None)
