"""Contrast in loops that leave the block out, in those that it refuses, and in a run that is resumed."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from contrast_parts import ONE_STEP, knob, make, noisy, on_bound, regulariser, scaled, secant, train
from torch import Tensor, nn

from hdet import Engine
from hdet.controllers import Gated
from hdet.errors import IdentifiabilityError, StepError
from hdet.evidence import Contrast
from hdet.spreads import TwoLevel


def train_outside(engine: Engine) -> None:
    losses = []
    for replica in engine.replicas:
        with replica:
            losses.append(scaled(replica.model))
    torch.stack(losses).sum().backward()
    engine.share_gradients()
    for optimizer in engine.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    engine.step([loss.detach() for loss in losses])


@pytest.mark.parametrize("copies", [False, True])
def test_a_backward_outside_the_block_is_warned_of_once(copies: bool, recwarn: pytest.WarningsRecorder) -> None:
    engine = make([knob()], copies=copies)
    for _ in range(3):
        train_outside(engine)
    (warning,) = (one for one in recwarn if "what the optimizer trains had no gradient in step 0" in str(one.message))
    assert warning.filename == __file__


@pytest.mark.parametrize("horizon", [0, 20])
def test_steps_with_a_backward_outside_the_block_are_left_out(horizon: int, recwarn: pytest.WarningsRecorder) -> None:
    """Counted as zeros they would make the slope small, and sure."""
    engine = make([knob(evidence=Contrast(horizon=horizon))], copies=True, window=24)
    for step in range(24):
        if step % 3:
            train(engine, step + 1)
        else:
            train_outside(engine)
    estimate = engine.history.windows[0].estimates["a"]
    assert estimate["slope"] == pytest.approx(24 * ONE_STEP * secant(), rel=1e-4)
    assert len(recwarn) == 1


def test_nothing_is_remembered_of_weights_that_are_gone() -> None:
    """Before they were NaN they may have blown up, and such gradients would outweigh all that follow."""
    engine = make([knob(evidence=Contrast(horizon=20))], window=12, windows=4)
    train(engine, 12)
    assert engine.cycle.collectors[0].record.explored == 12
    for step in range(13, 25):
        with torch.no_grad():
            next(engine.hosts[0][0].parameters()).fill_(math.nan)
        train(engine, step)
    assert [fault["kind"] for fault in engine.history.latest[-1].faults][-1] == "restored"
    assert engine.cycle.collectors[0].record.explored == 0


def test_a_backward_inside_it_is_not(recwarn: pytest.WarningsRecorder) -> None:
    train(make([knob()]))
    assert not [one for one in recwarn if "had no gradient" in str(one.message)]


# -- what is refused ------------------------------------------------------------------------------


def test_local_gradients_are_refused() -> None:
    with pytest.raises(IdentifiabilityError, match="shared"):
        make([knob()], copies=True, gradients="local")


@pytest.mark.parametrize("horizon", [0, 400])
def test_a_replica_that_did_not_run_is_named(horizon: int) -> None:
    """At whatever horizon: a step that was not seen would count as one without an effect."""
    engine = make([knob(evidence=Contrast(horizon=horizon))], n=4)
    with engine.replicas[0] as replica:
        scaled(replica.model).backward()
    engine.share_gradients()
    engine.optimizers[0].step()
    with pytest.raises(StepError, match=r"1 of 4 replicas .* in step 0 \(not 1, 2, 3\)"):
        engine.step([0.0] * 4)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("evidence", [None, Contrast(horizon=400), Contrast(), Contrast(paired=True)])
def test_a_loop_without_the_block_is_told_at_its_first_step(evidence: Contrast | None, copies: bool) -> None:
    """Though the regulariser would begin to explore only later, off its bound."""
    engine = make([regulariser(evidence or Contrast(horizon=400))], copies=copies)
    for replica in engine.replicas:
        scaled(replica.model).backward()
    engine.share_gradients()
    for optimizer in engine.optimizers:
        optimizer.step()
    with pytest.raises(StepError, match=r"0 of 4 replicas ran inside `with replica:` in step 0.*run forward and"):
        engine.step([0.0] * 4)


def test_a_pass_that_failed_was_none() -> None:
    engine = make([knob()])
    train(engine, 2)
    for replica in engine.replicas[1:]:
        with replica:
            scaled(replica.model).backward()
    with pytest.raises(ZeroDivisionError), engine.replicas[0]:
        raise ZeroDivisionError
    engine.share_gradients()
    with pytest.raises(StepError, match=r"3 of 4 replicas .* in step 2 \(not 0\)"):
        engine.step([0.0] * 4)


@pytest.mark.parametrize("horizon", [0, 20])
def test_a_short_accumulation_that_is_said_costs_its_block(horizon: int) -> None:
    engine = make([knob(evidence=Contrast(horizon=horizon))], window=24)
    for step in range(24):
        if step != 5:
            train(engine, step + 1)
            continue
        with engine.replicas[0] as replica:
            scaled(replica.model).backward()
        engine.share_gradients()
        engine.optimizers[0].zero_grad()
        engine.step([0.0] * 4, complete=False)
    estimate = engine.history.windows[0].estimates["a"]
    assert estimate["slope"] == pytest.approx(24 * ONE_STEP * secant(), rel=1e-4)


def test_a_knob_without_a_spread_asks_for_no_block() -> None:
    make([knob(spread=TwoLevel(0.0))]).step([0.0] * 4)


# -- resume ---------------------------------------------------------------------------------------


def small(step: int, own: Tensor) -> Tensor:
    """A training loss that is below any held-out one, but not from the start, which would show another scale."""
    return torch.tensor(1e6 if step < 10 else -1e6)


class Plain(torch.optim.Optimizer):
    """Somebody's own, whose steps leave no state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def weakened(model: Any, step: int, index: int) -> Tensor:
    return (1.0 - model.late) * noisy(model, step, index)


@pytest.mark.filterwarnings("ignore:hdet does not know how Plain")
@pytest.mark.parametrize("optimizer", [adam, Plain])
@pytest.mark.parametrize("horizon", [0, 30])
@pytest.mark.parametrize(
    ("n", "copies", "window", "stop"),
    [(1, False, 10, 13), (4, True, 5, 7), (4, False, 5, 10), (4, True, 5, 25), (4, False, 5, 32)],
)
def test_a_resume_is_the_same_run_bit_for_bit(
    n: int, copies: bool, window: int, stop: int, horizon: int, optimizer: Any
) -> None:
    """In mid-block, with blocks saved from the windows before; a regulariser on its bound explores from a third on."""
    evidence = Contrast(refresh=3, horizon=horizon)

    def fresh() -> Engine:
        rule = Gated(0.1, gate=0.0, memory=0.7)
        knobs = [knob(controller=rule, evidence=evidence), on_bound(evidence=evidence), regulariser(evidence)]
        return make(knobs, **options)

    options: dict[str, Any] = {"n": n, "copies": copies, "window": window, "windows": 10, "optimizer": optimizer}
    whole = fresh()
    expected = train(whole, loss=weakened, report=small)
    assert any(record.estimates["a"]["t"] for record in expected)
    first = fresh()
    train(first, stop, loss=weakened, report=small)
    stored = io.BytesIO()
    torch.save(first.state_dict(), stored)
    stored.seek(0)
    second = fresh()
    second.load_state_dict(torch.load(stored, weights_only=True))
    records = train(second, loss=weakened, report=small)
    for one, other in zip(expected[-len(records) :], records, strict=True):
        assert (one.estimates, one.moves, one.bases, one.values) == (
            other.estimates,
            other.moves,
            other.bases,
            other.values,
        )
    assert torch.equal(whole.replicas[0].model.w, second.replicas[0].model.w)


@pytest.mark.parametrize("horizon", [0, 16])
def test_a_sub_batch_of_the_probe_that_is_not_finite_is_told_of_once(horizon: int) -> None:
    """The gradient of all has it in it, and nothing is learned."""
    engine = make([knob(evidence=Contrast(horizon=horizon))], batches=(1.0, math.nan), windows=3)
    with pytest.warns(
        UserWarning, match="contrast took its gradient, so that it learned nothing in that window"
    ) as told:
        records = train(engine)
    assert len(told) == 1
    assert [record.estimates["a"]["t"] for record in records] == [0.0] * 3


@pytest.mark.parametrize("horizon", [0, 16])
def test_a_damage_of_the_probe_that_comes_back_is_told_of_anew(horizon: int) -> None:
    damaged = (1, 3, 4)
    engine = make(
        [knob(evidence=Contrast(horizon=horizon))],
        batches=lambda window: (1.0, math.nan if window in damaged else 1.0),
        windows=7,
    )
    with pytest.warns(UserWarning, match="took its gradient, so that it learned nothing in that window") as told:
        train(engine)
    assert [str(warning.message).partition(" the ")[0] for warning in told] == ["in window 1", "in window 3"]
