"""What a command prints, and writes to where it was told to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO, cast

from hdet.app.ending import OutputClosed, OutputFailed
from hdet.errors import ConfigError


class _Output:
    """An output whose writes raise `OutputClosed` where nobody reads them, else `OutputFailed` where they fail.

    In all else it is the given one.
    """

    def __init__(self, given: TextIO) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def write(self, text: str) -> int:
        with self._taken():
            return self._given.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        with self._taken():
            self._given.writelines(lines)

    def flush(self) -> None:
        with self._taken():
            self._given.flush()

    @contextmanager
    def _taken(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._given is sys.__stdout__:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._given.fileno())  # for what Python writes as it ends
            raise (OutputClosed() if isinstance(error, BrokenPipeError) else OutputFailed(error)) from None


@contextmanager
def heard() -> Iterator[None]:
    """What the block prints raises what `_Output` says; it is dropped where there is no output."""
    with ExitStack() as stack:
        given = sys.stdout if sys.stdout is not None else stack.enter_context(open(os.devnull, "w"))
        output = _Output(given)
        stack.enter_context(redirect_stdout(cast(TextIO, output)))
        yield
        output.flush()


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """What goes wrong with the file or folder in the block is a ConfigError, which names the option that gave it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to: {error}; choose another {option}") from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A file or folder that this user may not look into is a ConfigError in the block."""
    try:
        _look_into(path)
        yield
    except PermissionError as error:
        raise ConfigError(f"{path} may not be read: {error}; have its owner allow it, or give another path") from None


def _look_into(path: Path) -> None:
    """Raises PermissionError where this user may not, of which `Path.exists` says False from Python 3.14 on."""
    try:
        os.stat(os.path.join(path, "."))
    except PermissionError:
        raise
    except OSError:
        return  # a file, or nothing, of which the caller tells
