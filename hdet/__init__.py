"""hdet: online hyperparameter search inside one training run."""

from importlib import import_module
from types import ModuleType

from hdet.checkpoints.folder import CheckpointFolder
from hdet.checkpoints.stateful import Stateful
from hdet.controllers import (
    Calibrate,
    Comparison,
    Context,
    Controller,
    Estimate,
    Estimator,
    Gated,
    Hold,
    Kalman,
    LeastSquares,
    Marginal,
    Newton,
    Paper,
    Regularize,
    Softmax,
)
from hdet.engine.engine import Engine
from hdet.engine.guard import Rewind
from hdet.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    HdetError,
    IdentifiabilityError,
    LostRankError,
    MatchError,
    MissingExtraError,
    StepError,
)
from hdet.evidence import Analytic, Contrast, Divergent, Evidence, Line, MixedDifference, Recursion
from hdet.history import History, WindowRecord
from hdet.hparams import (
    WSD,
    Arcsine,
    AttentionTemperature,
    Beta1,
    Beta2,
    Constant,
    Cosine,
    Design,
    Dropout,
    Fixed,
    FromCallable,
    Geometric,
    Hadamard,
    Knob,
    LabelSmoothing,
    LatinHypercube,
    LearningRate,
    Linear,
    Log,
    Logit,
    Momentum,
    OneCycle,
    OneSided,
    Permutation,
    Relative,
    Replay,
    Scalar,
    Schedule,
    Space,
    Spread,
    Symmetric,
    TwoLevel,
    WeightDecay,
)
from hdet.overlay.attach import attach
from hdet.overlay.explore import explore
from hdet.overlay.one_cycle import OneCycleHDET
from hdet.overlay.search import Search
from hdet.recipes.paper import HeldOneCycle, paper_engine
from hdet.recipes.recommended import recommended
from hdet.replicas import micro_batches, replicate
from hdet.replicas.distributed import distribute, process_group
from hdet.replicas.merge import Mean, Merge
from hdet.replicas.perturb import perturb
from hdet.signals import Objective, Probe, TrainingLoss
from hdet.spec import Spec, register
from hdet.windows import FixedWindow, GrowingWindow, Windows

__version__ = "0.1.0"

_INTEGRATIONS = frozenset({"lightning", "loggers", "transformers"})


def __getattr__(name: str) -> ModuleType:
    """The integration with a framework, imported when it is asked for.

    Raises:
        MissingExtraError: the framework is not installed.
    """
    if name not in _INTEGRATIONS:
        raise AttributeError(f"module 'hdet' has no attribute {name!r}")
    return import_module(f"hdet.integrations.{name}")


__all__ = [
    "WSD",
    "Analytic",
    "Arcsine",
    "AttentionTemperature",
    "Beta1",
    "Beta2",
    "Calibrate",
    "CheckpointError",
    "CheckpointFolder",
    "Comparison",
    "ConfigError",
    "Constant",
    "Context",
    "Contrast",
    "Controller",
    "Cosine",
    "Design",
    "DivergedError",
    "Divergent",
    "Dropout",
    "Engine",
    "Estimate",
    "Estimator",
    "Evidence",
    "Fixed",
    "FixedWindow",
    "FromCallable",
    "Gated",
    "Geometric",
    "GrowingWindow",
    "Hadamard",
    "HdetError",
    "HeldOneCycle",
    "History",
    "Hold",
    "IdentifiabilityError",
    "Kalman",
    "Knob",
    "LabelSmoothing",
    "LatinHypercube",
    "LearningRate",
    "LeastSquares",
    "Line",
    "Linear",
    "Log",
    "Logit",
    "LostRankError",
    "Marginal",
    "MatchError",
    "Mean",
    "Merge",
    "MissingExtraError",
    "MixedDifference",
    "Momentum",
    "Newton",
    "Objective",
    "OneCycle",
    "OneCycleHDET",
    "OneSided",
    "Paper",
    "Permutation",
    "Probe",
    "Recursion",
    "Regularize",
    "Relative",
    "Replay",
    "Rewind",
    "Scalar",
    "Schedule",
    "Search",
    "Softmax",
    "Space",
    "Spec",
    "Spread",
    "Stateful",
    "StepError",
    "Symmetric",
    "TrainingLoss",
    "TwoLevel",
    "WeightDecay",
    "WindowRecord",
    "Windows",
    "attach",
    "distribute",
    "explore",
    "micro_batches",
    "paper_engine",
    "perturb",
    "process_group",
    "recommended",
    "register",
    "replicate",
]
