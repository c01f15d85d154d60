"""The view of `hdet watch` in a terminal that is too low for a row a knob."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hdet.app.watch import fitted
from hdet.record import WindowRecord
from hdet.report import ReportedRun

HEIGHT = 24
FAULT = {"kind": "rewound", "step": 10}


def many(count: int, alike: bool) -> ReportedRun:
    """A run with so many learning rates, judged together or each otherwise, and a dropout, that has ended."""
    rates = {f"learning_rate[layer.{place}.weight]": 1e-3 * (1 + place) for place in range(count)}
    slope = {name: 2.0 if alike else 2.0 + place for place, name in enumerate([*rates, "dropout"])}
    bases = {**rates, "dropout": 0.1}
    record = WindowRecord(
        window=0,
        start=0,
        stop=10,
        bases=bases,
        values={},
        losses=[3.0],
        estimates={name: {"slope": slope[name], "stderr": 0.1} for name in bases},
        moves={**dict.fromkeys(rates, 0.3), "dropout": 0.0},
        merged=True,
        learned={name: {"start": value, "opened": value, "closed": 2 * value} for name, value in bases.items()},
        faults=[FAULT],
    )
    return ReportedRun("many", [record], declared={"steps": 10}, result={"test_loss": 1.25})


def seen(run: ReportedRun, height: int = HEIGHT) -> list[str]:
    console = Console(file=io.StringIO(), width=100, height=height, force_terminal=True, color_system=None)
    with console.capture() as told:
        console.print(fitted(run, console))
    return told.get().splitlines()


@pytest.mark.parametrize("alike", [True, False])
def test_many_knobs_hide_neither_faults_nor_the_ending(alike: bool) -> None:
    lines = seen(many(30, alike))
    assert len(lines) <= HEIGHT
    told = "\n".join(lines)
    assert "dropout" in told
    assert "window 1: kind rewound" in told
    assert "over: held-out loss 1.2500" in told
    if alike:
        row = next(line for line in lines if "learning_rate of 30 groups" in line)
        assert [cell.strip() for cell in row.split("\N{BOX DRAWINGS LIGHT VERTICAL}")][2:5] == [
            "0.001 to 0.03",
            "0.002 to 0.06",
            "0.001 to 0.03",
        ]
        assert "more; hdet watch --once" not in told
    else:
        rows = sum("learning_rate[" in line for line in lines)
        assert 5 < rows < 30
        assert f"and {30 - rows} more; hdet watch --once shows all" in told


def test_few_knobs_have_a_row_each() -> None:
    lines = seen(many(5, alike=True))
    assert sum("learning_rate[" in line for line in lines) == 5
    assert "of 5 groups" not in "\n".join(lines)


@pytest.mark.parametrize("knobs", [0, 30])
def test_a_terminal_of_a_few_lines_is_no_fault(knobs: int) -> None:
    run = many(knobs, alike=True)
    run.windows[0].bases.pop("dropout")
    assert "many: step 10 of 10" in seen(run, height=4)[0]
