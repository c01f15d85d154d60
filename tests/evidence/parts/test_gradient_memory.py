"""What a contrast keeps, against sums worked out in NumPy and against training again."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import explicit_loop
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hdet import Engine, Probe
from hdet.controllers import Estimate, Hold
from hdet.evidence import Contrast
from hdet.evidence.contrast import ContrastCollector
from hdet.evidence.parts import gradient_memory as memory
from hdet.evidence.parts.gradient_memory import Dots, Record, Traces
from hdet.hparams.binding import Attribute
from hdet.hparams.forward import ModuleKnob
from hdet.replicas import Replicas, in_process
from hdet.spreads import TwoLevel

RATE, WIDTH, SIZE = 0.1, 0.2, 5
AIM = np.array([2.0, 1.0, 3.0, -1.0, 0.5])
WIDTHS = np.array([0.2, 0.5])

Array = NDArray[np.float64]


def home(n: int = 4) -> Replicas:
    model = nn.Linear(SIZE, 1, bias=False)
    return in_process.micro_batches(model, torch.optim.SGD(model.parameters(), lr=RATE), n)


def given(gradients: Array, step: int, replica: Any) -> Tensor:
    """A gradient as traces are given it: times the learning rate."""
    return torch.tensor(rate_at(step) * gradients[step, replica.index], dtype=torch.float32)


def traces(n: int = 4, *, knobs: int = 2, block_steps: int = 1, horizon: int = 20, groups: int = 4) -> Traces:
    return Traces(home(n), knobs, block_steps, horizon, groups)


def signs_of(step: int, n: int) -> Array:
    """Balanced signs [n, 2], other ones in each step, orthogonal between the knobs where n is 4."""
    turned = np.roll([1.0, 1.0, -1.0, -1.0], step % 4)
    other = np.roll([1.0, -1.0, 1.0, -1.0], step // 4 % 2)
    return np.stack([turned, other], axis=1)[:n]


def course(steps: int, n: int = 4, seed: int = 0) -> Array:
    """[steps, n, P] gradients."""
    drawn: Array = np.random.default_rng(seed).normal(size=(steps, n, SIZE))
    return drawn


def rate_at(step: int) -> float:
    return RATE * (1 + step % 5)


def feed(record: Traces, gradients: Array, steps: Iterator[int] | range, active: Any = lambda step: (1, 1)) -> None:
    for step in steps:
        signs = signs_of(step, len(record.replicas.local)) * np.array(active(step))
        explores = bool(signs.any())
        if explores:
            for replica in record.replicas.local:
                record.add(replica, given(gradients, step, replica), signs, WIDTHS)
        record.end_step(step, signs if explores else None, last=False)


def by_hand(
    gradients: Array, k: int, *, horizon: float, groups: int, block_steps: int = 1, active: Any = lambda step: (1, 1)
) -> tuple[float, float]:
    """Slope and standard error of -<P g_p, Z_j> over the sums of the weights, with (P / lr) g_p = AIM."""
    steps, n, _ = gradients.shape
    sums, weights, explored = np.zeros((groups, SIZE)), np.zeros(groups), 0
    for step in range(steps):
        own = np.array(active(step))
        if not own.any():
            continue
        group = explored // block_steps % groups
        explored += 1
        if not own[k]:
            continue
        fading = math.exp(-(steps - step) / horizon)
        contrast = (signs_of(step, n)[:, k, None] * gradients[step]).sum(axis=0) / n / WIDTHS[k]
        sums[group] += fading * rate_at(step) * contrast
        weights[group] += fading
    slopes = -(sums @ AIM) / weights
    return slopes.mean(), slopes.std(ddof=1) / math.sqrt(groups)


def judged(record: Traces, heard: tuple[int, ...] = (0, 1)) -> dict[int, Estimate]:
    return record.close(heard, WIDTHS, lambda: torch.tensor(AIM, dtype=torch.float32))


def check(found: dict[int, Estimate], gradients: Array, rel: float = 1e-4, **options: Any) -> None:
    for k in (0, 1):
        slope, stderr = by_hand(gradients, k, **options)
        assert found[k].slope == pytest.approx(slope, rel=rel)
        assert found[k].stderr == pytest.approx(stderr, rel=rel)


# -- the sums -------------------------------------------------------------------------------------


@pytest.mark.parametrize("horizon", [3, 20, 10_000])
@pytest.mark.parametrize("groups", [2, 4, 8])
def test_slope_and_error_by_hand(horizon: int, groups: int) -> None:
    """Weights fade with age; contrasts count by the rate of their time, which differs from step to step."""
    gradients = course(48)
    record = traces(horizon=horizon, groups=groups)
    feed(record, gradients, range(48))
    check(judged(record), gradients, horizon=horizon, groups=groups)


def test_blocks_of_several_steps_go_to_one_group() -> None:
    gradients = course(48, n=2)
    record = traces(2, block_steps=2)
    feed(record, gradients, range(48))
    check(judged(record), gradients, horizon=20, groups=4, block_steps=2)


def test_a_knob_that_rests_and_steps_that_do_not_explore_add_nothing_and_age_the_rest() -> None:
    def active(step: int) -> tuple[int, int]:
        return (0, 0) if step % 6 == 5 else (1, int(step < 30))

    gradients = course(48)
    record = traces()
    feed(record, gradients, range(48), active)
    check(judged(record), gradients, horizon=20, groups=4, active=active)


def test_windows_that_close_in_between_change_nothing() -> None:
    """What was summed is judged by the aim of each window's end."""
    gradients = course(48)
    record = traces()
    for start in range(0, 48, 16):
        feed(record, gradients, range(start, start + 16))
        check(judged(record), gradients[: start + 16], horizon=20, groups=4)


@pytest.mark.parametrize("largest", [1.01, 1.3, 5.0])
def test_weights_that_grew_large_are_scaled_back(largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In mid-window, several times over, and the sums stay what they were."""
    gradients = course(48)
    whole = traces()
    feed(whole, gradients, range(48))
    want = judged(whole)
    monkeypatch.setattr(memory, "LARGEST_GAIN", largest)
    record = traces()
    seen = []
    for step in range(48):
        feed(record, gradients, range(step, step + 1))
        seen.append(record.gain)
    assert max(seen) <= largest
    assert 1.0 in seen
    found = judged(record)
    for k in (0, 1):
        assert found[k].slope == pytest.approx(want[k].slope, rel=1e-4)
        assert found[k].stderr == pytest.approx(want[k].stderr, rel=1e-4)


def test_gains_stay_in_range_over_many_horizons() -> None:
    record = traces(horizon=1, groups=2)
    gradients = course(400)
    feed(record, gradients, range(400))
    assert record.traces is not None
    assert torch.isfinite(record.traces).all()
    check(judged(record), gradients, horizon=1, groups=2, rel=1e-3)


def test_the_scale_of_gradients_shows_in_the_slope_and_not_in_t() -> None:
    gradients = course(48)
    plain, scaled = traces(), traces()
    feed(plain, gradients, range(48))
    feed(scaled, 1024.0 * gradients, range(48))
    small, large = judged(plain)[0], judged(scaled)[0]
    assert large.slope == pytest.approx(1024.0 * small.slope, rel=1e-6)
    assert large.t == pytest.approx(small.t, rel=1e-6)


# -- how much is needed ---------------------------------------------------------------------------


def test_eight_blocks_and_one_in_each_group_are_needed() -> None:
    gradients = course(16)
    few, many = traces(groups=4), traces(groups=16)
    known = {4: [], 16: []}
    for step in range(16):
        for groups, record in ((4, few), (16, many)):
            feed(record, gradients, range(step, step + 1))
            known[groups].append(bool(judged(record)))
    assert known[4].index(True) == 7
    assert known[16].index(True) == 15
    assert all(known[4][7:])


@pytest.mark.parametrize("block_steps", [5, 6, 7, 10])
def test_so_it_is_whatever_a_block_is_long(block_steps: int) -> None:
    """A sixth added six times is less than 1."""
    steps = 8 * block_steps
    record, gradients = traces(block_steps=block_steps, groups=8), course(steps)
    feed(record, gradients, range(steps - 1))
    assert judged(record) == {}
    feed(record, gradients, range(steps - 1, steps))
    assert judged(record).keys() == {0, 1}


def test_memory_is_taken_when_a_knob_first_explores() -> None:
    """A buffer of the parameters' size a knob and group."""
    record = traces(groups=8)
    for step in range(5):
        record.end_step(step, None, last=False)
    assert record.traces is None
    feed(record, course(1), range(1))
    assert record.traces is not None
    assert record.traces.shape == (8, 2, SIZE)


def test_only_knobs_that_are_heard_are_judged() -> None:
    record = traces()
    feed(record, course(16), range(16))
    assert set(judged(record, (1,))) == {1}


def test_without_a_direction_nothing_is_told_and_nothing_is_lost() -> None:
    gradients = course(16)
    record = traces()
    feed(record, gradients, range(16))
    assert record.close((0, 1), WIDTHS, lambda: None) == {}
    check(judged(record), gradients, horizon=20, groups=4)


def test_where_nothing_moved_nothing_is_told() -> None:
    """At a rate of zero; a slope of zero that was measured would be another thing."""
    record = traces()
    for step in range(16):
        for replica in record.replicas.local:
            record.add(replica, torch.zeros(SIZE), signs_of(step, 4), WIDTHS)
        record.end_step(step, signs_of(step, 4), last=False)
    assert judged(record) == {}


@pytest.mark.parametrize("spoilt", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_was_not_finite_costs_its_block_and_no_more(spoilt: float) -> None:
    """Sum and weights of the others stay, as if that step had not explored."""
    gradients = course(48)
    want = by_hand_without(gradients, 10)
    gradients[10, 2, 1] = spoilt
    record = traces()
    for start in (0, 16, 32):
        feed(record, gradients, range(start, start + 16))
        assert set(judged(record)) == {0, 1}
    found = judged(record)
    for k in (0, 1):
        assert (found[k].slope, found[k].stderr) == pytest.approx(want[k], rel=1e-4)


def by_hand_without(gradients: Array, step: int) -> list[tuple[float, float]]:
    """`by_hand` with one step's block left out of its group, whose number others keep."""
    found = []
    for k in (0, 1):
        sums, weights = np.zeros((4, SIZE)), np.zeros(4)
        for t in range(len(gradients)):
            if t != step:
                fading = math.exp(-(len(gradients) - t) / 20)
                contrast = (signs_of(t, 4)[:, k, None] * gradients[t]).sum(axis=0) / 4 / WIDTHS[k]
                sums[t % 4] += fading * rate_at(t) * contrast
                weights[t % 4] += fading
        slopes = -(sums @ AIM) / weights
        found.append((slopes.mean(), slopes.std(ddof=1) / math.sqrt(4)))
    return found


def test_a_pass_that_gave_no_gradient_costs_its_block() -> None:
    gradients = course(48)
    want = by_hand_without(gradients, 10)
    record = traces()
    feed(record, gradients, range(10))
    for replica in record.replicas.local:
        if replica.index == 1:
            record.reject(replica)
        else:
            record.add(replica, given(gradients, 10, replica), signs_of(10, 4), WIDTHS)
    record.end_step(10, signs_of(10, 4), last=False)
    feed(record, gradients, range(11, 48))
    found = judged(record)
    for k in (0, 1):
        assert (found[k].slope, found[k].stderr) == pytest.approx(want[k], rel=1e-4)


def test_a_group_all_of_whose_blocks_were_left_out_has_no_slope() -> None:
    gradients = course(16)
    gradients[::4] = math.nan
    record = traces()
    feed(record, gradients, range(16))
    assert judged(record) == {}


def test_what_rests_since_the_window_was_taken_up_again_saves_no_slope() -> None:
    record = Dots(home(), 2, 1, 50)
    record.open(lambda: torch.tensor(AIM, dtype=torch.float32))
    feed(record, course(8), range(8))
    assert set(record.close((), WIDTHS * [1.0, 0.0], lambda: None)) == {0}


def test_a_direction_that_is_not_finite_is_not_told_and_costs_nothing() -> None:
    gradients = course(16)
    record = traces()
    feed(record, gradients, range(16))
    assert record.close((0, 1), WIDTHS, lambda: torch.full((SIZE,), math.inf)) == {}
    check(judged(record), gradients, horizon=20, groups=4)


# -- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 3, 9, 16])
def test_state_goes_round_bit_for_bit(stop: int) -> None:
    gradients = course(32)

    def active(step: int) -> tuple[int, int]:
        return (0, 0) if step < 5 else (1, 1)

    whole = traces(horizon=7)
    feed(whole, gradients, range(32), active)
    first, second = traces(horizon=7), traces(horizon=7)
    feed(first, gradients, range(stop), active)
    second.load_state_dict(first.state_dict(), torch.device("cpu"), SIZE, same_window=True)
    feed(first, gradients, range(stop, stop + 1), active)  # what was loaded is a copy
    feed(second, gradients, range(stop, 32), active)
    assert whole.traces is not None
    assert second.traces is not None
    assert torch.equal(whole.traces, second.traces)
    assert judged(whole) == judged(second)


@pytest.mark.parametrize("kind", [Traces, Dots])
def test_a_state_is_a_copy(kind: type[Record], assert_same: Any) -> None:
    """What is trained on does not reach it."""
    record = traces() if kind is Traces else Dots(home(), 2, 1, 50)
    record.open(lambda: torch.tensor(AIM, dtype=torch.float32))
    feed(record, course(32), range(9))
    state = record.state_dict()
    kept = copy.deepcopy(state)
    feed(record, course(32), range(9, 32))
    for held in vars(record).values():
        if isinstance(held, Tensor):
            held.fill_(math.nan)
    assert_same(state, kept)


def test_a_block_of_which_a_part_was_let_go_is_left_out() -> None:
    """As where a layer is thawed in it: the rest of it does not cancel the mean gradient."""
    record = traces(2, knobs=1, block_steps=2, horizon=10**6)
    for step in range(16):
        if step == 7:
            record.renew()
        signs = np.full((2, 1), 1.0 if step % 2 == 0 else -1.0)  # alike, as are the gradients: a block comes to nothing
        for replica in record.replicas.local:
            record.add(replica, torch.ones(SIZE), signs, WIDTHS[:1])
        record.end_step(step, signs, last=False)
    assert record.traces is not None
    assert float(record.traces.abs().max()) < 1e-3


def test_traces_outlive_the_window() -> None:
    gradients = course(32)
    whole, first, second = traces(), traces(), traces()
    feed(whole, gradients, range(32))
    feed(first, gradients, range(16))
    second.load_state_dict(first.state_dict(), torch.device("cpu"), SIZE, same_window=False)
    feed(second, gradients, range(16, 32))
    assert judged(whole) == judged(second)


def test_without_its_sums_a_state_starts_anew() -> None:
    """As from a checkpoint that leaves the tensors out: the counts alone would pass for evidence."""
    first, second = traces(), traces()
    feed(first, course(17), range(17))
    state = {**first.state_dict(), "traces": None, "block": None, "weights": None}
    second.load_state_dict(state, torch.device("cpu"), SIZE, same_window=False)
    assert second.explored == 0
    assert not second.blocks.any()
    feed(second, course(4), range(4))
    assert judged(second) == {}


def test_another_number_of_replicas_starts_anew() -> None:
    first, second = traces(4), traces(2)
    feed(first, course(16), range(16))
    feed(second, course(4, n=2), range(4))
    second.load_state_dict(first.state_dict(), torch.device("cpu"), SIZE, same_window=False)
    assert second.traces is None
    assert second.weights is None
    assert judged(second) == {}


def test_unless_every_process_has_its_own_back_all_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all ranks load what one has saved: with some sums here and none there they would decide differently."""
    first, second = traces(), traces()
    feed(first, course(16), range(16))
    monkeypatch.setattr(second.replicas, "gather", lambda rows: np.array([[1.0], [1.0], [0.0], [1.0]]))
    second.load_state_dict(first.state_dict(), torch.device("cpu"), SIZE, same_window=False)
    assert second.traces is None
    assert judged(second) == {}


@pytest.mark.parametrize("kind", [Traces, Dots])
def test_to_forget_is_to_be_as_new(kind: type[Record]) -> None:
    replicas = home()
    record = Traces(replicas, 1, 1, 20, 4) if kind is Traces else Dots(replicas, 1, 1, 50)
    new = record.state_dict()
    record.open(lambda: torch.ones(SIZE))
    for step in range(9):
        for replica in replicas.local:
            record.add(replica, torch.ones(SIZE) * step, signs_of(step, 4)[:, :1], WIDTHS[:1])
        record.end_step(step, signs_of(step, 4)[:, :1], last=False)
    record.forget()
    assert record.state_dict() == new
    assert record.close([0], WIDTHS[:1], lambda: torch.ones(SIZE)) == {}


# -- in a run -------------------------------------------------------------------------------------


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE))
        self.a = 1.5


class Strength(ModuleKnob):
    """`Vector.a`, said to act in training alone."""

    kind = "strength_for_tests"
    role = "a"
    bounds: tuple[float, float] = (0.01, 100.0)

    def cells(self, model: nn.Module, pattern: str) -> Any:
        return {"a": Attribute(model, "a")}


def run(
    loss: Any,
    *,
    horizon: int,
    window: int = 16,
    windows: int = 1,
    n: int = 4,
    copies: bool = False,
    probe: Any = lambda model, batch: batch * (torch.tensor(AIM, dtype=torch.float32) @ model.w),
    batches: tuple[float, ...] = (1.0, 1.0),
    width: float = WIDTH,
) -> tuple[Engine, list[dict[str, Any]]]:
    """The estimates of each window, under SGD at RATE."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    knob = Strength(spread=TwoLevel(width), evidence=Contrast(horizon=horizon), controller=Hold())
    engine = Engine(
        (in_process.replicate if copies else in_process.micro_batches)(model, optimizer, n),
        [knob],
        window=window,
        signal=Probe(probe, batches),
        total_steps=window * windows,
    )
    records = explicit_loop.train(engine, loss=loss)
    return engine, [record.estimates["strength_for_tests"] for record in records]


C = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.0])
ONE_STEP = -RATE * float(torch.tensor(AIM, dtype=torch.float32) @ C) * 1.5 * math.sinh(WIDTH) / WIDTH


@pytest.mark.parametrize(
    ("n", "copies", "rel"), [(4, False, 1e-3), (4, True, 1e-3), (8, False, 1e-3), (3, False, 0.03), (1, False, 0.03)]
)
def test_a_constant_effect_is_one_steps(n: int, copies: bool, rel: float) -> None:
    """Under a loss a (c . w) the gradient is the same everywhere: each window tells -r (g_p . c) a.

    Where several steps form a block its first ones have faded a little when its last come.
    """
    _, found = run(
        lambda model, step, index: model.a * (C @ model.w), horizon=200, window=40, windows=3, n=n, copies=copies
    )
    for estimate in found:
        assert estimate["slope"] == pytest.approx(ONE_STEP, rel=rel)
        assert estimate["stderr"] < rel * abs(ONE_STEP)


@pytest.mark.parametrize("horizon", [8, 40, 4000])
def test_an_effect_that_turned_is_outweighed_as_it_fades(horizon: int) -> None:
    """Two windows one way and one the other: the share of what is remembered that lies in the last."""

    def turning(model: Any, step: int, index: int) -> Tensor:
        loss: Tensor = (1.0 if step < 32 else -1.0) * model.a * (C @ model.w)
        return loss

    _, found = run(turning, horizon=horizon, windows=3)
    weights = np.exp(np.arange(48) / horizon)
    share = weights[32:].sum() / weights.sum()
    assert found[1]["slope"] == pytest.approx(ONE_STEP, rel=1e-3)
    # The groups' shares differ a little, block by block.
    assert found[2]["slope"] == pytest.approx(ONE_STEP * (1 - 2 * share), rel=0.02, abs=0.01)
    assert (found[2]["slope"] * ONE_STEP < 0) == (share > 0.5)


def noisy(model: Any, step: int, index: int) -> Tensor:
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(97 * step + index))
    loss: Tensor = (model.a * C + noise) @ model.w
    return loss


def test_seats_of_one_model_remember_what_copies_remember() -> None:
    _, one = run(noisy, horizon=40, windows=3)
    _, many = run(noisy, horizon=40, windows=3, copies=True)
    for left, right in zip(one, many, strict=True):
        assert abs(left["t"]) > 0.1
        for number in ("slope", "stderr"):
            assert left[number] == pytest.approx(right[number], rel=1e-3)


def test_a_resume_with_another_number_of_replicas_drops_the_traces() -> None:
    def collector(engine: Engine) -> Traces:
        (own,) = engine.cycle.collectors
        assert isinstance(own, ContrastCollector)
        assert isinstance(own.record, Traces)
        return own.record

    first, _ = run(noisy, horizon=40, windows=2)
    state = first.state_dict()
    assert collector(first).traces is not None
    other, _ = run(noisy, horizon=40, windows=2, n=2)
    fresh = collector(other)
    fresh.load_state_dict(state["collectors"][0]["record"], torch.device("cpu"), SIZE, same_window=False)
    assert fresh.traces is None


# -- what a horizon is for ------------------------------------------------------------------------

NOISE, TRUTH, STEPS, STRENGTH = 1.0, 0.5, 40, 0.3


def memorised(model: Any, step: int = 0, index: int = 0) -> Tensor:
    """Training pulls w[0] to NOISE, the regulariser `a` slows it."""
    gradient = (1.0 - model.a) * (model.w[0].detach() - NOISE)
    loss: Tensor = gradient * model.w[0]
    return loss


def held_out(model: Any, batch: float) -> Tensor:
    """Best at TRUTH, half-way there."""
    loss: Tensor = 0.5 * (model.w[0] - TRUTH).square() + batch
    return loss


def regularised(strength: float) -> float:
    """The held-out loss after training again."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        model.a = strength
        memorised(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return held_out(model, 0.0).item()


@pytest.mark.parametrize(("horizon", "sign"), [(0, 1.0), (400, -1.0)])
def test_a_regulariser_that_pays_late_needs_a_horizon(
    horizon: int, sign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the window's opening all learning helps, and one step ahead less of the regulariser looks better.

    By the window's end the noise has been learnt. Traces judge what was done by that, and training again agrees.
    """
    want = regularised(STRENGTH * 1.05) - regularised(STRENGTH / 1.05)
    assert want < 0.0
    monkeypatch.setattr(Vector, "__init__", started)
    monkeypatch.setitem(globals(), "RATE", 0.05)
    _, (estimate,) = run(memorised, horizon=horizon, window=STEPS, probe=held_out, batches=(0.0, 0.1), width=0.05)
    assert estimate["slope"] * sign > 0.0
    assert estimate["t"] * sign > 2.0


def started(self: Vector) -> None:
    nn.Module.__init__(self)
    self.w = nn.Parameter(torch.zeros(SIZE))
    self.a = STRENGTH
