"""How N replicas become one."""

from hdet.replicas.merge import Mean, Merge

__all__ = ["Mean", "Merge"]
