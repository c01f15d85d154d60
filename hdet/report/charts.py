"""The page's charts, as plotly figures in plain mappings: losses, values, evidence, time."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from hdet.digits import four_digits
from hdet.record import TURNS
from hdet.report import series
from hdet.report.reading import AHEAD, AVERAGED, LAST, ONLY, held_out_loss
from hdet.report.reported import ReportedRun
from hdet.report.together import Heading

# One a run. Four of Okabe and Ito's colours, a grey and a violet: each has contrast 3 on the light page and the dark.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#707070", "#8A7BD0")
SYMBOLS = {AVERAGED: "circle", LAST: "square-open", AHEAD: "diamond", ONLY: "circle"}
HEIGHT = 340
MOST_FAULTS = 200

Chart = dict[str, Any]


def losses(runs: Sequence[ReportedRun]) -> Chart:
    """Training and held-out loss of every run; a band where replicas' losses differ; faults as vertical lines."""
    data: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        label, colour = _label(run, runs), colour_of(number)
        steps, mean, held_out = [], [], []
        for group in series.groups(run.windows):
            steps.append(group[-1].stop)
            mean.append(_mean([record.loss for record in group]))
            held_out.append(_mean([held_out_loss(record) for record in group]))
        data.append(_line(steps, mean, f"training loss{label}", colour))
        if any(value is not None for value in held_out):
            trace = _line(steps, held_out, f"held-out loss{label}", colour, dash="dot")
            data.append({**trace, "mode": "lines+markers", "connectgaps": True})
    return _chart(data, "loss", runs)


def values(runs: Sequence[ReportedRun], drawn: Heading) -> Chart:
    """A knob's learned value, the value in force, the band of levels and every move; of many knobs learned values."""
    data: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        knobs = [knob for knob in drawn.knobs if knob in run.knobs]
        label, colour = _label(run, runs), colour_of(number)
        if len(drawn.knobs) > 1:
            traces = [_one_of_many(run.courses[knob], shown(knob) + label, colour) for knob in knobs]
        else:
            traces = [trace for knob in knobs for trace in _course(run.courses[knob], label, colour)]
        data.extend(_one_entry(traces, number, runs))
    drawn_values = [value for trace in data for value in trace["y"] if value is not None]
    low, high = min(drawn_values, default=0.0), max(drawn_values, default=0.0)
    chart = _chart(data, drawn.name, runs)
    chart["layout"]["hovermode"] = "closest" if len(drawn.knobs) > 1 else "x unified"
    if 0 < 4 * low < high:
        bottom = math.log10(max(low, high / 1e3)) - 0.1  # a schedule's way to 0 is no news
        chart["layout"]["yaxis"].update(type="log", range=[bottom, math.log10(high) + 0.1])
    elif low == high != 0:
        chart["layout"]["yaxis"]["range"] = sorted((0.0, 2 * low))  # plotly's own goes 1 either way
    return chart


def evidence(runs: Sequence[ReportedRun], knob: str) -> Chart:
    """What one unit more of the knob's coordinate would have saved, with two standard errors either way."""
    data: list[dict[str, Any]] = []
    ends: list[float] = []
    for number, run in enumerate(runs):
        own: list[dict[str, Any]] = []
        for made in series.evidence(run.windows, knob) if knob in run.knobs else ():  # it may have others of the kind
            bars = [2 * error for error in made.error]
            ends.extend(abs(gain) + bar for gain, bar in zip(made.gain, bars, strict=True))
            said = [
                f"{made.source}: asks for {'more' if t < 0 else 'less'}, t = {t:.2f}"
                + (f", mean of {count} windows" if count > 1 else "")
                for t, count in zip(made.t, made.count, strict=True)
            ]
            colour = colour_of(number)
            error = {"type": "data", "array": bars, "thickness": 1, "width": 0, "color": _faint(colour, 0.55)}
            marker = {"symbol": SYMBOLS[made.source], "size": 7, "color": colour}
            trace = _markers(made.steps, made.gain, made.source + _label(run, runs), marker, said)
            hover = "step %{x}: %{y:.3g}<br>%{text}<extra></extra>"
            own.append({**trace, "error_y": error, "hovertemplate": hover})
        data.extend(_one_entry(own, number, runs))
    chart = _chart(data, "saved by one unit more", runs)
    chart["layout"]["yaxis"]["zeroline"] = True
    ends.sort()
    shown = 1.2 * ends[int(0.9 * (len(ends) - 1))] if ends else 1.0
    beyond = sum(end > 1.001 * shown for end in ends)
    if beyond and shown > 0:
        chart["layout"]["yaxis"]["range"] = [-shown, shown]
        note = f"{beyond} of {len(ends)} points reach beyond; double-click shows all"
        # On the left: plotly's buttons lie on the right.
        corner = {"xref": "paper", "yref": "paper", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"}
        chart["layout"]["annotations"] = [{**corner, "text": note, "showarrow": False, "font": {"size": 11}}]
    return chart


def seconds(runs: Sequence[ReportedRun]) -> Chart:
    """Wall time of the windows, and the part spent at their ends."""
    data: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        label, colour = _label(run, runs), colour_of(number)
        steps, each, closing = [], [], []
        for group in series.groups(run.windows):
            count = max(1, sum(record.stop - record.start for record in group))
            steps.append(group[-1].stop)
            each.append(1e3 * _total([record.seconds for record in group]) / count)
            closing.append(1e3 * _total([record.closing for record in group]) / count)
        data.append(_line(steps, each, f"a step{label}", colour))
        data.append(_line(steps, closing, f"of it at windows' ends{label}", colour, dash="dot"))
    return _chart(data, "milliseconds a step", runs)


def colour_of(number: int) -> str:
    """A run's colour."""
    return COLOURS[number % len(COLOURS)]


def printable(text: object) -> str:
    """Text without control characters and lone surrogates, line ends apart."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in str(text)
    )


def shown(text: str) -> str:
    """Text as plotly shows it letter by letter: it takes a little HTML for markup."""
    return html.escape(printable(text), quote=False)


def _course(made: series.DrawnCourse, label: str, colour: str) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    if made.spread:
        band = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "legendgroup": f"levels{label}"}
        traces.append({**band, "x": made.steps, "y": made.low, "showlegend": False})
        filled = {"fill": "tonexty", "fillcolor": _faint(colour), "name": f"levels{label}"}
        traces.append({**band, **filled, "x": made.steps, "y": made.high})
    if made.scheduled:
        name = f"in force, schedule included{label}"
        traces.append(_line(made.steps, made.in_force, name, colour, width=1.2, dash="dash"))
    if made.learned:
        ends = [made.edges[0], made.edges[-1]]
        traces.append(_line(made.edges, made.learned, f"learned{label}", colour, width=2.5, shape="hv"))
        traces.append(_line(ends, [made.start] * 2, f"as it was set{label}", colour, width=1, dash="dot"))
    return traces + _moves(made, label, colour)


def _one_of_many(made: series.DrawnCourse, name: str, colour: str) -> dict[str, Any]:
    """The learned values of one of many knobs, which the pointer names."""
    return {**_line(made.edges, made.learned, name, colour, width=1, shape="hv"), "showlegend": False}


def _one_entry(traces: list[dict[str, Any]], number: int, runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """A run's traces; beside other runs with one entry in the legend, which hides and shows them all."""
    if len(runs) == 1 or not traces:
        return traces
    group = {"legendgroup": f"run {number}"}
    entry = _line([None], [None], shown(runs[number].name), colour_of(number))
    return [{**entry, **group}, *({**trace, **group, "showlegend": False} for trace in traces)]


def _moves(made: series.DrawnCourse, label: str, colour: str) -> list[dict[str, Any]]:
    traces = []
    line = {"width": 1.5, "color": colour}
    for name, up in (("moved up", True), ("moved down", False)):
        moves = [move for move in made.moves if (move.amount > 0) == up]
        if not moves:
            continue
        symbol = "triangle-up" if up else "triangle-down"
        symbols = [symbol if move.clear else f"{symbol}-open" for move in moves]
        marker = {"symbol": symbols, "size": 10, "color": colour, "line": line}
        steps, heights = [move.step for move in moves], [move.after for move in moves]
        traces.append(_markers(steps, heights, name + label, marker, [shown(reason(move)) for move in moves]))
    if held := made.held_back:
        steps, heights = [one.step for one in held], [one.after for one in held]
        marker = {"symbol": "x-thin", "size": 8, "line": line}
        said = [shown(objection(one)) for one in held]
        traces.append(_markers(steps, heights, f"held back by a veto{label}", marker, said))
    return traces


def reason(move: series.Move) -> str:
    """A move in words."""
    evidence = move.source + (f" (t = {move.t:+.1f})" if move.t is not None else "")
    several = f", the last of {move.count}" if move.count > 1 else ""
    guard = f" ({move.guard})" if move.guard else ""
    rule = f"{', and by' if move.guard else ';'} rule {move.rule}" if move.rule else ""
    veto = f"; {move.veto} let through only a part" if move.veto else ""
    course = f"{four_digits(move.before)} to {four_digits(move.after)}"
    return f"step {move.step}: {course}, by {evidence}{guard}{several}{rule}{veto}"


def objection(held: series.Move) -> str:
    """A move that was not made, in words."""
    several = f", the last of {held.count} times" if held.count > 1 else ""
    return (
        f"step {held.step}: stays at {four_digits(held.after)}; rule {held.rule} asked, {held.veto} forbade it{several}"
    )


def _line(
    steps: Sequence[float | None], heights: Sequence[float | None], name: str, colour: str, **style: Any
) -> dict[str, Any]:
    drawn = [None if value is None or not math.isfinite(value) else value for value in heights]
    return {
        "type": "scatter",
        "mode": "markers" if sum(value is not None for value in drawn) == 1 else "lines",
        "x": list(steps),
        "y": drawn,
        "name": name,
        "line": {"color": colour, "width": 1.8, **style},
        "hovertemplate": f"step %{{x}}: %{{y:.4g}}<extra>{name}</extra>",
    }


def _markers(
    steps: Sequence[float], heights: Sequence[float], name: str, marker: dict[str, Any], said: Sequence[str]
) -> dict[str, Any]:
    """Points, each of which says something when it is pointed at."""
    points = {"type": "scatter", "mode": "markers", "x": steps, "y": heights, "name": name, "marker": marker}
    return {**points, "text": said, "hovertemplate": "%{text}<extra></extra>"}


def _chart(data: list[dict[str, Any]], y: str, runs: Sequence[ReportedRun]) -> Chart:
    """The traces with axes; all charts of a page have the same steps."""
    first = min(run.windows[0].start for run in runs)
    last = max(run.windows[-1].stop for run in runs)
    return {
        "data": data,
        "layout": {
            "height": HEIGHT,
            "margin": {"l": 64, "r": 12, "t": 24, "b": 32},
            "xaxis": {
                "title": {"text": "step", "standoff": 0},
                "range": [first - 0.02 * (last - first), last + 0.02 * (last - first)],
                "zeroline": False,
            },
            "yaxis": {
                "title": {"text": shown(y), "standoff": 8},  # without it, it touches the ticks' long numbers
                "automargin": True,
                "zeroline": False,
                "exponentformat": "e",
            },
            "legend": {"orientation": "h", "y": -0.18, "yanchor": "top", "x": 0},
            "hovermode": "closest",
            "shapes": _faults(runs),
        },
    }


def _faults(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """A vertical line where something went wrong, a solid one where the run went back."""
    marked = [
        (number, record.stop, any(fault.get("kind") in TURNS for fault in record.faults))
        for number, run in enumerate(runs)
        for record in run.windows
        if record.faults
    ]
    marked.sort(key=lambda one: not one[2])
    whole = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1}
    return [
        {**whole, "x0": step, "x1": step, "line": {"color": colour_of(number), "width": 1.2, "dash": dash}}
        for number, step, turned in marked[:MOST_FAULTS]
        for dash in ["solid" if turned else "dot"]
    ]


def _label(run: ReportedRun, runs: Sequence[ReportedRun]) -> str:
    return f", {shown(run.name)}" if len(runs) > 1 else ""


def _faint(colour: str, alpha: float = 0.2) -> str:
    red, green, blue = (int(colour[index : index + 2], 16) for index in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _mean(found: Sequence[float]) -> float | None:
    finite = [value for value in found if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def _total(found: Sequence[float]) -> float:
    return math.fsum(value for value in found if math.isfinite(value))
