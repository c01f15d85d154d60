"""What a command writes to where it was told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hdet.errors import ConfigError


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """What goes wrong with the file or folder in the block is a ConfigError, which names the option that gave it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written to: {error}; choose another {option}") from None
