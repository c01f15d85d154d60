"""What a ruled controller is made of: rules, which ask for a move, and vetoes, which hold it back."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from hdet.controllers.controller import Context
from hdet.controllers.estimate import Estimate
from hdet.controllers.state import NoState
from hdet.spec import Spec


class Part(Spec):
    """One rule or veto. It holds its numbers; what it remembers of a run is a state of its own.

    All methods are pure: they return a state and never change the one that they were given.

    Attributes:
        needs_averaged: it cannot do without `Estimate.averaged`, which not all evidence has.
    """

    needs_averaged: ClassVar[bool] = False

    def start(self) -> Any:
        """The state before the first window: a frozen dataclass of numbers (see `hdet.controllers.state`)."""
        return NoState()

    def begin(self, state: Any, estimate: Estimate) -> Any:
        """The state once the run's first window has told what had trained its weights (`Estimate.excess`)."""
        return state

    def observe(self, state: Any, estimate: Estimate, context: Context) -> Any:
        """The state after a window was measured, and before any rule is asked."""
        return state

    def moved(self, state: Any, wish: float, move: float, estimate: Estimate, context: Context) -> Any:
        """The state after a rule asked for `wish` and the vetoes left `move` of it."""
        return state

    def retreat(self, state: Any, context: Context) -> Any:
        """The state after the run went back to an earlier point; by default the first one."""
        return self.start()

    def restart(self, state: Any, context: Context) -> Any:
        """The state after the run began anew from its first weights; by default the first one."""
        return self.start()


class Rule(Part, family="rule"):
    """One reason to move a base, or to hold it.

    Attributes:
        looks_ahead: it judges estimates that were taken ahead of the base (`Estimate.offset`), and no others.
        overrules: no veto holds its moves back.
    """

    looks_ahead: ClassVar[bool] = False
    overrules: ClassVar[bool] = False

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        """Whether a curvature could change what it asks for; see `Controller.wants_curvature`."""
        return True

    def power(self, state: Any, estimate: Estimate, context: Context) -> float | None:
        """To which power the rest of the schedule is to be taken; None, as a rule, has no say in that."""
        return None

    @abstractmethod
    def propose(self, state: Any, estimate: Estimate, context: Context) -> float | None:
        """The move that it asks for, in coordinates. 0 holds the base; None lets the next rule speak."""


class SlopeRule(Rule):
    """One that goes by slopes: no curvature could change what it asks for."""

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return False


class Veto(Part, family="veto"):
    """One reason to hold a move back.

    A veto that needs something it was not told forbids the move.
    """

    def allow(self, move: float, state: Any, estimate: Estimate, context: Context) -> float:
        """What is left of a move: between 0 and the move itself."""
        return move
