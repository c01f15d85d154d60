"""How N replicas become one."""

from hdet.merging.exploit import Exploit
from hdet.merging.mean import Mean
from hdet.merging.merge import Averager, Merge, Merger
from hdet.merging.outer import Outer

__all__ = ["Averager", "Exploit", "Mean", "Merge", "Merger", "Outer"]
