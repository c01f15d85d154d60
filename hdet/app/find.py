"""`hdet find`: a tenth of a declared run, spent before it, on what its learning rate should be."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hdet.app.figure_file import require_figure
from hdet.app.output import writing
from hdet.app.run.config import RunConfig
from hdet.errors import ConfigError
from hdet.hparams import LearningRate, Schedule
from hdet.hparams.schedule import Constant
from hdet.replicas.parallel import world
from hdet.replicas.perturb import perturb
from hdet.report.figures import write_figure
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
    if figure is not None:
        require_figure(figure)  # before the trials
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
        with writing(figure, "--figure"):
            write_figure(estimate.plot(), figure)
        print(f"{figure} written")


def _schedule(declared: RunConfig) -> Schedule:
    """Of the learning rate: of the first knob that has one of its own, else the run's, which holds it without one."""
    own = [knob.schedule for knob in declared.knobs or () if isinstance(knob, LearningRate) and knob.schedule]
    return own[0] if own else declared.schedule or Constant(declared.optimizer.lr)
