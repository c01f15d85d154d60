import pytest

from hdet.controllers import Context, Estimate, Paper
from hdet.errors import ConfigError

FLAT = Estimate(slope=1e-300)


def bases(paper: Paper, estimates: list[Estimate], schedule: list[float], authority: float = 10.0) -> list[float]:
    """The base after each window, worked as the engine does: schedule (1 + shift) in `Relative` space.

    The schedule is given at window starts; when a window ends, it has gone half the way to the next.
    """
    state, shift, out = paper.start(), 0.0, []
    for window, estimate in enumerate(estimates):
        now = (schedule[window] + schedule[window + 1]) / 2
        context = Context(
            base=now * (1 + shift),
            schedule_now=now,
            schedule_next=schedule[window + 1],
            step=10 * (window + 1),
            windows_left=len(estimates) - window,
            shift=shift,
            authority=authority,
        )
        move, state = paper.step(state, estimate, context)
        shift += move
        out.append(schedule[window + 1] * (1 + shift))
    return out


def test_recursion_by_hand() -> None:
    # base 2, floor 2 (no decay), beta .5, rate .5. Delta = -slope * base:
    # 0.2: v = 0.1, base = 2.05;  then Delta = 0.1 * 2.05: v = 0.05 + 0.1025 = 0.1525, base = 2.12625.
    paper = Paper(2.0, beta=0.5, rate=0.5)
    estimates = [Estimate(slope=-0.1), Estimate(slope=-0.1)]
    assert bases(paper, estimates, [2.0] * 3) == pytest.approx([2.05, 2.12625])


def test_the_decay_reaches_the_floor_in_the_windows_left() -> None:
    # gamma = 1 - (1 / 0.0625)^(-1/4) = 1/2 for K = 4.
    assert bases(Paper(0.0625), [FLAT] * 4, [1.0] * 5) == pytest.approx([0.5, 0.25, 0.125, 0.0625])


def test_the_printed_decay_would_have_grown() -> None:
    # Erratum: 1 - exp(-log(f_div / f_final) / K) with f_div = 25, f_final = 1e4 is below 0; ours is not.
    (base,) = bases(Paper(1e-7), [FLAT], [1e-3, 1e-3])
    assert base < 1e-3


def test_a_base_below_the_floor_is_not_raised() -> None:
    assert bases(Paper(5.0), [FLAT] * 2, [1.0] * 3) == pytest.approx([1.0, 1.0])


def test_control_waits_for_the_warm_up_and_starts_from_the_base_it_finds() -> None:
    # Steps 10, 20, 30; control from 20 on, where the schedule stands at 3: nothing remembered from before.
    paper = Paper(3.0, warmup_steps=20, beta=0.0, rate=1.0)
    estimates = [Estimate(slope=-0.5), Estimate(slope=-0.1), Estimate(slope=1e-300)]
    assert bases(paper, estimates, [1.0, 3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.3, 3.3])


def test_once_it_controls_the_schedule_does_not_matter() -> None:
    estimates = [Estimate(slope=-0.1), Estimate(slope=0.2), Estimate(slope=-0.3)]
    paper = Paper(0.5)
    steady = bases(paper, estimates, [1.0] * 4)
    assert bases(paper, estimates, [1.0, 1.0, 0.7, 0.2]) == pytest.approx(steady)


def test_a_lost_window_is_made_up_for() -> None:
    # Where the schedule moves meanwhile, the base follows it for one window and then is taken back.
    lost = bases(Paper(1.0), [FLAT, Estimate.nothing(), FLAT], [1.0, 1.0, 0.5, 0.5])
    assert lost == pytest.approx([1.0, 0.5, 1.0])


def test_the_recursion_does_not_run_away_from_its_authority() -> None:
    paper = Paper(1.0, beta=0.0, rate=1.0)
    pushed = bases(paper, [Estimate(slope=-1.0)] * 5 + [Estimate(slope=0.1)], [1.0] * 7, authority=0.5)
    assert pushed[4] == pytest.approx(1.5)
    assert pushed[5] == pytest.approx(1.35)


def test_an_endless_run_is_refused_when_control_begins() -> None:
    paper = Paper(0.1, warmup_steps=5)
    assert paper.step(paper.start(), FLAT, Context(step=4)) == (0.0, paper.start())
    with pytest.raises(ConfigError, match=r"total_steps.*or use HeavyBall"):
        paper.step(paper.start(), FLAT, Context(step=5))


def test_where_the_schedule_comes_to_0_the_base_stays() -> None:
    paper = Paper(0.5)
    _, state = paper.step(paper.start(), FLAT, Context(windows_left=2))
    for state_before in (paper.start(), state):
        assert paper.step(state_before, FLAT, Context(windows_left=1, schedule_next=0.0)) == (0.0, state_before)
