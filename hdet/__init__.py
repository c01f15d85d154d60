"""hdet: online hyperparameter search inside one training run."""

from importlib import import_module
from types import ModuleType

from hdet import contrib, controllers, designs, errors, estimators, merges, schedules, spaces, spreads
from hdet.checkpoints.folder import CheckpointFolder
from hdet.checkpoints.stateful import Stateful
from hdet.engine.engine import Engine
from hdet.engine.guard import Rewind
from hdet.errors import HdetError
from hdet.evidence import Analytic, Contrast, Divergent, Evidence, GroupLines, Line, MixedDifference, Recursion
from hdet.history import History, WindowRecord
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
    Replay,
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
from hdet.replicas.distributed import distribute, process_group
from hdet.replicas.perturb import perturb
from hdet.signals import Objective, Probe, TrainingLoss
from hdet.spec import Spec, register
from hdet.trials import RateEstimate, find
from hdet.windows import FixedWindow, GrowingWindow, Windows

__version__ = "0.1.0"

_INTEGRATIONS = frozenset({"deepspeed", "lightning", "loggers", "torchft", "transformers"})


def __getattr__(name: str) -> ModuleType:
    """The integration with a framework, imported when it is asked for.

    Raises:
        MissingExtraError: the framework is not installed.
    """
    if name not in _INTEGRATIONS:
        raise AttributeError(f"module 'hdet' has no attribute {name!r}")
    return import_module(f"hdet.integrations.{name}")


__all__ = [
    "Analytic",
    "AttentionTemperature",
    "Beta1",
    "Beta2",
    "CheckpointFolder",
    "ClipNorm",
    "Contrast",
    "Divergent",
    "Dropout",
    "Engine",
    "Evidence",
    "FixedWindow",
    "GroupLines",
    "GrowingWindow",
    "HdetError",
    "History",
    "Knob",
    "LabelSmoothing",
    "LearningRate",
    "Line",
    "MixedDifference",
    "Momentum",
    "Objective",
    "OneCycleHDET",
    "Probe",
    "RateEstimate",
    "Recursion",
    "Replay",
    "ReplayLR",
    "Rewind",
    "Scalar",
    "Search",
    "Spec",
    "Stateful",
    "TrainingLoss",
    "WeightDecay",
    "WindowRecord",
    "Windows",
    "attach",
    "clip_gradients",
    "contrib",
    "controllers",
    "designs",
    "distribute",
    "errors",
    "estimators",
    "explore",
    "find",
    "merges",
    "micro_batches",
    "paper_engine",
    "perturb",
    "process_group",
    "recommended",
    "register",
    "replicate",
    "schedules",
    "spaces",
    "spreads",
]
