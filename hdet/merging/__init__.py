"""How N replicas become one."""

from hdet.merging.mean import Mean
from hdet.merging.merge import Merge

__all__ = ["Mean", "Merge"]
