"""Files that are whole under their names, whoever writes them and however that ends."""

from __future__ import annotations

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
