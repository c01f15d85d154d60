"""Evidence on many learning rates at the price of one: a common line, and how far each one's steps go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from hdet.controllers import Controller, Estimate, Pooled
from hdet.evidence.collector import Collector, Evidence
from hdet.evidence.line import Line, LineCollector, moved_by
from hdet.evidence.parts.step_ratio import compare
from hdet.evidence.parts.step_size import scale_free
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import Knob
from hdet.hparams.space import Log, Space
from hdet.spec import register


@register
class GroupLines(Evidence):
    """The learning rates of several parameter groups: what all have in common, and where each stands among them.

    In common: `Line` along the whole window's update, all groups together, as for one rate.

    Each among the others (`Estimate.step_ratio`): how far the group's steps went beside its weights in the run's first
    window and in a few after it, over the geometric mean of all groups. A group that this cannot be told of, as of
    vectors, is compared by its rate (`Estimate.rate_ratio`). Slopes do not tell a ratio that ruins a run from the right
    one (docs/results-recipe.md).

    The price is that of one `Line`, whatever the number of groups.

    Args:
        line: how the common line is read.
        again: shares of the run, of known length, in whose windows the groups are compared again. First steps alone
            mislead: Adam's all point one way at first, and under SGD the gradients of some layers soon become smaller.
        first: share of a ratio, as a logarithm, that is told in the first window where steps grow with the gradient.
            Those of Adam's kind do not, and their ratios are told whole.
    """

    sees: ClassVar[frozenset[str]] = frozenset({"update"})
    looks_ahead: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    needs_probe: ClassVar[bool] = True
    spaces: ClassVar[tuple[type[Space], ...]] = (Log,)

    line: Line = Line()
    again: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (0.1, 0.2)
    first: float = Field(default=1.0, gt=0, le=1)

    @property
    def width(self) -> float:
        """How far the common line reaches, in coordinate units."""
        return self.line.width

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> GroupLinesCollector:
        return GroupLinesCollector(self, scene, knobs)

    def default_controller(self, knob: Knob) -> Controller:
        return Pooled()


class GroupLinesCollector(Collector):
    """Reads the common line, and compares how far the groups' steps go."""

    def __init__(self, spec: GroupLines, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        super().__init__(scene, knobs)
        self.spec = spec
        self.common = LineCollector(spec.line, scene, knobs, together=True)

    def state_dict(self) -> dict[str, Any]:
        return self.common.state_dict()

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        self.common.load_state_dict(state, window)

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        found = self.common.close(harvest)
        if not self._compares(harvest.window):
            return found
        moves = [moved_by(knob, self.scene) for knob in self.knobs]
        compared = compare(self.scene, harvest, self.knobs, moves)
        if harvest.window.start == 0 and self.spec.first < 1.0 and not scale_free(self.scene, self.knobs):
            compared = [one.shrunk(self.spec.first) for one in compared]
        first = harvest.window.start == 0 and any(one.step_ratio for one in compared)
        excess = self.scene.excess if first else found[self.knobs[0].name].excess
        return {
            knob.name: replace(found[knob.name], step_ratio=one.step_ratio, rate_ratio=one.rate_ratio, excess=excess)
            for knob, one in zip(self.knobs, compared, strict=True)
        }

    def _compares(self, window: Window) -> bool:
        """Whether it is the first window, or one of those in which groups are compared again."""
        total = window.total_steps or 0
        return window.start == 0 or any(window.start <= share * total < window.stop for share in self.spec.again)
