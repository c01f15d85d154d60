"""Figures of a run for papers and notebooks, by matplotlib: losses, what was learned, and the evidence."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from hdet.errors import ConfigError, MissingExtraError
from hdet.files import replace
from hdet.record import TURNS, WindowRecord, knobs_of
from hdet.report import series
from hdet.report.reading import AHEAD, AVERAGED, CLEAR_T, LAST, ONLY, held_out_loss, readings
from hdet.report.together import Heading, headings

Figure = Any
"""matplotlib's `Figure`, which is imported when one is drawn."""

# Okabe and Ito's colours, which colour-blind readers tell apart; shapes and strokes do the same in black and white.
BLUE = "#0072B2"
SKY = "#56B4E9"
ORANGE = "#E69F00"
RED = "#D55E00"
GREY = "#767676"
INK = "#222222"
DECADES = 1e3
FORMATS = ("pdf", "svg", "png")
MOST_LABELS = 40
TICKS = (-1000, -100, -20, -5, -2, 0, 2, 5, 20, 100, 1000)
MARKS = {
    AVERAGED: ("o", BLUE, "averaged weights"),
    LAST: ("s", ORANGE, "last weights"),
    AHEAD: ("D", RED, "looking ahead"),
    ONLY: ("P", BLUE, "the window's evidence"),
}


def overview(history: Iterable[WindowRecord], *, title: str = "") -> Figure:
    """The whole run: losses on top, then a row a knob, its values on the left and its evidence on the right.

    More than three learning rates that are judged together have one row.

    Raises:
        ConfigError: the history explores no knob.
        MissingExtraError: matplotlib is not installed (the extra `report`).
    """
    windows = list(history)
    knobs = _rows(windows)
    figure = blank_figure(11.0, 2.6 + 2.2 * len(knobs))
    grid = figure.add_gridspec(1 + len(knobs), 2, height_ratios=[1.0] + [1.1] * len(knobs))
    top = figure.add_subplot(grid[0, :])
    _draw_losses(top, windows)
    for row, knob in enumerate(knobs, start=1):
        left = figure.add_subplot(grid[row, 0], sharex=top)
        right = figure.add_subplot(grid[row, 1], sharex=top)
        _draw_values(left, windows, knob)
        _draw_evidence(right, windows, knob.first)
        if row == 1:
            left.set_title("value: learned (at its schedule's peak), and in force", fontsize=9, color=GREY)
            right.set_title("evidence", fontsize=9, color=GREY)
        for axis in (left, right):
            axis.tick_params(labelbottom=row == len(knobs))
        if row == len(knobs):
            left.set_xlabel("step")
            right.set_xlabel("step")
    figure.legend(
        handles=_legend(windows, [knob.first for knob in knobs]),
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    if title:
        figure.suptitle(plain(title), fontsize=11)
    return figure


def losses(history: Iterable[WindowRecord]) -> Figure:
    """Mean training loss by window, the held-out loss where evidence tells it, faults and returns to earlier points."""
    windows = list(history)
    return _single(lambda axis: _draw_losses(axis, windows))


def course(history: Iterable[WindowRecord], knob: str) -> Figure:
    """A knob's learned value, the value in force, the replicas' levels as a band, and every move."""
    windows = _of(history, knob)
    return _single(lambda axis: _draw_course(axis, windows, knob))


def evidence(history: Iterable[WindowRecord], knob: str) -> Figure:
    """A knob's evidence by window, as t with its sign turned: up asks for more."""
    windows = _of(history, knob)
    figure = _single(lambda axis: _draw_evidence(axis, windows, knob))
    figure.axes[0].legend(handles=_evidence_legend(windows, [knob]), fontsize=8, frameon=False)
    return figure


def save_figures(
    history: Iterable[WindowRecord], folder: Path | str, *, formats: Sequence[str] = FORMATS, title: str = ""
) -> list[Path]:
    """Write every figure of a run in every format; returns the files. Without a knob these are its losses alone.

    Raises:
        ConfigError: the history is empty, or a format is not known.
        MissingExtraError: matplotlib is not installed (the extra `report`).
        OSError: a file cannot be written.
    """
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ConfigError(f"figures are written as {', '.join(FORMATS)}, not as {', '.join(unknown)}")
    windows = list(history)
    explored = not windows or knobs_of(windows)  # an empty history is refused by the overview
    made = {"overview": overview(windows, title=title)} if explored else {}
    made["losses"] = losses(windows)
    for number, knob in enumerate(_rows(windows) if explored else ()):
        named = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in knob.name)
        made[f"{number}_{named}_values"] = _single(lambda axis: _draw_values(axis, windows, knob))  # noqa: B023
        made[f"{number}_{named}_evidence"] = evidence(windows, knob.first)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    import matplotlib

    written = []
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):  # text stays text
        for name, figure in made.items():
            for ending in formats:
                path = target / f"{name}.{ending}"
                write_figure(figure, path)
                written.append(path)
    return written


def write_figure(figure: Figure, path: Path, *, dpi: int = 200) -> None:
    """Write a figure in the format of its file's ending, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    drawn = io.BytesIO()  # on a full disk matplotlib's PDF ends in an error of zlib
    figure.savefig(drawn, format=path.suffix[1:], dpi=dpi)
    replace(path, drawn.getvalue())


def _drawn(windows: Sequence[WindowRecord]) -> list[str]:
    """The knobs to draw, of which there is one at least."""
    knobs = knobs_of(windows)
    if not knobs:
        raise ConfigError("there is nothing to draw: the history is empty or explores no knob")
    return knobs


def _rows(windows: Sequence[WindowRecord]) -> list[Heading]:
    """The same, those together that are judged together."""
    _drawn(windows)
    return headings([windows])


def _of(history: Iterable[WindowRecord], knob: str) -> list[WindowRecord]:
    windows = list(history)
    known = _drawn(windows)
    if knob not in known:
        raise ConfigError(f"no knob {knob!r} in this history; there are {known}")
    return windows


def blank_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that a notebook shows without pyplot.

    Raises:
        MissingExtraError: matplotlib, or a package that it needs, is not installed (the extra `report`).
        ConfigError: matplotlib cannot be imported for another reason.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Drawn
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name).partition(".")[0], "report") from None
    except (ImportError, AttributeError, ValueError) as error:  # the last two of a NumPy that it does not fit
        raise ConfigError(f"matplotlib is installed and cannot be imported: {error}; install it anew") from None

    class Shown(Drawn):
        """A figure that a notebook shows without pyplot."""

        def _repr_png_(self) -> bytes:
            image = io.BytesIO()
            self.savefig(image, format="png", dpi=110)
            return image.getvalue()

    figure = Shown(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(text: str) -> str:
    """Text that matplotlib takes as it is: no mathematics, no control characters."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text).replace(
        "$", r"\$"
    )


def _single(draw: Callable[[Any], None]) -> Figure:
    figure = blank_figure(6.0, 3.2)
    axis = figure.add_subplot()
    draw(axis)
    axis.set_xlabel("step")
    return figure


def _draw_losses(axis: Any, windows: Sequence[WindowRecord]) -> None:
    losses = [record.loss for record in windows]
    alone = {"marker": "."} if len(windows) == 1 else {}  # a line of one point is none
    axis.plot([record.stop for record in windows], losses, color=INK, linewidth=1.5, label="training loss", **alone)
    held_out = [(record.stop, level) for record in windows if math.isfinite(level := held_out_loss(record))]
    if held_out:
        style = {"color": RED, "linewidth": 1.2, "linestyle": "--", "label": "held-out loss"}
        axis.plot(*zip(*held_out, strict=True), **style, **alone)
    shown = np.array([*losses, *(level for _, level in held_out)])
    shown = shown[np.isfinite(shown)]
    if len(shown) and shown.min() > 0 and shown.max() > 4 * shown.min():
        axis.set_yscale("log")
    axis.set_ylabel("loss", fontsize=9)
    axis.legend(fontsize=8, frameon=False, loc="upper right")
    _dress(axis, windows, labelled=True)


def _draw_values(axis: Any, windows: Sequence[WindowRecord], drawn: Heading) -> None:
    """A knob's course; of many what each has learned, and what they were set to."""
    if len(drawn.knobs) == 1:
        _draw_course(axis, windows, drawn.first)
        return
    courses = [made for knob in drawn.knobs if (made := series.course(windows, knob)).learned]
    for made in courses:
        axis.stairs(made.learned[:-1], made.edges, baseline=None, color=BLUE, linewidth=0.8, alpha=0.6)
    for start in sorted({made.start for made in courses if made.start is not None}):
        axis.axhline(start, color=GREY, linewidth=0.7, linestyle=":")
    if courses and min(min(made.learned) for made in courses) > 0:
        axis.set_yscale("log")
    axis.set_ylabel(plain(drawn.name), fontsize=9)
    _dress(axis, windows)


def _draw_course(axis: Any, windows: Sequence[WindowRecord], knob: str) -> None:
    made = series.course(windows, knob)
    if made.spread:
        axis.fill_between(made.steps, made.low, made.high, color=SKY, alpha=0.35, linewidth=0)
    if made.scheduled:
        axis.plot(made.steps, made.in_force, color=GREY, linewidth=1.2, linestyle="--")
    if made.learned:
        axis.stairs(made.learned[:-1], made.edges, baseline=None, color=BLUE, linewidth=2.0)
        axis.axhline(made.start, color=GREY, linewidth=0.7, linestyle=":")
    for up, clear in product((True, False), repeat=2):
        points = [(move.step, move.after) for move in made.moves if (move.amount > 0, move.clear) == (up, clear)]
        color = BLUE if up else RED
        style = {"markeredgecolor": color, "markerfacecolor": color if clear else "white", "markersize": 6, "zorder": 4}
        if points:
            axis.plot(*zip(*points, strict=True), "^" if up else "v", **style)
    levels = [*made.low, *made.high, *made.learned, *([made.start] if made.start is not None else [])]
    if min(levels) > 0 and max(levels) > 4 * min(levels):
        axis.set_yscale("log")
        axis.set_ylim(bottom=max(min(levels), max(levels) / DECADES) / 1.3)  # a schedule's way to 0 is no news
    axis.set_ylabel(plain(knob), fontsize=9)
    _dress(axis, windows)


def _draw_evidence(axis: Any, windows: Sequence[WindowRecord], knob: str) -> None:
    points: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for record in windows:
        for place, one in enumerate(readings(record, knob)):
            at, height = (record.start + record.stop) / 2, -max(-1e3, min(1e3, one.t))
            points.setdefault((one.source, place == 0), []).append((at, height))
    for (source, decides), found in points.items():
        shape, color, _ = MARKS[source]
        middles, heights = zip(*found, strict=True)
        if decides:
            axis.vlines(middles, 0.0, heights, color=color, linewidth=1.0, alpha=0.7)
        fill = color if decides else "white"
        axis.plot(middles, heights, shape, markersize=4.5, markeredgecolor=color, markerfacecolor=fill)
    axis.set_yscale("symlog", linthresh=5.0)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, -2 * CLEAR_T), max(high, 2 * CLEAR_T))
    low, high = axis.get_ylim()
    axis.set_yticks([-t for t in TICKS if low <= -t <= high], [f"{t:g}" for t in TICKS if low <= -t <= high])
    axis.set_yticks([], minor=True)
    axis.axhline(0.0, color=GREY, linewidth=0.7)
    axis.axhspan(-CLEAR_T, CLEAR_T, color=GREY, alpha=0.12, linewidth=0)
    axis.set_ylabel("t: up asks for more", fontsize=9)
    _dress(axis, windows)


def _dress(axis: Any, windows: Sequence[WindowRecord], *, labelled: bool = False) -> None:
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.tick_params(labelsize=8)
    faulty = [(one.stop, list(dict.fromkeys(str(fault.get("kind")) for fault in one.faults))) for one in windows]
    faulty = [(step, kinds) for step, kinds in faulty if kinds]
    whole = axis.get_xaxis_transform()  # steps along, the axis' whole height up
    for turned, style in ((True, "-"), (False, ":")):
        steps = [step for step, kinds in faulty if any(kind in TURNS for kind in kinds) == turned]
        if steps:
            axis.vlines(steps, 0.0, 1.0, transform=whole, color=RED, linewidth=0.9, linestyle=style)
    for step, kinds in faulty[:MOST_LABELS] if labelled else ():
        axis.text(step, 1.0, plain(", ".join(kinds)), transform=whole, fontsize=7, rotation=90, va="top")


def _legend(windows: Sequence[WindowRecord], knobs: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Line2D([], [], color=BLUE, linewidth=2, label="learned value"),
        Line2D([], [], color=GREY, linestyle="--", label="in force, schedule included"),
        Line2D([], [], color=GREY, linestyle=":", label="as it was set"),
        Patch(color=SKY, alpha=0.35, label="levels of the replicas"),
        Line2D([], [], color=BLUE, marker="^", linestyle="", label="moved up (hollow: weak evidence)"),
        Line2D([], [], color=RED, marker="v", linestyle="", label="moved down (hollow: weak evidence)"),
        *_evidence_legend(windows, knobs),
    ]


def _evidence_legend(windows: Sequence[WindowRecord], knobs: Sequence[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    there = {one.source for knob in knobs for record in windows for one in readings(record, knob)}
    return [
        Line2D([], [], marker=shape, color=color, label=f"evidence: {label}")
        for source, (shape, color, label) in MARKS.items()
        if source in there
    ]
