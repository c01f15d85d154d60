"""What one window of a run did, as plain numbers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar, cast

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from hdet.errors import HdetError
from hdet.nested import mapped

MOST_REPLICAS = 64
"""Replicas that a record has values and losses of one by one; the others are in what it says of all."""

TURNS = ("rewound", "restarted", "restored")
"""Faults after which the run went on from an earlier point."""

AT_PEAK = ("start", "opened", "closed")
"""What a whole record tells of each knob in `learned`."""

BY_KNOB = ("values", "estimates", "moves", "learned", "course", "reasons", "ranges", "powers")
"""Fields that have an entry for each knob, but for `bases`, and for `best_schedule`, which only populations have."""

ALIKE = "alike"
"""What a line has for `BY_KNOB` where it has many knobs, as a rate for each matrix: for each of these fields lists of
knobs, by their places in `bases`, that have one entry together, which the first of them holds."""

MOST_WRITTEN_APART = 8
"""Knobs of a window whose entries are all written, alike or not."""

BALANCE = "balance"
"""The rule by which the rate of a group takes its place among the others (`hdet.controllers.Pooled`)."""


V = TypeVar("V")


class ByKnob(dict[str, V]):
    """Something of each knob, by its name.

    Of several of a kind, as `learning_rate[head]`, the name of the kind alone, `learning_rate`, gives what is told of
    the one in the middle, if anything is. It is no key: `"learning_rate" in bases` is false.

    Args:
        entries: by name.
        order: by the name of every knob, the number that tells which is in the middle; by default the entries.

    >>> bases = {"learning_rate[a]": 0.1, "learning_rate[b]": 0.3, "learning_rate[c]": 0.2}
    >>> ByKnob(bases, bases)["learning_rate"]
    0.2
    >>> ByKnob({"learning_rate[a]": "raise"}, bases).get("learning_rate")
    """

    def __init__(self, entries: Any = (), order: Mapping[str, float] | None = None) -> None:
        super().__init__(entries)
        self._order = order

    def __missing__(self, kind: str) -> V:
        known = self._places()
        several = [] if kind in known else [name for name in known if name.partition("[")[0] == kind]
        comparable = all(isinstance(known[name], (int, float)) for name in several)
        if several and comparable and (middle := sorted(several, key=known.__getitem__)[len(several) // 2]) in self:
            return self[middle]
        raise KeyError(kind)

    def get(self, name: str, default: Any = None) -> Any:
        """As of any dict, and as by `[]` of several of a kind."""
        try:
            return self[name]
        except KeyError:
            return default

    def _places(self) -> Mapping[str, Any]:
        """By the name of every knob, what tells which is in the middle."""
        return self if self._order is None else self._order


@dataclass(frozen=True, repr=False)
class WindowRecord:
    """One window, from opening to the moves made at its end. Its size does not grow with the number of replicas.

    Where there are several knobs of a kind, as rates of many matrices, the kind's name alone, `learning_rate`, gives
    what is told of the one whose base is in the middle (`ByKnob`).

    Attributes:
        window: its number, from 0.
        start, stop: the steps it covers, `start <= t < stop`.
        bases: each knob's base at its last step.
        values: each knob's values at its last step, by replica, of the first 64 of N.
        losses: mean training losses of the same; `None` where a replica was not finite.
        estimates: by knob: slope, stderr, t, curvature, curvature_stderr, and `averaged` (the same at
            window-averaged weights) where the evidence has it.
        moves: by knob, in coordinate units: how far its shift moved since the window before closed. Under torchft this
            includes what groups agreed on as the window opened.
        merged: whether replicas were merged.
        faults: what went wrong, each with `kind` and the step or replica it concerns; `because` is why the guard acted.
        seconds: wall time of the window, and `closing`, the part of it spent at its end.
        hints: advice that concerns no fault, such as a probe that is too small; each with `kind` and `knob`.
        learned: by knob, its value at the peak of its schedule: as set (`start`), in force in this window (`opened`),
            and after the moves made at its end (`closed`). Empty in a history written without it.
        course: by knob, its base at each step of the window; one number alone where that did not change. Empty in a
            history written without it.
        reasons: by knob, which `rule` asked for the move and which `veto` held it back, for controllers that tell
            (`hdet.controllers.Ruled`); and after which turn of the run the `guard` moved it, a fault's kind. A key is
            absent where there was none.
        replicas: N; 0 in a history written without it, whose losses are those of all.
        ranges: by knob, the lowest and the highest value of all replicas; empty where `values` has them all.
        best_schedule: by knob of a population, in its last window, the value at each step of the run in the line of
            the replica that it ended as. Such a knob has no `course`: no replica need have trained at its base.
        noise_scale: what `hdet.Engine(noise_scale=True)` read of the gradients of micro-batches; empty without.
        powers: by knob, the power to which what is left of its schedule is taken after this window
            (`hdet.controllers.rules.Fall`); absent where it stays as given.
        tail: in a run's last window, where averaged weights took the place of the last ones (`hdet.TailAverage`): the
            share of these (`last`), of each of the `parts` that have one the first step (`start`), the one after the
            last (`stop`) and the `share`; the `difference` of the held-out loss to that of the last weights, and its
            `stderr` (without these two where the last weights' loss is not finite); else empty.
        mean_loss: over all replicas that stayed finite; `None` where `losses` has them all, or none did.
        first_loss: in a run's first window the first training loss that it was told, as a rule that of its first
            weights; else `None`.
    """

    __pydantic_config__ = ConfigDict(allow_inf_nan=False, extra="forbid")

    window: int
    start: int
    stop: int
    bases: dict[str, float]
    values: dict[str, list[float]]
    losses: list[float | None]
    estimates: dict[str, dict[str, Any]]
    moves: dict[str, float]
    merged: bool
    faults: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    closing: float = 0.0
    hints: list[dict[str, Any]] = field(default_factory=list)
    learned: dict[str, dict[str, float]] = field(default_factory=dict)
    course: dict[str, list[float]] = field(default_factory=dict)
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    replicas: int = 0
    ranges: dict[str, list[float]] = field(default_factory=dict)
    mean_loss: float | None = None
    first_loss: float | None = None
    best_schedule: dict[str, list[float]] = field(default_factory=dict)
    noise_scale: dict[str, float | None] = field(default_factory=dict)
    powers: dict[str, float] = field(default_factory=dict)
    tail: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bases", ByKnob(self.bases))
        for name in BY_KNOB:
            object.__setattr__(self, name, ByKnob(getattr(self, name), self.bases))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # an earlier version has pickled plain dicts

    def __repr__(self) -> str:
        """In short: all fields of a run with many knobs are pages; `dataclasses.asdict` and `to_json` have them."""
        moved = named(name for name, move in self.moves.items() if move)
        faults = "".join(f", {fault['kind']}" for fault in self.faults)
        steps = f"steps {self.start} to {self.stop - 1}"
        return f"<WindowRecord {self.window}, {steps}: loss {self.loss:.4g}{faults}; moved {moved or 'nothing'}>"

    @property
    def loss(self) -> float:
        """Mean training loss over the replicas that stayed finite; NaN if none did."""
        if self.mean_loss is not None:
            return self.mean_loss
        sound = [value for value in self.losses if value is not None]
        return float(np.mean(sound)) if sound else math.nan

    @property
    def ending(self) -> str:
        """In a run's last window which weights it ended with, in words; nothing for the last ones.

        >>> record = WindowRecord(4, 52, 60, {}, {}, [1.0], {}, {}, False)
        >>> part = {"start": 31, "stop": 60, "share": 0.8}
        >>> record.tail.update(last=0.2, parts=[part], difference=-0.0268, stderr=0.0101)
        >>> print(record.ending.partition("), ")[0])
        ends with averaged weights (80 % from step 31 on, 20 % the last
        >>> print(record.ending.partition("), ")[2])
        whose held-out loss is 0.0268 ± 0.0101 below that of the last
        >>> record.tail.update(last=0.0, parts=[part | {"stop": 48, "share": 1.0}])
        >>> print(record.ending.partition(",")[0])
        ends with averaged weights (those of steps 31 to 47)
        """
        if not self.tail:
            return ""
        ends = f"ends with averaged weights ({self.averaged_over}), "
        if "difference" not in self.tail:
            return ends + "since the held-out loss of the last is not finite"
        gain, error = -self.tail["difference"], self.tail["stderr"]
        return ends + f"whose held-out loss is {gain:.4f} ± {error:.4f} below that of the last"

    @property
    def averaged_over(self) -> str:
        """Over which steps the weights are averaged that the run ended with, in words; nothing where they are not."""
        if not self.tail:
            return ""
        shares = {self._steps(part["start"], part["stop"]): part["share"] for part in self.tail["parts"]}
        if self.tail["last"]:
            shares["the last"] = self.tail["last"]
        told = [f"{share:.0%} {steps}".replace("%", " %") for steps, share in shares.items()]
        return f"those {next(iter(shares))}" if len(shares) == 1 else ", ".join(told)

    def _steps(self, start: int, stop: int) -> str:
        if stop == self.stop:
            return f"from step {start} on"
        return f"of steps {start} to {stop - 1}" if stop - start > 1 else f"of step {start}"

    def range(self, knob: str) -> tuple[float, float]:
        """The lowest and the highest value of a knob at the window's last step."""
        values = self.ranges.get(knob) or self.values.get(knob) or [self.bases[knob]]
        return min(values), max(values)

    def to_json(self) -> str:
        """One line of strict JSON; non-finite numbers become null.

        Of more than 8 knobs, what several have alike is written once (`ALIKE`); `from_json` gives each its own again.
        """
        told = strict(asdict(self))
        if len(self.bases) > MOST_WRITTEN_APART:
            _fold(told)
        return json.dumps(told, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> WindowRecord:
        """The inverse of `to_json`; one of an earlier version, which lacks some fields, reads too.

        Raises:
            ValueError: the line is not JSON.
            HdetError: it is not a window record, or has fields that this version does not know.
        """
        if "NaN" in line or "Infinity" in line:
            json.loads(line, parse_constant=_refuse)
        if f'"{ALIKE}"' in line:
            line = json.dumps(_unfolded(json.loads(line)))
        try:
            record: WindowRecord = _checked(WindowRecord).validate_json(line, strict=True)
            if record.tail:
                _checked(_Nested).validate_json(json.dumps({"tail": record.tail}), strict=True)
        except ValidationError as error:
            found = error.errors()
            unknown = sorted(str(one["loc"][-1]) for one in found if one["type"] == "unexpected_keyword_argument")
            if unknown:
                raise HdetError(
                    f"hdet here does not know the fields {unknown}; read it with the version of hdet that wrote it"
                ) from None
            place = ".".join(str(part) for part in found[0]["loc"])
            raise HdetError(f"{place or 'the line'}: {found[0]['msg']}, got {found[0]['input']!r:.60}") from None
        for knob, estimate in record.estimates.items():
            _refuse_odd(estimate, f"estimates.{knob}")
        if record.window < 0 or not 0 <= record.start < record.stop:
            raise HdetError(f"window {record.window} from step {record.start} to {record.stop} cannot be")
        for fault in record.faults:
            if fault.get("kind") in TURNS and type(fault.get("step")) is not int:
                raise HdetError(f"faults: {fault['kind']} without the step that it went back to, got {fault!r:.60}")
        for knob, told in record.learned.items():
            if lacking := [key for key in AT_PEAK if key not in told]:
                raise HdetError(f"learned.{knob} lacks {', '.join(lacking)}")
        for knob, bases in record.course.items():
            if len(bases) not in (1, record.stop - record.start):
                raise HdetError(
                    f"course.{knob}: {len(bases)} bases for {record.stop - record.start} steps; one each is expected, "
                    f"or one for all"
                )
        if any(fault.get("kind") == "small_probe" for fault in record.faults):  # where hints once stood
            record.hints.extend(fault for fault in record.faults if fault.get("kind") == "small_probe")
            record.faults[:] = [fault for fault in record.faults if fault.get("kind") != "small_probe"]
        return record


def knobs_of(windows: Iterable[WindowRecord]) -> list[str]:
    """The knobs that records name, in order."""
    return list(dict.fromkeys(name for record in windows for name in record.bases))


def named(knobs: Iterable[str]) -> str:
    """Knobs in words: of several of a kind the first, and how many more there are.

    >>> named(["learning_rate[a]", "learning_rate[b]", "dropout"])
    'learning_rate[a] and 1 more, dropout'
    """
    kinds: dict[str, list[str]] = {}
    for knob in knobs:
        kinds.setdefault(knob.partition("[")[0], []).append(knob)
    return ", ".join(own[0] + (f" and {len(own) - 1} more" if len(own) > 1 else "") for own in kinds.values())


def strict(value: Any) -> Any:
    """Nested plain values as JSON can hold them: numbers that are not finite become null."""
    return mapped(value, lambda one: None if isinstance(one, float) and not math.isfinite(one) else one)


def _fold(told: dict[str, Any]) -> None:
    """Take out of a record what a knob has as one before it has."""
    places = {knob: place for place, knob in enumerate(told["bases"])}
    told[ALIKE] = {}
    for field_name in BY_KNOB:
        having: dict[str, list[str]] = {}
        for knob, entry in told[field_name].items():
            if knob in places:
                having.setdefault(json.dumps(entry), []).append(knob)
        several = [knobs for knobs in having.values() if len(knobs) > 1]
        told[ALIKE][field_name] = [[places[knob] for knob in knobs] for knobs in several]
        for knobs in several:
            for knob in knobs[1:]:
                del told[field_name][knob]


def _unfolded(told: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `_fold`: every knob has its entries, in the order of `bases`.

    Raises:
        HdetError: the line names knobs that it does not have.
    """
    try:
        alike, knobs = told.pop(ALIKE, {}), list(told["bases"])
        for field_name, several in alike.items():
            held = told[field_name]
            if any(type(place) is not int or place < 0 for places in several for place in places):
                raise IndexError(several)
            others = {knobs[place]: held[knobs[first]] for first, *following in several for place in following}
            if others.keys() & held.keys():
                raise KeyError(*others.keys() & held.keys())
            held |= others
            told[field_name] = {knob: held[knob] for knob in (*knobs, *held) if knob in held}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise HdetError(f"{ALIKE}: it puts together knobs that the line does not have ({error!r})") from None
    return told


@dataclass(frozen=True)
class _TailPart:
    start: int
    stop: int
    share: float


@dataclass(frozen=True)
class _Told:
    """What a line has as `tail` where that is not empty."""

    last: float
    parts: Annotated[list[_TailPart], Field(min_length=1)]
    difference: float = 0.0
    stderr: float = 0.0


@dataclass(frozen=True)
class _Nested:
    tail: _Told


@cache
def _checked(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _is_told(value: object) -> bool:
    """Whether it is null or a number that a float can hold, as not every integer of JSON is."""
    return value is None or (type(value) in (int, float) and abs(cast("float", value)) <= sys.float_info.max)


def _refuse_odd(estimate: Mapping[str, Any], place: str) -> None:
    """Refuse what is no estimate as `Estimate.to_dict` gives it, whatever its fields.

    Raises:
        HdetError: something that is no finite number where one or null is to be, or several are in `slopes`.
    """
    for name, value in estimate.items():
        if name == "averaged" and isinstance(value, dict):
            _refuse_odd(value, f"{place}.averaged")
            continue
        numbers = value if name == "slopes" else [value]
        if not isinstance(numbers, list) or not all(map(_is_told, numbers)):
            expected = "a list of numbers" if name == "slopes" else "a finite number or null"
            raise HdetError(f"{place}.{name}: {expected} is expected, got {value!r:.60}")


def _refuse(constant: str) -> None:
    raise HdetError(f"{constant} is no JSON; non-finite numbers are written as null")
