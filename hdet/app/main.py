"""The command `hdet`: errors in one line, without a traceback, and exit codes that scripts can tell apart."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Any

from hdet.app.ending import FAILED, INTERRUPTED, REFUSED, ended_early
from hdet.app.output import heard
from hdet.app.text import one_line
from hdet.errors import ConfigError, HdetError, MissingExtraError

DEBUG = "--debug"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `python -m hdet` and the script `hdet` both come here.

    Exits with 0 when all went well, 2 when something given cannot be (nothing was written then), 1 when a
    run failed, 130 when it was interrupted, 143 when it was terminated (SIGTERM), 141 where nobody reads
    its output. `--debug`, anywhere on the line, shows an error's traceback and the place of a warning.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    rest = [argument for argument in given if argument != DEBUG]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a user's own tasks and knobs lie in the working directory
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as the error stream has it: no name ends a command
    try:
        with warnings.catch_warnings():
            if rest == given:
                warnings.showwarning = _told(warnings.showwarning)
            with heard():
                code = _run(rest if rest == given else [DEBUG, *rest])
    except HdetError as error:
        if rest != given:
            traceback.print_exc()
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        code = REFUSED if isinstance(error, (ConfigError, MissingExtraError)) else FAILED
    except KeyboardInterrupt as error:  # outside the commands: as they are imported, or as the last is printed
        code = ended_early(error)
    if code:
        sys.exit(code)


def _told(otherwise: Callable[..., None]) -> Callable[..., None]:
    """Shows a warning to users in one line: the place that it names is of some package here, not of their code."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, UserWarning):
            otherwise(message, category, *place, **more)
            return
        print(f"warning: {one_line(str(message))}", file=sys.stderr)

    return show


def _run(arguments: list[str]) -> int:
    """The exit code of a command line."""
    try:
        from typer import Abort
        from typer.exceptions import TyperException

        from hdet.app.commands import application
    except ModuleNotFoundError as error:
        if error.name in ("typer", "rich"):
            raise MissingExtraError(error.name, "cli") from None
        raise
    try:
        code = application(args=arguments, prog_name="hdet", standalone_mode=False)
    except TyperException as error:
        place = getattr(getattr(error, "ctx", None), "command_path", "hdet")
        said = error.format_message().rstrip()
        raise ConfigError(f"{said}{'' if said.endswith(('.', '?')) else '.'} See {place} --help") from None
    except Abort:
        return INTERRUPTED
    return code if isinstance(code, int) else 0
