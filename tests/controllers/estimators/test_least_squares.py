import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdet.contrib import Marginal
from hdet.controllers import Estimate, NoState
from hdet.controllers.estimators import Comparison, LeastSquares

LINE = 0.3 * np.array([-1.0, -0.4, 0.4, 1.0])


def fit(levels: object, losses: object, estimator: LeastSquares | Marginal) -> list[Estimate]:
    levels = np.array(levels, dtype=np.float64)
    n, k = levels.shape
    comparison = Comparison(levels, np.array(losses), np.zeros(k), np.ones(n, dtype=bool))
    return estimator.estimate(NoState(), comparison)[0]


@given(a=st.floats(-5, 5), b=st.floats(-5, 5), c=st.floats(-5, 5), d=st.floats(-5, 5))
@settings(max_examples=30)
def test_an_exact_quadratic_in_two_knobs_is_recovered(a: float, b: float, c: float, d: float) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.uniform(-0.5, 0.5, (2, 9))
    losses = 1 + a * x + c * x**2 / 2 + b * y + d * y**2 / 2
    first, second = fit(np.stack([x, y], axis=1), losses, LeastSquares(curvature=True))
    assert (first.slope, first.curvature) == pytest.approx((a, c), abs=1e-6)
    assert (second.slope, second.curvature) == pytest.approx((b, d), abs=1e-6)


def test_a_line_probe_with_sub_batches_gives_the_bracket_rules_t() -> None:
    # Four points, eight sub-batches, y_j = a_j + b_j x + c_j x^2 / 2: b and c are means over j, and
    # t = b / (sd(b_j) / sqrt 8) although four points leave hardly a residual.
    draw = np.random.default_rng(1)
    a, b, c = draw.normal(size=8), draw.normal(-1, 0.3, size=8), draw.normal(2, 0.3, size=8)
    losses = a + np.outer(LINE, b) + np.outer(LINE**2 / 2, c)
    (estimate,) = fit(LINE[:, None], losses, LeastSquares(curvature=True))
    assert estimate.slope == pytest.approx(b.mean())
    assert estimate.curvature == pytest.approx(c.mean())
    assert estimate.t == pytest.approx(b.mean() / (b.std(ddof=1) / np.sqrt(8)))
    assert estimate.curvature_stderr == pytest.approx(c.std(ddof=1) / np.sqrt(8))


def test_two_levels_have_no_curvature_and_leave_it_to_those_that_do() -> None:
    # [x_lr, x_decay, x_lr^2]: the learning rate has four levels, the decay two.
    x, y = np.tile(LINE, 2), np.repeat([-0.7, 0.7], 4)
    losses = 1 + 2 * x + 3 * x**2 / 2 - y
    rate, decay = fit(np.stack([x, y], axis=1), losses, LeastSquares(curvature=True))
    assert (rate.slope, rate.curvature) == pytest.approx((2, 3))
    assert decay.slope == pytest.approx(-1)
    assert decay.curvature is None


def test_curvature_waits_for_degrees_of_freedom() -> None:
    # Two columns, an intercept and no residual left: linear instead, and with an error.
    x = np.array([-1.0, 0.2, 1.0])
    (estimate,) = fit(x[:, None], x + x**2, LeastSquares(curvature=True))
    assert estimate.curvature is None
    assert np.isfinite(estimate.stderr)
    # Sub-batches bring their own errors, so the same three points suffice.
    losses = (x + x**2)[:, None] * np.array([1.0, 1.2])
    (estimate,) = fit(x[:, None], losses, LeastSquares(curvature=True))
    assert (estimate.slope, estimate.curvature) == pytest.approx((1.1, 2.2))
    # Where the scatter of replicas is part of the error, it has to be left, too.
    (estimate,) = fit(x[:, None], losses, LeastSquares(curvature=True, replica_noise=True))
    assert estimate == fit(x[:, None], losses, LeastSquares(replica_noise=True))[0]
    assert np.isfinite(estimate.stderr)


def test_curvature_is_off_unless_asked_for() -> None:
    (estimate,) = fit(LINE[:, None], LINE**2, LeastSquares())
    assert estimate.curvature is None
    assert estimate.curvature_stderr is None


def test_more_knobs_than_replicas_have_slopes_but_no_errors() -> None:
    signs = np.array([[-1, -1, 1], [1, -1, -1], [-1, 1, -1]], dtype=np.float64)
    for estimate in fit(signs, signs @ [1.0, 0.0, 0.0], LeastSquares()):
        assert estimate.stderr == np.inf
        assert estimate.t == 0


def test_joint_beats_marginal_where_a_neighbour_is_loud() -> None:
    draw = np.random.default_rng(3)
    joint, marginal = [], []
    for _ in range(200):
        levels = draw.uniform(-0.5, 0.5, (8, 2))
        losses = levels @ [5.0, 0.2] + draw.normal(0, 0.05, 8)
        joint.append(fit(levels, losses, LeastSquares())[1].slope - 0.2)
        marginal.append(fit(levels, losses, Marginal())[1].slope - 0.2)
    assert np.std(joint) < 0.15
    assert np.std(marginal) > 1
