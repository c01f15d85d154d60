"""A checkpoint's table of contents: sizes and checksums of its files, written last and read first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hdet.checkpoints.leader import led, shared_out
from hdet.errors import CheckpointError
from hdet.files import renamed, replace

NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Content:
    """One file: its length in bytes and its SHA-256, in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    A disk's faults and a cut transfer show in it. It is no signature: whoever can write the files can write their
    manifest too. Against that, keep the manifest's own checksum elsewhere; see docs/errors.md.

    Attributes:
        run: the run that saved it.
        files: by name, what they must be.
    """

    run: str
    files: Mapping[str, Content]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest in a checkpoint's folder.

        Raises:
            CheckpointError: there is none, or it is not one of this version's.
        """
        path = folder / NAME
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            if given["format"] != FORMAT:
                raise CheckpointError(f"{path} has format {given['format']!r}; this version reads format {FORMAT}")
            files = {str(name): Content(int(c["bytes"]), str(c["sha256"])) for name, c in given["files"].items()}
            return cls(str(given["run"]), files)
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} has no {NAME}, so nothing in it can be checked: it was not saved by this version of "
                f"hdet.checkpoints.CheckpointFolder. Remove it to resume from an earlier one, or, if you trust who "
                "wrote it, load it by torch.distributed.checkpoint.load("
                '{"hdet": hdet.checkpoints.Stateful(engine)}, ...)'
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is no manifest of a checkpoint ({type(error).__name__}: {error}); remove {folder} to resume "
                f"from an earlier one"
            ) from None

    def verify(self, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Whether the folder's files are those that were saved; the ranks of the group share them out.

        Raises:
            CheckpointError: on every rank, naming a file that is not.
        """
        shared_out(group, sorted(self.files), lambda name: _verify(folder / name, self.files[name]))


def publish(part: Path, folder: Path, run: str, group: dist.ProcessGroup | None) -> None:
    """Give a checkpoint that is written its manifest, and then its name; all ranks of the group take part."""
    names: list[str] = led(group, lambda: sorted(entry.name for entry in part.iterdir()))
    files = shared_out(group, names, lambda name: content(part / name))
    led(group, lambda: _publish(part, folder, Manifest(run, files)))


def content(path: Path) -> Content:
    """A file's length and checksum."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return Content(file.tell(), digest.hexdigest())


def _publish(part: Path, folder: Path, manifest: Manifest) -> None:
    plain: dict[str, Any] = {"format": FORMAT, **asdict(manifest)}
    replace(part / NAME, json.dumps(plain, indent=2).encode())
    renamed(part, folder)


def _verify(path: Path, expected: Content) -> None:
    wrong = f"{path.parent} is not as it was saved: {path.name}"
    remedy = "remove it to resume from an earlier checkpoint, or fetch it again from where it was copied"
    if path.name in ("", ".", "..") or path.parent / path.name != path or not path.is_file():
        raise CheckpointError(f"{wrong} is missing; {remedy}")
    found = path.stat().st_size
    if found != expected.bytes:
        raise CheckpointError(f"{wrong} has {found} bytes instead of {expected.bytes}; {remedy}")
    if content(path) != expected:
        raise CheckpointError(f"{wrong} has another SHA-256 than when it was written; {remedy}")
