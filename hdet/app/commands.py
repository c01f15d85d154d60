"""What the command `hdet` can do. Needs the extra `cli`."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import hdet
from hdet.app.doctor import doctor
from hdet.app.ending import ended_early, terminable
from hdet.app.export import export
from hdet.app.find import find
from hdet.app.knobs import knobs
from hdet.app.planning.command import plan
from hdet.app.report import report
from hdet.app.run.config import RunConfig
from hdet.app.run.display import Display, show_result
from hdet.app.run.folder import RunFolder
from hdet.app.run.launching import GOES_ON, launch, leads, led, ranks, restarted, shared_out
from hdet.app.run.runner import Run
from hdet.app.study.command import ablate
from hdet.app.watch import watch
from hdet.errors import HdetError
from hdet.recipes.recommended import describe

WIDE = 110
COMPARES_ANEW = "; the run is over, and --resume --compare begins the one without hdet anew"


class Commands(TyperGroup):
    """Tells of Ctrl-C, SIGTERM and broken pipes where a command did not: typer passes over them in silence."""

    def make_context(self, *given: Any, **named: Any) -> Any:
        with _told():
            return super().make_context(*given, **named)

    def invoke(self, ctx: Any) -> Any:
        with _told():
            return super().invoke(ctx)


@contextmanager
def _told() -> Iterator[None]:
    try:
        with terminable():
            yield
    except KeyboardInterrupt as error:
        raise typer.Exit(ended_early(error)) from None
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        raise HdetError(
            f"what the command was connected to, such as a server of data, has closed the connection ({error}); "
            f"--debug shows where"
        ) from error


application = typer.Typer(
    name="hdet",
    help="Online hyperparameter search inside one training run.",
    pretty_exceptions_enable=False,
    cls=Commands,
)


def _version(asked: bool) -> None:
    if asked:
        print(hdet.__version__)
        raise typer.Exit


@application.callback()
def hdet_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show an error's traceback; may stand anywhere.")] = False,
) -> None:
    """Online hyperparameter search inside one training run."""


@application.command()
def run(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML file that declares the run.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field: --set knobs.0.spread.width=0.2"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Override the seed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/ and the file's name.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Train again without hdet, beside it.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a run in the folder.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    replicas: Annotated[int | None, typer.Option(help="Override the number of replicas.")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Share the replicas out over this many processes of this machine.")
    ] = 1,
) -> None:
    """Train a task with the engine; under torchrun, on all its ranks. A restart by torchrun goes on with the run.

    Example: hdet run examples/quickstart.yaml --compare --set steps=200
    """
    changed = [*(assignments or ()), *([f"replicas={replicas}"] if replicas is not None else [])]
    declared = RunConfig.load(config, changed, seed=seed)
    folder = out if out is not None else Path("runs") / config.stem
    if processes > 1:
        shared_out(declared.replicas, processes)
        RunFolder(folder).check(declared, force=force, resume=resume)
        flags = {"--compare": compare, "--force": force, "--resume": resume}
        arguments = ["--debug"] if context.find_root().params["debug"] else []
        arguments += ["run", "--out", str(folder), *(flag for flag, said in flags.items() if said)]
        arguments += [part for assignment in changed for part in ("--set", assignment)]
        arguments += ["--seed", str(seed)] if seed is not None else []
        raise typer.Exit(launch(processes, [*arguments, "--", str(config)]))  # its name may begin with a dash
    with ranks(declared.device):
        again = restarted() and led(RunFolder(folder).config.exists)
        _run(declared, folder, compare=compare, force=force and not again, resume=resume or again, again=again)


def _run(declared: RunConfig, folder: Path, *, compare: bool, force: bool, resume: bool, again: bool) -> None:
    """Run, or go on with the run `again`, which torchrun has started anew; one that is over is left as it is."""
    prepared = Run(declared, folder, force=force, resume=resume)
    if again and prepared.over(compare=compare):
        return
    if not leads():
        prepared(compare=compare)
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    for split, fact in prepared.workload.facts.items():
        console.print(f"{split}: {fact}", markup=False, soft_wrap=True)
    if declared.knobs is None:
        training = prepared.training
        choices = declared.choices(training.model, training.engine.optimizers[0])
        console.print(describe(choices, guard=declared.guard, tail=declared.tail), markup=False, soft_wrap=True)
    try:
        result = prepared(compare=compare, watcher=Display(console))
    except KeyboardInterrupt as error:
        trained = prepared.folder.result.exists()
        raise typer.Exit(ended_early(error, COMPARES_ANEW if trained else GOES_ON)) from None
    show_result(console, result, prepared.folder)


for command in (plan, find, report, watch, export, knobs, doctor, ablate):
    application.command()(command)
