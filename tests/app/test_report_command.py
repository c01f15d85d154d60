"""`hdet report`, from run folders and from histories of a loop of one's own."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest

from hdet.app.main import main
from hdet.history import History
from hdet.record import WindowRecord


def written(folder: Path, **beside: str) -> Path:
    """A run folder with a history of three windows, and other files by name."""
    history = History(folder / "history.jsonl")
    for w in range(3):
        learned = {"rate": {"start": 0.1, "opened": 0.1, "closed": 0.1}}
        history.append(
            WindowRecord(w, 5 * w, 5 * w + 5, {"rate": 0.1}, {}, [1.0], {}, {"rate": 0.0}, False, learned=learned)
        )
    for name, text in beside.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def run(*arguments: object) -> int:
    try:
        main(["report", *map(str, arguments)])
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def test_a_run_folder_gets_its_page_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "one", config_yaml="seed: 7\n", result_json=json.dumps({"test_loss": 0.5}))
    assert run(folder) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "seed: 7" in text
    assert "0.5000" in text
    assert "report.html written" in capsys.readouterr().out


def test_several_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    folders = [written(tmp_path / name, config_yaml=f"seed: {name}\n") for name in ("1", "2")]
    assert run(*folders, "--out", tmp_path / "both.html") == 0
    assert "Where the runs differ" in (tmp_path / "both.html").read_text(encoding="utf-8")


def test_a_history_of_ones_own_loop_is_enough(tmp_path: Path) -> None:
    assert run(written(tmp_path / "mine") / "history.jsonl", "--out", tmp_path / "page.html") == 0
    assert "<h1>mine</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_disk_that_fills_leaves_the_page_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    folder = written(tmp_path / "one")
    assert run(folder) == 0
    before = (folder / "report.html").read_bytes()
    monkeypatch.setattr(Path, "write_bytes", half)
    assert run(folder, "--title", "anew") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (folder / "report.html").read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["history.jsonl", "report.html"]


def test_figures_are_written_instead(tmp_path: Path) -> None:
    assert run(written(tmp_path / "one"), "--figures", tmp_path / "figures") == 0
    assert sorted({path.suffix for path in (tmp_path / "figures").iterdir()}) == [".pdf", ".png", ".svg"]
    assert not (tmp_path / "one" / "report.html").exists()


def test_figures_of_runs_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    assert run(written(tmp_path / "a" / "r"), written(tmp_path / "b" / "r"), "--figures", tmp_path / "figures") == 0
    folders = sorted((tmp_path / "figures").iterdir())
    assert [folder.name for folder in folders] == ["r", "r (2)"]
    assert all(list(folder.glob("*.pdf")) for folder in folders)


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({"history_jsonl": '{"window": 0}\n'}, "line 1 is not a window record"),
        ({"result_json": "{"}, "result.json cannot be read"),
        ({"config_yaml": "a: *b\n"}, "config.yaml"),
        ({"config_yaml": "- 1\n"}, "config.yaml: expected a mapping of the run's fields, got list"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], beside: dict[str, str], said: str
) -> None:
    assert run(written(tmp_path / "one", **beside)) in (1, 2)
    told = capsys.readouterr().err
    assert said in told
    assert told.startswith("error: ")


def test_a_declaration_that_is_no_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "one")
    (folder / "config.yaml").write_bytes("name: Käfer".encode("latin-1"))
    assert run(folder) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: cannot read ")
    assert "config.yaml: 'utf-8' codec" in told


def test_where_there_is_no_run_or_no_place_for_the_page_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 2
    assert "holds no run" in capsys.readouterr().err
    assert run(written(tmp_path / "one"), "--out", tmp_path / "no" / "page.html") == 2
    assert f"{tmp_path / 'no' / 'page.html'} cannot be written to: " in capsys.readouterr().err
    (tmp_path / "taken").write_text("")
    assert run(tmp_path / "one", "--figures", tmp_path / "taken") == 2
    assert "choose another --figures" in capsys.readouterr().err


def test_without_plotly_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert run(written(tmp_path / "one")) == 2
    assert "pip install 'hdet[report]'" in capsys.readouterr().err
