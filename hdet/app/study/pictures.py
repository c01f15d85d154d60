"""A study's pictures: training curves with bands, and the metric against every factor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hdet.app.study.statistics import Levels, Row
from hdet.report.figures import Figure, blank_figure, plain, write_figure

COLUMNS = 2
MOST_PANELS = 12


def draw_curves(curves: Mapping[Levels, Sequence[Sequence[tuple[int, float]]]], path: Path, *, title: str) -> None:
    """Mean training loss over seeds by step, with a band of one standard error.

    The last factor's levels share a panel, a panel for each combination of the others (the first 12 of them).
    """
    panels: dict[Levels, dict[str, Sequence[Sequence[tuple[int, float]]]]] = {}
    for levels, seeds in curves.items():
        panels.setdefault(levels[:-1], {})[levels[-1][1] if levels else "base"] = seeds
    chosen = list(panels.items())[:MOST_PANELS]
    if not chosen:
        return
    figure, axes = _figure(len(chosen), title)
    for axis, (levels, lines) in zip(axes, chosen, strict=False):
        for color, (name, seeds) in enumerate(lines.items()):
            steps, mean, error = _band(seeds)
            axis.plot(steps, mean, color=f"C{color % 10}", linewidth=1.4, label=_in_legend(name))
            axis.fill_between(steps, mean - error, mean + error, color=f"C{color % 10}", alpha=0.2, linewidth=0)
        axis.set_title(plain(_named(levels)), fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.set_ylabel("training loss", fontsize=8)
        axis.legend(fontsize=7)
    write_figure(figure, path, dpi=110)


def draw_factor(rows: Sequence[Row], factor: str, path: Path, *, metric: str) -> None:
    """The metric by one factor's levels, mean and standard error, a line for each combination of the others.

    Levels that are all numbers lie to scale, on a logarithmic axis where they span more than a decade.
    """
    lines: dict[Levels, list[tuple[str, Row]]] = {}
    for row in rows:
        others = tuple(item for item in row.levels if item[0] != factor)
        lines.setdefault(others, []).append((dict(row.levels)[factor], row))
    names = list(dict.fromkeys(name for line in lines.values() for name, _ in line))
    numbers = _numbers(names)
    place = dict(zip(names, numbers if numbers is not None else range(len(names)), strict=True))
    figure, (axis,) = _figure(1, f"{metric} by {factor}")
    for others, line in lines.items():
        places, means = [place[name] for name, _ in line], [row.mean for _, row in line]
        errors = [0.0 if math.isnan(row.stderr) else row.stderr for _, row in line]
        style = {"marker": "o", "markersize": 3, "linewidth": 1.2, "capsize": 2}
        axis.errorbar(places, means, yerr=errors, label=_in_legend(_named(others)) or None, **style)
    if numbers is None:
        axis.set_xticks(range(len(names)), [plain(name) for name in names], rotation=25, ha="right", fontsize=8)
    elif min(numbers) > 0 and max(numbers) > 10 * min(numbers):
        axis.set_xscale("log")
    axis.set_xlabel(plain(factor), fontsize=8)
    axis.set_ylabel(plain(metric), fontsize=8)
    if any(lines):
        axis.legend(fontsize=6)
    write_figure(figure, path, dpi=110)


def _figure(panels: int, title: str) -> tuple[Figure, list[Any]]:
    columns = min(COLUMNS, panels)
    lines = -(-panels // columns)
    figure = blank_figure(6.0 * columns, 0.4 + 3.6 * lines)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis in axes:
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.tick_params(labelsize=7)
    for axis in axes[panels:]:
        axis.set_visible(False)
    figure.suptitle(plain(title), fontsize=10)
    return figure, axes[:panels]


def _band(seeds: Sequence[Sequence[tuple[int, float]]]) -> tuple[Any, Any, Any]:
    """Steps, mean and standard error over seeds, at the steps that all finite curves have."""
    tables = [{step: loss for step, loss in seed if math.isfinite(loss)} for seed in seeds]
    tables = [table for table in tables if table]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    values = np.array([[table[step] for step in shared] for table in tables]).reshape(len(tables), len(shared))
    error = values.std(axis=0, ddof=1) / math.sqrt(len(tables)) if len(tables) > 1 else np.zeros(len(shared))
    return np.array(shared), values.mean(axis=0) if tables else np.zeros(0), error


def _named(levels: Levels) -> str:
    return ", ".join(f"{factor}={level}" for factor, level in levels)


def _in_legend(name: str) -> str:
    """A name for a legend, of which matplotlib leaves out what begins with an underscore."""
    return plain(f" {name}" if name.startswith("_") else name)


def _numbers(names: Sequence[str]) -> list[float] | None:
    try:
        return [float(name) for name in names]
    except ValueError:
        return None
