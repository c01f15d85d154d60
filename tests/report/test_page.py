"""The page as text: what stands on it, that it is whole, and that nothing of a history becomes markup."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
import sys
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from reported_runs import HOSTILE, run, windows

from hdet.document import parse
from hdet.errors import ConfigError, MissingExtraError
from hdet.record import WindowRecord
from hdet.report import ReportedRun, page
from hdet.report.advice import as_python, as_yaml
from hdet.report.charts import COLOURS
from hdet.report.series import course, evidence
from hdet.report.telling import digits
from hdet.report.verdict import Moves, Verdict


def still(name: str) -> ReportedRun:
    """A run whose loss ends where it began."""
    return run(name, windows=[dataclasses.replace(one, losses=[2.3], estimates={}) for one in windows()])


class Reader(HTMLParser):
    """The page's text by section, its embedded data, and every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data: dict[str, Any] = {}
        self._open: dict[str, str | None] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open = {"tag": tag, **dict(attrs)}

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open.get("tag"):
            self._open = {}

    def handle_data(self, data: str) -> None:
        if self._open.get("type") == "application/json":
            self.data[str(self._open["id"])] = json.loads(data)
        elif not self._open:
            self.text += data + " "

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def charts(reader: Reader) -> list[dict[str, Any]]:
    return [reader.data[name] for name in reader.data if name.startswith("chart-")]


def test_the_glance_tells_each_knobs_course_and_what_the_run_earned() -> None:
    words = Reader(page(run())).words
    assert "1.2500 held-out loss; 1.5000 without hdet, 0.2500 lower (one run each)" in words
    assert "learning_rate 0.1 0.4953 (\N{MULTIPLICATION SIGN} 4.953) ● clear up in 4 windows, steps 10 to 40" in words
    assert "dropout" in words
    assert "○ weak" in words


def test_late_steps_are_told_whole_and_values_in_few_digits() -> None:
    late = [dataclasses.replace(one, start=one.start + 123_450, stop=one.stop + 123_455) for one in windows()]
    drawn = charts(Reader(page(late)))
    places = {x for chart in drawn for trace in chart["data"] for x in trace["x"]}
    assert {123_460, 123_457.5} <= places
    heights = [y for chart in drawn for trace in chart["data"] for y in trace["y"] if y is not None]
    assert max(len(repr(abs(y)).partition("e")[0]) for y in heights) <= 12


def test_a_run_that_ended_without_a_finite_loss_is_not_told_an_earlier_one() -> None:
    ended = [*windows(4), dataclasses.replace(windows(5)[-1], losses=[None, None])]
    assert "not finite training loss of the last window" in Reader(page(ended)).words


def test_without_a_result_it_says_what_is_not_known() -> None:
    assert "training loss of the last window; no result lies beside the history" in Reader(page(windows())).words
    alone = run(result={"test_loss": 1.25})
    assert "no run without hdet lies beside it" in Reader(page(alone)).words


@pytest.mark.parametrize(
    ("found", "plain", "told"),
    [
        (None, None, "not finite held-out loss; no run without hdet lies beside it"),
        (None, {"test_loss": 1.5}, "not finite held-out loss; 1.5000 without hdet (one run each)"),
        (1.25, {"test_loss": None}, "1.2500 held-out loss; not finite without hdet (one run each)"),
        (None, {"test_loss": None}, "not finite held-out loss; not finite without hdet (one run each)"),
        (
            1.25,
            {"test_loss": 1.25},
            "1.2500 held-out loss; 1.2500 without hdet, the same to four decimals (one run each)",
        ),
    ],
)
def test_a_run_that_ended_in_no_finite_loss_is_told_as_one(
    found: float | None, plain: dict[str, float | None] | None, told: str
) -> None:
    """`result.json` holds null for such a loss, and its training loss of some window says nothing of it."""
    assert told in Reader(page(run(result={"test_loss": found, "plain": plain}))).words


@pytest.mark.parametrize("result", [{"test_loss": "1.25"}, {"test_loss": 1.25, "plain": {"test_loss": True}}])
def test_a_test_loss_that_is_no_number_is_refused(result: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the result of a run has test_loss ('1.25'|True); give a number, or null"):
        page(run(result=result))


def test_it_is_whole_and_may_run_its_own_two_scripts_only() -> None:
    text = page(run())
    reader = Reader(text)
    assert not [attrs for tag, attrs in reader.tags if tag in ("link", "img", "iframe", "object", "embed")]
    assert not [attrs for tag, attrs in reader.tags if tag == "script" and "src" in attrs]
    [policy] = [str(attrs["content"]) for tag, attrs in reader.tags if attrs.get("http-equiv")]
    assert re.fullmatch(
        r"default-src 'none'; script-src( 'sha256-[\w+/=]{44}'){2}; style-src 'unsafe-inline'; img-src data: blob:",
        policy,
    )
    assert len(text.encode()) < 5.5e6


def test_every_knob_has_its_values_its_evidence_and_its_moves() -> None:
    reader = Reader(page(run()))
    assert len(charts(reader)) == 2 + 2 * 2
    names = {trace["name"] for trace in reader.data["chart-1"]["data"]}
    assert names == {"learned", "in force, schedule included", "as it was set", "moved up"}
    said = reader.data["chart-2"]["data"]
    assert {trace["name"] for trace in said} == {"averaged weights", "last weights"}
    assert all(len(trace["error_y"]["array"]) == len(trace["y"]) for trace in said)
    assert "step 10: 0.1 to 0.14918, by last weights (t = -10.0)" in reader.words.replace("0.1492", "0.14918")


def test_the_rule_that_spoke_the_veto_that_held_it_back_and_the_guard_are_told_and_drawn() -> None:
    told = windows()
    told[0].reasons["learning_rate"] = {"rule": "raise"}
    told[1].reasons["learning_rate"] = {"rule": "raise", "veto": "small_steps"}
    told[2].reasons["learning_rate"] = {"rule": "raise", "veto": "small_steps", "guard": "rewound"}
    told[3].reasons["learning_rate"] = {"guard": "restarted"}
    for record in told[2:4]:
        record.faults.append({"kind": record.reasons["learning_rate"]["guard"], "step": 10})
    for record in told[6:8]:
        record.reasons["learning_rate"] = {"rule": "lower", "veto": HOSTILE}
    reader = Reader(page(told))
    assert "by last weights (t = -10.0); rule raise step 20" in reader.words
    assert "(t = -10.0); rule raise; small_steps let through only a part" in reader.words
    assert "by the guard (rewound), and by rule raise; small_steps let through only a part step 40" in reader.words
    assert "by the guard (restarted) step" in reader.words
    assert "step 70: stays at 0.4953; rule lower asked, </script>" in reader.words
    held = [trace for trace in reader.data["chart-1"]["data"] if trace["name"] == "held back by a veto"]
    assert [trace["x"] for trace in held] == [[70, 80]]
    assert "<script>" not in held[0]["text"][0], "plotly would take it for markup"


def test_faults_returns_and_hints_are_told_and_drawn() -> None:
    reader = Reader(page(run()))
    assert "60 fault non_finite replica 0, step 53" in reader.words
    assert "90 fault rewound step 40" in reader.words
    assert "80 hint small_probe knob dropout" in reader.words
    assert [(shape["x0"], shape["line"]["dash"]) for shape in reader.data["chart-0"]["layout"]["shapes"]] == [
        (90, "solid"),
        (60, "dot"),
    ]


def test_what_to_set_next_time_can_be_pasted() -> None:
    text = page(run())
    blocks = re.findall(r"<pre[^>]*>(.*?)</pre>", text, re.DOTALL)
    unescaped = [block.replace("&#34;", '"') for block in blocks]
    assert parse(unescaped[0], name="page") == {"learning_rate": 0.4953, "dropout": 0.1}
    assert ast.literal_eval(unescaped[1].partition("=")[2].strip()) == {"learning_rate": 0.4953, "dropout": 0.1}


def test_a_beta_to_set_next_time_is_one_that_an_optimizer_takes() -> None:
    up = Moves(3, 10, 30, 1.5, {"averaged weights": 6.0})
    beta = Verdict("beta2", 0.999, 0.99997, up, None, 1.0, 0.2, 5, 90, 100)
    assert as_yaml([beta]) == '"beta2": 0.99997  # learned; it was set to 0.999\n'
    assert "0.99997," in as_python([beta])
    assert digits(0.99997) == "0.99997"


def test_several_runs_stand_side_by_side_and_their_differences_are_told() -> None:
    other = run("a run", declared={"seed": 1})
    reader = Reader(page([run(), other]))
    assert "Where the runs differ run seed held-out loss a run 0 1.2500 a run (2) 1 1.2500" in reader.words
    names = [trace["name"] for trace in reader.data["chart-0"]["data"]]
    assert names == [f"{what} loss, {who}" for who in ("a run", "a run (2)") for what in ("training", "held-out")]


def test_a_bare_history_beside_a_run_differs_in_no_field() -> None:
    assert "Where the runs differ" not in Reader(page([run(), run("bare", declared={})])).words


def test_a_value_that_never_changes_has_an_axis_of_its_own_size() -> None:
    """plotly's own goes from 1 below it to 1 above, and a weight decay is then a line at 0."""
    still = [
        WindowRecord(0, 0, 10, {"weight_decay": 1e-2}, {}, [2.0], {}, {"weight_decay": 0.0}, merged=False),
        WindowRecord(1, 10, 20, {"weight_decay": 1e-2}, {}, [1.5], {}, {"weight_decay": 0.0}, merged=False),
    ]
    layout = Reader(page(still)).data["chart-1"]["layout"]
    assert layout["yaxis"]["range"] == [0.0, 0.02]


def test_of_several_runs_each_has_one_entry_in_a_knobs_legend() -> None:
    reader = Reader(page([run(), run()]))
    for chart in (reader.data["chart-1"], reader.data["chart-2"]):
        entries = [trace for trace in chart["data"] if trace.get("showlegend", True)]
        assert [trace["name"] for trace in entries] == ["a run", "a run (2)"]
        assert {trace["legendgroup"] for trace in chart["data"]} == {trace["legendgroup"] for trace in entries}


def test_beside_a_run_with_a_rate_for_each_group_one_rate_has_its_own_evidence_alone() -> None:
    groups = run("groups", windows=windows(knobs=("learning_rate[a]", "learning_rate[b]")))
    reader = Reader(page([run("one", windows=windows(knobs=("learning_rate",))), groups]))
    assert {trace["legendgroup"] for trace in reader.data["chart-2"]["data"]} == {"run 0"}


def test_moves_and_forbidden_moves_are_counted_apart() -> None:
    told = windows()
    for record in told[6:8]:
        record.reasons["learning_rate"] = {"rule": "lower", "veto": "small_steps"}
    assert "In words: 4 moves, and 2 that a veto forbade" in Reader(page(told)).words


def test_a_runs_colour_has_contrast_on_the_light_page_and_on_the_dark() -> None:
    """3 to 1, as WCAG 2.1 asks of graphics (1.4.11)."""
    style = files("hdet.report").joinpath("page.css").read_text(encoding="utf-8")
    for background in map(luminance, re.findall(r"--back: (#\w{6})", style)):
        for colour in map(luminance, COLOURS):
            dark, light = sorted((background + 0.05, colour + 0.05))
            assert light / dark >= 3.0


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_what_a_history_says_is_text_and_never_markup() -> None:
    knobs = ("learning_rate", HOSTILE)
    hostile = ReportedRun(HOSTILE, windows(knobs=knobs), HOSTILE, {HOSTILE: HOSTILE}, {"test_loss": math.nan})
    for record in hostile.windows:
        record.faults.append({"kind": HOSTILE, HOSTILE: HOSTILE})
    text = page([hostile, run()])
    text.encode("utf-8")
    reader = Reader(text)
    plain = Reader(page([run(), run()]))
    assert {tag for tag, _ in reader.tags} == {tag for tag, _ in plain.tags}
    assert len([tag for tag, _ in reader.tags if tag == "script"]) == len(charts(reader)) + 4
    assert not [attrs for _, attrs in reader.tags if any(name.startswith("on") for name in attrs)]
    assert "</script><script>window.hacked" in reader.text
    assert "\x1b" not in text
    drawn = json.dumps([chart["data"] for chart in charts(reader)], ensure_ascii=False)
    assert "<img" not in drawn, "plotly would take it for markup"


def test_numbers_that_are_not_finite_are_left_out() -> None:
    odd = windows()
    odd[3] = dataclasses.replace(odd[3], losses=[None, None], bases={"learning_rate": math.nan, "dropout": math.inf})
    odd[4].estimates["dropout"].update(slope=None, stderr=math.nan, level=None)
    reader = Reader(page(odd))
    assert reader.data["chart-0"]["data"][0]["y"][3] is None


def test_a_history_without_learned_values_or_times_is_shown_by_its_bases() -> None:
    older = [dataclasses.replace(record, learned={}, seconds=0.0, closing=0.0) for record in windows()]
    words = Reader(page(older)).words
    assert "not recorded" in words
    assert "the history has no times" in words


def test_many_windows_are_drawn_as_few_points_and_nothing_is_lost_at_the_edges() -> None:
    many = windows(2003)
    many[700].values["dropout"][0] = 9.0
    made = course(many, "dropout")
    assert len(made.steps) == 500
    assert made.steps[-1] == many[-1].stop
    assert max(made.high) == 9.0, "the band covers every window of its group"
    assert sum(move.count for move in made.moves) == sum(bool(record.moves["dropout"]) for record in many)
    [found] = evidence(many, "dropout")
    assert sum(found.count) == 2003
    assert max(found.error) == 0.1, "a mean's error is not taken for smaller than its windows'"


def test_nothing_to_report_is_refused() -> None:
    for empty in ([], [ReportedRun("empty", [])], [run(), ReportedRun("empty", [])]):
        with pytest.raises(ConfigError, match=r"there is nothing to report of .*no window yet"):
            page(empty)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "kind"),
    [("history.jsonl", "str"), (Path("history.jsonl"), "PosixPath"), (None, "NoneType"), ([windows()] * 2, "list")],
)
def test_what_is_no_history_is_named(given: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"a report is of one history or of ReportedRun objects, got {kind}; read"):
        page(given)
    with pytest.raises(ConfigError, match="got WindowRecord; read a file by"):
        page([run(), *windows()])  # type: ignore[list-item]


def test_a_run_that_explores_nothing_still_has_its_losses() -> None:
    bare = [WindowRecord(0, 0, 10, {}, {}, [2.0], {}, {}, merged=False)]
    assert len(charts(Reader(page(bare)))) == 2


@pytest.mark.parametrize("package", ["plotly.offline", "jinja2"])
def test_without_its_packages_the_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"(plotly|jinja2) is not installed.*hdet\[report\]"):
        page(windows())


def test_one_window_is_one() -> None:
    assert "10 steps, 1 window " in Reader(page(windows(1))).text


def test_a_run_that_ended_with_averaged_weights_says_so_on_top() -> None:
    records = windows()
    part = {"start": 70, "stop": records[-1].stop, "share": 1.0}
    records[-1].tail.update(last=0.0, parts=[part], difference=-0.0268, stderr=0.0101)
    said = "ends with averaged weights (those from step 70 on), whose held-out loss is 0.0268 ± 0.0101 below"
    assert f"(one run each) {said} that of the last 120 steps, 12 windows" in Reader(page(run(windows=records))).words
    assert "averaged weights" not in Reader(page(run())).words


def test_a_run_that_learned_nothing_is_told_on_top() -> None:
    told = Reader(page(still("wrecked"))).words
    assert "the run learned nothing, its loss ended where it began 120 steps, 12 windows" in told
    assert "✕ no progress" in told
    assert '"learning_rate": 0.1, # as it was set, which says nothing for it: the run learned nothing' in told
    assert "the run learned nothing" not in Reader(page(run())).words
