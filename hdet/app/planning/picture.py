"""A planned run as a matplotlib figure, and as lines for a terminal."""

from __future__ import annotations

from bisect import bisect_right

from hdet.engine.preview import PlannedKnob, Preview
from hdet.report.figures import BLUE, GREY, INK, SKY, Figure, blank_figure, plain

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-:=+*#"
"""Where a terminal has no blocks."""
COLUMNS = 60
MOST_LINES = 200


def plan_figure(seen: Preview, *, title: str = "") -> Figure:
    """Each knob's schedule with the values it will be compared at, and where windows end."""
    rows = max(1, len(seen.knobs))
    figure = blank_figure(8.0, 0.6 + 2.0 * rows)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    stops = [stop for _, stop in seen.windows]
    for axis, knob in zip(axes, seen.knobs.values(), strict=False):
        axis.fill_between(knob.steps, knob.low, knob.high, color=SKY, alpha=0.45, linewidth=0, label="compared values")
        axis.plot(knob.steps, knob.bases, color=BLUE, linewidth=1.6, label="base, by its schedule")
        if len(stops) <= MOST_LINES:
            axis.vlines(stops, 0, 0.06, transform=axis.get_xaxis_transform(), color=INK, linewidth=0.8)
        told = plain(f"{knob.name}: {knob.evidence} evidence, moved by {knob.controller}")
        axis.set_title(told, fontsize=9, color=GREY)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.tick_params(labelsize=8)
    axes[0].legend(fontsize=8, frameon=False)
    axes[-1].set_xlabel("step; ticks at the bottom are windows' ends")
    if title:
        figure.suptitle(plain(title), fontsize=11)
    return figure


def line(knob: PlannedKnob, encoding: str = "utf-8") -> str:
    """A knob's schedule in one line of a terminal with this encoding.

    >>> line(PlannedKnob("rate", "line", "hold", [0, 1, 2], [0.0, 0.5, 1.0], [], []))[:3] == BARS[0] + BARS[4] + BARS[7]
    True
    """
    columns, last = min(COLUMNS, knob.steps[-1] + 1), knob.steps[-1]
    shown = (column * last // max(1, columns - 1) for column in range(columns))
    chosen = [knob.bases[bisect_right(knob.steps, step) - 1] for step in shown]  # short windows have more of them
    highest, lowest = max(chosen), min(0.0, *chosen)
    span = highest - lowest
    try:
        BARS.encode(encoding)
        bars = BARS
    except UnicodeEncodeError:
        bars = PLAIN_BARS
    return "".join(bars[round((value - lowest) / span * (len(bars) - 1)) if span else 0] for value in chosen)


def ruler(seen: Preview) -> str:
    """Where windows end, in a line as wide as those of the knobs."""
    total = seen.windows[-1][1]
    columns = min(COLUMNS, total)
    marks = [" "] * columns
    for _, stop in seen.windows:
        marks[min(columns - 1, stop * columns // total)] = "|"
    return "".join(marks)
