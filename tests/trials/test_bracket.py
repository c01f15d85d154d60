"""Which rate is tried next, and where the best one is said to lie."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.errors import DivergedError
from hdet.trials.bracket import Minimum, Trial, is_better, minimum, next_rate

BEFORE = Trial(0.0, tuple(9.0 + 0.1 * j for j in range(8)))


def bowl(best: float, *, noise: float = 0.0, seed: int = 0):
    """Losses of 8 sub-batches: a parabola in log rate, with the same offsets at every rate and a little noise."""
    offsets = np.linspace(-0.2, 0.2, 8)
    rng = np.random.default_rng(seed)

    def trial(rate: float) -> Trial:
        losses = 1.0 + 0.1 * math.log(rate / best) ** 2 + offsets + noise * rng.standard_normal(8)
        return Trial(rate, tuple(losses))

    return trial


def searched(trial, first: float, count: int) -> list[Trial]:
    trials = [trial(first)]
    while len(trials) < count:
        trials.append(trial(next_rate(trials, BEFORE, 4.0)))
    return trials


@given(st.floats(-3.0, 3.0), st.integers(6, 9))
def test_a_parabolas_minimum_is_found_from_far_off(decades: float, count: int) -> None:
    trials = searched(bowl(10.0**decades), 1.0, count + 2 * math.ceil(abs(decades)))
    found = minimum(trials, BEFORE)
    assert found.rate == pytest.approx(10.0**decades, rel=1e-6)
    assert found.verdict == "settled"
    assert found.low <= found.rate <= found.high


def test_no_rate_is_tried_twice() -> None:
    rates = [trial.rate for trial in searched(bowl(0.03, noise=0.01), 1.0, 12)]
    assert len(set(rates)) == len(rates)


def test_where_nothing_can_be_told_it_goes_up() -> None:
    """Far below the best rate nothing is learned; the lower of two such trials is lower by chance."""
    alike = [Trial(1e-6, (2.30, 2.31, 2.29)), Trial(4e-6, (2.31, 2.30, 2.30))]
    assert next_rate(alike, Trial(0.0, (2.30, 2.31, 2.31)), 4.0) == pytest.approx(1.6e-5)


def test_from_rates_that_diverge_it_goes_down() -> None:
    before = Trial(0.0, (2.0, 2.1))
    trials = [Trial(1.0, None)]
    assert next_rate(trials, before, 4.0) == 0.25
    assert next_rate([*trials, Trial(0.25, (9.0, 9.1))], before, 4.0) == 0.0625
    assert next_rate([*trials, Trial(0.25, (1.0, 1.1))], before, 4.0) == 0.0625  # nothing lower is known


def test_a_low_loss_above_a_rate_that_diverged_is_chance() -> None:
    before = Trial(0.0, (1.0, 1.1, 1.2))
    trials = [Trial(0.16, (3.2, 3.1, 3.3)), Trial(0.64, (0.5, 0.6, 0.7)), Trial(2.56, None)]
    assert next_rate(trials, before, 4.0) == 0.04
    with pytest.raises(DivergedError):
        minimum(trials, before)


def test_on_a_plateau_it_looks_below_first() -> None:
    """Losses a little lower at higher rates, all far above what lower rates reach."""
    before = Trial(0.0, (1.0, 1.1, 1.2))
    trials = [Trial(0.16, (0.51, 0.61, 0.71)), Trial(0.64, (0.50, 0.60, 0.70))]
    assert next_rate(trials, before, 4.0) == 0.04
    assert next_rate([*trials, Trial(0.04, (0.2, 0.3, 0.4))], before, 4.0) == 0.01


def test_a_little_worse_than_before_is_not_divergence() -> None:
    """As where the running statistics of a normalisation layer are behind its weights."""
    before = Trial(0.0, (2.30, 2.31, 2.29))
    trials = [Trial(1e-4, (2.35, 2.36, 2.34)), Trial(4e-4, (2.34, 2.35, 2.33))]
    assert next_rate(trials, before, 4.0) == pytest.approx(1.6e-3)


def test_a_neighbour_that_diverged_bounds_the_rate() -> None:
    trials = [Trial(0.1, (2.0, 2.1, 2.2)), Trial(0.4, (1.0, 1.1, 1.3)), Trial(1.6, None)]
    before = Trial(0.0, (5.0, 5.2, 5.1))
    assert minimum(trials, before) == Minimum(0.4, pytest.approx(0.2), pytest.approx(0.8), "settled")
    rising = [Trial(0.1, (2.0, 2.1, 2.2)), Trial(0.4, (1.0, 1.1, 1.3))]
    assert minimum(rising, before) == Minimum(0.4, pytest.approx(0.2), None, "still rising")


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [((0.01, 0.04, 0.16), "still rising"), ((4.0, 16.0, 64.0), "still falling"), ((0.25, 1.0, 4.0), "settled")],
)
def test_what_no_trial_bounds_is_said(rates: tuple[float, ...], verdict: str) -> None:
    found = minimum([bowl(1.0)(rate) for rate in rates], BEFORE)
    assert found.verdict == verdict
    assert (found.high is None, found.low is None) == (verdict == "still rising", verdict == "still falling")


def test_a_neighbour_that_is_as_good_widens_the_interval() -> None:
    best, neighbour = Trial(1.0, (1.0, 1.1, 1.2, 1.3)), Trial(4.0, (1.1, 1.0, 1.3, 1.25))
    found = minimum([Trial(0.25, (2.0, 2.1, 2.2, 2.3)), best, neighbour], Trial(0.0, (5.0, 5.1, 5.2, 5.3)))
    assert found.verdict == "flat"
    assert found.low > 0.25
    assert found.high >= 4.0


def test_trials_that_learned_nothing_say_so() -> None:
    trials = [Trial(rate, tuple(loss + 1e-3 * rate for loss in BEFORE.losses)) for rate in (0.1, 0.4, 1.6)]
    assert minimum(trials, BEFORE) == Minimum(0.1, None, None, "no clear sign")


def test_of_trials_that_all_diverged_there_is_no_minimum() -> None:
    trials = [Trial(rate, None) for rate in (4.0, 1.0, 0.25)]
    with pytest.raises(
        DivergedError, match=r"all 3 trials diverged, at learning rates from 0\.25 to 4; begin at a lower"
    ):
        minimum(trials, Trial(0.0, (1.0, 1.1)))


def test_a_finite_trial_is_better_than_one_that_diverged() -> None:
    assert is_better(Trial(0.1, (9.0, 9.0)), Trial(0.4, None))
    assert not is_better(Trial(0.4, None), Trial(0.1, (9.0, 9.0)))
    assert not is_better(Trial(0.4, None), Trial(1.6, None))
