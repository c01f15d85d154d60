"""docs/reading-a-report.md tells of three runs: they still come out so."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import hdet
from hdet.app.run import Run

SCRIPT = Path(hdet.__file__).parent.parent / "docs" / "pictures" / "example_runs.py"
EXAMPLES = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
TEXT = EXAMPLES.PAGE.read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\w+) \| [^|]+ \| [^|]+ \(x ([^)]+)\) \| `([a-z ]+)` \|", re.MULTILINE)
LOSSES = re.compile(r"^Held-out loss (\S+); without hdet (\S+)\.", re.MULTILINE)


def test_the_page_declares_a_run_for_each_picture() -> None:
    assert EXAMPLES.declared(TEXT).keys() == EXAMPLES.PICTURES.keys()


@pytest.mark.filterwarnings("ignore:the probe is too small")
@pytest.mark.parametrize("name", EXAMPLES.PICTURES)
def test_a_run_comes_out_as_the_page_says(name: str, tmp_path: Path) -> None:
    """Up to what another CPU rounds otherwise: factors, trust and losses."""
    _, quote, _ = EXAMPLES.quoted(TEXT, name)
    said = {knob: (float(factor), trust) for knob, factor, trust in ROW.findall(quote)}
    result = Run(EXAMPLES.declared(TEXT)[name], tmp_path / "run")(compare=True)
    stale = "make example-runs, and read the text around the tables again"
    assert {verdict.knob: verdict.trust for verdict in result.knobs} == {
        knob: trust for knob, (_, trust) in said.items()
    }, stale
    for verdict in result.knobs:
        factor, _ = said[verdict.knob]
        assert factor / 1.5 < verdict.factor < factor * 1.5, f"{verdict.knob}: {stale}"
    losses = LOSSES.search(quote)
    assert losses is not None
    assert (result.test_loss, result.plain["test_loss"]) == pytest.approx(
        tuple(map(float, losses.groups())), rel=0.1
    ), stale
