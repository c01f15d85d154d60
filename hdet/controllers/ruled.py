"""A controller that is a table: the first rule that speaks moves the base, and vetoes hold it back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from pydantic import Field, model_validator

from hdet.controllers.controller import Context, Controller, Judgement
from hdet.controllers.estimate import Estimate
from hdet.controllers.part import Part, Rule, Veto
from hdet.errors import ConfigError
from hdet.spec import meant, register


@dataclass(frozen=True)
class RuledState:
    """The state of each rule and veto, by its kind."""

    parts: Mapping[str, Any]


@register
class Ruled(Controller):
    """Ask rules in their order for a move; the first that answers is followed, as far as all vetoes allow.

    Vetoes shrink the move one after another. Values are compared by their ratio, so the knob is in `Log` space.

    After a rewind (`hdet.Rewind`) the base goes on `retreat_factor` times below the value that had worked, or where it
    is, if that is lower. After a new start it goes on `retreat_factor` times below its present value.

    A number that is a field of rules or vetoes, and not of the controller, can be given to the controller. Every rule
    and veto that has the field takes it.

    Args:
        rules: each of another kind.
        vetoes: each of another kind.
        until: share of the run after which the base holds and nothing is measured.
        retreat_factor: see above; 1 returns to the value that had worked, and leaves a new start alone.

    Raises:
        ConfigError: two parts have one kind; a number belongs to no part; an estimate has no judgement at averaged
            weights, and a rule needs one.

    >>> from hdet.controllers.rules import Lower, Raise
    >>> ruled = Ruled(rules=(Lower(), Raise()), limit=0.2)
    >>> ruled.rules[1].limit
    0.2
    >>> raising = Estimate(slope=-0.3, stderr=0.1, averaged=Estimate.nothing())
    >>> judged = ruled.judge(ruled.start(), raising, Context())
    >>> judged.move, judged.rule
    (0.2, 'raise')
    """

    rules: tuple[Rule, ...] = ()
    vetoes: tuple[Veto, ...] = ()
    until: float = Field(default=1.0, gt=0, le=1)
    retreat_factor: float = Field(default=1.0, ge=1, le=100)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**self._handed_on(fields))

    @model_validator(mode="after")
    def _kinds_differ(self) -> Ruled:
        kinds = [part.kind for part in self.parts]
        double = sorted({kind for kind in kinds if kinds.count(kind) > 1})
        if double:
            raise ValueError(f"{double} are there twice; a rule or veto is told apart by its kind, so leave one out")
        return self

    @classmethod
    def _handed_on(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields, with numbers that are not the controller's handed on to the parts that have them."""
        numbers = {name: value for name, value in fields.items() if name not in cls.model_fields}
        if not numbers:
            return fields
        fields = {name: value for name, value in fields.items() if name not in numbers}
        known = set(cls.model_fields)
        families: dict[str, type[Part]] = {"rules": Rule, "vetoes": Veto}
        for group, family in families.items():
            given = fields.get(group, cls.model_fields[group].default)
            parts: list[Part] = [family.from_dict(one) for one in given] if isinstance(given, (list, tuple)) else []
            known.update(*(type(part).model_fields for part in parts))
            fields[group] = [
                part.replace(**{name: numbers[name] for name in type(part).model_fields if name in numbers})
                for part in parts
            ]
        for name in numbers:
            if name not in known:
                raise ConfigError(
                    f"{cls.kind}: {name}: no such field, and none of its rules and vetoes has it; there are "
                    f"{sorted(known)}{meant(name, known)} (given: {numbers[name]!r})"
                )
        return fields

    @property
    def parts(self) -> tuple[Part, ...]:
        """All rules, then all vetoes."""
        return (*self.rules, *self.vetoes)

    @property
    def needs_averaged(self) -> bool:
        """Whether one of its parts reads `Estimate.averaged`."""
        return any(part.needs_averaged for part in self.parts)

    def without(self, *kinds: str) -> Ruled:
        """The same controller with some rules and vetoes left out, as for an ablation.

        Raises:
            ConfigError: it has no rule or veto of that kind.

        >>> import hdet
        >>> [rule.kind for rule in hdet.controllers.Calibrate().without("look_ahead", "stall").rules]
        ['cut_back', 'regain', 'lower', 'await_schedule', 'warm_up', 'raise', 'return', 'catch_up']
        """
        known = [part.kind for part in self.parts]
        for kind in kinds:
            if kind not in known:
                raise ConfigError(f"{self.kind} has no rule or veto {kind!r}; it has {known}{meant(kind, known)}")
        return self.replace(
            rules=tuple(rule for rule in self.rules if rule.kind not in kinds),
            vetoes=tuple(veto for veto in self.vetoes if veto.kind not in kinds),
        )

    def listens(self, step: int, total_steps: int | None) -> bool:
        return total_steps is None or step < self.until * total_steps

    def wants_curvature(self, slope: Estimate, *, averaged: bool = False) -> bool:
        return any(rule.wants_curvature(slope, averaged=averaged) for rule in self.rules)

    def start(self) -> RuledState:
        return RuledState({part.kind: part.start() for part in self.parts})

    def step(self, state: RuledState, estimate: Estimate, context: Context) -> tuple[float, RuledState]:
        judged = self.judge(state, estimate, context)
        return judged.move, judged.state

    def judge(self, state: RuledState, estimate: Estimate, context: Context) -> Judgement:
        if estimate.excess is not None:
            state = RuledState({part.kind: part.begin(state.parts[part.kind], estimate) for part in self.parts})
        if not estimate.testable or not self.listens(context.step, context.total_steps):
            return Judgement(0.0, state)
        if self.needs_averaged and estimate.averaged is None and estimate.offset <= 0:
            raise ConfigError(
                f"{type(self).__name__} was given an estimate without its counterpart at window-averaged weights; "
                "use evidence that has one (Line), or another controller, such as Gated or Newton"
            )
        seen = {part.kind: part.observe(state.parts[part.kind], estimate, context) for part in self.parts}
        wish, speaker = self._wish(seen, estimate, context)
        heard = speaker is None or not speaker.overrules
        move, veto = self._allowed(wish, seen, estimate, context) if heard else (wish, "")
        after = {part.kind: part.moved(seen[part.kind], wish, move, estimate, context) for part in self.parts}
        powers = (rule.power(seen[rule.kind], estimate, context) for rule in self.rules)
        power = next((power for power in powers if power is not None), None)
        return Judgement(move, RuledState(after), speaker.kind if speaker is not None else "", veto, power)

    def _wish(self, seen: Mapping[str, Any], estimate: Estimate, context: Context) -> tuple[float, Rule | None]:
        """What the first rule that speaks asks for, and which it is."""
        for rule in self.rules:
            if rule.looks_ahead is not (estimate.offset > 0):
                continue
            wish = rule.propose(seen[rule.kind], estimate, context)
            if wish is not None:
                return _number(wish, rule, "propose"), rule
        return 0.0, None

    def _allowed(self, move: float, seen: Mapping[str, Any], estimate: Estimate, context: Context) -> tuple[float, str]:
        """What the vetoes leave of a move, and the kind of the last that took something away."""
        held_by = ""
        for veto in self.vetoes:
            allowed = _number(veto.allow(move, seen[veto.kind], estimate, context), veto, "allow")
            allowed = min(max(allowed, min(0.0, move)), max(0.0, move))  # a veto of somebody's own can only shrink it
            if allowed != move:
                move, held_by = allowed, veto.kind
        return move, held_by

    def retreat(self, state: RuledState, context: Context, worked: float) -> tuple[float, RuledState]:
        """Go on `retreat_factor` times below the value that worked."""
        parts = {part.kind: part.retreat(state.parts[part.kind], context) for part in self.parts}
        if worked <= 0.0 or context.schedule_next <= 0.0:
            return 0.0, RuledState(parts)
        shift = math.log(worked) - math.log(context.schedule_next)  # their ratio may overflow
        return min(0.0, shift - math.log(self.retreat_factor) - context.shift), RuledState(parts)

    def restart(self, state: RuledState, context: Context) -> tuple[float, RuledState]:
        """Come to the present value from `retreat_factor` times below: fresh weights want a warm-up."""
        parts = {part.kind: part.restart(state.parts[part.kind], context) for part in self.parts}
        return 0.0 - math.log(self.retreat_factor), RuledState(parts)


def _number(answer: object, part: Part, method: str) -> float:
    """What a part answered, which may be one of somebody's own.

    Raises:
        ConfigError: it is no number.
    """
    if not isinstance(answer, Real):
        raise ConfigError(f"{type(part).__name__}.{method} returned {answer!r}; it returns a move, a number")
    return float(answer)
