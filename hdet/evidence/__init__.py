"""Where comparisons come from."""

from hdet.evidence.analytic import Analytic
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.contrast import Contrast
from hdet.evidence.divergent import Divergent
from hdet.evidence.group_lines import GroupLines
from hdet.evidence.line import Line
from hdet.evidence.mixed_difference import MixedDifference
from hdet.evidence.outer_line import OuterLine
from hdet.evidence.population import Population
from hdet.evidence.recursion import Recursion
from hdet.evidence.scene import Harvest, Scene, Window

__all__ = [
    "Analytic",
    "Collector",
    "Contrast",
    "Divergent",
    "Evidence",
    "GroupLines",
    "Harvest",
    "Line",
    "MixedDifference",
    "OuterLine",
    "Population",
    "Recursion",
    "Scene",
    "Window",
]
