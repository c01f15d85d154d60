"""hdet: online hyperparameter search inside one training run."""

from hdet.checkpoint_folder import CheckpointFolder
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
    Softmax,
)
from hdet.engine import Engine
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
from hdet.evidence import Analytic, Contrast, Divergent, Evidence, Line
from hdet.explored import explore
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
from hdet.merging import Mean, Merge
from hdet.paper import HeldOneCycle, paper_engine
from hdet.perturb import perturb
from hdet.recommended import recommended
from hdet.replicas import micro_batches, replicate
from hdet.replicas.distributed import distribute, process_group
from hdet.schedulers import OneCycleHDET
from hdet.signals import Probe, TrainingLoss
from hdet.spec import Spec, register
from hdet.stateful import Stateful
from hdet.windows import FixedWindow, GrowingWindow, Windows

__version__ = "0.1.0"

__all__ = [name for name in dir() if not name.startswith("_")]
