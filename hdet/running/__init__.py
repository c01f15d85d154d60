"""A whole run from one declaration: what `hdet run` does, for Python too.

`Run(RunConfig.load("quickstart.yaml", ["steps=200"]), "runs/first")(compare=True)` is
`hdet run quickstart.yaml --set steps=200 --out runs/first --compare` without the display.
"""

from __future__ import annotations

from hdet.running.config import RunConfig
from hdet.running.folder import RunFolder
from hdet.running.loop import Training, Watcher
from hdet.running.optimizer import SGD, AdamW, Optimizer, TorchOptimizer
from hdet.running.runner import Result, Run

__all__ = [
    "SGD",
    "AdamW",
    "Optimizer",
    "Result",
    "Run",
    "RunConfig",
    "RunFolder",
    "TorchOptimizer",
    "Training",
    "Watcher",
]
