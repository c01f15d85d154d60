"""What is explored: knobs, the spaces they move in, how far and by whom, and the schedules under them."""

from hdet.hparams.clipping import ClipNorm, Clipping, clip_gradients
from hdet.hparams.design import Design, Fixed, Hadamard, LatinHypercube, Permutation
from hdet.hparams.evidence_needs import EvidenceNeeds
from hdet.hparams.forward import AttentionTemperature, Dropout, LabelSmoothing
from hdet.hparams.knob import Knob
from hdet.hparams.outer import OuterLearningRate, OuterMomentum
from hdet.hparams.scalar import Scalar
from hdet.hparams.schedule import WSD, Constant, Cosine, FromCallable, OneCycle, Replay, Schedule
from hdet.hparams.space import Arcsine, Linear, Log, Logit, Relative, Space
from hdet.hparams.spread import OneSided, Spread, Symmetric, TwoLevel
from hdet.hparams.update import Beta1, Beta2, LearningRate, Momentum, WeightDecay

__all__ = [
    "WSD",
    "Arcsine",
    "AttentionTemperature",
    "Beta1",
    "Beta2",
    "ClipNorm",
    "Clipping",
    "Constant",
    "Cosine",
    "Design",
    "Dropout",
    "EvidenceNeeds",
    "Fixed",
    "FromCallable",
    "Hadamard",
    "Knob",
    "LabelSmoothing",
    "LatinHypercube",
    "LearningRate",
    "Linear",
    "Log",
    "Logit",
    "Momentum",
    "OneCycle",
    "OneSided",
    "OuterLearningRate",
    "OuterMomentum",
    "Permutation",
    "Relative",
    "Replay",
    "Scalar",
    "Schedule",
    "Space",
    "Spread",
    "Symmetric",
    "TwoLevel",
    "WeightDecay",
    "clip_gradients",
]
