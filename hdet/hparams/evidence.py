"""The declaration of where a knob's comparisons come from; `hdet.evidence` holds the kinds there are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hdet.hparams.space import Space
from hdet.spec import Spec

if TYPE_CHECKING:
    from hdet.evidence.collector import Collector, Scene
    from hdet.hparams.bound import BoundKnob


class Evidence(Spec, family="evidence"):
    """What a knob is judged by: diverged replicas, or one trajectory read counterfactually.

    A member says what it needs, so that a declaration which cannot work is refused before it runs.

    Attributes:
        diverges: replicas are trained at different values and so come apart; they need a merge.
        sees: the kinds of knob whose effect it can tell apart under shared gradients.
        averages: its estimates carry the same comparison at window-averaged weights (`Estimate.averaged`).
        shared: it takes replicas that share gradients and stay alike.
        spaces: the spaces in which its slopes are slopes; empty for all.
        needs_probe: it measures a held-out loss and so needs `signal=hdet.Probe(...)`.
        needs_objective: it evaluates the training loss by itself and so needs `objective=hdet.Objective(...)`.
    """

    diverges: ClassVar[bool] = False
    sees: ClassVar[frozenset[str]] = frozenset({"update", "forward"})
    averages: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    spaces: ClassVar[tuple[type[Space], ...]] = ()
    needs_probe: ClassVar[bool] = False
    needs_objective: ClassVar[bool] = False

    @abstractmethod
    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> Collector:
        """The collector that gathers it over the knobs that share this declaration."""
