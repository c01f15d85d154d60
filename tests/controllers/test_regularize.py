import math
from dataclasses import replace
from typing import Any

import pytest
from windows import moves

from hdet.controllers import Context, Estimate, Gated, GatedState, Regularize, RuledState
from hdet.controllers.gap import gap_of
from hdet.controllers.rules import Leap, SlopeSum, Spare
from hdet.controllers.rules.slope_sum import SlopeSumState
from hdet.controllers.vetoes import KeepsWeights, NeedsGap

EAGER = {
    "rate": 0.1,
    "gate": 1.0,
    "lower_gate": 1.0,
    "memory": 0.0,
    "window_steps": None,
    "min_harm": 0.0,
    "min_effect": 0.0,
}


def rule(**options: Any) -> Regularize:
    return Regularize(**{**EAGER, "raise_after": 0.0, "until": 1.0, **options})


def slope(value: float, level: float | None = 2.0, span: float | None = 9.0, t: float = 9.0) -> Estimate:
    return Estimate(slope=value, stderr=abs(value) / t, level=level, span=span)


def test_a_slope_whose_error_comes_from_few_numbers_is_believed_less() -> None:
    """Without sub-batches its variance is that by which it would be a normal deviate."""
    few = replace(slope(0.4, t=4.0), freedom=7.0)
    for estimate in (few, replace(few, freedom=None)):
        state = SlopeSum().observe(SlopeSum().start(), estimate, Context(base=2.0))
        assert state.total == pytest.approx(0.2)
        assert state.variance == pytest.approx((estimate.normal_stderr / 2.0) ** 2)
    assert few.normal_stderr > 1.4 * few.stderr


def test_a_sum_that_sub_batches_told_the_error_of_begins_anew_without_them() -> None:
    """Its variance is not known, and counted as none the next window's would be taken for that of all."""
    rule, context = SlopeSum(), Context(length=30)
    split = Estimate(0.1, stderr=1.0, slopes=(1.0, -0.8))
    summed = rule.observe(rule.start(), split, context)
    for _ in range(9):
        summed = rule.observe(summed, split, context)
    alone = slope(0.01, t=1.0)
    assert rule.observe(summed, alone, context).tau == pytest.approx(1.0)
    assert rule.observe(rule.observe(summed, alone, context), split, context).tau == pytest.approx(summed.tau)


# Of a window whose held-out loss is 2, as `slope` has it: a gap of 0.1, which forbids nothing.
SMALL_GAP = Context(loss=1.8)


def move(regularize: Regularize, estimate: Estimate, loss: float | None = 1.8, **context: Any) -> float:
    return moves(regularize, (estimate, Context(loss=loss, **context)))[0]


def later(regularize: Regularize, estimate: Estimate, loss: float | None) -> float:
    """The move of a window in mid-run, where the mean gap of the earlier ones, 0.1, has faded."""
    _, state = regularize.step(regularize.start(), Estimate(0.0, stderr=1.0, level=2.0), SMALL_GAP)
    faded = {name: replace(part, weight=0.0) for name, part in state.parts.items() if name.endswith("gap")}
    return regularize.step(RuledState({**state.parts, **faded}), estimate, Context(loss=loss))[0]


def test_slopes_are_added_per_unit_of_the_value_and_so_are_their_variances() -> None:
    """By hand: base 0.5 and slope 1 +- 0.2, then base 2 and slope -1 +- 2.4, of which memory .5 keeps half."""
    regularize = rule(memory=0.5, saturation=100.0, gate=0.0, lower_gate=0.0, rate=1.0)
    _, state = regularize.step(regularize.start(), Estimate(1.0, stderr=0.2), Context(base=0.5))
    summed = state.parts["slope_sum"]
    assert (summed.total, summed.variance) == pytest.approx((2.0, 0.4**2))
    _, state = regularize.step(state, Estimate(-1.0, stderr=2.4), Context(base=2.0))
    summed = state.parts["slope_sum"]
    assert (summed.total, summed.variance) == pytest.approx((1.0 - 0.5, 0.25 * 0.16 + 1.2**2))


def test_easy_batches_do_not_count_for_more() -> None:
    """Windows of +0.1 +- 0.05 and of -1 +- 0.6 in turn: t-statistics say less (2 against 1.7), slopes say more."""
    told = {"level": 2.0, "span": 9.0}
    windows = [(Estimate(0.1, stderr=0.05, **told), SMALL_GAP), (Estimate(-1.0, stderr=0.6, **told), SMALL_GAP)] * 4
    assert moves(rule(memory=0.9), *windows)[-1] > 0
    gated, state = Gated(memory=0.9), GatedState()
    for estimate, context in windows:
        _, state = gated.step(state, estimate, context)
    assert state.total > 0


def test_a_window_has_a_veto() -> None:
    sure, against = slope(1.0), Estimate(-0.1, stderr=1.0, level=2.0)
    first, second = moves(rule(memory=0.9), (sure, SMALL_GAP), (against, SMALL_GAP))
    assert (first, second) == (pytest.approx(-0.1), 0.0)


def test_a_model_that_fits_training_data_better_is_not_held_back_less() -> None:
    regularize = rule(max_gap=0.2)
    assert later(regularize, slope(1.0), loss=1.59) == 0.0, "held-out loss 2, a gap of 0.21"
    assert later(regularize, slope(1.0), loss=1.61) == pytest.approx(-0.1)


def test_a_model_that_fits_both_alike_is_not_held_back_more() -> None:
    regularize = rule(min_gap=0.05)
    assert move(regularize, slope(-1.0), loss=1.91) == 0.0
    assert move(regularize, slope(-1.0), loss=2.09) == 0.0
    assert move(regularize, slope(-1.0), loss=1.89) == pytest.approx(0.1)


def test_a_training_loss_above_the_held_out_one_tells_of_no_overfitting() -> None:
    """As under dropout: a decay that was lowered comes back, and goes no further than what was set."""
    regularize = rule(min_gap=0.05)
    assert move(regularize, slope(-1.0), loss=2.11) == 0.0
    assert move(regularize, slope(-1.0), loss=2.11, shift=-0.04) == pytest.approx(0.04)
    assert move(regularize, slope(-1.0), loss=2.11, shift=-0.4) == pytest.approx(0.1)


@pytest.mark.parametrize("way", [1.0, -1.0])
def test_a_condition_that_was_told_nothing_forbids_a_move(way: float) -> None:
    """No training loss, or no held-out one: the gap is unknown, in the first window and in later ones."""
    regularize = rule(min_gap=0.05)
    assert move(regularize, slope(way)) == pytest.approx(-0.1 * way)
    for level in (None, 0.0, math.nan, math.inf):
        assert move(regularize, slope(way, level=level)) == 0.0
        assert later(regularize, slope(way, level=level), loss=1.8) == 0.0
    for loss in (None, math.nan):
        assert move(regularize, slope(way), loss=loss) == 0.0
        assert later(regularize, slope(way), loss=loss) == 0.0
    assert move(rule(), slope(-1.0, span=None)) == 0.0, "nobody knows how far it was measured"


@pytest.mark.parametrize("way", [1.0, -1.0])
@pytest.mark.parametrize("micro_batches", [2, 4, 16])
def test_a_training_loss_divided_by_the_micro_batches_moves_nothing(way: float, micro_batches: int) -> None:
    """Its gap of 0.5 and more looks like overfitting, and would have decay raised for the whole run."""
    window = (slope(way), Context(loss=1.9 / micro_batches))
    assert moves(rule(), *[window] * 20) == [0.0] * 20
    regularize, state = rule(), rule().start()
    _, state = regularize.step(state, *window)
    _, state = regularize.retreat(state, Context(), worked=1.0)
    assert regularize.step(state, *window)[0] == 0.0, "a rewind does not make it known"


def test_the_gap_is_a_mean_over_windows() -> None:
    """Gaps 0, 0, 0.6: the mean that keeps 0.7 is 0.6 / (1 + .7 + .49) = 0.27, next to 0.2 x 2."""
    regularize, easy, hard = rule(max_gap=0.2), Context(loss=2.0), Context(loss=1.4)
    assert moves(regularize, (slope(1.0), easy), (slope(1.0), easy), (slope(1.0), hard))[-1] == pytest.approx(-0.1)
    assert moves(regularize, (slope(1.0), easy), *[(slope(1.0), hard)] * 3)[-1] == 0.0


def test_it_goes_no_further_up_than_twice_what_was_measured() -> None:
    assert move(rule(max_extrapolation=2.0), slope(-1.0, span=0.02)) == pytest.approx(0.04)
    assert move(rule(max_extrapolation=2.0), slope(-1.0, span=0.9)) == pytest.approx(0.1)
    assert move(rule(max_extrapolation=2.0), slope(1.0, span=0.02)) == pytest.approx(-0.1), "down is safe: D shrinks"
    assert move(rule(min_effect=10.0), slope(-1e-9, span=0.02)) == pytest.approx(0.04), "nor does a leap"


@pytest.mark.parametrize(("excess", "leaps"), [(None, True), (0.0, True), (1.0, True), (1.3, False), (math.inf, False)])
def test_weights_that_had_been_trained_are_not_leapt_at(excess: float | None, leaps: bool) -> None:
    """Nor after a rewind or a new start: the first window tells it once in a run."""
    leap, weak = Leap(min_effect=1.0), slope(-1e-3)
    first = leap.start() if excess is None else leap.begin(leap.start(), replace(weak, excess=excess))
    told = leap.observe(first, weak, SMALL_GAP)
    for state in (told, leap.retreat(told, SMALL_GAP), leap.restart(told, SMALL_GAP)):
        seen = leap.observe(state, weak, SMALL_GAP)
        assert (leap.propose(seen, weak, SMALL_GAP) is not None) is leaps


WINDOW = Context(length=10, total_steps=300, loss=0.5)
"""Of a run whose held-out loss is 2, as `slope` has it: a gap at which no decay is lowered."""


@pytest.mark.parametrize("excess", [1.0, 1.3])
def test_pretrained_weights_are_spared_a_decay_that_takes_much_of_them(excess: float) -> None:
    """By hand: 1 - e^-0.05 of them in 10 of 300 steps, so 1.5 in all, where 0.2 may go; whatever vetoes say."""
    strong = replace(slope(-0.1), stretch=1.0 - math.exp(-0.05), excess=excess)
    judged = Regularize().judge(Regularize().start(), strong, WINDOW)
    if excess > 1.2:
        assert (judged.move, judged.rule, judged.veto) == (pytest.approx(math.log(0.2 / 1.5)), "spare", "")
    else:
        assert judged.rule != "spare"
    later = replace(strong, excess=None)
    for state in (judged.state, Regularize().retreat(judged.state, WINDOW, worked=1.0)[1]):
        spared = Regularize().judge(state, later, WINDOW).rule == "spare"
        assert spared is (excess > 1.2)


@pytest.mark.parametrize(("own", "most"), [(0.0, 1.0), (0.9, 1.0), (1.3, 0.2), (None, 0.2)])
def test_of_adapters_more_may_be_taken(own: float | None, most: float) -> None:
    strong = replace(slope(-0.1), stretch=1.0 - math.exp(-0.05), excess=1.3, own_excess=own)
    judged = Regularize().judge(Regularize().start(), strong, WINDOW)
    assert judged.move == pytest.approx(math.log(most / 1.5))
    for _, state in (
        Regularize().retreat(judged.state, WINDOW, worked=1.0),
        Regularize().restart(judged.state, WINDOW),
    ):
        assert Regularize().judge(state, replace(strong, excess=None), WINDOW).move == judged.move


@pytest.mark.parametrize("stretch", [1.0, 5.0, math.inf])
def test_a_decay_that_takes_all_in_one_window_goes_down_by_a_finite_move(stretch: float) -> None:
    """It counts as one that leaves a millionth."""
    spare, run = Spare(most_taken=0.2), Context(length=10, total_steps=1000)
    wish = spare.propose(spare.begin(spare.start(), Estimate(0.0, excess=1.3)), Estimate(0.0, stretch=stretch), run)
    assert wish == pytest.approx(math.log(0.2 / (-math.log(1e-6) * 100)))


@pytest.mark.parametrize(
    ("stretch", "steps"),
    [(1.0 - math.exp(-0.006), 300), (1e-17, 300), (None, 300), (0.0, 300), (0.5, None), (0.5, 1001)],
)
def test_what_takes_little_of_them_or_nobody_knows_how_much_is_left_alone(
    stretch: float | None, steps: int | None
) -> None:
    rule = Spare()
    state = rule.begin(rule.start(), replace(slope(0.1), excess=1.3))
    told = replace(slope(0.1), stretch=stretch)
    assert rule.propose(state, told, replace(WINDOW, total_steps=steps)) is None


@pytest.mark.parametrize(("taken", "speaks"), [(0.19, False), (0.205, False), (0.22, True)])
def test_a_decay_that_takes_hardly_too_much_leaves_other_rules_their_say(taken: float, speaks: bool) -> None:
    spare, run = Spare(most_taken=0.2), Context(length=10, total_steps=10)
    pretrained = spare.begin(spare.start(), Estimate(0.0, excess=1.3))
    wish = spare.propose(pretrained, Estimate(0.0, stretch=-math.expm1(-taken)), run)
    assert wish == (pytest.approx(math.log(0.2 / taken)) if speaks else None)


def test_what_was_spared_is_not_raised_again() -> None:
    """Windows in which slopes call for more, and decay takes what the base says: the base stays where it was put."""
    regularize, shift = Regularize(raise_after=0.0, min_gap=0.0), 0.0
    state, moved = regularize.start(), []
    for step in range(10, 250, 10):
        taken = 0.05 * math.exp(shift)
        told = replace(slope(-0.1), stretch=1.0 - math.exp(-taken), excess=1.3 if step == 10 else None)
        judged = regularize.judge(state, told, replace(WINDOW, step=step, shift=shift, base=math.exp(shift)))
        state, shift = judged.state, shift + judged.move
        moved.append(judged.move)
    assert moved[0] == pytest.approx(math.log(0.2 / 1.5))
    assert moved[1:] == pytest.approx([0.0] * (len(moved) - 1), abs=1e-6)


def test_weights_that_have_learnt_nothing_say_nothing_of_more() -> None:
    regularize = rule(raise_after=0.3)
    assert move(regularize, slope(-1.0), step=29, total_steps=100) == 0.0
    assert move(regularize, slope(-1.0), step=30, total_steps=100) == pytest.approx(0.1)
    assert move(regularize, slope(1.0), step=29, total_steps=100) == pytest.approx(-0.1)
    assert move(regularize, slope(-1.0), step=29, total_steps=None) == pytest.approx(0.1)


def test_what_was_lowered_early_may_come_back() -> None:
    """From 7.5 % of the run on, and before 30 % no further than to what was set."""
    regularize = rule(raise_after=0.3, back_after=0.075, back_steps=0)
    for shift, step, moved in ((-0.5, 74, 0.0), (-0.5, 75, 0.1), (-0.03, 299, 0.03), (0.0, 299, 0.0), (0.2, 299, 0.0)):
        went = move(regularize, slope(-1.0), step=step, total_steps=1000, shift=shift)
        assert went == pytest.approx(moved), (shift, step)


def test_what_was_lowered_early_comes_back_only_in_long_runs() -> None:
    regularize = rule(raise_after=0.3, back_after=0.075, back_steps=1000)
    for step, total, moved in (
        (999, 10_000, 0.0),
        (1000, 10_000, 0.1),
        (500, 2000, 0.0),
        (600, 2000, 0.1),
        (500, None, 0.1),
    ):
        went = move(regularize, slope(-1.0), step=step, total_steps=total, shift=-0.5)
        assert went == pytest.approx(moved), (step, total)


def test_a_raise_takes_less_proof_than_a_lowering() -> None:
    """More vetoes watch over it; and what calls for less decay now may call for more in the end."""
    regularize = rule(gate=1.0, lower_gate=2.0)
    for wanted, t, moved in ((-1.0, 1.1, 1), (-1.0, 0.9, 0), (1.0, 1.9, 0), (1.0, 2.1, -1)):
        went = move(regularize, slope(wanted, t=t), step=500, total_steps=1000)
        assert (went > 0) - (went < 0) == moved, t


def test_early_in_the_run_more_proof_is_asked_for() -> None:
    """2.5 standard errors are enough from 30 % of the run on, where its end is known, and where a gate is higher."""
    regularize = rule(lower_gate=2.0, early_gate=3.0, early_until=0.3)
    for t, step, total, moved in (
        (2.5, 29, 100, False),
        (3.5, 29, 100, True),
        (2.5, 30, 100, True),
        (2.5, 29, None, True),
    ):
        assert (move(regularize, slope(1.0, t=t), step=step, total_steps=total) < 0.0) is moved
    assert move(regularize.replace(rules=rule(lower_gate=4.0).rules), slope(1.0, t=3.5), step=0, total_steps=100) == 0.0


def test_a_knob_too_weak_to_do_harm_is_not_lowered() -> None:
    regularize = rule(min_harm=1e-3)
    assert move(regularize, slope(0.0019)) == 0.0
    assert move(regularize, slope(0.0021)) == pytest.approx(-0.1)
    assert move(regularize, slope(-0.0019)) == pytest.approx(0.1), "raised as ever"
    assert move(regularize, slope(0.0019, level=-2.0), loss=-2.2) == 0.0, "the level's sign is no matter"


def test_a_knob_too_weak_to_be_felt_is_raised_to_where_it_would_be() -> None:
    regularize = rule(min_effect=1e-3)
    assert move(regularize, slope(-0.0015)) == pytest.approx(math.log(4 / 3))
    assert move(regularize, slope(-0.0019)) == pytest.approx(0.1), "no less than one that is felt"
    assert move(regularize, slope(-1e-9)) == pytest.approx(0.4), "by `max_scale` rates at the most"
    leap = Leap(**{name: EAGER[name] for name in ("rate", "window_steps")})
    summed = leap.observe(leap.start(), slope(-0.1), Context())
    assert leap.propose(summed, Estimate(0.0, stderr=0.1, level=2.0), Context()) == 1.6 / 4, "nor without any slope"
    for level in (math.nan, math.inf, -math.inf, None, 0.0):
        assert leap.propose(summed, slope(-1e-9, level=level), Context()) is None, "and of no level it is no share"
    assert move(regularize, slope(-0.0021)) == pytest.approx(0.1)
    assert move(regularize, slope(0.0015)) == pytest.approx(-0.1), "lowered as ever"
    for gate, moved in ((1.9, 0.4), (2.1, 0.0)):
        assert move(rule(min_effect=1e-3, gate=gate), slope(-1e-9, t=2.0)) == pytest.approx(moved)


def test_after_a_rewind_it_goes_back_to_the_value_that_worked_but_not_up() -> None:
    regularize = rule(memory=0.5)
    _, state = regularize.step(regularize.start(), slope(-1.0), SMALL_GAP)
    context = Context(schedule_next=0.1, shift=1.0)
    move, after = regularize.retreat(state, context, 0.1 * math.e**0.25)
    assert move == pytest.approx(0.25 - 1.0)
    fresh = regularize.start().parts
    known = {name: replace(part, told=3) for name, part in fresh.items() if name.endswith("gap")}
    assert after == RuledState({**fresh, **known}), "what led there is forgotten"
    assert regularize.retreat(state, context, 0.1 * math.e**1.5)[0] == 0.0
    assert regularize.retreat(state, context, 0.0)[0] == 0.0


def test_a_slope_that_once_was_enormous_does_not_rule_for_ever() -> None:
    """The fourth window in a row that says the opposite begins the sum anew."""
    regularize = rule(memory=0.99)
    spike = (Estimate(slope=-50.0, stderr=25.0, level=2.0), SMALL_GAP)
    after = moves(regularize, spike, *[(slope(0.02), SMALL_GAP)] * 5)[1:]
    assert after == pytest.approx([0.1, 0.1, 0.1, -0.1, -0.1], rel=1e-2)


def test_a_sum_of_sub_batches_is_their_mean_per_unit_of_the_value() -> None:
    summed, context = SlopeSum(memory=0.5, window_steps=None), Context(base=0.5)
    state = summed.observe(summed.start(), Estimate(2.0, stderr=1.0, slopes=(1.0, 3.0)), context)
    assert state == SlopeSumState(total=4.0, sums=(2.0, 6.0))
    state = summed.observe(state, Estimate(1.0, stderr=1.0, slopes=(0.0, 2.0)), context)
    assert state == SlopeSumState(total=4.0, sums=(1.0, 7.0))


def test_after_four_windows_against_it_a_sum_counts_them_anew() -> None:
    state = SlopeSum().observe(SlopeSumState(total=9.0, variance=1.0, against=3), slope(-0.1), Context())
    assert (state.total, state.against) == (-0.1, 0)


@pytest.mark.parametrize(
    ("levels", "kept"),
    [
        ((8.0, 4.0), 1.0),
        ((8.0, 2.0), 0.5),
        ((8.0, 2.0, 3.0), 0.5),
        ((8.0, 2.0, 1.0), 0.25),
        ((8.0, -1.0), 1.0),
        ((None, 8.0, math.nan, -math.inf, 2.0), 0.5),
    ],
)
def test_slopes_of_an_enormous_loss_count_in_proportion_to_what_it_has_become(
    levels: tuple[float | None, ...], kept: float
) -> None:
    rule = SlopeSum(memory=1.0 - 1e-9)
    state = rule.start()
    for estimate in (slope(1.0, level=levels[0]), *(slope(0.0, level=level) for level in levels[1:])):
        state = rule.observe(state, estimate, Context(length=30))
    assert state.total == pytest.approx(kept)


@pytest.mark.parametrize(("total", "move"), [(0.8, -0.08), (-0.8, 0.16), (-8.0, 0.4)])
def test_without_gates_small_sums_move_too_each_way_by_its_own_saturation(total: float, move: float) -> None:
    summed, state = SlopeSum(gate=0.0, lower_gate=0.0), SlopeSumState(total=total, variance=1.0)
    assert summed.propose(state, slope(0.1), Context(length=30)) == pytest.approx(move)
    assert summed.propose(state, slope(0.1), Context(length=3000)) == pytest.approx(4.0 * move), "max_scale"


def test_numbers_that_overflow_are_not_remembered() -> None:
    regularize = rule()
    _, state = regularize.step(regularize.start(), Estimate(slope=1.0, stderr=1e200), Context())
    assert state == regularize.start(), "the variance alone"
    moved, state = regularize.step(regularize.start(), Estimate(slope=1e200, stderr=1e200), Context(base=1e-200))
    assert moved == 0.0
    assert state == regularize.start()


def test_one_wrecked_window_does_not_fill_the_mean_gap() -> None:
    """A training loss of 1000 counts as a gap of -1, not of -999: the mean with the next window is -0.32."""
    regularize, lowered = rule(min_gap=0.5), Context(shift=-1.0)
    wrecked = (slope(-1.0, level=1.0), replace(lowered, loss=1000.0))
    fine = (slope(-1.0, level=1.0), replace(lowered, loss=1.0))
    assert [move > 0.0 for move in moves(regularize, fine, wrecked, fine, fine)] == [False, True, False, False]


@pytest.mark.parametrize(("level", "loss", "gap"), [(1.0, 1000.0, -1.0), (0.01, -9.0, 1.0), (-2.0, -3.0, 0.5)])
def test_a_gap_is_the_held_out_loss_at_most(level: float, loss: float, gap: float) -> None:
    assert gap_of(slope(0.1, level=level), Context(loss=loss)) == gap


def test_a_base_near_the_smallest_number_there_is_is_no_error() -> None:
    regularize, tiny = rule(), 5e-324
    assert regularize.retreat(regularize.start(), Context(schedule_next=1e300), worked=tiny)[0] < -1000.0
    assert regularize.retreat(regularize.start(), Context(schedule_next=tiny), worked=1e300)[0] == 0.0
    estimate = Estimate(slope=0.1, stderr=0.1, level=2.0, span=1.0, slopes=(0.1, -0.1, 0.3))
    moved, state = regularize.step(regularize.start(), estimate, Context(base=tiny, loss=1.8))
    assert (moved, state.parts["slope_sum"].sums) == (0.0, ())


def test_of_a_base_of_zero_no_slope_is_known() -> None:
    summed = SlopeSum().observe(SlopeSum().start(), slope(-0.1), Context())
    assert SlopeSum().observe(summed, slope(-0.1), Context(base=0.0)) == summed
    assert SlopeSum().propose(summed, slope(-0.1), Context(base=0.0)) is None


def test_a_raise_is_as_large_as_it_gets_at_a_smaller_sum_than_a_lowering() -> None:
    full = 0.4 * 30 / 30
    regularize = Regularize(raise_after=0.0, memory=0.0)
    raised = regularize.step(regularize.start(), slope(-1.0, t=2.0), Context(loss=1.7, length=30))[0]
    lowered = regularize.step(regularize.start(), slope(1.0, t=2.5), Context(loss=1.9, length=30))[0]
    assert raised == pytest.approx(full)
    assert lowered == pytest.approx(-full * 2.5 / 4.0)


def lowered_early(
    costs: float, *, t: float = 2.5, falls: float = 0.4, window: int = 30, total: int | None = 1000, **options: Any
) -> float:
    """The move of the second window of a run, whose loss has fallen and whose slopes are worth that share of it."""
    told: dict[str, Any] = {"loss": options.pop("loss", 1.5), "shift": options.pop("shift", 0.0)}
    told |= {"length": window, "total_steps": total}
    regularize = Regularize(memory=0.0, raise_after=0.0, **options)
    _, state = regularize.step(regularize.start(), Estimate(0.0, stderr=1.0, level=2.0), Context(step=window, **told))
    now = Estimate(costs * falls, stderr=abs(costs) * falls / t, level=2.0 - falls, span=9.0)
    return regularize.step(state, now, Context(step=2 * window, **told))[0]


def test_early_windows_are_believed_where_decay_costs_much_of_the_losss_fall() -> None:
    assert lowered_early(0.2) == 0.0, "tau 2.5, and early moves take 3"
    assert lowered_early(0.2, t=4.0) == pytest.approx(-0.4)
    assert lowered_early(0.5) == pytest.approx(-0.4 * 2.5 / 4.0 * 2.0), "twice what is much"
    assert lowered_early(9.0) == pytest.approx(-0.4 * 2.5 / 4.0 * 4.0), "max_boost"
    assert lowered_early(9.0, t=1.5) == 0.0, "however much it costs, it has to be proven"
    assert lowered_early(9.0, window=120) == pytest.approx(-0.4 * 2.5 / 4.0 * 4.0), "no window moves further"
    assert lowered_early(0.5, early_until=0.05) == pytest.approx(-0.4 * 2.5 / 4.0), "later it takes more proof"


def test_later_the_first_move_down_of_a_cost_that_is_well_proven_is_larger() -> None:
    def lowered(costs: float, *, t: float = 3.2, total: int | None = 150, **seen: float) -> float:
        return lowered_early(costs, t=t, total=total, **{"loss": 1.7, **seen})

    full = -0.4 * 3.2 / 4.0
    assert lowered(0.02) == pytest.approx(full)
    assert lowered(0.06) == pytest.approx(full * 2.0), "twice three hundredths"
    assert lowered(0.06, loss=1.6, shift=-0.2) == pytest.approx(full * 2.0)
    assert lowered(0.06, total=1000) == pytest.approx(full), "early"
    assert lowered(0.06, total=None) == pytest.approx(full), "who knows whether it is early"
    assert lowered(0.06, loss=1.5) == pytest.approx(full), "held-out loss is above training loss"
    assert lowered(0.06, shift=-0.3) == pytest.approx(full), "lowered before"
    assert lowered(9.0) == pytest.approx(full * 4.0), "max_boost"
    assert lowered(9.0, t=2.9) == pytest.approx(-0.4 * 2.9 / 4.0), "not proven as well"
    assert lowered(-0.06, t=1.1, loss=1.5) == pytest.approx(0.4 * 1.1 / 2.0), "up"


@pytest.mark.parametrize("base", [1.0, 0.01])
@pytest.mark.parametrize("slopes", [(), (0.1, 0.3), (0.1, 0.2, 0.2, 0.3)])
def test_what_decay_costs_does_not_depend_on_sub_batches_or_on_the_value(
    base: float, slopes: tuple[float, ...]
) -> None:
    rule, begun = SlopeSum(lower_gate=0.0, saturation=0.01), SlopeSumState(first=2.0, lowest=1.6)
    context = Context(base=base, length=30, step=30, total_steps=1000)
    told = Estimate(0.2, stderr=0.02, slopes=slopes)
    assert rule.propose(rule.observe(begun, told, context), told, context) == pytest.approx(-0.4 * 0.5 / 0.25)


@pytest.mark.parametrize("level", [None, math.nan, math.inf, -math.inf])
def test_where_nobody_tells_the_loss_nothing_says_that_decay_costs_much(level: float | None) -> None:
    rule = SlopeSum(memory=0.0)
    estimate = Estimate(5.0, stderr=2.0, level=level)
    state = rule.observe(rule.observe(rule.start(), estimate, Context()), estimate, Context())
    assert state.fall == 0.0
    assert rule.propose(state, estimate, Context(step=10, total_steps=1000, length=30)) is None
    told = rule.observe(
        rule.observe(state, replace(estimate, level=2.0), Context()), replace(estimate, level=1.5), Context()
    )
    assert told.fall == 0.5
    assert rule.observe(told, replace(estimate, level=1.9), Context()).fall == 0.5, "the lowest counts"


def test_no_curvature_is_measured_for_weight_decay() -> None:
    assert not any(
        Regularize().wants_curvature(slope(way), averaged=own) for way in (-9.0, 9.0) for own in (False, True)
    )


@pytest.mark.parametrize(
    ("losses", "moves_on"),
    [
        ((1.8, 1.0, 1.0, 1.8), True),
        ((1.0, 1.8, 1.8, 1.8), True),  # steps that were far too large, and no sign of another scale
        ((1.0, 1.8, 1.0, 1.8), False),  # a loss that fell fast in the second window
        ((1.0, 1.0, 1.8, 1.8), False),
        ((1.0, 1.0, 1.0, 1.8), False),
        ((1.0, 1.8), False),  # not known yet
    ],
)
def test_a_second_window_has_to_agree_that_losses_are_on_two_scales(losses: tuple[float, ...], moves_on: bool) -> None:
    """Else decay would stay as it was given for good."""
    regularize = rule()
    windows = [(slope(-1.0), Context(loss=loss)) for loss in losses]
    assert (moves(regularize, *windows)[-1] > 0.0) == moves_on


def test_what_seemed_another_scale_is_no_gap() -> None:
    """A model that does not overfit is not restrained more, though the first window's held-out loss was far above."""
    regularize = rule()
    windows = [(slope(-1.0), Context(loss=loss)) for loss in (1.0, 2.0, 2.0, 2.0)]
    assert moves(regularize, *windows) == [0.0] * 4


@pytest.mark.parametrize(("shift", "left"), [(-0.1, 0.1), (-0.7, 0.5), (0.0, 0.0), (0.1, 0.0)])
def test_without_overfitting_a_raise_ends_at_what_was_set(shift: float, left: float) -> None:
    veto, place = NeedsGap(), Context(loss=2.2, shift=shift)
    assert veto.allow(0.5, veto.observe(veto.start(), slope(-0.1), place), slope(-0.1), place) == left


@pytest.mark.parametrize(
    ("taken", "move", "left"),
    [(0.15, 0.4, math.log(4 / 3)), (0.15, 0.1, 0.1), (0.15, -0.4, -0.4), (0.3, 0.4, 0.0), (0.3, -0.1, -0.1)],
)
def test_pretrained_weights_keep_most_of_what_they_were(taken: float, move: float, left: float) -> None:
    veto, run = KeepsWeights(most_taken=0.2), Context(length=10, total_steps=10)
    pretrained = veto.begin(veto.start(), Estimate(0.0, excess=1.3))
    assert veto.allow(move, pretrained, Estimate(0.0, stretch=-math.expm1(-taken)), run) == pytest.approx(left)
    assert veto.allow(move, veto.start(), Estimate(0.0, stretch=-math.expm1(-taken)), run) == move
