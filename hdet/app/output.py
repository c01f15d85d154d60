"""What a command writes to where it was told to, and the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from hdet.app.ending import OutputClosed
from hdet.errors import ConfigError


class Screen(Console):
    """rich's console, whose output may lose its reader."""

    def on_broken_pipe(self) -> NoReturn:
        raise _closed()


@contextmanager
def heard() -> Iterator[None]:
    """Raises `OutputClosed` where nobody reads what the block prints."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise _closed() from None


def _closed() -> OutputClosed:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes as it ends
    return OutputClosed()


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
        yield
    except PermissionError as error:
        raise ConfigError(f"{path} may not be read: {error}; have its owner allow it, or give another path") from None
