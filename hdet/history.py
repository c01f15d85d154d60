"""What happened: one JSON object a window, appended as the window closes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hdet.errors import HdetError
from hdet.record import WindowRecord
from hdet.report.figures import overview

__all__ = ["History", "WindowRecord"]


class History:
    """The windows of a run, in memory and, with a path, one line each in a JSON-lines file.

    A line is flushed to the operating system before training goes on, so a kill loses at most the window under
    way. Reading skips a torn last line.

    >>> History().windows
    []
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self.windows: list[WindowRecord] = []
        self._torn = False
        if self.path is not None and self.path.exists():
            self.windows, self._torn = _read(self.path)

    def __iter__(self) -> Iterator[WindowRecord]:
        return iter(self.windows)

    def __len__(self) -> int:
        return len(self.windows)

    def expect(self, window: int) -> None:
        """Window `window` is about to be run.

        Raises:
            HdetError: it is here already, so the record would be of two runs.
        """
        if self.windows and self.windows[-1].window >= window:
            raise HdetError(
                f"the history {self.path or ''} already holds windows up to {self.windows[-1].window}, and window "
                f"{window} is to be run: resume a checkpoint, give another path, or drop them by truncate({window})"
            )

    def append(self, record: WindowRecord) -> None:
        """Add a window and write its line."""
        if self._torn:
            self.truncate(len(self.windows) and self.windows[-1].window + 1)
        self.windows.append(record)
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(record.to_json() + "\n")
            except OSError as error:
                raise HdetError(f"the history {self.path} could not be written: {error}") from error

    def truncate(self, windows: int) -> None:
        """Drop the windows from a number on (they are about to be run again), a torn line too; atomically."""
        self.windows = [record for record in self.windows if record.window < windows]
        if self.path is not None and self.path.exists():
            beside = self.path.with_name(self.path.name + ".tmp")
            beside.write_text("".join(record.to_json() + "\n" for record in self.windows), encoding="utf-8")
            os.replace(beside, self.path)
        self._torn = False

    def bases(self, knob: str) -> NDArray[np.float64]:
        """[windows, 2]: the step a window stopped at, and the knob's base there.

        Raises:
            HdetError: no such knob in this history.
        """
        known = {name for record in self.windows for name in record.bases}
        if knob not in known:
            raise HdetError(f"no knob {knob!r} in this history; there are {sorted(known)}")
        return np.array([[record.stop, record.bases[knob]] for record in self.windows if knob in record.bases])

    def plot(self) -> Any:
        """The run as one matplotlib figure: losses, and each knob's values and evidence. A notebook shows it.

        Raises:
            ConfigError: the history explores no knob.
            MissingExtraError: matplotlib is not installed (the extra `report`).
        """
        return overview(self.windows)


def _read(path: Path) -> tuple[list[WindowRecord], bool]:
    """The windows in a file, and whether its last line was cut short by a kill."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    windows = []
    for number, line in enumerate(lines, start=1):
        try:
            windows.append(WindowRecord.from_json(line))
        except (json.JSONDecodeError, TypeError) as error:
            if number == len(lines):
                return windows, True  # the window it belonged to is run again
            raise HdetError(f"{path}, line {number} is not a window record: {error}") from None
        except HdetError as error:
            raise HdetError(f"{path}, line {number} is not a window record of this version: {error}") from None
    return windows, bool(text) and not text.endswith("\n")
