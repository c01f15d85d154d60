"""What a knob is judged by where its declaration does not say; the evidence then says what it is moved by."""

from __future__ import annotations

from hdet.evidence.analytic import Analytic
from hdet.evidence.collector import Evidence
from hdet.evidence.contrast import Contrast
from hdet.evidence.divergent import Divergent
from hdet.evidence.line import Line
from hdet.evidence.outer_line import OuterLine
from hdet.evidence.recursion import Recursion
from hdet.hparams.clipping import ClipNorm
from hdet.hparams.knob import Knob
from hdet.hparams.update import Beta1, Beta2, LearningRate, Momentum, WeightDecay

HORIZON = 400


def complete(knob: Knob, evidence: Evidence | None, diverge: bool) -> Knob:
    """The knob with its evidence and controller filled in.

    Args:
        evidence: the engine's, for knobs that name none.
        diverge: whether the replicas can come apart; if not, counterfactual evidence is the default. (A knob
            with a spread of 0 asks for no comparison: divergent evidence then measures nothing.)
    """
    explored = knob.spread.width != 0.0
    if knob.acts_on == "merge":
        source = knob.evidence or (OuterLine() if explored else Divergent())  # the engine's is for knobs of replicas
    else:
        source = knob.evidence or evidence or (Divergent() if diverge or not explored else counterfactual(knob))
    assert isinstance(source, Evidence)  # each that can be declared is one
    return knob.replace(evidence=source, controller=knob.controller or source.default_controller(knob))


def counterfactual(knob: Knob) -> Evidence:
    """The evidence that judges a knob on one trajectory: by its line, formula, recursion or gradients."""
    if isinstance(knob, LearningRate):
        return Line()
    if isinstance(knob, WeightDecay):
        return Analytic()
    if isinstance(knob, (Momentum, Beta1, Beta2, ClipNorm)):
        return Recursion()
    return Contrast(horizon=HORIZON) if knob.acts_on == "forward" else Divergent()
