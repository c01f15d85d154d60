"""The page in a real browser: it loads, reads on every width, and does what a hand on it expects.

Needs playwright and a Chromium (on Debian: `apt-get install chromium`); skipped where either is missing.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reported_runs import HOSTILE, run, windows

from hdet.app.serving import PageServer
from hdet.report import ReportedRun, page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; apt-get install chromium")
DRAWN = "() => [...document.querySelectorAll('[data-chart]')].every(chart => chart.querySelector('.main-svg'))"
NARROWEST = "() => Math.min(...[...document.querySelectorAll('.run')].map(run => run.clientWidth || Infinity))"
CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.slice(0, 3).map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const found = parse(getComputedStyle(node).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || node.closest("script, style, .modebar")) continue;
    const style = getComputedStyle(node);
    const ink = node.ownerSVGElement ? style.fill : style.color;
    const [a, b] = [light(parse(ink)), light(behind(node))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) bad.push(node.textContent.trim() + ": " + ((a + .05) / (b + .05)).toFixed(2));
  }
  return bad;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """A page in the browser, with what it said and asked for."""

    def __init__(self, browser: Any, path: Path | str, width: int = 1440, scheme: str = "light") -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.view.on("console", lambda message: self.said.append(message.text))
        self.view.on("pageerror", lambda error: self.said.append(str(error)))
        self.view.on("request", lambda request: self.asked.append(request.url))
        self.view.goto(path.as_uri() if isinstance(path, Path) else path)
        self.view.wait_for_function(DRAWN)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *raised: object) -> None:
        self.view.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_bytes(page([run("first"), run("second", declared={"seed": 1})]).encode())
    return path


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (768, "light"), (390, "light"), (1440, "dark")])
def test_it_loads_alone_fits_the_width_and_has_contrast(browser: Any, written: Path, width: int, scheme: str) -> None:
    with Opened(browser, written, width, scheme) as opened:
        assert opened.said == []
        assert opened.asked == [written.as_uri()], "nothing from outside"
        assert opened.view.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.view.evaluate(CONTRAST) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_an_axis_title_does_not_touch_its_numbers(browser: Any, tmp_path: Path, width: int) -> None:
    """Of a rate about 1e-3, on a logarithmic axis, whose numbers are long."""
    there = windows()
    for record in there:
        record.bases["learning_rate"] *= 1e-2 * 0.6**record.window
        record.learned["learning_rate"].update({name: 1e-2 * v for name, v in record.learned["learning_rate"].items()})
    (tmp_path / "report.html").write_bytes(page([ReportedRun("wide", there)]).encode())
    with Opened(browser, tmp_path / "report.html", width) as opened:
        assert (
            opened.view.evaluate("""() => [...document.querySelectorAll('[data-chart]')].flatMap((chart) => {
            const title = chart.querySelector('.ytitle').getBoundingClientRect();
            return [...chart.querySelectorAll('.ytick text')].filter((tick) => {
                const box = tick.getBoundingClientRect();
                return box.left < title.right + 5 && box.top < title.bottom && title.top < box.bottom;
            }).map((tick) => tick.textContent);
        })""")
            == []
        )


@pytest.fixture(scope="module")
def opened(browser: Any, written: Path) -> Iterator[Opened]:
    """One page for the tests that only use it."""
    with Opened(browser, written) as there:
        yield there


def test_it_follows_the_colour_scheme_while_open(opened: Opened) -> None:
    all_are = """(color) => [...document.querySelectorAll('[data-chart]')].every(
        (chart) => chart.layout.template.layout.font.color === color)"""
    opened.view.emulate_media(color_scheme="dark")
    opened.view.wait_for_function(all_are, arg="#e6e8eb")
    assert opened.view.evaluate(CONTRAST) == []
    opened.view.emulate_media(color_scheme="light")
    opened.view.wait_for_function(all_are, arg="#1f2328")


def test_hovering_tells_why_a_base_moved(opened: Opened) -> None:
    chart = opened.view.locator("[data-chart]").nth(1)
    chart.scroll_into_view_if_needed()
    place = chart.evaluate(
        """chart => {
          const moved = chart._fullData.find((trace) => trace.name.startsWith('moved up'));
          const { xaxis, yaxis } = chart._fullLayout, box = chart.getBoundingClientRect();
          return [box.x + xaxis._offset + xaxis.d2p(moved.x[0]), box.y + yaxis._offset + yaxis.d2p(moved.y[0])];
        }"""
    )
    opened.view.mouse.move(*place)
    opened.view.wait_for_function("() => document.querySelectorAll('.hoverlayer .legendtext').length > 2")
    assert "by last weights (t = -10.0)" in chart.locator(".hoverlayer").text_content()


def test_a_click_on_the_legend_hides_a_line_and_shows_it_again(opened: Opened) -> None:
    toggle = opened.view.locator("[data-chart]").first.locator(".legendtoggle").first
    visible = "document.querySelector('[data-chart]')._fullData[0].visible"
    toggle.click()
    opened.view.wait_for_function(f"() => {visible} === 'legendonly'")
    opened.view.wait_for_timeout(400)  # two clicks at once would be another gesture
    toggle.click()
    opened.view.wait_for_function(f"() => {visible} === true")


def zoom(opened: Opened) -> None:
    area = opened.view.locator("[data-chart] .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    height = box["y"] + box["height"] / 2
    opened.view.mouse.move(box["x"] + 0.3 * box["width"], height)
    opened.view.mouse.down()
    opened.view.mouse.move(box["x"] + 0.6 * box["width"], height, steps=5)
    opened.view.mouse.up()


ALL_SHOW = """(test) => {
  const charts = [...document.querySelectorAll('[data-chart]')];
  const ranges = charts.map((chart) => chart.layout.xaxis.range.map(Math.round));
  const first = test === 'zoomed' ? ranges[0][0] > 20 : ranges[0][0] < 0;
  return first && ranges.every((range) => String(range) === String(ranges[0]));
}"""


def test_zooming_one_time_axis_zooms_all_and_a_double_click_shows_everything_again(opened: Opened) -> None:
    zoom(opened)
    opened.view.wait_for_function(ALL_SHOW, arg="zoomed")
    opened.view.wait_for_timeout(400)  # or the double click is part of the gesture before
    opened.view.locator("[data-chart] .nsewdrag").first.dblclick()
    opened.view.wait_for_function(ALL_SHOW, arg="all")
    assert opened.said == []


def test_a_page_that_is_served_stays_zoomed_in_when_it_refreshes_itself(browser: Any) -> None:
    range_of = "document.querySelector('[data-chart]').layout.xaxis.range"
    with PageServer(lambda: (page(run()), True), host="127.0.0.1", port=0, every=60.0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with Opened(browser, server.url) as opened:
                zoom(opened)
                opened.view.wait_for_function(f"() => {range_of}[0] > 20")
                zoomed = opened.view.evaluate(range_of)
                opened.view.reload()
                opened.view.wait_for_function(DRAWN)
                assert opened.view.evaluate(range_of) == zoomed
                assert opened.said == []
        finally:
            server.shutdown()
            thread.join()


def test_everything_is_reached_by_the_keyboard(browser: Any, written: Path) -> None:
    active = "document.activeElement.tagName + ' ' + (document.activeElement.ariaLabel || '')"
    with Opened(browser, written) as opened:
        reached = []
        for _ in range(60):
            opened.view.keyboard.press("Tab")
            reached.append(opened.view.evaluate(active))
            if reached[-1].startswith("SUMMARY"):
                break
        assert "DIV What each knob has learned" in reached
        assert "DIV Where the runs differ" in reached
        assert not [name for name in reached if "Share" in name or "Edit" in name], "nothing that would send it away"
        opened.view.keyboard.press("Enter")
        assert opened.view.evaluate("document.activeElement.parentElement.open") is True


def test_nothing_that_a_history_holds_is_run(browser: Any, tmp_path: Path) -> None:
    hostile = ReportedRun(HOSTILE, windows(knobs=("learning_rate", HOSTILE)), HOSTILE, {HOSTILE: HOSTILE}, {})
    for record in hostile.windows:
        record.faults.append({"kind": HOSTILE, HOSTILE: HOSTILE})
    path = tmp_path / "report.html"
    path.write_bytes(page([hostile, run()], title=HOSTILE).encode())
    with Opened(browser, path) as opened:
        opened.view.wait_for_timeout(200)
        assert opened.view.evaluate("window.hacked") is None
        assert "<script>window.hacked" in opened.view.locator("h1").text_content()
        assert (opened.said, opened.asked) == ([], [path.as_uri()])


@pytest.mark.parametrize("width", [1280, 360])
def test_long_names_and_dollars_fit_the_width(browser: Any, tmp_path: Path, width: int) -> None:
    knobs = ("x" * 300, "$x_1$")
    names = ("y" * 300, "$y$", "a short name")
    runs = [ReportedRun(name, windows(knobs=knobs), "", {"a": name}, {}) for name in names]
    path = tmp_path / "report.html"
    path.write_bytes(page(runs).encode())
    with Opened(browser, path, width) as opened:
        assert opened.view.evaluate("document.documentElement.scrollWidth") <= width
        assert opened.view.evaluate(NARROWEST) >= 90, "no name is broken letter by letter"
        assert opened.said == []


def test_a_script_that_got_in_all_the_same_would_not_run(browser: Any, written: Path) -> None:
    """The second line of defence: scripts that are not the page's own are refused by their hash."""
    with Opened(browser, written) as opened:
        opened.view.evaluate(
            "() => { const s = document.createElement('script'); s.textContent = 'window.hacked = 3';"
            " document.body.append(s); }"
        )
        assert opened.view.evaluate("window.hacked") is None
        assert any("Content Security Policy" in said for said in opened.said)
