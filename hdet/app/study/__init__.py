"""Ablations anyone can rerun: a grid over any field of a run, times seeds, at equal cost.

| what | where |
|---|---|
| what is varied | `declaration.py` |
| the runs that come of it | `cells.py` |
| what they cost | `timing.py` |
| running them, once each | `runner.py`, `folder.py` |
| what the numbers say | `statistics.py`, `tables.py`, `pictures.py` |
| `hdet ablate` | `command.py` |
| controls that nobody should train with | `controls.py` |
"""

from __future__ import annotations

from hdet.app.study.cells import Cell, cells, shard
from hdet.app.study.declaration import Budget, Quick, Study
from hdet.app.study.folder import StudyFolder
from hdet.app.study.statistics import NamedDifference, PairedDifference, Row, contrasts, holm, rows

__all__ = [
    "Budget",
    "Cell",
    "NamedDifference",
    "PairedDifference",
    "Quick",
    "Row",
    "Study",
    "StudyFolder",
    "cells",
    "contrasts",
    "holm",
    "rows",
    "shard",
]
