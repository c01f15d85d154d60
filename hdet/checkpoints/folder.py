"""A folder of a distributed run's checkpoints, of which there is always a whole one to resume from."""

from __future__ import annotations

import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as until_done
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hdet.checkpoints.leader import led
from hdet.checkpoints.manifest import NAME as MANIFEST
from hdet.checkpoints.manifest import Manifest, publish
from hdet.checkpoints.stateful import Stateful, everyone, step_of, unpacked
from hdet.engine import snapshot
from hdet.engine.engine import Engine
from hdet.errors import CheckpointError, ConfigError
from hdet.files import PART, part_of, renamed
from hdet.replicas.distributed.layout import Group
from hdet.replicas.distributed.lost_rank import translated
from hdet.replicas.distributed.process_group import BEFORE_THE_END
from hdet.user_warning import warn

KEY = "hdet"
ENDED = ".ended"
"""What the name of a checkpoint ends with if `Engine.finish` had ended the run before its last step."""

UNDER_WAY: dict[Future[None], tuple[Path, int]] = {}
"""The saves in the background, the folders that they write to, and the process that does: not its forked children."""


@dataclass(frozen=True)
class Saving:
    """A save in the background; `published` is done when the checkpoint has its name."""

    engine: Engine
    target: Path
    published: Future[None]


class CheckpointFolder:
    """Saves an engine's converged point as `step_00001000/` and so on, and resumes from the newest whole one.

    All ranks of the engine's run call the same methods, with one path on storage that all can reach. A save that
    fails, or is cut short by a kill, leaves the earlier ones as they were: a checkpoint is written as
    `step_00001000.*.part/` and gets its name when it is whole and its `manifest.json` lists sizes and checksums. A
    resume checks these first, and reads everything as data: no code that a file names is called. Replicas that differ
    even at a converged point (`Mean("keep")`) are stored each, and resumed so by as many as were saved; another number
    starts from the first place's. The end of a run that `Engine.finish` ended early is `step_00001000.ended/`.

    Args:
        path: the folder; made when first saved to.
        keep: how many whole checkpoints of a run to keep.
    """

    def __init__(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise ConfigError(
                f"keep must be at least 1 and an integer, got {keep!r}: the last checkpoint is what a resume needs"
            )
        if not dist.is_available():
            raise ConfigError(
                "a CheckpointFolder is written by torch.distributed, which this torch is built without; save "
                "state_dict() of the engine or of the search by torch.save"
            )
        self.path = Path(path)
        self.keep = keep
        self._saving: Saving | None = None
        self._groups: dict[tuple[int, ...], Group] = {}

    def save(self, engine: Engine, *, wait: bool = True) -> Path:
        """Save the last converged point; without `wait`, copy it and write in the background.

        What is written in the background is lost where its process group is destroyed before: call `wait()` first,
        which `hdet.process_group` does by itself. When the run is over nothing trains beside it, and it is waited for.

        Raises:
            CheckpointError: on every rank, if any rank could not write, or if the folder holds a newer point, from
                which this engine has not gone on. The folder's other checkpoints are whole. Or the engine is that of
                `hdet.attach`, which is saved with its search.
        """
        import torch.distributed.checkpoint as dcp

        snapshot.refuse_of_a_search(engine.cycle)
        self.wait()
        here = self.path.resolve()
        others = [published for published, (folder, _) in list(UNDER_WAY.items()) if folder == here]
        for published in others:
            _require_own(published)
        until_done(others)
        wait = wait or engine.finished
        target = self.path / _name(engine)
        group = everyone(engine)
        try:
            with translated("saving a checkpoint"):
                engine.cycle.run = run = led(group, lambda: engine.cycle.run or uuid.uuid4().hex)
                part = led(group, lambda: self._claimed(target, run))
                if part is None:
                    return target  # this point is there already: no window has closed since
                point = {KEY: Stateful(engine).point(each=True)}
                if wait:
                    with _quiet():
                        dcp.save(point, checkpoint_id=part, process_group=group, no_dist=group is None)  # type: ignore[attr-defined]
                    publish(part, target, run, group)
                else:
                    group = self._background(engine)
                    under_way: Any = dcp.async_save(point, checkpoint_id=part, process_group=group)  # type: ignore[attr-defined]
                    written: Future[Any] = getattr(under_way, "upload_completion", under_way)

                    def finish() -> None:
                        written.result()
                        publish(part, target, run, group)

                    publisher = ThreadPoolExecutor(1)
                    published = publisher.submit(finish)
                    self._saving = Saving(engine, target, published)
                    UNDER_WAY[published] = here, os.getpid()
                    published.add_done_callback(UNDER_WAY.pop)
                    publisher.shutdown(wait=False)  # its thread ends with the save
                    if group is not None:
                        BEFORE_THE_END.add(self.wait)
        except (dcp.api.CheckpointException, OSError) as error:
            raise _failed(target, error) from None
        if wait:
            self._prune(engine, target)
        return target

    def wait(self) -> None:
        """Wait until a save in the background is done.

        Raises:
            CheckpointError: it failed; or it is another process's, of which this one was forked meanwhile.
        """
        import torch.distributed.checkpoint as dcp

        if self._saving is None:
            return
        _require_own(self._saving.published)
        saving, self._saving = self._saving, None
        BEFORE_THE_END.discard(self.wait)
        try:
            with translated("waiting for a checkpoint"):
                saving.published.result()
        except (dcp.api.CheckpointException, OSError) as error:
            raise _failed(saving.target, error) from None
        self._prune(saving.engine, saving.target)

    def resume(self, engine: Engine) -> int | None:
        """Load the newest whole checkpoint, if there is one; returns the step it was saved at.

        Where there is none the run begins, and the engine's history with it.

        Raises:
            CheckpointError: it is another engine's, is not as it was saved, or cannot be read; or this engine is that
                of `hdet.attach`. It is as it was.
        """
        import torch.distributed.checkpoint as dcp

        snapshot.refuse_of_a_search(engine.cycle, loads=True)
        group = everyone(engine)
        with translated("loading a checkpoint"):
            newest = led(group, self._newest)  # one rank looks: the others' view of the folder may lag
            if newest is None:
                engine.history.truncate(engine.cycle.window.index)  # a window may have been written and no checkpoint
                return None
            manifest = led(group, lambda: Manifest.read(newest))
            manifest.verify(newest, group)
            control = led(group, lambda: _control(newest, manifest))
            stateful = Stateful(engine)
            try:
                stateful.check(control)
                found = {KEY: stateful.template(control)}
                _load(found, newest, manifest, group)
                stateful.load_state_dict(found[KEY])
            except dcp.api.CheckpointException as error:
                raise CheckpointError(f"{newest} cannot be loaded: {_first(error)}") from None
            except CheckpointError as error:
                raise CheckpointError(f"{newest} cannot be loaded: {error}") from None
        return engine.step_count

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        return next((entry for entry in reversed(self._named()) if (entry / MANIFEST).exists()), None)

    def _newest(self) -> Path | None:
        """The newest checkpoint, be it one that a resume refuses."""
        return next(reversed(self._named()), None)

    def _claimed(self, target: Path, run: str) -> Path | None:
        """Where a point is to be written, whose place is free then; None where it has been."""
        newest = self._newest()
        if newest is not None and _place(newest) > _place(target):
            raise CheckpointError(
                f"{self.path} holds {newest.name}, from which this engine has not gone on, and {target.name} would be "
                f"older; resume(engine) first, choose another folder, or remove that one"
            )
        if target.exists():
            if Manifest.read(target).run == run:
                return None
            raise CheckpointError(
                f"{target} is another run's; resume(engine) to go on with that, choose another folder, or remove it"
            )
        for cut_short in self.path.glob(f"step_*{PART}"):
            shutil.rmtree(cut_short)
        return part_of(target)

    def _background(self, engine: Engine) -> dist.ProcessGroup | None:
        """A group for the writing thread alone: on training's own, its collectives and training's would mix."""
        group = everyone(engine)
        if group is None:
            return None
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._groups:
            # Ranks outside the run need not take part in making it. (Where there are none all make it. Up to torch
            # 2.13 that works even where some have made more groups than others; from then on nothing does.)
            among = len(ranks) < dist.get_world_size()
            self._groups[ranks] = Group(dist.new_group(list(ranks), backend="gloo", use_local_synchronization=among))
        return self._groups[ranks]()

    def _named(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        name = re.compile(rf"step_\d{{8,}}({re.escape(ENDED)})?")
        return sorted((entry for entry in self.path.iterdir() if name.fullmatch(entry.name)), key=_place)

    def _prune(self, engine: Engine, target: Path) -> None:
        """Drop this run's checkpoints before the one just written, but for the last few."""
        if not engine.home.is_leader:
            return
        earlier = [entry for entry in self._named() if _place(entry) <= _place(target)]
        for old in earlier[: -self.keep]:
            try:
                if Manifest.read(old).run == engine.cycle.run:
                    part = part_of(old)
                    renamed(old, part)  # half of it never counts as a checkpoint
                    shutil.rmtree(part)
            except (OSError, CheckpointError) as error:
                warn(f"{old} is no longer needed and cannot be removed: {error}")


def _require_own(published: Future[None]) -> None:
    """Refuse to wait for a save in the background that another process makes."""
    folder, process = UNDER_WAY.get(published, (None, os.getpid()))
    if process != os.getpid():
        raise CheckpointError(
            f"process {process} was saving to {folder} in the background when this one was forked from it, which never "
            f"hears that it is done: save, and wait, in that process alone"
        )


def _name(engine: Engine) -> str:
    """A run that was ended early has two points at that step: the one it could have gone on from, and its end."""
    ended_early = engine.finished and engine.step_count != engine.total_steps
    return f"step_{step_of(engine):08d}" + (ENDED if ended_early else "")


def _place(path: Path) -> tuple[int, bool]:
    """Where a checkpoint comes among the others."""
    return int(path.name.removeprefix("step_").removesuffix(ENDED)), path.name.endswith(ENDED)


def _control(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The plain numbers of a checkpoint, read by this process alone."""
    import torch.distributed.checkpoint as dcp

    found = {KEY: {"control": b""}}
    try:
        _load(found, path, manifest, None)
    except dcp.api.CheckpointException as error:
        raise CheckpointError(f"{path} cannot be read: {_first(error)}") from None
    return unpacked(found[KEY]["control"])


def _load(into: dict[str, Any], path: Path, manifest: Manifest, group: dist.ProcessGroup | None) -> None:
    import torch.distributed.checkpoint as dcp

    from hdet.checkpoints.data_only import DataPlanner, DataReader

    reader = DataReader(path, manifest.files)
    with _quiet():
        dcp.load(into, storage_reader=reader, planner=DataPlanner(), process_group=group, no_dist=group is None)  # type: ignore[attr-defined]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a save or load in one process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first(error: BaseException) -> str:
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(sorted(failures.items(), key=lambda item: item[0])))
        if isinstance(cause, CheckpointError):
            return str(cause)
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def _failed(target: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{target} could not be written ({_first(error)}); the checkpoints before it are whole, and training can go on "
        f"or be resumed from them"
    )
