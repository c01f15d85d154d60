import math

import pytest

from hdet.controllers import Context, Estimate, Newton, NoState
from hdet.controllers.newton import newton_move


@pytest.mark.parametrize(
    ("slope", "curvature", "move"),
    [
        (-0.2, 1.0, 0.2),
        (0.2, 0.5, -0.4),
        (-0.2, 0.1, 0.5),
        (0.2, 0.1, -0.5),
        (-0.2, 0.0, 0.5),
        (0.2, -3.0, -0.5),
        (0.2, None, -0.5),
        (0.2, math.nan, -0.5),
        (0.2, math.inf, 0.0),
        (-0.2, 1e-320, 0.5),
        (0.0, 1.0, 0.0),
        (0.0, -1.0, 0.0),
    ],
)
def test_newton_move(slope: float, curvature: float | None, move: float) -> None:
    assert newton_move(Estimate(slope, curvature), 0.5) == pytest.approx(move)


def test_gate() -> None:
    estimate = Estimate(slope=0.2, curvature=1.0, stderr=0.1)
    assert Newton(0.5, gate=2.1).step(NoState(), estimate, Context())[0] == 0
    assert Newton(0.5, gate=1.9).step(NoState(), estimate, Context())[0] == pytest.approx(-0.2)


def test_the_spread_is_the_default_limit() -> None:
    estimate = Estimate(slope=-9.0, curvature=1.0, stderr=0.1)
    assert Newton().step(NoState(), estimate, Context(spread=0.3))[0] == 0.3
    assert Newton(0.7).step(NoState(), estimate, Context(spread=0.3))[0] == 0.7


def test_where_the_evidence_tells_how_far_it_looked_that_is_the_default_limit() -> None:
    estimate = Estimate(slope=-9.0, curvature=1.0, stderr=0.1, span=0.1)
    assert Newton().step(NoState(), estimate, Context(spread=0.3))[0] == 0.1


def test_an_exact_parabola_is_solved_in_one_step() -> None:
    # L = 3 (u - 0.4)^2 / 2 at u = 0: slope -1.2, curvature 3.
    move, _ = Newton(0.5).step(NoState(), Estimate(-1.2, 3.0, stderr=0.0), Context())
    assert move == pytest.approx(0.4)
