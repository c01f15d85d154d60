"""For each knob: what moved it, on what evidence, and what is still asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from hdet.record import WindowRecord, knobs_of
from hdet.report.reading import CLEAR_T, STEPS, made_progress, proof, readings, surprise, turn_that_moved
from hdet.report.series import Move, move

BELIEVABLE = 10.0
SUPPORTED = 2 / 3
WEAK = 1 / 3
RETURNS = 0.5
BECAUSE = {
    "rewound": "training had gone wrong (rewound)",
    "restarted": "the first steps had been far too large, or had wrecked the model (restarted)",
    "restored": "every replica had become non-finite (restored)",
}
NO_PROGRESS = "the run learned nothing, its loss ended where it began"


@dataclass(frozen=True)
class Moves:
    """All windows that moved a knob in one direction.

    Attributes:
        windows: how many.
        first, last: the steps at which the first and the last of these moves were made.
        move: how far they moved it in all, in coordinate units, positive.
        evidence: by what the moves rest on, the largest |t|; 0 where no single window is clear.
    """

    windows: int
    first: int
    last: int
    move: float
    evidence: dict[str, float]

    @property
    def words(self) -> str:
        """The course in words.

        >>> Moves(7, 10, 80, 3.5, {"looking ahead": 28.3, "last weights": 32.3}).words
        '7 windows, steps 10 to 80, by looking ahead (|t| up to 28.3) and last weights (|t| up to 32.3)'
        """
        where = f"step {self.first}" if self.windows == 1 else f"steps {self.first} to {self.last}"
        up_to = "" if self.windows == 1 else "up to "
        by = [name + (f" (|t| {up_to}{t:.1f})" if t else "") for name, t in self.evidence.items()]
        return f"{self.windows} window{'s' * (self.windows > 1)}, {where}, by {' and '.join(by)}"


@dataclass(frozen=True)
class Retreat:
    """The guard's moves of a knob after faults of one kind, which speak neither for nor against its evidence.

    Attributes:
        kind: the fault, such as `rewound`.
        steps: at which the moves were made.
        move: how far they moved it in all, in coordinate units.
    """

    kind: str
    steps: list[int]
    move: float

    @property
    def words(self) -> str:
        """The same in words.

        >>> Retreat("restored", [40, 60], -1.4).words
        'the guard lowered it at steps 40, 60, after every replica had become non-finite (restored)'
        """
        where = f"step{'s' * (len(self.steps) > 1)} {', '.join(map(str, self.steps))}"
        because = BECAUSE.get(self.kind, self.kind)
        return f"the guard {'lowered' if self.move < 0 else 'raised'} it at {where}, after {because}"


@dataclass(frozen=True)
class Verdict:
    """A knob's course over a run.

    Attributes:
        knob: its name.
        start, end: its value as it was set and as it was left, at the schedule's peak; None where the history does
            not tell.
        up, down: the moves in each direction, the guard's aside; None where there were none.
        support: share of this movement that is proven by its own window: by a t that all judgements of the run
            together would rarely show by chance (`hdet.report.reading.proof`).
        asked: mean t of the windows measured since the last move; negative where more is asked for. The mean and not a
            sum: errors of windows that share a probe do not average out, and a mean holds for any correlation.
        asked_windows: how many these are.
        measured_until: the step up to which there is evidence; None without any.
        stop: the step at which the history ends.
        progress: whether the run's loss fell at all (`hdet.report.reading.made_progress`).
        retreats: the guard's moves.
        power: to which what is left of its schedule was taken in the end; 1 as given.
    """

    knob: str
    start: float | None
    end: float | None
    up: Moves | None
    down: Moves | None
    support: float
    asked: float
    asked_windows: int
    measured_until: int | None
    stop: int
    progress: bool = True
    retreats: list[Retreat] = field(default_factory=list)
    power: float = 1.0

    @property
    def factor(self) -> float | None:
        """end / start; None where there is none."""
        return self.end / self.start if self.start and self.end is not None else None

    @property
    def trust(self) -> str:
        """Whether its moves deserve trust: `clear`, `partly clear`, `weak`, `to and fro` or `not moved`.

        `no progress` where it moved in a run that learned nothing: what helps a wrecked model helps no other. The
        guard's moves count neither for nor against it; `by the guard` where there are no others.
        """
        total = sum(course.move for course in (self.up, self.down) if course)
        if total == 0.0:
            return "by the guard" if self.retreats else "not moved"
        if not self.progress:
            return "no progress"
        if self.support < WEAK:
            return "weak"
        both = min(self.up.move, self.down.move) if self.up and self.down else 0.0
        if 2 * both > RETURNS * total:
            return "to and fro"
        return "clear" if self.support >= SUPPORTED else "partly clear"

    @property
    def entered_beyond(self) -> bool:
        """Whether it ended on the other side of what was set than its moves led to, since it was entered there."""
        if self.start is None or self.end is None or self.retreats:
            return False
        led = (self.up.move if self.up else 0.0) - (self.down.move if self.down else 0.0)
        return led * (self.end - self.start) < 0.0

    @property
    def moved(self) -> str:
        """What moved it, and when."""
        said = [f"{name} in {course.words}" for name, course in (("up", self.up), ("down", self.down)) if course]
        said += [retreat.words for retreat in self.retreats]
        if self.power != 1.0:
            said.append(f"falls {'slower' if self.power < 1.0 else 'faster'} than given (power {self.power:.2f})")
        entered = "" if self.factor in (None, 1.0) else f" since it was entered at {self.factor:.3g} times what was set"
        return "; ".join(said) if said else f"nothing{entered}"

    @property
    def wanted(self) -> str:
        """`less` or `more` where the windows since the last move clearly ask for it, else empty."""
        return "" if abs(self.asked) < CLEAR_T else "less" if self.asked > 0 else "more"

    @property
    def outlook(self) -> str:
        """What is still asked for."""
        if self.measured_until is None:
            return "never measured"
        since = "since it last moved" if self.up or self.down or self.retreats else "in the run"
        if not self.asked_windows:
            return f"not measured {since}"
        told = f"{self.wanted} is still asked for" if self.wanted else "nothing clear is asked for"
        told = f"{told} (mean t = {self.asked:+.1f} in {self.asked_windows} window{'s' * (self.asked_windows > 1)})"
        return told if self.measured_until >= self.stop else f"{told}; not measured after step {self.measured_until}"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, with what is read off them."""
        return {**asdict(self), "trust": self.trust, "moved": self.moved, "outlook": self.outlook}


def verdicts(history: Iterable[WindowRecord]) -> list[Verdict]:
    """One verdict a knob, in the order in which the run's windows name them."""
    history = list(history)
    progress = made_progress(history)
    by_knob = {knob: [record for record in history if knob in record.bases] for knob in knobs_of(history)}
    return [_verdict(windows, knob, progress) for knob, windows in by_knob.items()]


def _verdict(windows: list[WindowRecord], knob: str, progress: bool) -> Verdict:
    moved: list[tuple[Move, float]] = []
    tested = 0
    retreats: dict[str, list[Move]] = {}
    measured: WindowRecord | None = None
    since: list[float] = []
    for record in windows:
        found = readings(record, knob)
        if found:
            measured = record
            tested += len(found)
            since.append(found[0].t)
        if record.moves.get(knob):
            turn = turn_that_moved(record, knob)
            made = move([record], knob)
            if turn is not None:
                retreats.setdefault(turn, []).append(made)
            else:
                proven = math.inf if made.source == STEPS else surprise(record, knob, made.source, made.t or 0.0)
                moved.append((made, proven))
            since.clear()
    total = math.fsum(abs(made.amount) for made, _ in moved)
    clear = math.fsum(abs(made.amount) for made, found in moved if found >= proof(tested))
    return Verdict(
        knob=knob,
        start=_learned(windows[0], knob, "start"),
        end=_learned(windows[-1], knob, "closed"),
        up=_course([made for made, _ in moved if made.amount > 0]),
        down=_course([made for made, _ in moved if made.amount < 0]),
        support=clear / total if total else 0.0,
        asked=math.fsum(max(-BELIEVABLE, min(BELIEVABLE, t)) for t in since) / len(since) if since else 0.0,
        asked_windows=len(since),
        measured_until=measured.stop if measured else None,
        stop=windows[-1].stop,
        progress=progress,
        retreats=[
            Retreat(kind, [one.step for one in made], math.fsum(one.amount for one in made))
            for kind, made in retreats.items()
        ],
        power=windows[-1].powers.get(knob, 1.0),
    )


def _course(moves: list[Move]) -> Moves | None:
    if not moves:
        return None
    evidence: dict[str, float] = {}
    for one in moves:
        evidence[one.source] = max(evidence.get(one.source, 0.0), min(abs(one.t), 1e3) if one.t is not None else 0.0)
    return Moves(
        windows=len(moves),
        first=moves[0].step,
        last=moves[-1].step,
        move=math.fsum(abs(one.amount) for one in moves),
        evidence=evidence,
    )


def _learned(record: WindowRecord, knob: str, when: str) -> float | None:
    value = record.learned.get(knob, {}).get(when)
    return None if value is None else float(value)
