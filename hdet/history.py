"""What happened: one JSON object a window, appended as the window closes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hdet.errors import ConfigError, HdetError
from hdet.files import replace
from hdet.record import WindowRecord, knobs_of, named
from hdet.report.figures import overview
from hdet.report.reading import readings
from hdet.spec import some
from hdet.user_warning import warn

__all__ = ["History", "WindowRecord"]

IN_MEMORY = 256
"""Windows that a history with a file keeps in memory; the others are read back when asked for."""

WITHOUT_FILE = 4096
"""Windows that a history without a file keeps."""

BASES = 2**18
"""Numbers of `WindowRecord.course` that stay in memory, of all windows and knobs together: about 8 MB."""


class History:
    """The windows of a run, in memory or, with a path, one line each in a JSON-lines file.

    A line is handed to the operating system before training goes on, so a kill loses at most the window under way.
    Reading skips a last line that a kill cut short. A line that could not be written, on a full disk say, is kept in
    memory and written with the next; a run warns of it and goes on. After the last window
    `history.take_over(history.windows)` writes what is missing.

    Memory is bounded: of a history with a file the last 256 windows stay there once they are written, and `windows`
    reads the others back; one without keeps the last 4,096, and says so when it drops the first. So it is with courses,
    which hold a number for each step: the last 262,144 numbers stay.

    Args:
        path: the file; without one the history is in memory alone.
        whole: the file begins with the run. Else it may begin at a later resume.

    Raises:
        HdetError: the file cannot be read, or is not the record of one run: windows follow each other, none is
            missing, and each begins at the step where the one before ended.

    Attributes:
        latest: the windows in memory, the last ones; of these the first may be without their courses.

    >>> History().windows
    []
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, whole: bool = False) -> None:
        self.whole = whole
        self.path = Path(path) if path is not None else None
        self.latest: list[WindowRecord] = []
        self._unwritten = 0
        self._in_file = 0  # windows before `latest` that are in the file alone
        self._elsewhere = False  # another process has the file
        self._dropped = False
        self._bare = 0  # windows at the front of `latest` without their courses
        self._bases = 0
        self._torn = self.path is not None and self.path.exists() and _is_cut(self.path)
        if self.path is not None and self.path.exists():
            for record in _each(self.path):
                self._hold(record)

    @property
    def windows(self) -> list[WindowRecord]:
        """All windows, of a run with a file; else those in memory.

        Raises:
            HdetError: the file can no longer be read, or lacks windows that were written.
        """
        missing = self._in_file + self._bare
        if not missing or self.path is None:
            return self.latest
        found, whole = list(islice(_each(self.path), missing)), self.latest[self._bare :]
        if len(found) < missing or found[-1].window + 1 != whole[0].window:
            raise HdetError(
                f"the history {self.path} no longer holds the {missing} windows before window "
                f"{whole[0].window} that were written to it: something else has written or replaced it; put the "
                f"file back, or read `history.latest`, the windows in memory"
            )
        return found + whole

    @property
    def is_behind(self) -> bool:
        """Whether windows are missing from the file that could not be written: a state that is saved is ahead of it."""
        return self.path is not None and self._unwritten > 0

    @classmethod
    def given(cls, history: History | str | os.PathLike[str] | None, *, writes: bool = True) -> History:
        """What a run was given as its history: a `History` as it is, or a new one.

        A path is that of a run which begins. One that goes on opens its history itself, `hdet.History(path)`, so a
        forgotten path is told of before anything trains.

        Args:
            writes: this process writes it. Another's is in memory alone from here on: every rank opens the same file.

        Raises:
            ConfigError: it is neither.
            HdetError: the file at the path holds windows already, or cannot be read.
        """
        if not isinstance(history, History):
            if not isinstance(history, (str, os.PathLike, type(None))):
                raise ConfigError(f"history is a path or an hdet.History, got {history!r}")
            history = cls(history)
            if history.latest:
                raise HdetError(
                    f"the history {history.path} already holds windows up to {history.latest[-1].window}: a run that "
                    f"goes on there is given history=hdet.History({str(history.path)!r}); one that begins, another path"
                )
        if not writes and history.path is not None:
            history.path, history._elsewhere = None, True
            history._become([])
        return history

    def __repr__(self) -> str:
        knobs = named(knobs_of(self.latest))
        where = f" in {self.path}" if self.path is not None else ""
        steps = f" to step {self.latest[-1].stop}" if self.latest else ""
        return f"<History of {len(self)} window{'s' * (len(self) != 1)}{steps}{where}: {knobs or 'no knobs'}>"

    def __iter__(self) -> Iterator[WindowRecord]:
        return iter(self.windows)

    def __len__(self) -> int:
        return self._in_file + len(self.latest)

    def expect(self, window: int) -> None:
        """Window `window` is about to be run.

        Raises:
            HdetError: it is here already, so the record would be of two runs.
        """
        if self.latest and self.latest[-1].window >= window:
            raise HdetError(
                f"the history {self.path or 'in memory'} already holds windows up to {self.latest[-1].window}, and "
                f"window {window} is to be run: resume a checkpoint, give another path, or drop them by "
                f"truncate({window})"
            )

    def require(self, windows: int, step: int) -> None:
        """A run is to go on at a window that opens at `step`, with `windows` before it.

        Raises:
            HdetError: the file lacks some of these, or they ended at another step.
        """
        if self.path is None:
            return  # what was in memory is gone with the process that trained
        held = [record for record in self.windows if record.window < windows]
        first, past = (held[0].window, held[-1].window + 1) if held else (0, 0)
        if (held and past != windows) or (self.whole and (first, past) != (0, windows)):
            raise HdetError(
                f"the history {self.path} holds {f'windows {first} to {past - 1}' if held else 'no window'} of the "
                f"{windows} before the checkpoint, so lines of it are missing; put the file back that was beside the "
                f"checkpoint{'' if self.whole else ', or give another path'}"
            )
        if held and held[-1].stop != step:
            raise HdetError(
                f"the history {self.path} is of another run: its window {held[-1].window} ends at step "
                f"{held[-1].stop}, and the checkpoint goes on at step {step}; put the file back that was beside the "
                f"checkpoint{'' if self.whole else ', or give another path'}"
            )

    def append(self, record: WindowRecord) -> None:
        """Add a window and write its line, and those that could not be written before.

        Raises:
            HdetError: the file cannot be written. The window is kept, and is written with the next.
        """
        self.latest.append(record)
        self._bases += _bases(record)
        self._unwritten += 1
        if self.path is None:
            self._drop()
            self._bare_courses()
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._torn:
                replace(self.path, _lines(self.windows).encode())
            else:
                self._torn = True  # until all is written
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(_lines(self.latest[-self._unwritten :]))
        except OSError as error:
            raise HdetError(
                f"the history {self.path} could not be written: {error}; window {record.window} is kept in memory, "
                f"and is written with the next"
            ) from error
        self._torn = False
        self._unwritten = 0
        self._rely_on_file()

    def _hold(self, record: WindowRecord) -> None:
        """Take up a window that is in the file."""
        self.latest.append(record)
        self._bases += _bases(record)
        self._rely_on_file()

    def _rely_on_file(self) -> None:
        """All is written: keep no more of it in memory than there may be."""
        if len(self.latest) >= 2 * IN_MEMORY:  # now and then, as many at once
            self._in_file += len(self.latest) - IN_MEMORY
            self._forget(len(self.latest) - IN_MEMORY)
        self._bare_courses()

    def _bare_courses(self) -> None:
        """Keep no more of the courses than there may be in memory: those of the last windows, of one at least."""
        if self._bases <= BASES:
            return
        while self._bases > BASES // 2 and self._bare < len(self.latest) - 1:  # now and then, as many at once
            self._bases -= _bases(self.latest[self._bare])
            self.latest[self._bare] = dataclasses.replace(self.latest[self._bare], course={})
            self._bare += 1
        if self.path is None and self._bare:
            self._say(
                f"a history without a file keeps the last {BASES} bases of its knobs step by step, and drops those up "
                f"to step {self.latest[self._bare - 1].stop} now, without which the run cannot be replayed; give "
                f"history='history.jsonl' for all of them (said once)"
            )

    def _forget(self, windows: int) -> None:
        """Take the first windows out of memory."""
        self._bases -= sum(map(_bases, self.latest[:windows]))
        self._bare = max(0, self._bare - windows)
        del self.latest[:windows]

    def _say(self, what: str) -> None:
        """Once, where the history is this process's."""
        if not (self._dropped or self._elsewhere):
            self._dropped = True
            warn(what)

    def _drop(self) -> None:
        """Keep no more windows than there may be without a file."""
        if len(self.latest) <= WITHOUT_FILE:
            return
        self._forget(1)
        self._say(
            f"a history without a file keeps the last {WITHOUT_FILE} windows, and drops window "
            f"{self.latest[0].window - 1} now; give history='history.jsonl' for all of them (said once)"
        )

    def truncate(self, windows: int) -> None:
        """Drop the windows from a number on (they are about to be run again), a torn line too; atomically.

        Raises:
            HdetError: the file cannot be written; it is as it was.
        """
        self._become([record for record in self.windows if record.window < windows])

    def take_over(self, windows: Sequence[WindowRecord]) -> None:
        """Hold other windows instead: those of a process that was there when this one was not; atomically.

        Raises:
            HdetError: the file cannot be written; it is as it was.
        """
        self._become(list(windows), written=self.path is not None)

    def _become(self, windows: list[WindowRecord], *, written: bool = False) -> None:
        """Hold these windows. A file that is there holds them too, and is made with `written`."""
        is_written = self.path is not None and (written or self.path.exists())
        if self.path is not None and is_written:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                replace(self.path, _lines(windows).encode())
            except OSError as error:
                raise HdetError(f"the history {self.path} could not be written: {error}") from error
        self.latest, self._torn, self._unwritten, self._in_file, self._bare = windows, False, 0, 0, 0
        self._bases = sum(map(_bases, windows))
        if is_written:
            self._rely_on_file()

    def bases(self, knob: str) -> NDArray[np.float64]:
        """[windows, 2]: the step a window stopped at, and the knob's base there.

        Of several knobs of a kind, the kind alone gives the middle base, which may be another knob's in each window.

        Raises:
            HdetError: no such knob in this history.
        """
        windows = self.windows
        found = [(record.stop, base) for record in windows if (base := record.bases.get(knob)) is not None]
        if not found:
            raise HdetError(f"no knob {knob!r} in this history; there are {some(sorted(knobs_of(windows)))}")
        return np.array(found, dtype=np.float64)

    def rows(self) -> list[dict[str, Any]]:
        """A flat row for each window and knob, for a table: `pandas.DataFrame(history.rows())`.

        A row has `window`, `start`, `stop`, `loss`, `knob`, `base`, `learned` (after the window's move) and `move`.
        `slope`, `stderr` and `t` are those of the judgement that decides, which `judgement` names; None where there is
        none.
        """
        return [
            {
                "window": record.window,
                "start": record.start,
                "stop": record.stop,
                "loss": record.loss,
                "knob": knob,
                "base": base,
                "learned": record.learned.get(knob, {}).get("closed"),
                "move": record.moves.get(knob),
                "judgement": decisive.source if decisive else None,
                "slope": decisive.slope if decisive else None,
                "stderr": decisive.stderr if decisive else None,
                "t": decisive.t if decisive else None,
            }
            for record in self.windows
            for knob, base in record.bases.items()
            for decisive in [next(iter(readings(record, knob)), None)]
        ]

    def plot(self) -> Any:
        """The run as one matplotlib figure: losses, and each knob's values and evidence. A notebook shows it.

        Raises:
            ConfigError: the history explores no knob.
            MissingExtraError: matplotlib is not installed (the extra `report`).
        """
        return overview(self.windows)


def _bases(record: WindowRecord) -> int:
    """Numbers in a record's courses."""
    return sum(map(len, record.course.values()))


def _lines(windows: Sequence[WindowRecord]) -> str:
    return "".join(record.to_json() + "\n" for record in windows)


def _is_cut(path: Path) -> bool:
    """Whether a kill cut the last line of a file short."""
    with _opened(path) as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _each(path: Path) -> Iterator[WindowRecord]:
    """The windows in a file, one after another; not one that a kill cut short, which is run again."""
    before: WindowRecord | None = None
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                before = _following(before, WindowRecord.from_json(line.decode()))
            except (HdetError, ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                reason = (str(error) or type(error).__name__).splitlines()[0]
                raise HdetError(f"{path}, line {number} is not a window record: {reason}") from None
            yield before


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise HdetError(f"the history {path} cannot be read: {error}") from None


def _following(before: WindowRecord | None, record: WindowRecord) -> WindowRecord:
    if before is not None and (before.window + 1, before.stop) != (record.window, record.start):
        raise HdetError(
            f"window {record.window} begins at step {record.start}, but window {before.window}, before it, ends at "
            f"step {before.stop}: lines are missing, doubled or out of order"
        )
    return record
