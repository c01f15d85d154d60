"""How N replicas become one."""

from hdet.hparams.outer import OuterLearningRate, OuterMomentum
from hdet.merging import Averager, Exploit, Grawa, Mean, Merge, Merger, Outer, Weighted

__all__ = [
    "Averager",
    "Exploit",
    "Grawa",
    "Mean",
    "Merge",
    "Merger",
    "Outer",
    "OuterLearningRate",
    "OuterMomentum",
    "Weighted",
]
