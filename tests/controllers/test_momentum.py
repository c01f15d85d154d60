import pytest

from hdet.controllers import Context, Estimate, HeavyBall


def test_by_hand() -> None:
    # v: 0.1 * 2 = 0.2; 0.9 * 0.2 + 0.1 * 2 = 0.38; 0.9 * 0.38 - 0.1 = 0.242. Moves are half of it.
    momentum = HeavyBall(beta=0.9, rate=0.5)
    state, moves = momentum.start(), []
    for slope in (-2.0, -2.0, 1.0):
        move, state = momentum.step(state, Estimate(slope=slope), Context())
        moves.append(move)
    assert moves == pytest.approx([0.1, 0.19, 0.121])


def test_settles_at_a_constant_slope() -> None:
    momentum = HeavyBall(beta=0.9, rate=0.5)
    state = momentum.start()
    for _ in range(300):
        move, state = momentum.step(state, Estimate(slope=-2.0), Context())
    assert move == pytest.approx(1.0)
