"""A knob at work: base, levels, moves. The laws over all spaces and spreads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hdet
from hdet.contrib import Geometric
from hdet.controllers import Context, Controller, Estimate, Gated
from hdet.controllers.controller import Judgement
from hdet.controllers.state import NoState
from hdet.engine.defaults import complete
from hdet.errors import CheckpointError, ConfigError
from hdet.hparams.bend import Bend
from hdet.hparams.bound_knob import BoundKnob
from hdet.schedules import WSD, Cosine, FromCallable, LinearDecay, OneCycle, Replay, Schedule
from hdet.spaces import Arcsine, Linear, Log, Logit, Relative
from hdet.spreads import OneSided, Symmetric, TwoLevel


class Cell:
    """A scalar in thin air that notes what is written to it."""

    def __init__(self, value: float) -> None:
        self.written = [value]
        self.targets: frozenset[Any] = frozenset()

    def read(self) -> float:
        return self.written[-1]

    def write(self, value: float) -> None:
        self.written.append(value)

    def overwritten(self, value: float) -> None:
        return None


@hdet.spec.register
class Wish(Controller):
    """Moves by what the slope says, and keeps the context it was shown."""

    kind = "wish"

    def start(self) -> NoState:
        return NoState()

    def step(self, state: NoState, estimate: Estimate, context: Context) -> tuple[float, NoState]:
        Shown.context = context
        return estimate.slope, state


class Shown:
    context: Context


def bound(n: int = 4, value: float = 0.1, **fields: Any) -> BoundKnob:
    knob = hdet.LearningRate(**{"controller": Wish(), "bounds": (0.0, 1.0), **fields})
    return BoundKnob(complete(knob, None, diverge=True), [Cell(value) for _ in range(n)], n)


def wish(knob: BoundKnob, move: float, step: int = 1) -> float:
    return knob.judge(Estimate(slope=move, stderr=0.1), Context(step=step, total_steps=100, window=0, windows_left=3))


SPACES = st.sampled_from([Log(), Logit(), Linear(0.3), Relative(), Arcsine()])
SPREADS = st.sampled_from([TwoLevel, Symmetric, Geometric, OneSided, lambda w: OneSided(w, "down")])


@settings(max_examples=300)
@given(
    space=SPACES,
    make=SPREADS,
    width=st.floats(0, 3),
    n=st.integers(2, 9),
    low=st.floats(0, 0.5),
    high=st.floats(0.5000001, 1.0),
    where=st.floats(0, 1),
    move=st.floats(-5, 5),
)
def test_no_value_leaves_its_bounds_and_levels_stay_centred(
    space: Any, make: Any, width: float, n: int, low: float, high: float, where: float, move: float
) -> None:
    """Wherever the base is, at the bounds too, and however far it was moved."""
    value = min(max(low + where * (high - low), low), high)
    spread = make(width)
    assume(any(space.apply(value, shift) != value for shift in (0.1, -0.1)))  # 0 cannot be moved by factors
    knob = bound(n, value, space=space, spread=spread, bounds=(low, high))
    knob.spread(spread.levels(n), spread.centre(n))
    for _ in range(2):
        base, values = knob.base(0), knob.values(0, range(n))
        assert all(low <= v <= high for v in [base, *values])
        reach = knob.reach(base)
        assert 0 <= reach <= 1
        offsets = reach * (knob.centre + knob.levels)
        assert abs(offsets.mean() - reach * knob.centre) <= 1e-12 * max(1, width)
        # What is in force is those levels, seen through the space, wherever the space can tell.
        for one, offset in zip(values, offsets, strict=True):
            assert one == pytest.approx(space.apply(base, offset), rel=1e-9, abs=1e-12)
        wish(knob, move)
        assert abs(knob.shift) <= knob.spec.authority


def test_levels_shrink_together() -> None:
    knob = bound(4, 0.9, spread=Symmetric(0.6))
    knob.spread(Symmetric(0.6).levels(4), 0.0)
    room = math.log(1 / 0.9)
    assert knob.reach(0.9) == pytest.approx(room / 0.6)
    assert knob.values(0, range(4)) == pytest.approx([0.9 * math.exp(f * room) for f in (-1, -1 / 3, 1 / 3, 1)])
    assert knob.values(0, [3]) == [1.0]


def test_at_rest_values_are_the_base_bit_for_bit() -> None:
    schedule = OneCycle(0.3, total_steps=50)
    knob = bound(3, schedule=schedule)
    knob.spread(np.zeros(3), 0.0)
    for step in range(50):
        assert knob.base(step) == schedule(step)
        assert knob.values(step, range(3)) == [schedule(step)] * 3


def test_only_changes_are_written_until_it_forgets() -> None:
    knob = bound(1)
    cell: Any = knob.bindings[0]
    for value in (0.2, 0.2, 0.3):
        knob.write(0, value)
    assert cell.written == [0.1, 0.2, 0.3]
    knob.forget()
    knob.write(0, 0.3)
    assert cell.written == [0.1, 0.2, 0.3, 0.3]


def test_what_is_worked_out_ahead_is_what_each_step_would_have() -> None:
    """Whatever changes in between: the shift, the levels, the step that training is at."""
    ahead, alone = (bound(2, schedule=OneCycle(0.3, total_steps=300), spread=Symmetric(0.6)) for _ in range(2))
    for step in [*range(150), 40, *range(41, 120)]:
        for knob in (ahead, alone):
            if step == 70:
                knob.shift = 0.5
            if step == 90:
                knob.spread(Symmetric(0.6).levels(2), 0.0)
        ahead.put_in_force(step, [0, 1])
        cells: Any = ahead.bindings
        assert [cell.written[-1] for cell in cells] == alone.values(step, [0, 1])


def asked(step: int) -> float:
    if step == 9:
        raise ValueError("not yet")
    return 0.1 + step / 100


def test_a_function_of_the_users_own_is_asked_for_the_step_that_comes() -> None:
    knob = bound(1, schedule=FromCallable(f"{__name__}:asked"))
    for step in range(9):
        knob.put_in_force(step, [0])
    with pytest.raises(ValueError, match="not yet"):
        knob.put_in_force(9, [0])


@settings(max_examples=100)
@given(moves=st.lists(st.floats(-10, 10), min_size=1, max_size=8), authority=st.floats(0, 4), space=SPACES)
def test_the_shift_stays_within_authority_and_the_moves_add_up_to_it(
    moves: list[float], authority: float, space: Any
) -> None:
    knob = bound(value=0.3, authority=authority, space=space)
    made = [wish(knob, move) for move in moves]
    assert abs(knob.shift) <= authority
    assert sum(made) == pytest.approx(knob.shift, abs=1e-12)
    for wanted, got in zip(moves, made, strict=True):
        assert got * wanted >= 0
        assert abs(got) <= abs(wanted) + 1e-12
    assert 0.0 <= knob.base(0) <= 1.0


def test_rounding_is_no_move() -> None:
    """The shift has it all the same, and the next move counts it."""
    knob, again = bound(), bound()
    assert wish(knob, 0.25) == 0.25
    assert [wish(knob, 4e-16) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert knob.shift == 0.25 + 4e-16 + 4e-16 + 4e-16
    again.load_state_dict(knob.state_dict())
    assert wish(knob, 0.125) == wish(again, 0.125) == knob.shift - 0.25


def test_the_next_move_counts_what_others_agreed_on() -> None:
    knob, again = bound(authority=1.0), bound(authority=1.0)
    assert wish(knob, 0.25) == 0.25
    knob.agree(0.75, knob.bend)
    again.load_state_dict(knob.state_dict())
    for one in (knob, again):
        assert wish(one, -0.125) == 0.375
        assert one.shift == 0.625
        one.agree(1.5, one.bend)
        assert one.shift == 1.0


def test_a_move_into_a_bound_does_not_wind_up() -> None:
    knob = bound(value=0.5)
    assert wish(knob, 5.0) == pytest.approx(math.log(2))
    assert wish(knob, 5.0) == 0.0
    assert wish(knob, -0.1) == pytest.approx(-0.1)
    assert knob.base(0) == pytest.approx(math.exp(-0.1))


def test_a_controller_is_shown_how_far_down_the_lower_bound_is() -> None:
    """A move by more than that ends on it, whatever rounding does."""
    knob = bound(value=0.1, space=Arcsine(), authority=2.0)
    wish(knob, -0.1)
    down = Shown.context.down
    assert down == pytest.approx(math.asin(math.sqrt(0.1)))
    wish(knob, 0.1 - down - 0.15)
    assert knob.base(2) == 0.0


def test_what_a_controller_is_shown() -> None:
    schedule = Replay((0.1, 0.2, 0.4, 0.3))
    knob = bound(2, schedule=schedule, authority=2.0)
    knob.spread(np.array([-0.3, 0.3]), 0.0)
    knob.shift = 0.5
    wish(knob, 0.0, step=2)
    assert Shown.context == Context(
        base=0.2 * math.exp(0.5),
        schedule_now=0.2,
        schedule_next=0.4,
        peak=0.4,
        step=2,
        total_steps=100,
        window=0,
        windows_left=3,
        shift=0.5,
        authority=2.0,
        spread=0.3,
        warming=True,
    )
    wish(knob, 0.0, step=3)
    assert not Shown.context.warming


def stairs(step: int) -> float:
    return 0.001 * (1 + step // 10)


def test_a_schedule_warms_up_on_the_stairs_of_its_rise() -> None:
    """A scheduler that is stepped once an epoch is level within it."""
    course = [0.1] * 3 + [0.2] * 3 + [0.4] * 2 + [0.3] * 2 + [0.2] * 2
    rising = [True] * 6 + [False] * 6
    knob = bound(schedule=Replay(course))
    shown = []
    for step in range(1, len(course) + 1):
        wish(knob, 0.0, step=step)
        shown.append(Shown.context.warming)
    assert shown == rising
    assert bound(schedule=FromCallable(f"{__name__}:stairs", total_steps=100)).rises(2, 3)
    assert not bound(schedule=FromCallable(f"{__name__}:stairs")).rises(2, 3), "nobody knows its course"
    assert not bound(schedule=Replay([0.0, 0.0, 0.1])).rises(0, 1), "it sleeps"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_trough_between_two_cycles_is_no_stair_of_a_warm_up(resumed: bool) -> None:
    course = [0.2] * 4 + [0.1] * 4 + [0.4] * 4
    knob = bound(schedule=Replay(course))
    shown = []
    for step in (2, 4, 6, 8, 10):
        knob.judge(Estimate.nothing(), Context(step=step, length=2, total_steps=12))
        shown.append(Shown.context.warming)
        if resumed:
            state, knob = knob.state_dict(), bound(schedule=Replay(course))
            knob.load_state_dict(state)
    assert shown == [True, False, False, True, False]


def test_its_state_is_plain_and_restores_it() -> None:
    knob, again = bound(), bound()
    wish(knob, np.float64(0.25))  # a controller may well return NumPy's
    state = knob.state_dict()
    assert {type(value) for value in state.values()} == {float, bool, dict}
    again.write(0, 0.1)
    again.load_state_dict(state)
    assert again.shift == 0.25
    again.write(0, 0.1)
    cell: Any = again.bindings[0]
    assert cell.written == [0.1, 0.1, 0.1]  # after loading nothing is assumed to be in force
    with pytest.raises(CheckpointError, match="GatedState"):
        bound(controller=Gated()).load_state_dict(state)


def test_the_peak_of_an_endless_schedule_is_the_largest_so_far() -> None:
    knob = bound(schedule=FromCallable("math:log1p"), bounds=(0.0, 10.0))
    assert knob.peak == 0.0
    wish(knob, 0.0, step=5)
    assert knob.peak == math.log1p(4), "what comes next may be a guess"
    again = bound(schedule=FromCallable("math:log1p"), bounds=(0.0, 10.0))
    again.load_state_dict(knob.state_dict())
    assert again.peak == math.log1p(4)


def test_a_bases_bounds_are_checked_over_the_whole_schedule() -> None:
    with pytest.raises(ConfigError, match=r"its schedule reaches 1.5, outside the bounds"):
        bound(schedule=Cosine(1.5, total_steps=100_000))
    with pytest.raises(ConfigError, match=r"reaches 0.001, outside .* give bounds=\(0.001, 1\)"):
        bound(schedule=Replay((0.5, 0.001, 0.5)), bounds=(0.01, 1.0))


def test_the_base_is_read_where_no_schedule_is_given() -> None:
    assert bound(value=0.25).base(1000) == 0.25
    assert bound(value=0.25, schedule=0.5).base(0) == 0.5
    assert torch.tensor(bound(value=0.25).base(0)).item() == 0.25


@pytest.mark.parametrize("shift", [1.5, -1.5, math.nan])
def test_a_loaded_shift_beyond_the_authority_is_refused(shift: float) -> None:
    knob = bound(value=0.3, authority=1.0)
    state = knob.state_dict()
    with pytest.raises(CheckpointError, match=r"moved it by (-?1\.5|nan), and its authority is 1 "):
        knob.load_state_dict({**state, "shift": shift})
    assert knob.shift == 0.0


@pytest.mark.parametrize("of", [Schedule, LinearDecay])
def test_a_schedule_of_ones_own_is_asked_in_each_step(problem: Any, train: Any, of: type[Schedule]) -> None:
    """It may read what changes, and so may a subclass of hdet's own."""
    asked: list[int] = []

    class Live(of):  # type: ignore[misc, valid-type]
        total_steps: int = 30

        def __call__(self, t: int) -> float:
            asked.append(t)
            return 0.1

    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Live() if of is Schedule else Live(0.1)
    knob = hdet.LearningRate(schedule=schedule)
    engine = hdet.Engine(hdet.replicate(model, optimizer, n=2), [knob], window=30, total_steps=30)
    del asked[:]
    train(engine, 10)
    assert max(asked) == 10


@pytest.mark.parametrize("schedule", [WSD(0.1, total_steps=300), Replay(tuple([0.1] * 90 + [0.2, 0.2, 0.1] * 60)), 0.1])
def test_values_that_stay_for_a_while_are_in_force_at_each_step(schedule: Any, problem: Any, train: Any) -> None:
    """Whatever else writes them and puts them back, and where the shift is another from some step on."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    knob = hdet.LearningRate(schedule=schedule, controller=Wish())
    engine = hdet.Engine(hdet.replicate(model, optimizer, n=2), [knob], window=120, total_steps=300)
    bound = engine.knobs[0]
    for step in range(1, 240):
        train(engine, step)
        held = [own.param_groups[0]["lr"] for own in engine.optimizers]
        assert held == bound.values(step, [0, 1])
        if step % 50 == 0:
            with engine.at_base():
                assert [own.param_groups[0]["lr"] for own in engine.optimizers] == [bound.base(step)] * 2
        if step == 75:
            bound.shift = 0.5
            engine.cycle.apply()


@hdet.spec.register
class Bends(Wish):
    """Moves nothing, and takes the rest of the schedule to a power."""

    kind = "bends"

    def judge(self, state: NoState, estimate: Estimate, context: Context) -> Judgement:
        Shown.context = context
        return Judgement(0.0, state, power=estimate.slope)


def test_a_power_bends_what_is_left_of_the_schedule_and_a_resumed_run_has_it() -> None:
    line = LinearDecay(0.1, total_steps=100, warmup=0.1)
    knob, again = (bound(controller=Bends(), schedule=line) for _ in range(2))
    before = knob.values(20, [0])
    for step in (20, 21, 22, 23):
        knob.put_in_force(step, [0])  # works out some steps more
    assert knob.judge(Estimate(slope=0.5, stderr=0.1), Context(step=20, total_steps=100, length=10)) == 0.0
    assert knob.values(20, [0]) == pytest.approx(before)
    assert knob.base(60) == pytest.approx(line(20) * (line(60) / line(20)) ** 0.5)
    assert knob.learned.value == 0.1
    knob.put_in_force(24, [0])
    assert knob.bindings[0].read() == knob.base(24) != line(24)
    wish(knob, 0.5, step=60)
    shown = [Shown.context.schedule_now, Shown.context.schedule_next]
    assert shown == pytest.approx([knob.base(59), knob.base(60)])
    again.load_state_dict(knob.state_dict())
    assert [again.base(step) for step in range(20, 100)] == [knob.base(step) for step in range(20, 100)]
    before_bends = {name: value for name, value in knob.state_dict().items() if name != "bend"}
    again.load_state_dict(before_bends)
    assert again.base(60) == line(60)


@pytest.mark.parametrize("power", [0.0, -1.0, math.inf, math.nan])
def test_a_power_that_bends_no_schedule_is_refused(power: float) -> None:
    knob = bound(controller=Bends(), schedule=LinearDecay(0.1, total_steps=100, warmup=0.1))
    with pytest.raises(ConfigError, match="Bends asked for a power of"):
        knob.judge(Estimate(slope=power, stderr=0.1), Context(step=20, total_steps=100, length=10))


def test_others_agree_on_a_bend() -> None:
    line = LinearDecay(0.1, total_steps=100, warmup=0.1)
    knob, other = (bound(controller=Bends(), schedule=line) for _ in range(2))
    knob.judge(Estimate(slope=0.5, stderr=0.1), Context(step=20, total_steps=100, length=10))
    shift, power, log_factor = knob.learned_numbers
    assert power == 0.5
    other.agree(shift, Bend(power, log_factor))
    assert other.learned_numbers == (shift, power, log_factor)
    assert [other.base(step) for step in range(20, 100)] == [knob.base(step) for step in range(20, 100)]


def test_a_knob_that_an_earlier_version_has_pickled_is_at_work() -> None:
    """What was worked out of its bindings since is no part of it."""
    knob = bound(1)
    pickled = {name: held for name, held in knob.__getstate__().items() if name != "_watchable"}
    again = BoundKnob.__new__(BoundKnob)
    vars(again).update(pickled)
    again.put_in_force(0, [0])
    assert again.bindings[0].read() == knob.base(0)
