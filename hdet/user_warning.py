"""Warnings at the line of the user's own code, not at one of this package's."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

HERE = str(Path(__file__).parent)


def warn(message: str | Warning) -> None:
    """A UserWarning (or the given one), shown and counted at the first line outside hdet, and outside torch.

    Torch's own lines lie in between where one of its hooks has called.
    """
    torch = sys.modules.get("torch")
    inside = (HERE, str(Path(torch.__file__).parent)) if torch is not None and torch.__file__ else (HERE,)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def relayed(call: Callable[[], object]) -> None:
    """Call; what torch warns of, one frame up from its own, is warned of at the caller's line instead.

    Only for calls that may warn: recording makes Python forget which warnings it has shown.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    for warning in caught:
        warn(warning.message if isinstance(warning.message, Warning) else str(warning.message))
