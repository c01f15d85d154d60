"""Make the three runs of docs/reading-a-report.md anew: their pictures, and what the page quotes of them.

    make example-runs

The runs are declared on the page, by its YAML and the table above it. What the page's text tells beside its tables, of
other settings, is printed. Needs a Chromium; takes about a minute.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hdet.app.report import reported_run
from hdet.app.run import Run, RunConfig
from hdet.app.run.runner import Result
from hdet.document import override, parse
from hdet.record import WindowRecord
from hdet.report import Verdict, overview, page

HERE = Path(__file__).parent
PAGE = HERE.parent / "reading-a-report.md"
PICTURES = {"put right": "run-good.png", "made worse": "run-harmful.png", "undecided": "run-undecided.png"}
VIEWS = {"report-page": (1200, "light"), "report-page-dark": (1200, "dark"), "report-page-phone": (390, "light")}
HEIGHT = 1180
SEEDS = (1, 2, 3)
ASIDES = (
    ("put right", "optimizer.lr=0.1"),
    ("made worse", "optimizer.lr=0.01"),
    ("made worse", "optimizer.lr=0.015"),
    ("made worse", "task.probe_examples=32"),
)
DRAWN = "() => [...document.querySelectorAll('[data-chart]')].every(chart => chart.querySelector('.main-svg'))"


def declared(text: str, *changes: str) -> dict[str, RunConfig]:
    """The runs by name, as the page declares them, with changes."""
    block = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[-1]
    rows = re.findall(r"^\| ([a-z ]+) \| `--set ([^|]+)` \|$", text, re.MULTILINE)
    return {
        name: RunConfig.from_dict(override(parse(block, name=PAGE.name), [*own.split(" --set "), *changes]))
        for name, own in rows
    }


def quoted(text: str, name: str) -> tuple[str, str, str]:
    """The page up to what it quotes of a run, the quote, which lies between two comments, and the rest."""
    begin = f"<!-- of the run: {name} -->\n\n"
    start = text.index(begin) + len(begin)
    end = text.index("\n<!-- so far -->", start)
    return text[:start], text[start:end], text[end:]


def losses(config: RunConfig) -> tuple[float, float]:
    """The held-out losses with hdet and without."""
    with tempfile.TemporaryDirectory() as folder:
        result = Run(config, folder)(compare=True)
    return result.test_loss, result.plain["test_loss"]


def quote(result: Result, windows: list[WindowRecord], others: list[tuple[float, float]]) -> str:
    """The losses, those of other seeds, the hints, and a row for each knob."""
    hints = [f"`{hint['kind']}` for `{hint['knob']}`" for one in windows for hint in one.hints]
    searched, plain = (", ".join(f"{loss:.3f}" for loss in column) for column in zip(*others, strict=True))
    told = [
        f"Held-out loss {result.test_loss:.3f}; without hdet {result.plain['test_loss']:.3f}.",
        f"With seeds {', '.join(map(str, SEEDS))}: {searched}; without hdet {plain}.",
        f"Hints: {', '.join(hints) or 'none'}.",
    ]
    heading = ["| knob | set to | learned | trust | what moved it | at the end |", "|---|---|---|---|---|---|"]
    return "\n".join([*told, "", *heading, *map(row, result.knobs), ""])


def row(verdict: Verdict) -> str:
    told = [f"{verdict.start:.3g}", f"{verdict.end:.3g} (x {verdict.factor:.3g})", f"`{verdict.trust}`"]
    told += [words.replace("|", "\\|") for words in (verdict.moved, verdict.outlook)]
    return f"| {verdict.knob} | {' | '.join(told)} |"


def shrunk(path: Path) -> None:
    """A picture of lines and letters needs no more than 256 colours."""
    from PIL import Image

    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256).save(path, optimize=True)


def photograph(report: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (width, scheme) in VIEWS.items():
            view: Any = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
            view.goto(report.as_uri())
            view.wait_for_function(DRAWN)
            view.screenshot(path=HERE / f"{name}.png")
            shrunk(HERE / f"{name}.png")


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        for name, config in declared(text).items():
            out = Path(folder) / name.replace(" ", "-")
            result, run = Run(config, out)(compare=True), reported_run(out)
            others = [losses(declared(text, f"seed={seed}")[name]) for seed in SEEDS]
            said = quote(result, run.windows, others)
            print(f"{name}\n{said}")
            before, _, after = quoted(text, name)
            text = before + said + after
            overview(run.windows, title=name).savefig(HERE / PICTURES[name], dpi=90)
            shrunk(HERE / PICTURES[name])
            if name == "put right":
                report = Path(folder) / "report.html"
                report.write_bytes(page([run], title="digits").encode())
                photograph(report)
    PAGE.write_text(text, encoding="utf-8")
    for name, change in ASIDES:
        print(f"{name} with {change}: {{:.3f}}; without hdet {{:.3f}}".format(*losses(declared(text, change)[name])))


if __name__ == "__main__":
    main()
