"""Knobs that are judged together, as the learning rates of many matrices are: a report shows them as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hdet.record import WindowRecord, knobs_of

MOST_APART = 3
"""Knobs of one judgement that are shown each for itself."""
OWN = ("step_ratio", "rate_ratio")
"""What evidence on several learning rates tells of each alone."""


@dataclass(frozen=True)
class Heading:
    """What a report shows under one heading: a knob, or several that were always judged alike.

    >>> Heading(("learning_rate[a]", "learning_rate[b]")).name
    'learning_rate of 2 groups'
    """

    knobs: tuple[str, ...]

    @property
    def first(self) -> str:
        """The knob whose evidence is that of all."""
        return self.knobs[0]

    @property
    def kind(self) -> str:
        """What they all are, such as `learning_rate`."""
        return _kind(self.first)

    @property
    def name(self) -> str:
        """What it is called."""
        return self.first if len(self.knobs) == 1 else f"{self.kind} of {len(self.knobs)} groups"


def headings(histories: Sequence[Sequence[WindowRecord]]) -> list[Heading]:
    """All knobs of some runs, those of one kind together that had one judgement in every window of every run."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for knob in dict.fromkeys(knob for windows in histories for knob in knobs_of(windows)):
        judged = [_judgement(record, knob) for windows in histories for record in windows]
        alike.setdefault((_kind(knob), *judged), []).append(knob)
    found = []
    for knobs in alike.values():
        apart = len(knobs) <= MOST_APART
        found += [Heading((knob,)) for knob in knobs] if apart else [Heading(tuple(knobs))]
    return found


def _kind(knob: str) -> str:
    return knob.partition("[")[0]


def _judgement(record: WindowRecord, knob: str) -> str:
    estimate = record.estimates.get(knob, {})
    return repr([(name, value) for name, value in estimate.items() if name not in OWN])
