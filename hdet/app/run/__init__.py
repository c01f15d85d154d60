"""A whole run from one declaration: what `hdet run` does, for Python too.

`Run(RunConfig.load("quickstart.yaml", ["steps=200"]), "runs/first")(compare=True)` is
`hdet run quickstart.yaml --set steps=200 --out runs/first --compare` without the display.
"""

from __future__ import annotations

from hdet.app.run.config import RunConfig
from hdet.app.run.folder import RunFolder
from hdet.app.run.loop import Training, Watcher
from hdet.app.run.optimizer import SGD, AdamW, Optimizer, TorchOptimizer
from hdet.app.run.runner import Result, Run

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
