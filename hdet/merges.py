"""How N replicas become one."""

from hdet.hparams.outer import OuterLearningRate, OuterMomentum
from hdet.merging import Averager, Exploit, Mean, Merge, Merger, Outer

__all__ = [
    "Averager",
    "Exploit",
    "Mean",
    "Merge",
    "Merger",
    "Outer",
    "OuterLearningRate",
    "OuterMomentum",
]
