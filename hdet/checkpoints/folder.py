"""A folder of a distributed run's checkpoints, of which there is always a whole one to resume from."""

from __future__ import annotations

import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from hdet.checkpoints.stateful import Stateful, unpacked
from hdet.errors import CheckpointError, ConfigError, HdetError
from hdet.replicas.distributed import Ranks
from hdet.replicas.distributed.layout import Group
from hdet.replicas.distributed.lost_rank import translated

if TYPE_CHECKING:
    from hdet.engine.engine import Engine

T = TypeVar("T")

WHOLE = ".metadata"
"""The file that torch.distributed.checkpoint writes last."""

KEY = "hdet"


@dataclass(frozen=True)
class Saving:
    """A save in the background."""

    engine: Engine
    target: Path
    under_way: Any


class CheckpointFolder:
    """Saves an engine's converged point as `step_00001000/` and so on, and resumes from the newest whole one.

    All ranks of the engine's run call the same methods, with one path on storage that all can reach. A save that
    fails, or is cut short by a kill, leaves the earlier ones as they were. Replicas that differ even at a converged
    point (`Mean("keep")`) are stored each, and resumed so by as many as were saved; another number starts from the
    first place's.

    Args:
        path: the folder; made when first saved to.
        keep: how many whole checkpoints of a run to keep.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1, got {keep}: the last checkpoint is what a resume needs")
        self.path = Path(path)
        self.keep = keep
        self._saving: Saving | None = None
        self._groups: dict[tuple[int, ...], Group] = {}

    def save(self, engine: Engine, *, wait: bool = True) -> Path:
        """Save the last converged point; without `wait`, copy it and write in the background.

        Raises:
            CheckpointError: on every rank, if any rank could not write, or if the folder holds a newer point, from
                which this engine has not gone on. The folder's other checkpoints are whole.
        """
        import torch.distributed.checkpoint as dcp

        self.wait()
        target = self.path / f"step_{_step(engine):08d}"
        try:
            with translated("saving a checkpoint"):
                engine.run = _led(engine, lambda: engine.run or uuid.uuid4().hex)
                if not _led(engine, lambda: self._claimed(target, engine.run)):
                    return target  # this point is there already: no window has closed since
                point = {KEY: Stateful(engine).point(each=True)}
                if wait:
                    group = _group(engine)
                    dcp.save(point, checkpoint_id=target, process_group=group, no_dist=group is None)  # type: ignore[attr-defined]
                else:
                    group = self._background(engine)
                    under_way = dcp.async_save(point, checkpoint_id=target, process_group=group)  # type: ignore[attr-defined]
                    self._saving = Saving(engine, target, under_way)
        except (dcp.api.CheckpointException, OSError) as error:
            raise _failed(target, error) from None
        if wait:
            self._prune(engine, target)
        return target

    def wait(self) -> None:
        """Wait until a save in the background is done.

        Raises:
            CheckpointError: it failed.
        """
        import torch.distributed.checkpoint as dcp

        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        future: Future[Any] = getattr(saving.under_way, "upload_completion", saving.under_way)
        try:
            with translated("waiting for a checkpoint"):
                future.result()
        except (dcp.api.CheckpointException, OSError) as error:
            raise _failed(saving.target, error) from None
        self._prune(saving.engine, saving.target)

    def resume(self, engine: Engine) -> int | None:
        """Load the newest whole checkpoint, if there is one; returns the step it was saved at.

        Where there is none the run begins, and the engine's history with it.

        Raises:
            CheckpointError: it is another engine's, or cannot be read. The engine is as it was.
        """
        import torch.distributed.checkpoint as dcp

        with translated("loading a checkpoint"):
            newest = _led(engine, self.latest)  # one rank looks: the others' view of the folder may lag
            if newest is None:
                engine.history.truncate(engine.window.index)  # a window may have been written and no checkpoint
                return None
            control = _led(engine, lambda: self._control(newest))
            stateful = Stateful(engine)
            try:
                stateful.check(control)
                found = {KEY: stateful.template(control)}
                group = _group(engine)
                with _quiet():
                    dcp.load(found, checkpoint_id=newest, process_group=group, no_dist=group is None)  # type: ignore[attr-defined]
                stateful.load_state_dict(found[KEY])
            except dcp.api.CheckpointException as error:
                raise CheckpointError(f"{newest} cannot be loaded: {_first(error)}") from None
            except CheckpointError as error:
                raise CheckpointError(f"{newest} cannot be loaded: {error}") from None
        return engine.step_count

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        whole = self._whole()
        return whole[-1] if whole else None

    def _claimed(self, target: Path, run: str | None) -> bool:
        """Whether a point is still to be written; its folder is free then."""
        newest = self.latest()
        if newest is not None and _number(newest) > _number(target):
            raise CheckpointError(
                f"{self.path} holds {newest.name}, from which this engine has not gone on, and {target.name} would be "
                f"older; resume(engine) first, choose another folder, or remove that one"
            )
        if (target / WHOLE).exists():
            if self._control(target).get("run") == run:
                return False
            raise CheckpointError(
                f"{target} is another run's; resume(engine) to go on with that, choose another folder, or remove it"
            )
        if target.exists():
            shutil.rmtree(target)  # cut short by a kill
        return True

    def _control(self, path: Path) -> dict[str, Any]:
        """The plain numbers of a checkpoint, read by this process alone."""
        import torch.distributed.checkpoint as dcp

        found = {KEY: {"control": b""}}
        try:
            with _quiet():
                dcp.load(found, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
        except dcp.api.CheckpointException as error:
            raise CheckpointError(f"{path} cannot be read: {_first(error)}") from None
        return unpacked(found[KEY]["control"])

    def _background(self, engine: Engine) -> dist.ProcessGroup | None:
        """A group for the writing thread alone: on training's own, its collectives and training's would mix."""
        group = _group(engine)
        if group is None:
            return None
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._groups:
            # Ranks outside the run need not take part in making it. (Where there are none, it is made by all, which
            # works even where some have made more groups than others.)
            among = len(ranks) < dist.get_world_size()
            self._groups[ranks] = Group(dist.new_group(list(ranks), backend="gloo", use_local_synchronization=among))
        return self._groups[ranks]()

    def _whole(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        found = [entry for entry in self.path.iterdir() if re.fullmatch(r"step_\d{8,}", entry.name)]
        return sorted((entry for entry in found if (entry / WHOLE).exists()), key=_number)

    def _prune(self, engine: Engine, target: Path) -> None:
        """Drop this run's checkpoints before the one just written, but for the last few."""
        if not engine.home.is_leader:
            return
        earlier = [entry for entry in self._whole() if _number(entry) <= _number(target)]
        for old in earlier[: -self.keep]:
            try:
                if self._control(old).get("run") == engine.run:
                    (old / WHOLE).unlink()  # the file that makes it count as whole goes first
                    shutil.rmtree(old)
            except (OSError, CheckpointError) as error:
                warnings.warn(f"{old} is no longer needed and cannot be removed: {error}", stacklevel=3)


def _step(engine: Engine) -> int:
    return engine.step_count if engine.finished else engine.anchor.step


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _group(engine: Engine) -> dist.ProcessGroup | None:
    """All ranks of the engine's run, where it has several."""
    return engine.home.layout.everyone() if isinstance(engine.home, Ranks) else None


def _led(engine: Engine, act: Callable[[], T]) -> T:
    """What `act()` returns on the run's leading rank, which alone calls it, on every rank.

    Raises:
        HdetError: the leader's, on every rank, so that none waits for one that has gone; an OSError as one too.
    """
    group = _group(engine)
    found: list[Any] = [None, None]
    if engine.home.is_leader:
        try:
            found[0] = act()
        except HdetError as error:
            found[1] = error
        except OSError as error:
            found[1] = CheckpointError(f"the checkpoints' folder cannot be used: {error}")
    if group is not None:
        dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    if found[1] is not None:
        raise found[1]
    value: T = found[0]
    return value


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a load in one process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


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
