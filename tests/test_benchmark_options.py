"""Options of the benchmarks of which one would go unheeded beside the other."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import find
import group_rates


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (find, ["--lengths", "--regularisers"]),
        (group_rates, ["--worth", "--trials"]),
        (group_rates, ["--trials", "--again", "0.15"]),
    ],
)
def test_two_questions_are_not_asked_at_once(
    script: object, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in ("show_lengths", "show_regularisers", "print_worth", "print_trials"):
        monkeypatch.setattr(script, asked, lambda *arguments: None, raising=False)
    monkeypatch.setattr(sys, "argv", ["script", *options])
    with pytest.raises(SystemExit):
        script.main()  # type: ignore[attr-defined]
    assert "not allowed with argument" in capsys.readouterr().err
