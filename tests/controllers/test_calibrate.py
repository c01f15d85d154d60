import math
from dataclasses import replace

import pytest
from windows import moves

from hdet.controllers import Calibrate, Context, Estimate, RuledState
from hdet.controllers.beginning import Beginning, HarmlessState
from hdet.controllers.rules import Lower, Raise, Regain, Return, Stall
from hdet.controllers.rules.catch_up import CatchUpState
from hdet.controllers.rules.returning import ReturnState
from hdet.controllers.rules.stall import StallState
from hdet.errors import ConfigError


def bracket(t_last: float, t_avg: float, n_last: float = 0.0, n_avg: float = 0.0) -> Estimate:
    """An estimate with the given t-statistics and, where the signs allow, Newton moves (0: too far)."""

    def one(t: float, n: float, averaged: Estimate | None = None) -> Estimate:
        return Estimate(0.1 * t, -0.1 * t / n if n else None, stderr=0.1, averaged=averaged)

    return one(t_last, n_last, one(t_avg, n_avg))


def holding(**parts: object) -> RuledState:
    """A first state, but for some of its parts."""
    return RuledState({**Calibrate().start().parts, **parts})


UNTRAINED = {
    **dict.fromkeys(("regain", "small_steps"), HarmlessState(untrained=True)),
    "catch_up": CatchUpState(untrained=True),
}
UP, DOWN = bracket(-3, 0, n_last=0.2), bracket(0, 4, n_avg=-0.2)
LOW, LATE = Context(schedule_now=0.3, warming=True), Context(schedule_now=0.3, warming=False)


def move(estimate: Estimate, context: Context = LATE) -> float:
    return Calibrate().step(Calibrate().start(), estimate, context)[0]


def test_raise() -> None:
    assert move(UP) == pytest.approx(0.2)
    assert move(bracket(-3, 0)) == 0.5, "no positive curvature: the limit"
    assert move(bracket(-3, 0, n_last=4)) == 0.5
    assert move(bracket(-3, -9, n_last=0.2)) == pytest.approx(0.2)


@pytest.mark.parametrize("t_last", [-2.0, -1.0, 0.0, 3.0])
def test_no_raise_without_proof(t_last: float) -> None:
    assert move(bracket(t_last, 0)) == 0


@pytest.mark.parametrize(
    ("t", "averaged", "offset", "wanted"),
    [
        (-2.1, False, 0.0, True),
        (-1.9, False, 0.0, False),
        (9.0, False, 0.0, False),
        (9.0, False, 0.5, True),
        (-9.0, False, 0.5, True),
        (1.9, False, 0.5, False),
        (3.1, True, 0.0, True),
        (2.9, True, 0.0, False),
        (-9.0, True, 0.0, False),
    ],
)
def test_a_curvature_is_wanted_only_where_it_moves_something(
    t: float, averaged: bool, offset: float, wanted: bool
) -> None:
    slope = Estimate(0.1 * t, None, stderr=0.1, offset=offset)
    assert Calibrate().wants_curvature(slope, averaged=averaged) is wanted
    # What it does with the slope is the same with any curvature, if none is wanted.
    if not wanted:
        for curvature in (None, 0.1, 10.0):
            told = replace(slope, curvature=curvature)
            estimate = replace(bracket(0, 0), averaged=told) if averaged else replace(told, averaged=Estimate.nothing())
            assert move(estimate) == 0


def test_no_raise_early_in_the_warm_up() -> None:
    early = Context(schedule_now=0.24, warming=True)
    assert move(UP, early) == 0
    assert move(UP, Context(schedule_now=0.25, warming=True)) == pytest.approx(0.2)
    assert move(UP, Context(schedule_now=0.7, peak=2.0, warming=True)) == pytest.approx(0.2)


def test_lower() -> None:
    assert move(DOWN) == pytest.approx(-0.2)
    assert move(DOWN, LOW) == pytest.approx(-0.2), "also in the warm-up"
    assert move(bracket(0, 4)) == -0.5
    assert move(bracket(0, 2.9)) == 0


def test_a_raise_that_the_averaged_weights_contradict_is_a_lowering() -> None:
    assert move(bracket(-3, 4, n_last=0.2, n_avg=-0.1)) == pytest.approx(-0.1)


def test_the_last_iterate_alone_never_lowers() -> None:
    assert move(bracket(50, 1)) == 0


def test_evidence_without_averaged_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="window-averaged weights"):
        Calibrate().step(Calibrate().start(), Estimate(slope=1.0, stderr=1.0), LATE)


def test_constants_are_fields() -> None:
    timid = Calibrate(significance=4, lower_significance=4, limit=0.1, trusted_from=0.2)
    assert timid.step(timid.start(), UP, LATE)[0] == 0
    assert timid.step(timid.start(), bracket(-5, 3), LOW)[0] == 0.1


def ahead(t_last: float, n_last: float | None = None) -> Estimate:
    return replace(bracket(t_last, 50, n_last=n_last), offset=0.7)


def test_looking_ahead_moves_either_way_on_the_last_iterate_alone() -> None:
    low = Context(schedule_now=0.1, shift=-2.0, warming=True)
    assert move(ahead(-3, 0.2), low) == pytest.approx(0.2)
    assert move(ahead(3, -0.2), low) == pytest.approx(-0.2)
    assert move(ahead(-3), low) == 0.6, "no positive curvature: the early limit"
    assert move(ahead(2), low) == 0


def test_looking_ahead_raises_to_the_ceiling_only_and_lowers_from_above_it() -> None:
    cautious = Calibrate(ceiling=0.0)

    def step(estimate: Estimate, shift: float) -> float:
        context = Context(schedule_now=0.1, shift=shift, warming=True)
        return cautious.step(cautious.start(), estimate, context)[0]

    assert step(ahead(-3), -0.25) == 0.25
    assert step(ahead(-3), 0.5) == 0
    assert step(ahead(3), 0.5) == -0.6


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0, 30.0])
def test_a_raise_takes_the_same_proof_wherever_the_schedule_as_given_lies(factor: float) -> None:
    at = replace(LATE, shift=math.log(factor), total_steps=10_000)
    assert move(bracket(-2.1, 0), at) > 0.0
    assert move(bracket(-1.9, 0), at) <= (0.25 if factor < 1.0 else 0.0), "back to it, at most"


def test_by_default_the_ceiling_is_far_above() -> None:
    def step(shift: float) -> float:
        return move(ahead(-30), Context(schedule_now=0.1, shift=shift, warming=True))

    assert (step(0.0), step(4.0)) == (0.6, 0.6)
    assert step(4.9) == pytest.approx(0.1)
    assert step(5.0) == 0


@pytest.mark.parametrize("t_last", [3.0, 50.0])
def test_averaged_weights_that_were_not_read_lower_nothing(t_last: float) -> None:
    unread = replace(bracket(t_last, 0), averaged=Estimate.nothing())
    assert move(unread) == 0


def test_averaged_weights_that_were_not_read_do_not_hinder_a_raise() -> None:
    assert move(replace(UP, averaged=Estimate.nothing())) == pytest.approx(0.2)


def test_late_in_the_run_it_neither_listens_nor_moves() -> None:
    late = Context(schedule_now=0.3, step=85, total_steps=100)
    assert not Calibrate().listens(85, 100)
    assert Calibrate().listens(84, 100)
    assert Calibrate().listens(85, None)
    assert move(UP, late) == 0


# -- after a rewind -------------------------------------------------------------------------------


def test_it_goes_on_below_what_worked() -> None:
    """The value was 0.05 at the best point and the schedule says 0.1 next: the shift is log(1/6)."""
    calibrate, context = Calibrate(retreat_factor=3.0), Context(schedule_next=0.1, shift=1.0)
    moved, state = calibrate.retreat(holding(**UNTRAINED), context, worked=0.05)
    assert context.shift + moved == pytest.approx(math.log(0.5 / 3))
    assert state == holding(**{"return": ReturnState(waits=math.inf)})


def test_a_second_rewind_lowers_further() -> None:
    calibrate = Calibrate(retreat_factor=2.0)
    first, state = calibrate.retreat(calibrate.start(), Context(schedule_next=1.0, shift=0.0), worked=1.0)
    assert first == pytest.approx(-math.log(2.0))
    moved, _ = calibrate.retreat(state, Context(schedule_next=1.0, shift=-1.0), worked=math.exp(-2.0))
    assert moved == pytest.approx(-1.0 - math.log(2.0))


def test_it_is_not_raised_by_a_rewind() -> None:
    """A rate that already lies below what had worked stays where it is."""
    calibrate = Calibrate(retreat_factor=3.0)
    moved, _ = calibrate.retreat(calibrate.start(), Context(schedule_next=1.0, shift=-5.0), worked=1.0)
    assert moved == 0.0


def test_a_new_start_is_made_from_below_and_leaves_the_way_up_open() -> None:
    """Not "lowered": what was found is the better guess. Weights are untrained again; the old losses say nothing."""
    old = holding(stall=StallState(lowest=0.4, since=10, waited=3, lowered=1), **UNTRAINED)
    context = Context(step=30, total_steps=100, warming=True, schedule_now=0.5, shift=-2.0)
    move, state = Calibrate(retreat_factor=4.0).restart(old, context)
    assert move == pytest.approx(-math.log(4.0))
    assert state == holding(stall=StallState(since=30), **UNTRAINED)
    returned, _ = Calibrate(return_step=0.2).step(state, bracket(0, 0), context)
    assert returned == 0.2


@pytest.mark.parametrize(("schedule", "worked"), [(0.0, 0.1), (0.1, 0.0)])
def test_without_a_rate_to_compare_it_stays_as_it_was(schedule: float, worked: float) -> None:
    move, state = Calibrate().retreat(Calibrate().start(), Context(schedule_next=schedule), worked)
    assert move == 0.0
    assert state.parts["return"].waits == math.inf, "something went wrong all the same: it does not return by itself"


LESS, QUIET = bracket(3, 0), bracket(0, 0)


def test_training_that_stands_still_is_slowed_down() -> None:
    """The lowest loss at step 100: from step 150 on the last weights are believed, until the loss falls below it."""
    steps = ((100, 1.0), (120, 1.1), (130, 1.1), (149, 1.1), (150, 1.1), (200, 0.9), (299, 1.2), (300, 1.2))
    windows = [(LESS, Context(step=step, loss=loss)) for step, loss in steps]
    assert moves(Calibrate(stall_ratio=1.5, limit=0.4), *windows) == [0.0, 0.0, 0.0, 0.0, -0.4, 0.0, 0.0, 0.0]


def test_it_stands_still_only_after_three_windows() -> None:
    windows = [(LESS, Context(step=step, loss=loss)) for step, loss in ((10, 1.0), (20, 1.1), (30, 1.1), (40, 1.1))]
    assert moves(Calibrate(limit=0.4), *windows) == [0.0, 0.0, 0.0, -0.4]


def test_it_is_slowed_down_three_times_and_then_waits_as_long_again() -> None:
    stood = [(LESS, Context(step=step, loss=2.0)) for step in range(110, 300, 10)]
    moved = moves(Calibrate(stall_ratio=1.5, limit=0.4), (LESS, Context(step=100, loss=1.0)), *stood)
    assert [100 + 10 * number for number, each in enumerate(moved) if each] == [150, 160, 170, 260, 270, 280]


def test_averaged_weights_that_call_for_more_are_heard() -> None:
    def stood(t_avg: float) -> list[tuple[Estimate, Context]]:
        return [(bracket(3, t_avg), Context(step=step, loss=float(step))) for step in (100, 200, 300, 400)]

    assert moves(Calibrate(limit=0.4), *stood(-2.1))[-1] == 0.0
    assert moves(Calibrate(limit=0.4), *stood(-1.9))[-1] == -0.4


def test_standing_still_is_no_reason_by_itself() -> None:
    stood = [(bracket(1.9, 0), Context(step=900 + step, loss=2.0)) for step in range(5)]
    assert not any(moves(Calibrate(), (LESS, Context(step=100, loss=1.0)), *stood))
    unknown = [(LESS, Context(step=900 + step)) for step in range(5)]
    assert not any(moves(Calibrate(), (LESS, Context(step=100, loss=1.0)), *unknown))


def test_below_the_schedule_as_given_it_returns_where_nothing_speaks_against_it() -> None:
    calibrate = Calibrate(return_step=0.25)
    below = Context(shift=-0.6)
    assert moves(calibrate, (QUIET, below))[0] == pytest.approx(0.25)
    assert moves(calibrate, (QUIET, Context(shift=-0.1)))[0] == pytest.approx(0.1), "not above it"
    assert moves(calibrate, (QUIET, Context(shift=0.3)))[0] == 0.0
    assert moves(calibrate, (LESS, below))[0] == 0.0
    assert moves(calibrate, (QUIET, Context(schedule_now=0.2, shift=-0.6, warming=True)))[0] == 0.0, "too early"
    assert moves(Calibrate(return_step=0.0), (QUIET, below))[0] == 0.0


@pytest.mark.parametrize(("t_avg", "returned"), [(-1.9, 0.0), (-2.1, 0.25)])
def test_averaged_weights_that_call_for_more_overrule_the_last(t_avg: float, returned: float) -> None:
    """Last weights call for less at most rates, in large models above all."""
    below, called = Context(shift=-0.6), bracket(3, t_avg)
    assert moves(Calibrate(), (called, below))[0] == returned
    assert moves(Calibrate(significance=2.5), (called, below))[0] == 0.0
    assert moves(Calibrate(), (called, Context(shift=-0.1)))[0] == min(returned, 0.1), "not above what was given"
    assert moves(Calibrate(), (called, Context(shift=0.3)))[0] == 0.0
    assert moves(Calibrate(), (DOWN, below), (called, below)) == [pytest.approx(-0.2), 0.0], "lowered by evidence"
    _, rewound = Calibrate().retreat(Calibrate().start(), Context(), worked=1.0)
    assert Calibrate().step(rewound, called, below)[0] == 0.0
    _, anew = Calibrate().restart(Calibrate().start(), Context())
    assert Calibrate().step(anew, called, below)[0] == returned


def test_what_was_lowered_for_a_reason_returns_once_two_windows_on_end_do_not_call_for_less() -> None:
    below = Context(shift=-0.6)
    lowered, quiet, less = (DOWN, below), (QUIET, below), (LESS, below)
    down, up = pytest.approx(-0.2), 0.25
    assert moves(Calibrate(), lowered, quiet, quiet, quiet) == [down, 0.0, up, up]
    assert moves(Calibrate(), lowered, quiet, less, quiet, quiet) == [down, 0.0, 0.0, 0.0, up], "on end"
    assert moves(Calibrate(), lowered, quiet, (Estimate.nothing(), below), quiet) == [down, 0.0, 0.0, up], "none told"
    assert moves(Calibrate(), lowered, quiet, quiet, less, quiet) == [down, 0.0, up, 0.0, up], "has waited"
    assert moves(Calibrate(), lowered, quiet, lowered, quiet, quiet) == [down, 0.0, down, 0.0, up], "begins anew"
    assert moves(Calibrate(quiet_windows=3), lowered, quiet, quiet, quiet) == [down, 0.0, 0.0, up]


@pytest.mark.parametrize("then", [QUIET, LESS, DOWN], ids=["quiet", "less", "down"])
def test_what_a_guard_lowered_stays(then: Estimate) -> None:
    below, calibrate = Context(shift=-0.6), Calibrate()
    _, rewound = calibrate.retreat(calibrate.start(), Context(), worked=1.0)
    _, rewound = calibrate.step(rewound, then, below)
    for _ in range(5):
        move, rewound = calibrate.step(rewound, QUIET, below)
        assert move == 0.0


def test_what_looking_ahead_lowered_returns_at_once() -> None:
    below = Context(shift=-0.6)
    ahead = replace(bracket(3, 0), offset=0.5, curvature=None)
    moved = moves(Calibrate(), (ahead, Context(warming=True)), (QUIET, below))
    assert moved[0] < 0
    assert moved[1] == pytest.approx(0.25)
    # What a rewind did does not.
    calibrate = Calibrate()
    _, state = calibrate.retreat(calibrate.start(), Context(), worked=1.0)
    assert calibrate.step(state, QUIET, below)[0] == 0.0


def test_rates_near_the_smallest_number_there_is_are_no_error() -> None:
    calibrate, tiny = Calibrate(), 5e-324
    for worked, following in ((tiny, 1e300), (1e300, tiny), (tiny, tiny)):
        move, _ = calibrate.retreat(calibrate.start(), Context(schedule_next=following), worked)
        assert move <= 0.0
        assert math.isfinite(move)


@pytest.mark.parametrize(("excess", "t", "wanted"), [(2.0, 4.9, 0.0), (2.0, 5.1, -0.2), (1.0, 3.1, -0.2)])
def test_of_a_pretrained_model_averaged_weights_have_to_prove_more(excess: float, t: float, wanted: float) -> None:
    """Until the end, and after a rewind or a new start too."""
    lower = Lower()
    less = bracket(0, t, n_avg=-0.2)
    state = lower.begin(lower.start(), replace(less, excess=excess))
    for turned in (state, lower.retreat(state, LATE), lower.restart(state, LATE)):
        assert (lower.propose(lower.observe(turned, less, LATE), less, LATE) or 0.0) == pytest.approx(wanted)
    slope = Estimate(0.1 * 3.1, None, stderr=0.1)
    assert lower.wants_curvature(slope, averaged=True)
    assert lower.replace(pretrained_significance=2.0).wants_curvature(replace(slope, slope=0.25), averaged=True)


STALLED, PLACE = StallState(lowest=1.0, since=10, waited=3), Context(step=20, loss=2.0, shift=-1.0)
PROVED = Estimate(slope=6.0, stderr=1.0)


def answers(less: Estimate) -> dict[str, float | bool | None]:
    """What rules with a significance of 2 say where this estimate calls for less, or its mirror image for more."""
    more, quiet, lower, back = replace(less, slope=-less.slope), Estimate(0.0, stderr=1.0), Lower(), Return()
    lower = lower.replace(lower_significance=2.0)
    entered = ReturnState(pretrained=True)
    return {
        "raise": Raise().propose(Beginning(), more, PLACE),
        "a curvature for it": Raise().wants_curvature(more),
        "lower": lower.propose(lower.start(), replace(quiet, averaged=less), PLACE),
        "a curvature for that": lower.wants_curvature(less, averaged=True),
        "stall": Stall().propose(STALLED, replace(less, averaged=quiet), PLACE),
        "stall, unless averaged weights forbid it": Stall().propose(STALLED, replace(PROVED, averaged=more), PLACE),
        "return, unless last weights hold it": back.propose(back.start(), replace(less, averaged=quiet), PLACE),
        "return, if averaged weights overrule them": back.propose(back.start(), replace(PROVED, averaged=more), PLACE),
        "return from where it was entered": back.propose(entered, replace(quiet, averaged=less), PLACE),
        "regain": Regain().propose(UNTRAINED["regain"], replace(more, step_size=0.01, offset=0.7), PLACE),
    }


def test_all_rules_believe_what_is_proved() -> None:
    assert list(answers(PROVED).values()) == [0.5, True, -0.5, True, -0.5, None, None, 0.25, None, None]


@pytest.mark.parametrize("less", [Estimate(2.0, stderr=1.0), Estimate(6.0, stderr=1.0, freedom=1.0)])
def test_no_rule_believes_t_at_its_significance_nor_a_larger_one_by_few_numbers(less: Estimate) -> None:
    assert list(answers(less).values()) == [None, False, None, False, None, -0.5, 0.25, None, 0.25, 1.0]


@pytest.mark.parametrize("slope", [math.inf, -math.inf])
def test_averaged_weights_whose_slope_is_not_finite_say_nothing(slope: float) -> None:
    averaged = Estimate(slope, stderr=1.0)
    assert Lower().propose(Lower().start(), replace(PROVED, averaged=averaged), PLACE) is None
    back, quiet = Return(significance=0.5), Estimate(0.0, stderr=1.0, averaged=averaged)
    assert back.propose(back.start(), replace(PROVED, averaged=averaged), PLACE) is None
    assert back.propose(ReturnState(pretrained=True), quiet, PLACE) == 0.25


def test_after_a_rewind_a_stall_is_waited_for_anew_and_a_new_start_forgets_the_lowest_loss_too() -> None:
    place = Context(step=30)
    assert Stall().retreat(replace(STALLED, lowered=1), place) == StallState(lowest=1.0, since=30)
    assert Stall().restart(replace(STALLED, lowered=1), place) == StallState(since=30)


def test_only_what_was_lowered_for_a_stall_counts_as_that() -> None:
    stalled, place = StallState(lowest=1.0, since=10, waited=3), Context(step=20, loss=2.0)
    less = Estimate(slope=0.3, stderr=0.1)
    assert Stall().moved(stalled, -0.5, -0.5, less, place) == replace(stalled, lowered=1)
    assert Stall().moved(stalled, -0.5, -0.5, replace(less, offset=0.7), place) == stalled, "looking ahead"
    assert Stall().retreat(stalled, place) == StallState(lowest=1.0, since=20), "it waits for the same lowest loss"
    under_way = replace(stalled, waited=2)
    assert Stall().moved(under_way, -0.5, -0.5, less, place) == under_way
