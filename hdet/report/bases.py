"""The picture of a run: every base over time, and the evidence that moved it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hdet.errors import ConfigError, MissingExtraError
from hdet.history import WindowRecord
from hdet.report.verdict import SURE, t_statistic

INK = "#1f4e79"
PALE = "#9dc3e6"
RISE = "#2e7d32"
FALL = "#b23b3b"
GREY = "#8a8a8a"
CLIP = 10.0
DECADES = 1e3


def draw_bases(history: Sequence[WindowRecord], path: Path | str, *, title: str = "") -> None:
    """Write a PNG with one row a knob: base and replicas' values on the left, its evidence on the right.

    The evidence is each window's slope with its standard error, as the t-statistic: below -2 larger values
    did better, above 2 smaller ones. Bars past +-10 are cut there. Windows that taught nothing have no
    bar; those with a fault are marked by a cross.

    Raises:
        ConfigError: the history explores no knob.
        MissingExtraError: matplotlib is not installed (the extra `cli`).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "cli") from None
    knobs = list(dict.fromkeys(name for record in history for name in record.bases))
    if not knobs:
        raise ConfigError("there is no base to draw: the history is empty or explores no knob")
    figure = Figure(figsize=(11, 0.7 + 2.1 * len(knobs)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(knobs), 2, squeeze=False, sharex=True)
    for (left, right), knob in zip(axes, knobs, strict=True):
        windows = [record for record in history if knob in record.bases]
        _base(left, windows, knob)
        _evidence(right, windows, knob)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    axes[0][0].set_title("base (line) and the replicas' values (dots)", fontsize=9, color=GREY)
    axes[0][1].set_title("evidence: slope / standard error; green: up is better", fontsize=9, color=GREY)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path, format="png", dpi=110)


def _base(axis: Any, windows: Sequence[WindowRecord], knob: str) -> None:
    stops = [record.stop for record in windows]
    for record in windows:
        values = record.values.get(knob, [])
        axis.plot([record.stop] * len(values), values, ".", color=PALE, markersize=3, zorder=1)
    bases = [record.bases[knob] for record in windows]
    axis.plot(stops, bases, color=INK, linewidth=1.6, marker="o", markersize=2.5, zorder=2)
    every = [*bases, *(value for record in windows for value in record.values.get(knob, []))]
    if min(every) > 0 and max(every) > 4 * min(every):
        axis.set_yscale("log")
        axis.set_ylim(bottom=max(min(every), max(every) / DECADES) / 1.3)  # a schedule's way to 0 is no news
    axis.set_ylabel(knob, fontsize=9)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.tick_params(labelsize=8)


def _evidence(axis: Any, windows: Sequence[WindowRecord], knob: str) -> None:
    for record in windows:
        t = t_statistic(record, knob)
        if t is not None:
            cut = min(max(t, -CLIP), CLIP)
            axis.bar(
                record.start,
                cut,
                width=0.9 * (record.stop - record.start),
                align="edge",
                color=RISE if t < -SURE else FALL if t > SURE else GREY,
            )
        if record.faults:
            axis.plot((record.start + record.stop) / 2, 0.0, "x", color=FALL, markersize=6)
    axis.axhline(0.0, color=GREY, linewidth=0.6)
    for level in (-SURE, SURE):
        axis.axhline(level, color=GREY, linewidth=0.8, linestyle="--")
    axis.set_ylabel("t", fontsize=9)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.tick_params(labelsize=8)
