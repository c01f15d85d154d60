"""A controller as a table of rules, and vetoes that hold it back."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hdet.controllers import Calibrate, Context, Controller, Estimate, Regularize, Ruled, vetoes
from hdet.controllers.part import Veto
from hdet.controllers.rules import Lower, Raise, Return, SlopeSum
from hdet.controllers.state import NoState
from hdet.controllers.vetoes import DoesHarm, KeepsGap, NeedsGap, WithinSpan
from hdet.errors import CheckpointError, ConfigError

MORE = Estimate(slope=-0.3, curvature=1.0, stderr=0.1, averaged=Estimate.nothing())
LESS = replace(MORE, averaged=Estimate(slope=0.4, curvature=1.0, stderr=0.1))
BELOW = Context(shift=-1.0)


def told(controller: Controller, estimate: Estimate, context: Context = BELOW) -> tuple[float, dict[str, str]]:
    judged = controller.judge(controller.start(), estimate, context)
    return judged.move, judged.reasons


def test_the_first_rule_that_speaks_decides() -> None:
    up_first, down_first = Ruled(rules=(Raise(), Lower())), Ruled(rules=(Lower(), Raise()))
    assert told(up_first, LESS) == (0.3, {"rule": "raise"})
    assert told(down_first, LESS) == (-0.4, {"rule": "lower"})
    assert told(down_first, MORE) == (0.3, {"rule": "raise"})
    assert told(Ruled(rules=(Lower(),)), MORE) == (0.0, {})


def test_it_is_told_which_veto_held_a_move_back() -> None:
    rule = SlopeSum(gate=0.0, window_steps=None)
    sure = Estimate(slope=-0.4, stderr=0.01, span=0.1)
    assert told(Ruled(rules=(rule,)), sure) == (0.4, {"rule": "slope_sum"})
    assert told(Ruled(rules=(rule,), vetoes=(WithinSpan(),)), sure) == (
        0.2,
        {"rule": "slope_sum", "veto": "within_span"},
    )
    # The last to take something away, whichever stands first.
    for both in ((WithinSpan(), NeedsGap()), (NeedsGap(), WithinSpan())):
        assert told(Ruled(rules=(rule,), vetoes=both), sure) == (0.0, {"rule": "slope_sum", "veto": "needs_gap"})


def test_estimates_ahead_of_the_base_are_for_rules_that_look_ahead() -> None:
    ahead = replace(MORE, offset=0.5, averaged=None)
    assert told(Calibrate(), ahead) == (0.3, {"rule": "look_ahead"})
    assert told(Calibrate().without("look_ahead"), ahead) == (0.0, {})
    assert told(Calibrate().without("raise"), MORE) == (0.25, {"rule": "return"})


def test_a_number_is_taken_by_every_part_that_has_it() -> None:
    calibrate = Calibrate(limit=0.1, retreat_factor=2.0)
    assert {rule.kind: rule.limit for rule in calibrate.rules if hasattr(rule, "limit")} == {
        "lower": 0.1,
        "stall": 0.1,
        "raise": 0.1,
    }
    assert (calibrate.retreat_factor, calibrate.vetoes) == (2.0, Calibrate().vetoes)
    assert Calibrate(rules=[{"kind": "raise", "limit": 0.3}, "return"], limit=0.1).rules == (Raise(limit=0.1), Return())
    assert Controller.from_dict({"kind": "regularize", "rate": 0.1}) == Regularize(rate=0.1)
    assert {rule.kind: rule.rate for rule in Regularize(rate=0.1).rules if hasattr(rule, "rate")} == {
        "leap": 0.1,
        "slope_sum": 0.1,
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Calibrate(limits=0.1), "calibrate: limits: no such field, .*did you mean 'limit'.*given: 0.1"),
        (lambda: Ruled(limit=0.1), "ruled: limit: no such field"),
        (lambda: Ruled(rules=(Raise(), Raise(limit=0.1))), r"\['raise'\] are there twice"),
        (lambda: Calibrate(limit=-1.0), "limit"),
        (lambda: Calibrate(rules=5), "rules"),
        (lambda: Calibrate(rules=["rise"], limit=0.1), "no rule is called 'rise'.*did you mean 'raise'"),
        (lambda: Calibrate().without("look_back"), "has no rule or veto 'look_back'.*did you mean 'look_ahead'"),
    ],
)
def test_what_cannot_be_declared_is_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_averaged_weights_are_asked_for_only_where_a_rule_reads_them() -> None:
    assert Calibrate().needs_averaged
    assert not Calibrate().without("lower", "stall").needs_averaged
    assert told(Calibrate().without("lower", "stall"), replace(MORE, averaged=None))[0] == 0.3


@pytest.mark.parametrize(
    ("veto", "move"),
    [(NeedsGap(), 0.1), (KeepsGap(), -0.1), (WithinSpan(), 0.1), (DoesHarm(), -0.1)],
    ids=lambda given: getattr(given, "kind", None),
)
def test_a_veto_that_was_told_nothing_forbids(veto: object, move: float) -> None:
    """No losses and no span: it cannot know better. Of the other way it says nothing."""
    estimate = Estimate(slope=-math.copysign(0.3, move), stderr=0.1)
    assert veto.allow(move, veto.start(), estimate, Context()) == 0.0  # type: ignore[attr-defined]
    assert veto.allow(-move, veto.start(), estimate, Context()) == -move  # type: ignore[attr-defined]


def test_a_state_of_other_rules_is_refused() -> None:
    from hdet.controllers import from_plain, to_plain

    plain = to_plain(Calibrate().without("stall").start())
    with pytest.raises(CheckpointError, match="resume with the controller"):
        from_plain(Calibrate().start(), plain)


@pytest.mark.parametrize(("left", "expected"), [(-5.0, 0.0), (1e9, 0.3), (0.1, 0.1), (math.inf, 0.3)])
def test_a_veto_of_ones_own_can_only_shrink_a_move(left: float, expected: float) -> None:
    class Own(Veto):
        kind = "own"

        def allow(self, move: float, state: NoState, estimate: Estimate, context: Context) -> float:
            return left

    assert told(Ruled(rules=(Raise(),), vetoes=(Own(),)), MORE)[0] == expected
    if left < 0.0:
        assert told(Ruled(rules=(Lower(),), vetoes=(Own(),)), LESS)[0] == -0.4


@pytest.mark.parametrize("veto", [getattr(vetoes, name)() for name in vetoes.__all__], ids=lambda veto: veto.kind)
@pytest.mark.parametrize("move", [0.4, 0.01, 0.0, -0.01, -0.4])
def test_what_a_veto_leaves_lies_between_0_and_the_move(veto: Veto, move: float) -> None:
    for excess, shift, size, slope in product((1.0, 1.3), (-1.0, 0.0, 1.0), (0.01, 1.5, 30.0), (-0.1, 0.1)):
        estimate = Estimate(slope, stderr=0.1, level=1.0, span=0.1, stretch=size / 100, step_size=size)
        for (step, total), loss in product(((10, 1000), (2000, 10_000), (9000, 10_000)), (0.7, 1.0, 1.3)):
            context = Context(shift=shift, step=step, total_steps=total, length=10, loss=loss)
            begun = veto.begin(veto.start(), replace(estimate, excess=excess))
            left = veto.allow(move, veto.observe(begun, estimate, context), estimate, context)
            assert min(move, 0.0) <= left <= max(move, 0.0), (estimate, context)


def test_a_part_of_ones_own_that_answers_no_number_is_named() -> None:
    class Silent(Veto):
        def allow(self, move: float, *_: object) -> None:  # type: ignore[override]
            return None

    class Vague(Raise):
        def propose(self, *_: object) -> str:  # type: ignore[override]
            return "up"

    class Single(Veto):
        def allow(self, move: float, *_: object) -> float:  # type: ignore[override]
            return np.float32(0.25)  # type: ignore[return-value]

    assert told(Ruled(rules=(Raise(),), vetoes=(Single(),)), MORE)[0] == 0.25
    with pytest.raises(ConfigError, match=r"Silent.allow returned None; it returns a move, a number"):
        told(Ruled(rules=(Raise(),), vetoes=(Silent(),)), MORE)
    with pytest.raises(ConfigError, match=r"Vague.propose returned 'up'; it returns a move, a number"):
        told(Ruled(rules=(Vague(),)), MORE)
