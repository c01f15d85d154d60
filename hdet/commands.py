"""What the command `hdet` can do. Needs the extra `cli`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import hdet
from hdet.running.config import RunConfig
from hdet.running.display import Display, show_result
from hdet.running.runner import Run
from hdet.study.command import ablate

WIDE = 110
INTERRUPTED = 130

application = typer.Typer(
    name="hdet", help="Online hyperparameter search inside one training run.", pretty_exceptions_enable=False
)


def _version(asked: bool) -> None:
    if asked:
        print(hdet.__version__)
        raise typer.Exit


@application.callback()
def hdet_command(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Online hyperparameter search inside one training run."""


@application.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML file that declares the run.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field: --set knobs.0.spread.width=0.2"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Override the seed.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder; by default runs/ and the file's name.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Train again without hdet, beside it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a run in the folder.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
) -> None:
    """Train a task with the engine."""
    declared = RunConfig.load(config, assignments or (), seed=seed)
    prepared = Run(
        declared, out if out is not None else Path("runs") / config.stem, force=force, resume=resume
    )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    for split, fact in prepared.workload.facts.items():
        console.print(f"{split}: {fact}", markup=False, soft_wrap=True)
    try:
        result = prepared(compare=compare, watcher=Display(console))
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from the end of the last window", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    show_result(console, result, prepared.folder)


application.command()(ablate)
