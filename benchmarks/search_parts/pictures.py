"""The report's pictures: a task's test losses by starting point, everybody's mean rank, and regret by start."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from search_parts.interval import Interval
from search_parts.outcome import HARM, Findings
from search_parts.task import Start, Task

TWENTY = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
COLOURS = [*TWENTY[::2], *TWENTY[1::2]]
"""The ten colours that plots have anyhow, then paler ones of them."""


def draw_task(findings: Findings, task: Task, path: Path) -> None:
    """Left by the learning rate's factor, right the other starting points; the oracle is the dashed line."""
    by_rate = [start for start in task.starts if start.at is None and start.decay == start.dropout == 1]
    others = [start for start in task.starts if start not in by_rate]
    count = 2 if others else 1
    figure = Figure(figsize=(6 * count, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    _panel(findings, task, by_rate, panels[0], [start.lr for start in by_rate])
    if by_rate:
        panels[0].set_xscale("log")
    panels[0].set_xlabel("starting learning rate over the best")
    panels[0].set_ylabel("test loss")
    if others:
        _panel(findings, task, others, panels[1], list(range(len(others))), joined=False)
        panels[1].set_xticks(range(len(others)), [start.name for start in others], rotation=40, ha="right", fontsize=8)
    oracle = findings.oracle_loss(task.name).mean
    if math.isfinite(oracle):
        for panel in panels:
            panel.axhline(oracle, color="black", linestyle="--", linewidth=1, label="oracle")
        # Starts that learn next to nothing would squeeze all others onto the line.
        panels[0].set_ylim(*_limits(findings, task, oracle))
    panels[0].legend(fontsize=7)
    figure.suptitle(task.title, fontsize=11)
    figure.savefig(path, dpi=110)


def draw_ranks(findings: Findings, path: Path) -> None:
    """Mean ranks, best on top, with both intervals: thick over cases and seeds, thin over tasks."""
    standings = sorted(findings.standings().items(), key=lambda item: -item[1].rank.mean)
    figure = Figure(figsize=(7, 0.8 + 0.45 * max(1, len(standings))), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for height, (name, standing) in enumerate(standings):
        color = "C3" if name == "hdet" else "C0"
        axis.plot([standing.by_task.low, standing.by_task.high], [height, height], color=color, linewidth=1)
        axis.plot([standing.rank.low, standing.rank.high], [height, height], color=color, linewidth=4)
        axis.plot(standing.rank.mean, height, "o", color="black", markersize=4)
    axis.set_yticks(range(len(standings)), [findings.contenders[name].title for name, _ in standings])
    axis.set_xlabel("mean rank over tasks and starting points, 1 the best")
    figure.savefig(path, dpi=110)


def draw_starts(findings: Findings, path: Path) -> None:
    """Everybody's mean regret by starting point, what uses the library in bold; logarithmic above a hundredth."""
    starts = findings.shared_starts()
    if not starts:
        return
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    lowest = 0.0
    for number, (name, contender) in enumerate(findings.contenders.items()):
        regrets = findings.regret_by_start(name, starts)
        lowest = min(lowest, *regrets)
        axis.plot(
            regrets,
            color=COLOURS[number % len(COLOURS)],
            linewidth=3.0 if contender.uses_library else 1.0,
            zorder=3 if contender.uses_library else 2,
            marker="o",
            markersize=3,
            label=contender.title,
        )
    axis.axhline(0.0, color="black", linestyle="--", linewidth=1, label="the best of a sweep")
    axis.set_yscale("symlog", linthresh=HARM)
    axis.set_ylim(bottom=lowest - HARM / 4)
    axis.set_xticks(range(len(starts)), starts, rotation=40, ha="right")
    axis.set_xlabel("what is given, by its factor on what is right")
    axis.set_ylabel("mean regret over tasks")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=110)


def _panel(
    findings: Findings, task: Task, starts: list[Start], axis: Any, places: list[Any], *, joined: bool = True
) -> None:
    count = len(findings.contenders)
    for number, (name, contender) in enumerate(findings.contenders.items()):
        values: list[Interval] = [findings.loss(task.name, start.name, name) for start in starts]
        shift = 0.0 if joined else 0.5 * (number / max(1, count - 1) - 0.5)
        axis.errorbar(
            [place + shift for place in places],
            [value.mean for value in values],
            yerr=[0.0 if math.isnan(value.half) else value.half for value in values],
            color=COLOURS[number % len(COLOURS)],
            linestyle="-" if joined else "none",
            linewidth=2.0 if name == "hdet" else 1.0,
            marker="o",
            markersize=3,
            capsize=2,
            label=contender.title,
        )


def _limits(findings: Findings, task: Task, oracle: float) -> tuple[float, float]:
    means = [findings.loss(task.name, start.name, name).mean for start in task.starts for name in findings.contenders]
    finite = sorted(mean for mean in means if math.isfinite(mean))
    lowest = min([oracle, *finite])
    highest = finite[int(0.85 * (len(finite) - 1))] if finite else oracle
    reach = max(highest - lowest, 1e-3)
    return lowest - 0.05 * reach, highest + 0.15 * reach
