"""What a run did, for people: tables, figures and a page made from its history alone."""

from __future__ import annotations

from hdet.report.figures import course, evidence, losses, overview, save_figures
from hdet.report.html_page import page
from hdet.report.importance import Importance, Interaction, importances, interactions
from hdet.report.reported import ReportedRun
from hdet.report.verdict import Moves, Verdict, verdicts

__all__ = [
    "Importance",
    "Interaction",
    "Moves",
    "ReportedRun",
    "Verdict",
    "course",
    "evidence",
    "importances",
    "interactions",
    "losses",
    "overview",
    "page",
    "save_figures",
    "verdicts",
]
