"""The checkpoints that a study's cells set out from, made where they are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from hdet.app.run.config import RunConfig
from hdet.app.run.folder import RunFolder
from hdet.app.run.runner import Run
from hdet.app.study.cells import Cell
from hdet.app.study.declaration import Study
from hdet.errors import ConfigError

MODEL = RunFolder("").model.name


def missing(cells: Sequence[Cell]) -> dict[Path, RunConfig]:
    """The checkpoints that are not there, each with the run of a cell that sets out from it."""
    wanted = {Path(cell.config.start_path): cell.config for cell in cells if cell.config and cell.config.start_path}
    return {path: config for path, config in wanted.items() if not path.exists()}


def make_missing(study: Study, cells: Sequence[Cell], tell: Callable[[str], None]) -> None:
    """Train what the study's `prepare` declares, for each checkpoint that is missing; `tell` takes a line for each.

    Raises:
        ConfigError: the study does not say how they are made, or they are no run's models.
    """
    for path, config in missing(cells).items():
        if study.prepare is None:
            raise ConfigError(
                f"there is no checkpoint {path}, which cells of the study set out from (start:); make it, or declare "
                f"by prepare: the run that makes it"
            )
        if path.name != MODEL:
            raise ConfigError(f"prepare makes runs, whose model is {MODEL}; start: asks for {path}")
        declared = Path(study.prepare.run.replace("{task}", config.task.kind))
        run = RunConfig.load(declared, seed=study.prepare.seed + config.seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / ".start.lock"):  # another shard may be at it
            if not path.exists():
                tell(f"making {path}: {declared}, seed {run.seed}")
                begun = RunFolder(path.parent).config.exists()
                Run(run, path.parent, resume=begun, force=not begun)()
