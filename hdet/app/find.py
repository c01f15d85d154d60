"""`hdet find`: a tenth of a declared run, spent before it, on what its learning rate should be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from hdet.app.run.config import RunConfig
from hdet.errors import ConfigError
from hdet.hparams import LearningRate, Schedule
from hdet.hparams.schedule import Constant
from hdet.replicas.parallel import world
from hdet.replicas.perturb import perturb
from hdet.report.figures import blank_figure
from hdet.signals import Probe
from hdet.trials import find as rate_from_trials


def find(
    config: Annotated[Path, typer.Argument(help="YAML file that declares the run.")],
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a field, as hdet run does.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of all trials together; by default a tenth of the run's.")
    ] = None,
    trials: Annotated[int, typer.Option(min=3, help="How many rates to try.")] = 5,
    figure: Annotated[Path | None, typer.Option(help="Draw the trials there: a .pdf, .svg or .png file.")] = None,
) -> None:
    """Find a learning rate for a run by short trials of it, and print the lines to put into its file.

    Nothing is written but --figure. Every replica's batch counts as a micro-batch of one model.

    Example: hdet find examples/quickstart.yaml
    """
    if world() > 1:
        raise ConfigError("hdet find tries rates in one process; start it without torchrun")
    if figure is not None and figure.suffix not in (".pdf", ".svg", ".png"):
        raise ConfigError(f"--figure {figure}: figures are written as .pdf, .svg or .png; give such a name")
    if figure is not None:  # what keeps it from being written is told before the trials
        blank_figure(1.0, 1.0)
        with _writing(figure):
            figure.parent.mkdir(parents=True, exist_ok=True)
            if figure.is_dir():
                raise IsADirectoryError("it is a folder")
            if not os.access(figure if figure.exists() else figure.parent, os.W_OK):
                raise PermissionError("it may not be written")
    declared = RunConfig.load(config, assignments or ())
    workload = declared.workload()
    model = workload.model()
    perturb(model, 0.0, replica=0, checkpoint=declared.start_path)
    schedule = _schedule(declared)
    peak = schedule.nominal_peak()
    optimizer = declared.optimizer.replace(lr=peak).build(workload.groups(model))
    size = declared.replicas
    estimate = rate_from_trials(
        model,
        optimizer,
        loss=workload.loss,
        batches=lambda number: workload.batch(number // size, number % size),
        probe=Probe(workload.loss, workload.probe),
        total_steps=declared.steps,
        steps=steps,
        trials=trials,
        schedule=schedule,
        micro_batches=size,
        clip=declared.clip,
        seed=declared.seed,
    )
    print(f"{estimate}\n\n{estimate.to_yaml()}")
    if peak != declared.optimizer.lr:
        print(f"# {config} gives its schedule a peak of its own, {peak:g}: set that too")
    if figure is not None:
        with _writing(figure):
            estimate.plot().savefig(figure, dpi=200)
        print(f"{figure} written")


@contextmanager
def _writing(figure: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{figure} cannot be written: {error}; choose another --figure") from None


def _schedule(declared: RunConfig) -> Schedule:
    """Of the learning rate: of the first knob that has one of its own, else the run's, which holds it without one."""
    own = [knob.schedule for knob in declared.knobs or () if isinstance(knob, LearningRate) and knob.schedule]
    return own[0] if own else declared.schedule or Constant(declared.optimizer.lr)
