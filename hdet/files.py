"""Files that a kill or a power cut leaves whole: the old one or the new one."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

PART = ".part"
"""What a file or folder is called, after its name, until it is whole."""


def part_of(path: Path) -> Path:
    """Where the content of a file or folder is written before it is whole: a name that no other writer has."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")


def parts_of(path: Path) -> list[Path]:
    """What those who write a file, or were killed at it, have of it."""
    name = re.compile(rf"{re.escape(path.name)}(\.[0-9a-f]{{8}})?{re.escape(PART)}")
    return [other for other in path.parent.iterdir() if name.fullmatch(other.name)]


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Write the file that the block is given; it takes the place of `path` when the block ends.

    The content reaches the disk before the name does, so a power cut leaves no empty file under the name. Each block
    has a file of its own: of several that write at a time the last to end has the name.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "result.json"
    >>> with replaced(path) as part:
    ...     _ = part.write_text("{}")
    >>> path.read_text()
    '{}'
    """
    part = part_of(path)
    try:
        yield part
        synchronise(part)
        renamed(part, path)
    except BaseException:
        part.unlink(missing_ok=True)  # what is left of it fills the disk
        raise


def damaged_part(path: str | os.PathLike[str]) -> str | None:
    """The first part of a zip file, as torch.save writes one, whose checksum does not hold; None where all do.

    torch writes a CRC of every part and does not look at it when it reads.

    Raises:
        zipfile.BadZipFile: it is no zip file, or one whose table of contents is damaged.
    """
    with ZipFile(path) as parts:
        return parts.testzip()


def replace(path: Path, content: bytes) -> None:
    """Put `content` into a file, or leave the file as it was. A link leads to the file; a device is written to."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with replaced(path.resolve()) as part:
        part.write_bytes(content)


def renamed(part: Path, path: Path) -> None:
    """Give a file or folder that is on the disk its name, and have the disk keep the name."""
    os.replace(part, path)
    synchronise(path.parent)


def synchronise(path: Path) -> None:
    """Wait until the disk holds a file's content, or a folder's names."""
    posix = os.name == "posix"
    if path.is_dir() and not posix:
        return  # only POSIX opens folders
    descriptor = os.open(path, os.O_RDONLY if posix else os.O_RDWR)  # Windows synchronises what may be written
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
