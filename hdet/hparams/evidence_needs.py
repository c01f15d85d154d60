"""What a knob must know of the evidence that judges it; `hdet.evidence` holds the kinds there are."""

from __future__ import annotations

from typing import ClassVar

from hdet.hparams.space import Space
from hdet.spec import Spec


class EvidenceNeeds(Spec, family="evidence"):
    """What a kind of evidence needs, so that a declaration which cannot work is refused before it runs.

    Attributes:
        diverges: replicas are trained at different values and so come apart; they need a merge.
        sees: the kinds of knob whose effect it can tell apart under shared gradients.
        looks_ahead: `Estimate.offset` above 0 means that it looked ahead of a warm-up, to where the rate will be. Of
            other evidence controllers are told 0 in its place.
        averages: its estimates carry the same comparison at window-averaged weights (`Estimate.averaged`).
        shared: it takes replicas that share gradients and stay alike.
        spaces: the spaces in which its slopes are slopes; empty for all.
        needs_probe: it measures a held-out loss and so needs `signal=hdet.Probe(...)`.
        needs_objective: it evaluates the training loss by itself and so needs `objective=hdet.Objective(...)`.
    """

    diverges: ClassVar[bool] = False
    sees: ClassVar[frozenset[str]] = frozenset({"update", "forward"})
    looks_ahead: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    spaces: ClassVar[tuple[type[Space], ...]] = ()
    needs_probe: ClassVar[bool] = False
    needs_objective: ClassVar[bool] = False
