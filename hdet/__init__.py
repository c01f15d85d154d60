"""hdet: online hyperparameter search inside one training run.

Here is what a training loop names. What it may choose among lies in families, one a module: `hdet.evidence`,
`hdet.schedules`, `hdet.controllers` and the others at the end of `hdet.__all__`.
"""

import sys
from importlib import import_module
from opcode import opmap
from types import ModuleType
from typing import TYPE_CHECKING

from hdet import (
    checkpoints,
    contrib,
    controllers,
    designs,
    errors,
    estimators,
    evidence,
    history,
    merges,
    nn,
    report,
    schedules,
    signals,
    spaces,
    spec,
    spreads,
    trials,
    windows,
)
from hdet.engine.engine import Engine
from hdet.engine.guard import Rewind
from hdet.engine.tail import TailAverage
from hdet.history import History
from hdet.hparams import (
    AttentionTemperature,
    Beta1,
    Beta2,
    ClipNorm,
    Dropout,
    Knob,
    LabelSmoothing,
    LearningRate,
    Momentum,
    Scalar,
    WeightDecay,
    clip_gradients,
)
from hdet.overlay.attach import attach
from hdet.overlay.explore import explore
from hdet.overlay.one_cycle import OneCycleHDET
from hdet.overlay.replay import ReplayLR
from hdet.overlay.search import Search
from hdet.recipes.paper import paper_engine
from hdet.recipes.recommended import recommended
from hdet.replicas import micro_batches, replicate
from hdet.replicas.chained_optimizer import ChainedOptimizer
from hdet.replicas.distributed import distribute, process_group
from hdet.replicas.perturb import perturb
from hdet.signals import Objective, Probe
from hdet.trials import find

if TYPE_CHECKING:
    from hdet import deepspeed, fabric, lightning, loggers, torchft, transformers  # noqa: F401  # as `__getattr__` finds them

__version__ = "0.2.0.dev0"

__all__ = [
    "AttentionTemperature",
    "Beta1",
    "Beta2",
    "ChainedOptimizer",
    "ClipNorm",
    "Dropout",
    "Engine",
    "History",
    "Knob",
    "LabelSmoothing",
    "LearningRate",
    "Momentum",
    "Objective",
    "OneCycleHDET",
    "Probe",
    "ReplayLR",
    "Rewind",
    "Scalar",
    "Search",
    "TailAverage",
    "WeightDecay",
    "attach",
    "checkpoints",
    "clip_gradients",
    "contrib",
    "controllers",
    "designs",
    "distribute",
    "errors",
    "estimators",
    "evidence",
    "explore",
    "find",
    "merges",
    "micro_batches",
    "nn",
    "paper_engine",
    "perturb",
    "process_group",
    "recommended",
    "replicate",
    "report",
    "schedules",
    "spaces",
    "spreads",
    "windows",
]

_INTEGRATIONS = frozenset({"deepspeed", "fabric", "lightning", "loggers", "torchft", "transformers"})

_SHOWN_MODULES = [found for name in __all__ if isinstance(found := globals()[name], ModuleType)]
_FAMILIES = [*_SHOWN_MODULES, history, signals, spec, trials]


def __getattr__(name: str) -> ModuleType:
    """The integration with a framework, imported when it is asked for.

    Raises:
        MissingExtraError: the framework is not installed.
        AttributeError: there is no such name; of a family's name the message says which. To `from hdet import Line`
            it is an ImportError: Python would replace an AttributeError by one that does not say where the name is.
    """
    if name in _INTEGRATIONS:
        return import_module(f"hdet.{name}")
    place = next((f": it is {family.__name__}.{name}" for family in _FAMILIES if name in family.__all__), "")
    # Only the caller's instruction tells `from hdet import name` from `hdet.name`. Tried on CPython 3.11 to 3.13.
    caller = sys._getframe(1)
    if place and caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
        raise ImportError(f"cannot import name {name!r} from 'hdet'{place}", name=name, path=__file__)
    raise AttributeError(f"module 'hdet' has no attribute {name!r}{place}")


def __dir__() -> list[str]:
    # Without the integrations: who asks for every name in the list would import every framework.
    return sorted({*__all__, "__version__", *(family.__name__.removeprefix("hdet.") for family in _FAMILIES)})
