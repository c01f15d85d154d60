"""What a run did, for people: tables and pictures made from its history alone."""

from __future__ import annotations

from hdet.report.bases import draw_bases
from hdet.report.verdict import Verdict, verdicts

__all__ = ["Verdict", "draw_bases", "verdicts"]
