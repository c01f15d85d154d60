"""Make the three runs of docs/reading-a-report.md anew: their pictures, and what the page quotes of them.

    make example-runs

The runs are declared on the page, by its YAML and the table above it. Needs a Chromium; takes about a minute.
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
DRAWN = "() => [...document.querySelectorAll('[data-chart]')].every(chart => chart.querySelector('.main-svg'))"


def declared(text: str) -> dict[str, RunConfig]:
    """The runs by name, as the page declares them."""
    block = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[-1]
    rows = re.findall(r"^\| ([a-z ]+) \| `--set ([^|]+)` \|$", text, re.MULTILINE)
    return {
        name: RunConfig.from_dict(override(parse(block, name=PAGE.name), changes.split(" --set ")))
        for name, changes in rows
    }


def quoted(text: str, name: str) -> tuple[str, str, str]:
    """The page up to what it quotes of a run, the quote, which lies between two comments, and the rest."""
    begin = f"<!-- of the run: {name} -->\n\n"
    start = text.index(begin) + len(begin)
    end = text.index("\n<!-- so far -->", start)
    return text[:start], text[start:end], text[end:]


def quote(result: Result, windows: list[WindowRecord]) -> str:
    """The losses, the hints, and a row for each knob."""
    plain = (result.plain or {})["test_loss"]
    hints = [f"`{hint['kind']}` for `{hint['knob']}`" for one in windows for hint in one.hints]
    losses = f"Held-out loss {result.test_loss:.3f}; without hdet {plain:.3f}. Hints: {', '.join(hints) or 'none'}."
    heading = ["| knob | set to | learned | trust | what moved it | at the end |", "|---|---|---|---|---|---|"]
    return "\n".join([losses, "", *heading, *map(row, result.knobs), ""])


def row(verdict: Verdict) -> str:
    told = [f"{verdict.start:.3g}", f"{verdict.end:.3g} (x {verdict.factor:.3g})", f"`{verdict.trust}`"]
    told += [words.replace("|", "\\|") for words in (verdict.moved, verdict.outlook)]
    return f"| `{verdict.knob}` | {' | '.join(told)} |"


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
            said = quote(result, run.windows)
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


if __name__ == "__main__":
    main()
