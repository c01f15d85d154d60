"""What the page says in words and tables, as plain values for its template."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hdet.digits import four_digits, loss_digits
from hdet.nested import flat
from hdet.report.advice import as_python, as_yaml
from hdet.report.charts import colour_of, objection, reason
from hdet.report.importance import importances, interactions
from hdet.report.reading import made_progress
from hdet.report.reported import ReportedRun
from hdet.report.together import Heading
from hdet.report.verdict import NO_PROGRESS, Verdict, verdicts

MOST_ROWS = 200
MARKS = {
    "clear": "●",
    "partly clear": "◑",
    "weak": "○",
    "to and fro": "↔",
    "not moved": "–",  # noqa: RUF001
    "by the guard": "⤺",
    "no progress": "✕",
}
MEANINGS = {
    "clear": "at least two thirds of its movement rest on windows that prove it (chance rarely does, among so many)",
    "partly clear": "a third to two thirds of its movement rest on windows that prove it",
    "weak": "less than a third of its movement rests on windows that prove it",
    "to and fro": "it went up and down by like amounts",
    "not moved": "no window moved it",
    "by the guard": "only the guard moved it, which speaks neither for nor against its evidence",
    "no progress": "it moved, but the loss ended no lower than it began",
}


def of_run(number: int, run: ReportedRun, together: Sequence[Heading]) -> dict[str, Any]:
    """What the page says of one run."""
    found = verdicts(run.windows)
    names = {one.first: one.name for one in together}
    figure, earned = _earned(run)
    return {
        "name": run.name,
        "colour": colour_of(number),
        "number": figure,
        "earned": earned,
        "steps": run.windows[-1].stop,
        "windows": len(run.windows),
        "ended": run.windows[-1].ending,
        "verdicts": [_at_a_glance(one, own) for one in together if (own := _of_heading(found, one))],
        "warned": "" if made_progress(run.windows) else NO_PROGRESS,
        "importances": [replace(one, knob=names[one.knob]) for one in importances(run.windows) if one.knob in names],
        "interactions": interactions(run.windows),
        "declared": {field: str(value) for field, value in flat(run.declared, ".").items()},
        "held_out_loss": "" if run.held_out_loss is None else loss_digits(run.held_out_loss),
        "cost": _cost(run),
        "yaml": as_yaml(found),
        "python": as_python(found),
    }


def _of_heading(found: Sequence[Verdict], together: Heading) -> list[Verdict]:
    """The verdicts of the knobs under a heading."""
    return [verdict for verdict in found if verdict.knob in together.knobs]


def _at_a_glance(together: Heading, own: Sequence[Verdict]) -> dict[str, Any]:
    """A row of the first table: of many knobs the range of their values, and what is said of the first."""
    first = own[0]
    return {
        "knob": together.name,
        "start": _range([one.start for one in own]),
        "end": _range([one.end for one in own]),
        "factor": "" if first.factor is None else _range([one.factor for one in own]),
        "trust": first.trust,
        "moved": first.moved + ("" if len(own) == 1 else " (the first of them; the others differ in early moves)"),
        "outlook": first.outlook,
    }


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return digits(None)
    low, high = digits(min(known)), digits(max(known))
    return low if low == high else f"{low} to {high}"


def digits(value: float | None) -> str:
    """A value in as many digits as a table shows."""
    return "not recorded" if value is None else four_digits(value)


def each(runs: Sequence[ReportedRun], together: Heading) -> list[tuple[str, Verdict]]:
    """Of many knobs what each was set to and has learned: the run's name, and the verdict."""
    if len(together.knobs) == 1:
        return []
    return [(run.name, one) for run in runs for one in _of_heading(verdicts(run.windows), together)]


def counted(runs: Sequence[ReportedRun], knob: str) -> str:
    """How often a knob was moved, and how often a veto forbade it."""
    courses = [run.courses[knob] for run in runs if knob in run.courses]
    moved = sum(move.count for made in courses for move in made.moves)
    vetoed = sum(held.count for made in courses for held in made.held_back)
    told = f"{moved} move{'s' * (moved != 1)}"
    return f"{told}, and {vetoed} that a veto forbade" if vetoed else told


def moves(runs: Sequence[ReportedRun], knob: str) -> list[tuple[str, str]]:
    """Every move of a knob, and every one that a veto forbade: the run's name, and what happened and why."""
    told = []
    for run in runs:
        if knob not in run.courses:
            continue
        made = run.courses[knob]
        happened = [(move.step, reason(move)) for move in made.moves]
        happened += [(held.step, objection(held)) for held in made.held_back]
        told += [(run.name, words) for _, words in sorted(happened)]
    return told


def events(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Faults, returns to earlier points, and hints, in the order of their steps."""
    return [
        {
            "run": run.name,
            "step": record.stop,
            "sort": sort,
            "kind": str(one.get("kind")),
            "what": ", ".join(f"{key} {value}" for key, value in one.items() if key != "kind"),
        }
        for run in runs
        for record in run.windows
        for sort, found in (("fault", record.faults), ("hint", record.hints))
        for one in found
    ]


def differences(runs: Sequence[ReportedRun]) -> list[str]:
    """The fields in which the runs' declarations differ, as dotted paths; a bare history declares nothing."""
    declared = [flat(run.declared, ".") for run in runs if run.declared]
    fields = dict.fromkeys(field for one in declared for field in one)
    return [field for field in fields if len({repr(one.get(field)) for one in declared}) > 1]


def _earned(run: ReportedRun) -> tuple[str, str]:
    """The number that stands out, and what it means."""
    found, plain = run.held_out_loss, run.plain_loss
    if found is not None and plain is not None:
        told = f"held-out loss; {loss_digits(plain)} without hdet{_apart(found, plain)} (one run each)"
        return loss_digits(found), told
    if found is not None:
        return loss_digits(found), "held-out loss; no run without hdet lies beside it to tell what the search earned"
    return loss_digits(run.windows[-1].loss), "training loss of the last window; no result lies beside the history"


def _apart(found: float, plain: float) -> str:
    difference = found - plain
    if not math.isfinite(difference):
        return ""
    amount = f"{abs(difference):.4f}"
    if float(amount) == 0.0:
        return ", the same to four decimals"
    return f", {amount} {'lower' if difference < 0.0 else 'higher'}"


def _cost(run: ReportedRun) -> str:
    whole = math.fsum(record.seconds for record in run.windows if math.isfinite(record.seconds))
    closing = math.fsum(record.closing for record in run.windows if math.isfinite(record.closing))
    if whole <= 0.0:
        return "the history has no times."
    return f"{whole:.4g} s, {100 * closing / whole:.1f} % of it at windows' ends (probes, comparisons, merges)."
