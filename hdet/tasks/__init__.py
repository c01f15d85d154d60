"""Small real training tasks that need no download: what `hdet run` and the benchmarks train."""

from __future__ import annotations

from hdet.tasks.digits import Digits
from hdet.tasks.imported import Imported
from hdet.tasks.task import Task, Workload
from hdet.tasks.text import Text

__all__ = ["Digits", "Imported", "Task", "Text", "Workload"]
