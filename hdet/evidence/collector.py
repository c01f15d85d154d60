"""Evidence, and its collectors: one protocol from what a window produced to an estimate per knob."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from hdet.controllers import Controller, Estimate
from hdet.errors import ConfigError
from hdet.evidence.scene import Harvest, OuterStep, Scene, Window
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.evidence_needs import EvidenceNeeds
from hdet.hparams.knob import Knob
from hdet.replicas import Replica


class Evidence(EvidenceNeeds):
    """What a knob is judged by: diverged replicas, or one trajectory read counterfactually."""

    @abstractmethod
    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> Collector:
        """The collector that gathers it over the knobs that share this declaration."""

    def default_controller(self, knob: Knob) -> Controller:
        """What moves a knob that names no controller and is judged by this: the knob's own default, here."""
        return knob.default_controller


class Collector:
    """Gathers evidence on some knobs. Every hook may be left out; they run in the order given here.

    Attributes:
        by_member: whether each replica's values are its own from window to window, so that none may train at the base.
    """

    by_member: ClassVar[bool] = False

    def __init__(self, scene: Scene, knobs: Sequence[BoundKnob]) -> None:
        self.scene = scene
        self.knobs = list(knobs)

    @property
    def pairs(self) -> bool:
        """Whether in the coming step replicas 2 i and 2 i + 1 are compared on the same data and random numbers."""
        return False

    @property
    def needs_passes(self) -> str | None:
        """Why every replica's pass has to be seen, inside `with replica:`; `None` where it has not."""
        return None

    @property
    def watches(self) -> bool:
        """Whether `enter` and `exit` look at the coming step; only then are the update's values in force in `exit`."""
        return True

    @property
    def reads_on_entry(self) -> bool:
        """Whether `enter` looks at the optimizer; only then are the update's values in force in it."""
        return self.watches

    def open(self, window: Window) -> None:
        """A window opens: all replicas are alike. Decide the knobs' levels (`BoundKnob.spread`)."""

    def enter(self, replica: Replica, step: int) -> None:
        """A replica is about to run forward."""

    def exit(self, replica: Replica, step: int) -> None:
        """A replica has run backward; its gradient is not yet shared."""

    def miss(self, replica: Replica, step: int) -> None:
        """A replica had no pass in this step, and the loop said so (`engine.step(complete=False)`)."""

    def after_update(self, window: Window, step: int) -> None:
        """The optimizers have made step `step`. Runs every step: no synchronisation, little work."""

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        """The window's last step is done, nothing is merged yet: an estimate for each knob by name."""
        raise NotImplementedError

    def close_merged(self, harvest: Harvest, step: OuterStep) -> dict[str, Estimate]:
        """The replicas have become one, and the merge's own optimizer is about to step.

        Returns:
            estimates that take the place of those that `close` gave.
        """
        return {}

    def copied(self, sources: Sequence[int]) -> None:
        """A merge has copied replicas and not made them one.

        Args:
            sources: [N] the index of the replica that each is a copy of now.
        """

    def best_schedule(self) -> dict[str, list[float]]:
        """By knob the values at each step of the run in the line of the replica it ended as (asked if `by_member`)."""
        raise NotImplementedError

    def forget(self) -> None:
        """The run went back to an earlier point: what outlives windows came from where it led astray."""

    def state_dict(self) -> dict[str, Any]:
        """What a resume in mid-window needs, as plain numbers and tensors."""
        return {}

    def opened_from_first(self) -> None:
        """After `load_state_dict`: a window was opened anew, and all replicas set out from the first one's weights."""

    def load_state_dict(self, state: dict[str, Any], window: Window | None) -> None:
        """Restore `state_dict` in mid-window; with `None`, the window was opened anew: only what outlives windows."""


def at_work(evidence: Evidence, scene: Scene, knobs: Sequence[BoundKnob]) -> Collector:
    """The collector of an evidence, which may be one of somebody's own.

    Raises:
        ConfigError: it is none.
    """
    found: object = evidence.collect(scene, knobs)
    if not isinstance(found, Collector):
        raise ConfigError(f"{type(evidence).__name__}.collect returned {found!r}; it returns a hdet.evidence.Collector")
    return found


def told_by(collector: Collector, harvest: Harvest) -> dict[str, Estimate]:
    """What a collector, which may be one of somebody's own, returns at a window's end.

    Raises:
        ConfigError: it is no estimate for each of its knobs.
    """
    found: object = collector.close(harvest)
    names = {knob.name for knob in collector.knobs}
    if isinstance(found, dict) and found.keys() == names and all(isinstance(e, Estimate) for e in found.values()):
        return found
    raise ConfigError(
        f"{type(collector).__name__}.close returned {found!r}; it returns an Estimate for each of the knobs "
        f"{sorted(names)} and no others, Estimate.nothing() where it learnt nothing"
    )
