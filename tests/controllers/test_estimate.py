import math
from dataclasses import dataclass

import numpy as np
import pytest

from hdet.controllers import Estimate
from hdet.controllers.estimators import Comparison
from hdet.errors import ConfigError


@pytest.mark.parametrize(
    ("slope", "stderr", "t"),
    [
        (1.0, 0.5, 2.0),
        (-1.0, 0.5, -2.0),
        (0.0, 0.5, 0.0),
        (0.0, 0.0, 0.0),
        (1.0, math.inf, 0.0),
        (math.nan, 1.0, 0.0),
        (1.0, math.nan, 0.0),
        (-1.0, 0.0, -math.inf),
    ],
)
def test_t(slope: float, stderr: float, t: float) -> None:
    assert Estimate(slope=slope, stderr=stderr).t == t


@pytest.mark.parametrize("name", ["stderr", "curvature_stderr"])
def test_a_standard_error_below_0_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be at least 0, .* got -0\.1"):
        Estimate(slope=1.0, **{name: -0.1})
    assert vars(Estimate(slope=1.0, **{name: 0.0}))[name] == 0.0


@pytest.mark.parametrize("name", ["slope", "stderr", "offset", "slopes"])
def test_what_no_estimate_is_without_is_asked_for(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} of an Estimate is None, and no number can be made of that"):
        Estimate(**{"slope": 1.0, name: None})


@pytest.mark.parametrize("freedom", [0, -1.0, math.nan])
def test_freedom_that_is_not_above_0_is_refused(freedom: float) -> None:
    with pytest.raises(ConfigError, match=r"^freedom must be above 0, and None where nobody knows it; got"):
        Estimate(slope=1.0, stderr=1.0, freedom=freedom)


def test_of_very_many_numbers_t_is_a_normal_deviate() -> None:
    assert Estimate(slope=1.0, stderr=0.5, freedom=math.inf).normal_stderr == 0.5


@pytest.mark.parametrize(
    ("estimate", "known", "testable"),
    [
        (Estimate.nothing(), False, False),
        (Estimate(slope=math.nan, stderr=1.0), False, False),
        (Estimate(slope=math.inf, stderr=1.0), False, False),
        (Estimate(slope=1.0, stderr=math.nan), False, False),
        (Estimate(slope=1.0), True, False),
        (Estimate(slope=0.0, stderr=0.0), True, True),
        (Estimate(slope=1.0, stderr=1.0), True, True),
    ],
)
def test_known_and_testable(estimate: Estimate, known: bool, testable: bool) -> None:
    assert (estimate.known, estimate.testable) == (known, testable)


@pytest.mark.parametrize("t", [0.01, 1e-100, 5e-162, 1e-170, -1e-300])
def test_a_small_t_is_nearly_normal_also_where_it_has_no_square(t: float) -> None:
    """Also where its square vanishes."""
    assert Estimate(slope=t, stderr=1.0, freedom=7.0).normal_stderr == pytest.approx(59 / 57, rel=1e-4)


def test_only_valid_and_finite_replicas_are_heard() -> None:
    comparison = Comparison(
        levels=np.array([[1.0], [2.0], [np.nan], [4.0], [5.0]]),
        losses=np.array([[1.0, 1.0], [np.nan, 2.0], [3.0, 3.0], [np.inf, np.nan], [5.0, 6.0]]),
        shifts=np.zeros(1),
        valid=np.array([True, True, True, False, True]),
    )
    levels, losses = comparison.heard()
    assert levels.tolist() == [[1.0], [5.0]]
    assert losses.tolist() == [[1.0, 1.0], [5.0, 6.0]]


def test_losses_without_sub_batches_become_one_column() -> None:
    comparison = Comparison(np.zeros((3, 2)), np.arange(3.0), np.zeros(2), np.ones(3, dtype=bool))
    assert comparison.heard()[1].shape == (3, 1)
    assert comparison.knobs == 2


@pytest.mark.parametrize(
    ("levels", "losses", "shifts", "valid"),
    [
        ((3, 2), (4,), (2,), (3,)),
        ((3, 2), (3, 0), (2,), (3,)),
        ((3, 2), (3, 1, 1), (2,), (3,)),
        ((3, 2), (3,), (3,), (3,)),
        ((3, 2), (3,), (2,), (2,)),
        ((3,), (3,), (1,), (3,)),
    ],
)
def test_shapes_that_disagree_are_named(
    levels: tuple[int, ...], losses: tuple[int, ...], shifts: tuple[int, ...], valid: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"levels \[N, K\].*\(3,"):
        Comparison(np.zeros(levels), np.zeros(losses), np.zeros(shifts), np.ones(valid, dtype=bool))


def test_numbers_of_others_become_pythons_and_what_is_none_is_named() -> None:
    told = Estimate(np.float32(0.5), stderr=np.float64(0.25), slopes=np.array([0.25, 0.75], dtype=np.float32))
    assert (type(told.slope), type(told.stderr)) == (float, float)
    assert told.slopes == (0.25, 0.75)
    assert {type(own) for own in told.slopes} == {float}
    with pytest.raises(ConfigError, match="slope of an Estimate is 1j, and no number"):
        Estimate(1j)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"slopes of an Estimate is 0\.5, and no number"):
        Estimate(0.5, slopes=0.5)  # type: ignore[arg-type]


def test_an_estimate_of_ones_own_may_hold_other_fields() -> None:
    @dataclass(frozen=True)
    class Named(Estimate):
        source: str = "probe"

    assert Named(0.5).source == "probe"
