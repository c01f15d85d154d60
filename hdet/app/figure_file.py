"""A figure's file, tried before there is anything to draw."""

from __future__ import annotations

import os
from pathlib import Path

from hdet.app.output import writing
from hdet.errors import ConfigError
from hdet.report.figures import blank_figure


def require_figure(path: Path) -> None:
    """Make the file's folder, and tell what keeps a figure from being written.

    Raises:
        ConfigError: it has another ending than figures have, or the file cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix not in (".pdf", ".svg", ".png"):
        raise ConfigError(f"--figure {path}: figures are written as .pdf, .svg or .png; give such a name")
    blank_figure(1.0, 1.0)
    with writing(path, "--figure"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if not all(os.access(there, os.W_OK) for there in (path.resolve().parent, path) if there.exists()):
            raise PermissionError("it may not be written")
