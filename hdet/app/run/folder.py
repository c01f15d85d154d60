"""A run's folder: what lies in it, and the rules for taking one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from hdet.app.run.config import RunConfig
from hdet.document import dump, read
from hdet.errors import CheckpointError, ConfigError


class RunFolder:
    """`config.yaml` as resolved, `history.jsonl`, `checkpoint.pt`, `model.pt`, `bases.png` and `result.json`.

    Making the object touches nothing. A file is written under another name and moved into place, so a kill
    leaves the old one or the new one.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.history = self.path / "history.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.model = self.path / "model.pt"
        self.picture = self.path / "bases.png"
        self.result = self.path / "result.json"
        self._own = (self.config, self.history, self.checkpoint, self.model, self.picture, self.result)

    def check(self, config: RunConfig, *, force: bool, resume: bool) -> None:
        """Whether this run may use the folder.

        Raises:
            ConfigError: it is a file, or holds something and neither `force` nor `resume` was said, or holds
                a run of another configuration, which `resume` would not continue.
        """
        if force and resume:
            raise ConfigError("--force starts anew and --resume goes on; say one of them")
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"the run folder {self.path} is a file; choose another --out")
        if resume:
            self._check_same(config)
        elif not force and self.path.exists() and any(self.path.iterdir()):
            raise ConfigError(
                f"the run folder {self.path} is not empty; go on with its run by --resume, replace that run "
                f"by --force, or choose another --out"
            )

    def _check_same(self, config: RunConfig) -> None:
        if not self.config.exists():
            raise ConfigError(f"nothing to resume: {self.path} holds no run; leave --resume out to start one")
        kept, wanted = RunConfig.from_dict(read(self.config)).to_dict(), config.to_dict()
        changed = [name for name in wanted if kept[name] != wanted[name]]
        if changed:
            raise ConfigError(
                f"--resume goes on with the run in {self.path} as it was declared, and {', '.join(changed)} "
                f"differ; resume with {self.config}, or choose another --out"
            )

    def begin(self, config: RunConfig) -> None:
        """Make the folder, remove an earlier run's files (those only) and write the configuration."""
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self._own:
            path.unlink(missing_ok=True)
        self._replace(self.config, dump(config).encode())

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Keep plain numbers and tensors from which the run can go on."""
        self._save(self.checkpoint, state)

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint, or `None` where the run was killed before its first."""
        if not self.checkpoint.exists():
            return None
        try:
            return torch.load(self.checkpoint, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
        except Exception as error:
            raise CheckpointError(f"{self.checkpoint} cannot be read ({error}); use --force") from None

    def save_model(self, state: dict[str, Any]) -> None:
        """Keep the final model's `state_dict`."""
        self._save(self.model, state)

    def save_result(self, result: dict[str, Any]) -> None:
        """Keep the numbers the run ended with."""
        self._replace(self.result, (json.dumps(result, indent=2, allow_nan=False) + "\n").encode())

    def load_result(self) -> dict[str, Any] | None:
        """The numbers a finished run ended with."""
        if not self.result.exists():
            return None
        return json.loads(self.result.read_text())  # type: ignore[no-any-return]

    def _save(self, path: Path, state: dict[str, Any]) -> None:
        aside = path.with_name(path.name + ".part")
        try:
            torch.save(state, aside)
        except RuntimeError as error:  # how torch tells of a full disk
            raise CheckpointError(f"{path} could not be written ({error}); the one before it is whole") from None
        os.replace(aside, path)

    def _replace(self, path: Path, content: bytes) -> None:
        aside = path.with_name(path.name + ".part")
        aside.write_bytes(content)
        os.replace(aside, path)
