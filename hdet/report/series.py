"""What a report draws of one knob in one run, in as few points as an eye can tell apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hdet.record import WindowRecord
from hdet.report.reading import decided, readings, supported

MOST_POINTS = 500


@dataclass
class DrawnCourse:
    """A knob's values over the run; one point a window, or a group of windows where they are many.

    Attributes:
        start: what it was set to, where the history tells.
        edges, learned: the learned value from each edge to the next; the last one holds after the end.
        steps, in_force, low, high: the base with its schedule, and the band of the replicas' levels.
        moves: each move, or the last of a group of one direction.
        held_back: windows in which a rule asked for a move and a veto forbade all of it, or the last of a group.
    """

    start: float | None = None
    edges: list[float] = field(default_factory=list)
    learned: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    in_force: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    held_back: list[Move] = field(default_factory=list)

    @property
    def scheduled(self) -> bool:
        """Whether the base differs from what was learned."""
        return not self.learned or any(base != value for base, value in zip(self.in_force, self.learned, strict=False))

    @property
    def spread(self) -> bool:
        """Whether replicas were at different values."""
        return self.low != self.high


@dataclass
class Move:
    """A move of a base, and why; or one of 0 that a rule asked for and a veto forbade.

    Attributes:
        step: at which it was made.
        before, after: the learned values, or the base twice where the history does not tell them.
        amount: in coordinate units.
        source: what it rests on.
        t: of that, where this window has one.
        count: moves that it stands for.
        rule: of the controller that asked for it, where the controller tells.
        veto: that let less of it through, where one did.
        guard: after which turn of the run the guard moved it, by itself or besides the rule.
    """

    step: int
    before: float
    after: float
    amount: float
    source: str
    t: float | None
    count: int = 1
    rule: str = ""
    veto: str = ""
    guard: str = ""

    @property
    def clear(self) -> bool:
        """Whether what it rests on is clear by itself."""
        return supported(self.source, self.t)


@dataclass
class DrawnEvidence:
    """One judgement of a knob over the run.

    Attributes:
        source: what it was read from.
        steps: the middle of each window or group.
        gain: what one unit more would have saved: minus the slope. Of a group, the mean.
        error: its standard error. Of a group the mean: errors of windows that share a probe do not average out.
        t: slope / stderr; of a group the mean.
        count: windows that a point stands for.
    """

    source: str
    steps: list[float] = field(default_factory=list)
    gain: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    t: list[float] = field(default_factory=list)
    count: list[int] = field(default_factory=list)


def groups(windows: Sequence[WindowRecord]) -> Iterator[Sequence[WindowRecord]]:
    """The windows in at most `MOST_POINTS` groups of neighbours, of sizes that differ by one at most."""
    count = min(MOST_POINTS, len(windows))
    for index in range(count):
        yield windows[index * len(windows) // count : (index + 1) * len(windows) // count]


def course(windows: Sequence[WindowRecord], knob: str) -> DrawnCourse:
    """The values of a knob over a run."""
    windows = [record for record in windows if knob in record.bases]
    made = DrawnCourse()
    for group in groups(windows):
        lowest, highest = zip(*(record.range(knob) for record in group), strict=True)
        made.steps.append(group[-1].stop)
        made.in_force.append(group[-1].bases[knob])
        made.low.append(min(lowest))
        made.high.append(max(highest))
        told = group[0].learned.get(knob)
        if told:
            made.start = told["start"]
            made.edges.append(group[0].start)
            made.learned.append(told["opened"])
        made.moves.extend(_moves(group, knob, one_each=len(windows) <= MOST_POINTS))
        made.held_back.extend(_held_back(group, knob))
    last = windows[-1].learned.get(knob) if windows else None
    if last:
        made.edges.append(windows[-1].stop)
        made.learned.append(last["closed"])
    return made


def evidence(windows: Sequence[WindowRecord], knob: str) -> list[DrawnEvidence]:
    """The judgements of a knob over a run, one for each source."""
    made: dict[str, DrawnEvidence] = {}
    for group in groups(windows):
        found: dict[str, list[tuple[float, float, float]]] = {}
        for record in group:
            for one in readings(record, knob):
                found.setdefault(one.source, []).append((one.slope, one.stderr, max(-1e3, min(1e3, one.t))))
        for source, several in found.items():
            into = made.setdefault(source, DrawnEvidence(source))
            into.steps.append((group[0].start + group[-1].stop) / 2)
            slopes, errors, ts = zip(*several, strict=True)
            into.gain.append(-_mean(slopes))
            into.error.append(_mean(errors))
            into.t.append(_mean(ts))
            into.count.append(len(several))
    return list(made.values())


def _moves(group: Sequence[WindowRecord], knob: str, *, one_each: bool) -> list[Move]:
    moved = [record for record in group if record.moves.get(knob)]
    if not one_each and len(moved) > 1:
        moved_up = [record for record in moved if record.moves[knob] > 0]
        moved_down = [record for record in moved if record.moves[knob] < 0]
        return [move(same, knob) for same in (moved_up, moved_down) if same]
    return [move([record], knob) for record in moved]


def move(records: Sequence[WindowRecord], knob: str) -> Move:
    """The moves of some windows, all of one direction, as one."""
    last = records[-1]
    told = last.learned.get(knob, {"opened": last.bases[knob], "closed": last.bases[knob]})
    source, t = decided(last, knob)
    return Move(
        step=last.stop,
        before=told["opened"],
        after=told["closed"],
        amount=math.fsum(record.moves.get(knob, 0.0) for record in records),
        source=source,
        t=t,
        count=len(records),
        **_told(last, knob),
    )


def _held_back(group: Sequence[WindowRecord], knob: str) -> list[Move]:
    held = [record for record in group if not record.moves.get(knob) and _told(record, knob).get("veto")]
    return [move(held, knob)] if held else []


def _told(record: WindowRecord, knob: str) -> dict[str, str]:
    """The rule and the veto that a window's controller told of, and the guard's turn."""
    return {name: kind for name, kind in record.reasons.get(knob, {}).items() if name in ("rule", "veto", "guard")}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
