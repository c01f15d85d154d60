"""What a knob is judged by and moved by where its declaration does not say."""

from __future__ import annotations

from hdet.controllers import Calibrate, Controller, Gated, Hold, Pooled, Regularize
from hdet.evidence.analytic import Analytic
from hdet.evidence.collector import Evidence
from hdet.evidence.contrast import Contrast
from hdet.evidence.divergent import Divergent
from hdet.evidence.group_lines import GroupLines
from hdet.evidence.line import Line
from hdet.evidence.mixed_difference import MixedDifference
from hdet.evidence.population import Population
from hdet.evidence.recursion import Recursion
from hdet.hparams.evidence_needs import EvidenceNeeds
from hdet.hparams.forward import ModuleKnob
from hdet.hparams.knob import Knob
from hdet.hparams.space import Log
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
    source = knob.evidence or evidence or (Divergent() if diverge or not explored else counterfactual(knob))
    return knob.replace(evidence=source, controller=knob.controller or controller(knob, source))


def counterfactual(knob: Knob) -> Evidence:
    """The evidence that judges a knob on one trajectory: by its line, formula, recursion or gradients."""
    if isinstance(knob, LearningRate):
        return Line()
    if isinstance(knob, WeightDecay):
        return Analytic()
    if isinstance(knob, (Momentum, Beta1, Beta2)):
        return Recursion()
    return Contrast(horizon=HORIZON) if knob.acts_on == "forward" else Divergent()


def controller(knob: Knob, evidence: EvidenceNeeds) -> Controller:
    """The rule that suits a knob and its evidence."""
    if isinstance(evidence, Line):
        return Calibrate()
    if isinstance(evidence, Population):
        return Hold()
    if isinstance(evidence, GroupLines):
        return Pooled()
    if isinstance(evidence, Analytic) and isinstance(knob.space, Log):
        return Regularize()
    if isinstance(knob, WeightDecay):
        return Gated(0.4, gate=1.0, memory=0.6, window_steps=30, max_scale=4.0, until=0.85)
    if isinstance(knob, ModuleKnob):
        # Small steps on evidence that adds up: an angle of 0.0032 a step at most. What a trace remembers by itself the
        # controller has to where each window is judged alone.
        memory = 0.7 if isinstance(evidence, MixedDifference) else 0.0
        return Gated(0.08, gate=1.0, saturation=3.0, memory=memory, window_steps=25, max_scale=1.0, until=0.85)
    return Gated()
