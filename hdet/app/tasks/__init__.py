"""Small real training tasks that need no download: what `hdet run` and the benchmarks train."""

from __future__ import annotations

from hdet.app.tasks.digits import Digits
from hdet.app.tasks.imported import Imported
from hdet.app.tasks.task import Task, Workload
from hdet.app.tasks.text import Text

__all__ = ["Digits", "Imported", "Task", "Text", "Workload"]
