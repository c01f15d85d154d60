"""A folder of a distributed run's checkpoints, of which there is always a whole one to resume from."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hdet.errors import CheckpointError, ConfigError
from hdet.replicas.distributed.layout import Group
from hdet.replicas.distributed.lost import translated
from hdet.stateful import Stateful

if TYPE_CHECKING:
    from hdet.engine import Engine

WHOLE = ".metadata"
"""The file that torch.distributed.checkpoint writes last."""

KEY = "hdet"


class CheckpointFolder:
    """Saves an engine's converged point as `step_00001000/` and so on, and resumes from the newest whole one.

    All ranks call the same methods, with one path on storage that all can reach. A save that fails, or is cut short
    by a kill, leaves the earlier ones as they were.

    Args:
        path: the folder; made when first saved to.
        keep: how many whole checkpoints to keep.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, got {keep}: the last checkpoint is what a resume needs")
        self.path = Path(path)
        self.keep = keep
        self._saving: Any = None
        self._group: Group | None = None

    def save(self, engine: Engine, *, wait: bool = True) -> Path:
        """Save the last converged point; without `wait`, copy it and write in the background.

        Raises:
            CheckpointError: on every rank, if any rank could not write. The folder's other checkpoints are whole.
        """
        import torch.distributed.checkpoint as dcp

        self.wait()
        state = Stateful(engine)
        target = self.path / f"step_{_step(engine):08d}"
        if engine.all_agree((target / WHOLE).exists()):
            return target  # this point is there already: no window has closed since
        if _leads() and target.exists() and not (target / WHOLE).exists():
            shutil.rmtree(target)  # cut short by a kill
        try:
            with translated("saving a checkpoint"):
                _meet()
                self._write(state, target, wait)
        except (dcp.api.CheckpointException, OSError) as error:
            raise _failed(target, error) from None
        if wait:
            self._prune()
        return target

    def _write(self, state: Stateful, target: Path, wait: bool) -> None:
        import torch.distributed.checkpoint as dcp

        if wait:
            dcp.save({KEY: state}, checkpoint_id=target, no_dist=not _distributed())  # type: ignore[attr-defined]
        else:
            group = self._background()
            self._saving = dcp.async_save({KEY: state}, checkpoint_id=target, process_group=group)  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Wait until a save in the background is done.

        Raises:
            CheckpointError: it failed.
        """
        import torch.distributed.checkpoint as dcp

        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        future: Future[Any] = getattr(saving, "upload_completion", saving)
        try:
            future.result()
        except (dcp.api.CheckpointException, OSError) as error:
            raise _failed(self.path, error) from None
        self._prune()

    def resume(self, engine: Engine) -> int | None:
        """Load the newest whole checkpoint, if there is one; returns the step it was saved at.

        Raises:
            CheckpointError: it is another engine's, or cannot be read.
        """
        import torch.distributed.checkpoint as dcp

        whole = [self.latest()]
        if _distributed():
            dist.broadcast_object_list(whole, src=0)  # one rank looks: the others' view of the folder may lag
        newest = whole[0]
        if newest is None:
            return None
        try:
            with translated("loading a checkpoint"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load({KEY: Stateful(engine)}, checkpoint_id=newest, no_dist=not _distributed())  # type: ignore[attr-defined]
        except dcp.api.CheckpointException as error:
            cause = next((pair[0] for pair in error.failures.values() if isinstance(pair[0], CheckpointError)), None)
            raise CheckpointError(f"{newest} cannot be loaded: {cause or _first(error)}") from None
        return engine.step_count

    def _background(self) -> dist.ProcessGroup | None:
        """A group for the writing thread alone: on training's own, its collectives and training's would mix."""
        if self._group is None and _distributed():
            self._group = Group(dist.new_group(backend="gloo"))
        return self._group() if self._group is not None else None

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        whole = self._whole()
        return whole[-1] if whole else None

    def _whole(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        found = [entry for entry in self.path.iterdir() if re.fullmatch(r"step_\d{8,}", entry.name)]
        return sorted((entry for entry in found if (entry / WHOLE).exists()), key=lambda entry: int(entry.name[5:]))

    def _prune(self) -> None:
        if not _leads():
            return
        for old in self._whole()[: -self.keep]:
            # The file that makes it count as whole goes first.
            (old / WHOLE).unlink(missing_ok=True)
            shutil.rmtree(old, ignore_errors=True)


def _step(engine: Engine) -> int:
    return engine.step_count if engine.finished else engine.anchor.step


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _leads() -> bool:
    return not _distributed() or dist.get_rank() == 0


def _meet() -> None:
    if _distributed():
        dist.barrier()


def _first(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(sorted(failures.items(), key=lambda item: item[0])))
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def _failed(target: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{target} could not be written ({_first(error)}); the checkpoints before it are whole, and training can go on "
        f"or be resumed from them"
    )
