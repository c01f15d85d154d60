"""The root of every knob: a scalar hyperparameter that can be read, and written per replica."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from torch import nn
from torch.optim import Optimizer

from hdet.controllers import Controller, Gated
from hdet.hparams.binding import Binding
from hdet.hparams.evidence_needs import EvidenceNeeds
from hdet.hparams.schedule import Constant, Schedule
from hdet.hparams.space import Log, Space
from hdet.hparams.spread import Spread, TwoLevel
from hdet.spec import Spec

ActsOn = Literal["update", "forward", "merge"]


def _as_schedule(given: Any) -> Any:
    return Constant(given) if isinstance(given, (int, float)) and not isinstance(given, bool) else given


class Knob(Spec, family="knob"):
    """A scalar hyperparameter to explore. Subclass it, say where it lives in `bind`, and `@register` it.

    Args:
        name: how the knob is called in histories and reports; by default its kind and what it selects.
        space: the coordinate it is seen through. Moves and levels are in this coordinate.
        bounds: the closed interval no value of it ever leaves.
        spread: how far the replicas' levels lie from the base.
        schedule: base value by step, or a number; `None` reads the base from the model or optimizer.
        controller: how estimates move the base; `None` takes the evidence's default for this knob.
        evidence: where its comparisons come from; `None` takes the engine's.
        authority: how far the learned shift may go from the schedule, in coordinate units.
        initial_shift: the learned shift to begin from, in coordinate units, within the authority.
        accept_bias: let a knob that biases its own training loss be judged by it all the same.
    """

    name: str | None = None
    space: Space = Log()
    bounds: tuple[float, float]
    spread: Spread = TwoLevel(0.15)
    schedule: Annotated[Schedule | None, BeforeValidator(_as_schedule)] = None
    controller: Controller | None = None
    evidence: EvidenceNeeds | None = None
    authority: float = Field(default=3.0, ge=0)
    initial_shift: float = 0.0
    accept_bias: bool = False

    @property
    @abstractmethod
    def acts_on(self) -> ActsOn:
        """Whether it changes how an update is made from a gradient, the forward pass, or the step of a merge."""

    @property
    def biases_loss(self) -> bool:
        """Whether its value changes the training loss itself, so that this loss cannot judge it."""
        return False

    @property
    def acts_in_eval(self) -> bool:
        """Whether its value also changes the model's output in eval mode, and so the probe itself."""
        return False

    @property
    def label(self) -> str:
        """The knob's name, or its kind where none was given."""
        return self.name or self.kind

    @property
    def default_controller(self) -> Controller:
        """What moves it where its declaration names no controller and its evidence asks for no other."""
        return Gated()

    @abstractmethod
    def bind(self, model: nn.Module, optimizer: Optimizer) -> Binding:
        """Find the scalar in one replica.

        Raises:
            MatchError: nothing there is selected; the message lists what could be.
        """

    @model_validator(mode="after")
    def _in_domain(self) -> Knob:
        self.space.check(self.bounds)
        if abs(self.initial_shift) > self.authority:
            raise ValueError(f"initial_shift={self.initial_shift:g} lies beyond the authority of {self.authority:g}")
        return self
