"""Reading of torch.distributed.checkpoint's files as data: no code that a file names is called.

`torch.distributed.checkpoint.load` reads `.metadata` by pickle, and with it entries that are no tensors: a forged
file runs what it likes. Here a file can name the classes that a checkpoint consists of, and nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from hdet.errors import CheckpointError

ALLOWED = {
    **dict.fromkeys(
        (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        ("torch.distributed.checkpoint.metadata",),
    ),
    "_StorageInfo": ("torch.distributed.checkpoint.filesystem",),
    "_get_layout": ("torch.serialization",),
    "Size": ("torch",),
    "PosixPath": ("pathlib", "pathlib._local"),
    "WindowsPath": ("pathlib", "pathlib._local"),
}
"""By name, the modules that a class or function of a checkpoint's metadata may come from. Each keeps data only."""


class DataUnpickler(pickle.Unpickler):
    """Refuses every class and function but those that torch's metadata consist of."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or module in ALLOWED.get(name, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"its .metadata names {module}.{name}, which is no part of a checkpoint: the file is forged or damaged; "
            f"do not load it"
        )


class DataReader(FileSystemReader):
    """Reads a checkpoint whose files are known by name.

    Args:
        path: the checkpoint's folder.
        files: the names of the files that may be read.
    """

    def __init__(self, path: Path, files: Collection[str]) -> None:
        super().__init__(path)
        self._folder = path
        self._files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, and where.

        Raises:
            CheckpointError: it is no such description, or points to a file that is not the checkpoint's.
        """
        with (self._folder / ".metadata").open("rb") as file:
            try:
                metadata = DataUnpickler(file).load()
            except CheckpointError:
                raise
            except Exception as error:  # a damaged pickle can raise anything
                raise CheckpointError(f"its .metadata cannot be read ({type(error).__name__}: {error})") from None
        places = getattr(metadata, "storage_data", None)
        if not isinstance(metadata, Metadata) or not isinstance(places, dict):
            raise CheckpointError("its .metadata describes no checkpoint")
        odd = sorted({str(place.relative_path) for place in places.values()} - set(self._files))
        if odd:
            raise CheckpointError(f"its .metadata points to {odd[0]!r}, which its manifest does not name")
        return metadata


class DataPlanner(DefaultLoadPlanner):
    """Reads entries that are no tensors as plain numbers, strings and bytes."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one such entry into the state.

        Raises:
            CheckpointError: it holds more than plain data.
        """
        try:
            plain = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"its entry {read_item.dest_index.fqn!r} is no plain data ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]})"
            ) from None
        plainly = io.BytesIO()
        torch.save(plain, plainly)  # as the planner's own method reads it: it knows where in the state it belongs
        plainly.seek(0)
        super().load_bytes(read_item, plainly)
