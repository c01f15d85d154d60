"""How N replicas become one."""

from hdet.merging import Averager, Grawa, Mean, Merge, Merger, Outer, Weighted

__all__ = ["Averager", "Grawa", "Mean", "Merge", "Merger", "Outer", "Weighted"]
