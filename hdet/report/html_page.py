"""The report as one HTML page that needs nothing but a browser: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from hdet.errors import ConfigError, MissingExtraError
from hdet.nested import mapped
from hdet.record import WindowRecord, strict
from hdet.report import charts, telling
from hdet.report.charts import Chart
from hdet.report.reported import ReportedRun, reported
from hdet.report.together import headings

THEMES = {
    "light": {"text": "#1f2328", "grid": "#d9dde3", "zero": "#8b929c", "hover": "#ffffff"},
    "dark": {"text": "#e6e8eb", "grid": "#343a43", "zero": "#7d8590", "hover": "#20242a"},
}

COURSE = (
    "solid: learned, dashed: in force with its schedule, dotted: as it was set; triangles are moves, hollow on weak "
    "evidence; crosses are moves that a veto forbade"
)
MANY = "what each has learned, at its schedule's peak; the pointer names it"
EVIDENCE = "diamonds look ahead, hollow squares are of the last weights, circles of averaged ones or the only evidence"


def page(runs: ReportedRun | Iterable[ReportedRun] | Iterable[WindowRecord], *, title: str = "") -> str:
    """One self-contained HTML page on one run, or on several side by side.

    On top stands what each knob was set to, what it has learned, whether to trust that, and what the run earned. Below
    follow losses, values, evidence, faults, the cost of probing, configurations and what to set next time. Nothing that
    a history holds can run: the page allows its own two scripts only, by their hash.

    Args:
        runs: a run's history, or `ReportedRun`s, which also hold what lies beside a history.
        title: of the page; by default the runs' names.

    Raises:
        ConfigError: a run has no window, or it is no run at all.
        MissingExtraError: plotly or Jinja is not installed (the extra `report`).

    >>> import hdet
    >>> record = hdet.history.WindowRecord(0, 0, 10, {"dropout": 0.1}, {}, [2.0], {}, {"dropout": 0.0}, merged=False)
    >>> "dropout" in page([record])
    True
    """
    given = reported(runs)
    empty = [run.name for run in given if not run.windows]
    if empty:
        raise ConfigError(f"there is nothing to report of {', '.join(empty)}: the history has no window yet")
    together = headings([run.windows for run in given])
    drawn: dict[str, Chart] = {}

    def draw(chart: Chart, caption: str) -> dict[str, str]:
        name = f"chart-{len(drawn)}"
        drawn[name] = chart
        return {"id": name, "caption": caption}

    return _filled(
        drawn,
        title=title or ", ".join(run.name for run in given),
        several=len(given) > 1,
        runs=[telling.of_run(number, run, together) for number, run in enumerate(given)],
        differences=telling.differences(given),
        losses=draw(charts.losses(given), "Training and held-out loss by step; vertical lines are faults"),
        knobs=[
            {
                "name": one.name,
                "course": draw(charts.values(given, one), f"{one.name}; {COURSE if len(one.knobs) == 1 else MANY}"),
                "evidence": draw(
                    charts.evidence(given, one.first), f"Evidence on {one.name} with two standard errors; {EVIDENCE}"
                ),
                "each": telling.each(given, one),
                "counted": telling.counted(given, one.first),
                "moves": telling.moves(given, one.first) if len(one.knobs) == 1 else [],
            }
            for one in together
        ],
        events=telling.events(given),
        seconds=draw(charts.seconds(given), "Wall time by step"),
        configurations=[(run.name, run.configuration) for run in given if run.configuration],
        marks=telling.MARKS,
        meanings=telling.MEANINGS,
        most=telling.MOST_ROWS,
    )


def _filled(drawn: Mapping[str, Chart], **context: Any) -> str:
    """The template with everything in it; whatever comes from a history is escaped."""
    try:
        from jinja2 import Environment, StrictUndefined
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name).partition(".")[0], "report") from None
    beside = files("hdet.report")
    template, style, glue = (
        beside.joinpath(name).read_text(encoding="utf-8") for name in ("page.html.j2", "page.css", "page.js")
    )
    library = get_plotlyjs().replace("\r\n", "\n")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(printable=charts.printable, digits=telling.digits)
    themes = {f"theme-{name}": _template(theme) for name, theme in THEMES.items()}
    return environment.from_string(template).render(
        **context,
        style=style,
        library=library,
        glue=glue,
        allowed=" ".join(f"'sha256-{_digest(script)}'" for script in (library, glue)),
        embedded={name: _json(value) for name, value in {**drawn, **themes}.items()},
    )


def _template(theme: Mapping[str, str]) -> dict[str, Any]:
    """A plotly template: the colours that differ between the light page and the dark one."""
    axis = {
        "gridcolor": theme["grid"],
        "linecolor": theme["grid"],
        "zerolinecolor": theme["zero"],
        "zerolinewidth": 1.5,
    }
    return {
        "layout": {
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": theme["text"]},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "hoverlabel": {"bgcolor": theme["hover"], "font": {"color": theme["text"]}},
            "modebar": {"color": theme["zero"], "activecolor": theme["text"], "bgcolor": "rgba(0,0,0,0)"},
            "xaxis": axis,
            "yaxis": axis,
        }
    }


def _json(value: Any) -> str:
    """JSON that no HTML parser takes for markup. Numbers have seven digits, as late steps have; more make it large."""
    text = json.dumps(mapped(strict(value), _short), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _short(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
