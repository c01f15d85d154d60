"""Files that are whole under their names, whoever writes them and however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from hdet.files import parts_of, replace, replaced


def test_several_may_write_a_file_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    with replaced(path) as first:
        first.write_text("first")
        with replaced(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, RuntimeError, KeyboardInterrupt])
def test_what_fails_leaves_the_old_file_alone(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    replace(path, b"old")

    def fail() -> None:
        with replaced(path) as part:
            part.write_text("ne")
            assert parts_of(path) == [part]
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_where_only_what_may_be_written_is_synchronised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses all else, and opens no folder."""
    synchronised = []

    def fsync(descriptor: int) -> None:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        synchronised.append(descriptor)

    path = tmp_path / "table.txt"
    with monkeypatch.context() as windows:
        windows.setattr(os, "fsync", fsync)
        windows.setattr(os, "name", "nt")
        replace(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert len(synchronised) == 1


def test_a_link_leads_to_the_file_that_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far" / "file")
    replace(tmp_path / "near", b"one")
    assert (tmp_path / "near").is_symlink()
    assert [path.read_bytes() for path in (tmp_path / "far").iterdir()] == [b"one"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    replace(tmp_path / "pipe", b"one")
    assert os.read(reading, 9) == b"one"
    os.close(reading)
    assert (tmp_path / "pipe").is_fifo()
