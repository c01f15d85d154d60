"""What a run did, for people: tables and figures made from its history alone."""

from __future__ import annotations

from hdet.report.figures import course, evidence, losses, overview, save_figures
from hdet.report.verdict import Course, Verdict, verdicts

__all__ = ["Course", "Verdict", "course", "evidence", "losses", "overview", "save_figures", "verdicts"]
