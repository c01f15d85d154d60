"""What the report of a long run takes: to read its history, to make the page, to open it, zoom, pan and hover.

    python benchmarks/report_page.py --windows 10000 --knobs 8 --replicas 64 --browser

The history is made up: every window moves every knob and has an estimate at the last and at averaged weights.
`--browser` opens the page in Chromium, which needs playwright, and prints by gesture the longest time in which the page
did not answer (a "long task") and the longest time between two frames.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hdet.history import History
from hdet.record import WindowRecord
from hdet.report import page

WATCH = """() => {
  window.seen = {frames: [], tasks: []};
  let last = performance.now();
  const frame = (now) => { seen.frames.push(now - last); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  new PerformanceObserver((list) => list.getEntries().forEach((task) => seen.tasks.push(task.duration)))
    .observe({type: "longtask"});
}"""
DRAWN = "() => [...document.querySelectorAll('[data-chart]')].every(chart => chart.querySelector('.main-svg'))"
SETTLED_MS = 3000


def history(windows: int, knobs: int, replicas: int) -> list[WindowRecord]:
    """A run of so many windows, from fixed random numbers."""
    rng = np.random.default_rng(0)
    names = [f"knob_{index}" for index in range(knobs)]
    value = dict.fromkeys(names, 0.1)
    made = []
    for w in range(windows):
        moves = {name: float(move) for name, move in zip(names, rng.normal(0, 0.01, knobs), strict=True)}
        closed = {name: value[name] * float(np.exp(moves[name])) for name in names}
        estimates = {
            name: {"slope": float(slope), "stderr": 1.0, "averaged": {"slope": float(slope) / 2, "stderr": 1.0}}
            for name, slope in zip(names, rng.normal(0, 2, knobs), strict=True)
        }
        made.append(
            WindowRecord(
                window=w,
                start=10 * w,
                stop=10 * w + 10,
                bases=dict(value),
                values={name: (value[name] * rng.uniform(0.8, 1.2, replicas)).tolist() for name in names},
                losses=rng.uniform(1, 2, replicas).tolist(),
                estimates=estimates,
                moves=moves,
                merged=True,
                seconds=1.0,
                closing=0.1,
                learned={name: {"start": 0.1, "opened": value[name], "closed": closed[name]} for name in names},
            )
        )
        value = closed
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=10_000)
    parser.add_argument("--knobs", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--browser", action="store_true", help="Open the page, and zoom, pan and hover.")
    options = parser.parse_args()
    run = history(options.windows, options.knobs, options.replicas)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.jsonl"
        path.write_text("".join(record.to_json() + "\n" for record in run))
        print(f"{options.windows} windows, {options.knobs} knobs, {options.replicas} replicas")
        timed(f"reading {path.stat().st_size / 1e6:.0f} MB of history", lambda: History(path))
        text = timed("making the page", lambda: page(run))
        print(f"the page's size: {len(text.encode()) / 1e6:.2f} MB")
        if options.browser:
            target = Path(folder) / "report.html"
            target.write_text(text)
            browse(target)


def timed(name: str, work: Callable[[], Any]) -> Any:
    """What `work` returns; prints what it took."""
    wall, busy = time.perf_counter(), time.process_time()
    made = work()
    print(
        f"{name}: {time.perf_counter() - wall:.2f} s by the clock, {time.process_time() - busy:.2f} s of the processor"
    )
    return made


def browse(target: Path) -> None:
    """Open the page in Chromium, and zoom, pan and hover on its losses and on a knob's values and evidence."""
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1440, "height": 900})
        start = time.perf_counter()
        view.goto(target.as_uri())
        view.wait_for_selector("[data-chart] .main-svg")
        first = time.perf_counter() - start
        view.wait_for_function(DRAWN)
        count = view.locator("[data-chart]").count()
        print(f"opening it: first chart after {first:.2f} s, all {count} after {time.perf_counter() - start:.2f} s")
        view.evaluate(WATCH)
        for number, name in enumerate(("losses", "values", "evidence")):
            gestures(view, number, name)
        browser.close()


def gestures(view: Any, number: int, name: str) -> None:
    """Zoom, pan, show all and hover on one chart, and print how long the page did not answer."""
    area = view.locator("[data-chart]").nth(number).locator(".nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    height = box["y"] + box["height"] / 2

    def at(share: float) -> tuple[float, float]:
        return box["x"] + share * box["width"], height

    def drag(start: float, stop: float) -> None:
        view.mouse.move(*at(start))
        view.mouse.down()
        view.mouse.move(*at(stop), steps=20)
        view.mouse.up()

    def mode(name: str) -> None:
        chart = f"document.querySelectorAll('[data-chart]')[{number}]"
        view.evaluate(f"Plotly.relayout({chart}, {{dragmode: '{name}'}}).then(() => null)")

    def hover() -> None:
        for percent in range(20, 60):
            view.mouse.move(*at(percent / 100))

    gestures: tuple[tuple[str, Callable[[], None], Callable[[], None]], ...] = (
        ("zoom", lambda: mode("zoom"), lambda: drag(0.3, 0.6)),
        ("pan", lambda: mode("pan"), lambda: drag(0.6, 0.4)),
        ("show all", lambda: mode("zoom"), lambda: view.mouse.dblclick(*at(0.5))),
        ("hover", lambda: None, hover),
    )
    for gesture, prepare, make in gestures:
        prepare()
        view.wait_for_timeout(SETTLED_MS / 4)
        view.evaluate("() => { seen.frames.length = seen.tasks.length = 0; }")
        make()
        view.wait_for_timeout(SETTLED_MS)
        frames, tasks = view.evaluate("[seen.frames, seen.tasks]")
        print(
            f"{gesture} on {name}: longest task {f'{max(tasks):.0f}' if tasks else 'under 50'} ms, longest frame "
            f"{max(frames):.0f} ms, median {np.median(frames):.0f} ms"
        )


if __name__ == "__main__":
    main()
