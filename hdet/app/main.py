"""The command `hdet`: errors in one line, without a traceback, and exit codes that scripts can tell apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hdet.errors import ConfigError, HdetError, MissingExtraError

REFUSED = 2
FAILED = 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `python -m hdet` and the script `hdet` both come here.

    Exits with 0 when all went well, 2 when something given cannot be (nothing was written then), 1 when a
    run failed, 130 when it was interrupted.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's own tasks and knobs lie in the working directory
    try:
        try:
            from hdet.app.commands import application
        except ModuleNotFoundError as error:
            if error.name in ("typer", "rich"):
                raise MissingExtraError(error.name, "cli") from None
            raise
        application(args=None if arguments is None else list(arguments))
    except HdetError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(REFUSED if isinstance(error, (ConfigError, MissingExtraError)) else FAILED)
