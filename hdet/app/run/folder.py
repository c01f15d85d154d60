"""A run's folder: what lies in it, and the rules for taking one."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from hdet.app.output import reading
from hdet.app.run.config import RunConfig
from hdet.document import dump
from hdet.errors import CheckpointError, ConfigError, HdetError
from hdet.files import damaged_part, parts_of, replace, replaced

LOCK = ".run.lock"
STUDY_LOCK = ".lock"
"""A study's, whose cell the folder may be."""
PATIENCE = 0.2
"""Seconds: who looks whether a run has the folder (`taken`) has its lock for a moment."""


class RunFolder:
    """`config.yaml` as resolved, `history.jsonl`, `checkpoint.pt`, `model.pt`, `bases.png` and `result.json`.

    Making the object touches nothing. A file is written under another name and moved into place, so a kill or a power
    cut leaves the old one or the new one. One process at a time has the folder (`held`).
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.history = self.path / "history.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.model = self.path / "model.pt"
        self.picture = self.path / "bases.png"
        self.result = self.path / "result.json"
        self._lock = self.path / LOCK
        self._own = (self.config, self.history, self.checkpoint, self.model, self.picture, self.result)

    def check(self, config: RunConfig, *, force: bool, resume: bool) -> None:
        """Whether this run may use the folder; a ConfigError says why not."""
        if force and resume:
            raise ConfigError("--force starts anew and --resume goes on; say one of them")
        with reading(self.path):
            there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir():
            raise ConfigError(f"{self.path} cannot be a run folder: {there} is a file; choose another --out")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"{self.path} cannot be a run folder: {there} may not be written; choose another --out")
        if resume:
            self._check_same(config)
        elif not force and self.path.exists() and self._content():
            raise ConfigError(
                f"the run folder {self.path} is not empty; go on with its run by --resume, replace that run "
                f"by --force, or choose another --out"
            )

    def _check_same(self, config: RunConfig) -> None:
        if not self.config.exists():
            raise ConfigError(f"nothing to resume: {self.path} holds no run; leave --resume out to start one")
        kept, wanted = RunConfig.load(self.config).to_dict(), config.to_dict()
        changed = [name for name in wanted if kept[name] != wanted[name]]
        if changed:
            raise ConfigError(
                f"--resume goes on with the run in {self.path} as it was declared, and {', '.join(changed)} "
                f"differ; resume with {self.config}, or choose another --out"
            )

    def _content(self) -> list[Path]:
        """What lies in the folder, but for what a kill leaves behind before a run has begun."""
        left = {self._lock, self.path / STUDY_LOCK, *self._cut_short()}
        return [path for path in self.path.iterdir() if path not in left]

    def _cut_short(self) -> list[Path]:
        return [part for path in self._own for part in parts_of(path)]

    @contextmanager
    def held(self) -> Iterator[None]:
        """The folder belongs to this process inside the block. The lock is the system's: it ends with its process."""
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(self._lock).acquire(timeout=PATIENCE, poll_interval=PATIENCE / 10))
            except Timeout:
                raise ConfigError(
                    f"another process is at the run in {self.path}; wait until it has ended, or choose another --out"
                ) from None
            except OSError as error:
                raise ConfigError(f"{self.path} cannot be a run folder: {error}; choose another --out") from None
            for part in self._cut_short():  # checkpoints of one kill after another would fill the disk
                part.unlink(missing_ok=True)
            yield

    def taken(self) -> bool:
        """Whether a process has the folder, as far as the system tells; it ends with that process, be it killed."""
        try:
            import fcntl

            with self._lock.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except (ModuleNotFoundError, OSError):  # held, or this system cannot tell
            return True
        return False

    def abandoned(self, result: dict[str, Any]) -> bool:
        """Whether the comparison that a result tells of was killed outright.

        It is told on the machine that began it alone: another one need not see its lock.
        """
        began_on = result.get("comparing") is True and result.get("host")
        return bool(began_on) and began_on == platform.node() and not self.taken()

    def begin(self, config: RunConfig) -> None:
        """Make the folder, remove an earlier run's files (those only) and write the configuration."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self._own:
            path.unlink(missing_ok=True)
        try:
            replace(self.config, dump(config).encode())
        except OSError as error:  # a full disk's and a quota's name no file
            raise HdetError(
                f"{self.config} could not be written ({error}); make room, or choose another --out"
            ) from None

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Keep plain numbers and tensors from which the run can go on."""
        self._save(self.checkpoint, state)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint, or `None` where the run was killed before its first."""
        return _read(self.checkpoint) if self.checkpoint.exists() else None

    def save_model(self, state: dict[str, Any]) -> None:
        """Keep the final model's `state_dict`."""
        self._save(self.model, state)

    def save_result(self, result: dict[str, Any]) -> None:
        """Keep the numbers the run ended with."""
        content = json.dumps(result, indent=2, allow_nan=False) + "\n"
        try:
            replace(self.result, content.encode())
        except OSError as error:
            raise HdetError(f"{self.result} could not be written ({error}); make room, and go on by --resume") from None

    def load_result(self) -> dict[str, Any] | None:
        """The numbers a finished run ended with."""
        if not self.result.exists():
            return None
        try:
            found = json.loads(self.result.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise HdetError(f"{self.result} cannot be read ({error}); remove it and --resume writes it anew") from None
        if not isinstance(found, dict):
            raise HdetError(f"{self.result} holds no mapping of results; remove it and --resume writes it anew")
        return found

    def _save(self, path: Path, state: dict[str, Any]) -> None:
        try:
            with replaced(path) as part:
                torch.save(state, part)
        except (RuntimeError, OSError) as error:  # torch tells of a full disk by the first
            before = "the one before it is whole" if path.exists() else "there is none before it"
            raise CheckpointError(f"{path} could not be written ({error}); {before}") from None


def _read(path: Path) -> dict[str, Any]:
    """The state in a file by `torch.save`, whose checksums hold."""
    try:
        damaged = damaged_part(path)
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: {damaged} in it is not as it was written; use --force")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise CheckpointError(f"{path} cannot be read ({error}); use --force") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__} and no checkpoint; use --force")
    return state
