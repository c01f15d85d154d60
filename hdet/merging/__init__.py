"""How N replicas become one."""

from hdet.merging.exploit import Exploit
from hdet.merging.grawa import Grawa
from hdet.merging.mean import Mean
from hdet.merging.merge import Averager, Merge, Merger
from hdet.merging.outer import Outer
from hdet.merging.weighted import Weighted

__all__ = ["Averager", "Exploit", "Grawa", "Mean", "Merge", "Merger", "Outer", "Weighted"]
