"""The laws of rules and vetoes."""

from __future__ import annotations

from typing import Any

from hdet.controllers import Ruled
from hdet.controllers.part import Rule, Veto
from hdet.controllers.rules import SlopeSum
from hdet.testing import controllers
from hdet.testing.course import course
from hdet.testing.law import laws_of, require

MOVES = (-3.0, -0.1, -1e-9, 0.0, 1e-9, 0.1, 3.0)


def rules_keep_the_laws_of_controllers(rule: Rule) -> None:
    """A controller with this rule alone keeps the laws of controllers."""
    for law in laws_of(controllers):
        law(Ruled(rules=(rule,)))


def vetoes_keep_the_laws_of_controllers(veto: Veto) -> None:
    """A controller with this veto, and a rule that moves in most windows, keeps the laws of controllers."""
    for law in laws_of(controllers):
        law(_vetoed(veto))


def a_veto_only_shrinks(veto: Veto) -> None:
    """What it leaves of a move lies between 0 and the move."""
    for state, estimate, context in course(_vetoed(veto)):
        own: Any = veto.observe(state.parts[veto.kind], estimate, context)
        for move in MOVES:
            allowed = veto.allow(move, own, estimate, context)
            shrunk = min(0.0, move) <= allowed <= max(0.0, move)
            require(shrunk, f"of a move of {move} it left {allowed} after {estimate} in {context}")


def _vetoed(veto: Veto) -> Ruled:
    return Ruled(rules=(SlopeSum(gate=0.0, lower_gate=0.0),), vetoes=(veto,))


RULE_LAWS = (rules_keep_the_laws_of_controllers,)
VETO_LAWS = (vetoes_keep_the_laws_of_controllers, a_veto_only_shrinks)
