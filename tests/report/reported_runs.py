"""Histories for the tests of reports: small, and with everything in them that a page can show."""

from __future__ import annotations

import math
from typing import Any

from hdet.record import WindowRecord
from hdet.report import ReportedRun

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\x1b[31m\ud800"


def windows(
    count: int = 12, knobs: tuple[str, ...] = ("learning_rate", "dropout"), replicas: int = 2
) -> list[WindowRecord]:
    """A run whose first knob is raised on clear evidence and whose others drift on weak one."""
    made = []
    learned = dict.fromkeys(knobs, 0.1)
    for w in range(count):
        opened = dict(learned)
        moves = {}
        for number, knob in enumerate(knobs):
            moves[knob] = 0.4 if number == 0 and w < 4 else 0.05 * (-1.0) ** w if number and w % 2 else 0.0
            learned[knob] *= math.exp(moves[knob])
        falling = 1.0 - w / count
        made.append(
            WindowRecord(
                window=w,
                start=10 * w,
                stop=10 * w + 10,
                bases={knobs[0]: opened[knobs[0]] * falling, **{knob: opened[knob] for knob in knobs[1:]}},
                values={
                    knob: [opened[knob] * (0.9 + 0.2 * r / replicas) for r in range(replicas)] for knob in knobs[1:]
                },
                losses=[3.0 * math.exp(-w / count) if not (w == 5 and r == 0) else None for r in range(replicas)],
                estimates={knob: _estimate(w, number) for number, knob in enumerate(knobs)},
                moves=moves,
                merged=False,
                faults=_faults(w),
                hints=[{"kind": "small_probe", "knob": knobs[-1], "step": 80, "factor": 3.0}] if w == 7 else [],
                seconds=1.0,
                closing=0.1,
                learned={knob: {"start": 0.1, "opened": opened[knob], "closed": learned[knob]} for knob in knobs},
            )
        )
    return made


def _estimate(w: int, number: int) -> dict[str, Any]:
    if number:
        return {"slope": 0.1 * (-1.0) ** w, "stderr": 0.1, "level": 2.5, "t": (-1.0) ** w}
    averaged = {"slope": None, "stderr": None} if w < 4 else {"slope": 0.01, "stderr": 0.05}
    return {"slope": -0.5 if w < 4 else 0.1, "stderr": 0.05, "averaged": averaged}


def _faults(w: int) -> list[dict[str, Any]]:
    if w == 5:
        return [{"kind": "non_finite", "replica": 0, "step": 53}]
    return [{"kind": "rewound", "step": 40}] if w == 8 else []


def run(name: str = "a run", **changes: Any) -> ReportedRun:
    """A run with everything beside its history."""
    declared = {"seed": 0, "optimizer": {"lr": 0.1}, **changes.pop("declared", {})}
    beside = {
        "configuration": "seed: 0\noptimizer: {lr: 0.1}\n",
        "declared": declared,
        "result": {"test_loss": 1.25, "plain": {"test_loss": 1.5}},
    }
    return ReportedRun(name, **{"windows": windows(), **beside, **changes})
