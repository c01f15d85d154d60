"""What a declaration that leaves evidence or controller open is completed by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.contrib import Marginal
from hdet.controllers import Calibrate, Context, Estimate, Gated, Hold, Pooled, Regularize
from hdet.engine.defaults import complete, counterfactual
from hdet.evidence import Population
from hdet.spaces import Linear, Relative
from hdet.spreads import TwoLevel

SCALAR = hdet.Scalar("margin", path="margin", bounds=(0.0, 1.0), space=Linear())
PULL = hdet.Scalar("pull", path="pull", bounds=(0.1, 1.0), effect="update")

REMEMBERING = hdet.evidence.Contrast(horizon=400)

FORWARD_RULE = hdet.evidence.Contrast().default_controller(hdet.Dropout())
DECAY_RULE = hdet.evidence.Analytic().default_controller(hdet.WeightDecay())


@pytest.mark.parametrize(
    ("knob", "evidence", "rule"),
    [
        (hdet.LearningRate(), hdet.evidence.Line(), Calibrate()),
        (hdet.LearningRate(groups=0), hdet.evidence.Line(), Calibrate()),
        (hdet.WeightDecay(), hdet.evidence.Analytic(), DECAY_RULE),
        (hdet.Dropout(), REMEMBERING, FORWARD_RULE),
        (hdet.LabelSmoothing(), REMEMBERING, FORWARD_RULE),
        (hdet.AttentionTemperature(), REMEMBERING, hdet.AttentionTemperature().default_controller),
        (SCALAR, REMEMBERING, Gated()),
        (hdet.Momentum(), hdet.evidence.Recursion(), Gated()),
        (hdet.Beta1(), hdet.evidence.Recursion(), Gated()),
        (hdet.Beta2(), hdet.evidence.Recursion(), Gated()),
        (hdet.ClipNorm(), hdet.evidence.Recursion(), hdet.ClipNorm().default_controller),
        (PULL, hdet.evidence.Divergent(), Gated()),
    ],
)
def test_without_divergence_each_knob_gets_what_suits_it(knob: Any, evidence: Any, rule: Any) -> None:
    assert counterfactual(knob) == evidence
    done = complete(knob, None, diverge=False)
    assert (done.evidence, done.controller) == (evidence, rule)
    assert done.replace(evidence=None, controller=None) == knob


SURE, UNSURE = (Estimate(slope=1.0, stderr=error, level=2.0, span=1.0) for error in (0.01, 1.01))


def moved(rule: Any, estimate: Estimate, length: int, step: int = 50, total_steps: int = 100) -> float:
    context = Context(step=step, total_steps=total_steps, length=length, loss=1.8)
    return float(rule.step(rule.start(), estimate, context)[0])


def test_knobs_of_modules_move_in_small_steps() -> None:
    """However sure a window of 10 steps is, it moves dropout by a small angle; in a short run by up to 3 times that."""
    assert FORWARD_RULE.to_dict()["memory"] == 0.0  # the evidence remembers
    assert moved(FORWARD_RULE, SURE, 10, total_steps=600) == pytest.approx(-0.032)
    assert moved(FORWARD_RULE, SURE, 1000, total_steps=600) == pytest.approx(-0.08)
    assert moved(FORWARD_RULE, SURE, 10, total_steps=300) == pytest.approx(-0.064)
    assert moved(FORWARD_RULE, SURE, 10, total_steps=100) == pytest.approx(-0.096)
    assert moved(FORWARD_RULE, UNSURE, 1000) == 0.0
    assert moved(hdet.AttentionTemperature().default_controller, SURE, 10, total_steps=100) == pytest.approx(-0.032)


def test_decay_moves_by_its_share_of_a_window() -> None:
    """0.013 a step and a factor of 5 in all; it is not lowered where it cannot be felt, and then raised at once."""
    assert moved(DECAY_RULE, SURE, 10) == pytest.approx(-0.4 / 3)
    assert moved(DECAY_RULE, SURE, 1000) == pytest.approx(-1.6)
    assert moved(DECAY_RULE, UNSURE, 1000) == 0.0
    for t, moves in ((1.9, False), (-0.9, False), (2.1, True), (-1.1, True)):
        told = Estimate(slope=1e-3 * t, stderr=1e-3, level=0.1, span=1.0)
        context = Context(step=50, total_steps=100, length=30, loss=0.09)
        assert (DECAY_RULE.step(DECAY_RULE.start(), told, context)[0] != 0.0) is moves
    faint = {sign: Estimate(slope=sign * 1e-3, stderr=1e-4, level=2.0, span=1.0) for sign in (1, -1)}
    assert moved(DECAY_RULE, faint[1], 10) == 0.0
    assert moved(DECAY_RULE, faint[-1], 10) == pytest.approx(1.6)
    assert moved(DECAY_RULE, faint[-1], 10, step=29) == 0.0


@pytest.mark.parametrize("rule", [DECAY_RULE, FORWARD_RULE, Calibrate()])
def test_none_of_them_listens_to_the_end(rule: Any) -> None:
    assert [rule.listens(step, 100) for step in (84, 85)] == [True, False]
    assert moved(rule, SURE, 10, step=85) == 0.0


@pytest.mark.parametrize("knob", [hdet.LearningRate(), hdet.WeightDecay(), hdet.Dropout(), hdet.Momentum()])
def test_replicas_that_can_come_apart_are_compared(knob: Any) -> None:
    done = complete(knob, None, diverge=True)
    assert done.evidence == hdet.evidence.Divergent()
    assert done.controller == hdet.evidence.Divergent().default_controller(knob)
    assert not done.controller.needs_averaged


def test_a_learning_rate_judged_by_divergence_is_not_calibrated() -> None:
    """Calibrate needs a judgement at averaged weights, which divergent evidence has not."""
    assert hdet.evidence.Divergent().default_controller(hdet.LearningRate()) == Gated()
    assert hdet.evidence.Line().default_controller(hdet.LearningRate()) == Calibrate()


def test_what_was_declared_is_kept() -> None:
    own = hdet.LearningRate(evidence=hdet.evidence.Line(width=0.1), controller=Hold())
    assert complete(own, hdet.evidence.Divergent(), diverge=True) == own


def test_a_knobs_own_evidence_goes_before_the_engines_and_that_before_the_default() -> None:
    engines = hdet.evidence.Divergent(estimator=Marginal())
    assert complete(hdet.LearningRate(), engines, diverge=False).evidence == engines
    assert (
        complete(hdet.LearningRate(evidence=hdet.evidence.Line()), engines, diverge=True).evidence
        == hdet.evidence.Line()
    )


def test_the_controller_follows_the_evidence_that_was_chosen() -> None:
    assert complete(hdet.LearningRate(), hdet.evidence.Line(), diverge=True).controller == Calibrate()
    assert complete(hdet.LearningRate(evidence=hdet.evidence.Divergent()), None, diverge=False).controller == Gated()


@pytest.mark.parametrize("diverge", [False, True])
def test_a_knob_without_a_spread_asks_for_no_comparison(diverge: bool) -> None:
    """So that it needs no probe."""
    still = hdet.LearningRate(spread=TwoLevel(0.0))
    assert complete(still, None, diverge=diverge).evidence == hdet.evidence.Divergent()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hdet.Engine(hdet.micro_batches(model, optimizer, n=2), [still], window=2)
    assert engine.bases == {"learning_rate": 0.1}


def test_the_rule_for_decay_is_for_its_formula_in_log_space_only() -> None:
    """Elsewhere, say from a decay of 0 in `Linear` space, its units mean nothing."""
    assert isinstance(hdet.evidence.Analytic().default_controller(hdet.WeightDecay()), Regularize)
    for knob, evidence in (
        (hdet.WeightDecay(), hdet.evidence.Divergent()),
        (hdet.WeightDecay(space=Relative()), hdet.evidence.Analytic()),
        (hdet.WeightDecay(space=Linear(0.2)), hdet.evidence.Divergent()),
    ):
        assert type(evidence.default_controller(knob)) is Gated


def test_evidence_names_the_controller_of_the_knobs_that_it_judges() -> None:
    assert complete(hdet.LearningRate(evidence=hdet.evidence.GroupLines()), None, diverge=False).controller == Pooled()
    assert complete(hdet.LearningRate(evidence=Population()), None, diverge=True).controller == Hold()
    forgets = complete(hdet.Dropout(evidence=hdet.evidence.MixedDifference()), None, diverge=False).controller
    assert forgets == FORWARD_RULE.replace(memory=0.7)  # type: ignore[attr-defined]
    assert complete(SCALAR.replace(evidence=hdet.evidence.MixedDifference()), None, diverge=False).controller == Gated()
