"""`hdet plan`: what a declared run would do, before it is paid for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hdet.app.figure_file import require_figure
from hdet.app.output import writing
from hdet.app.planning.identifiable import Need, by_noise, by_pilot
from hdet.app.planning.picture import line, plan_figure, ruler
from hdet.app.planning.pilot import Pilot, pilot
from hdet.app.run.config import RunConfig
from hdet.app.run.loop import Training
from hdet.app.table import whole_table
from hdet.app.text import one_line
from hdet.digits import four_digits
from hdet.engine.engine import Engine
from hdet.engine.preview import Preview, preview
from hdet.errors import ConfigError
from hdet.recipes.footprint import footprint, held_by_merge
from hdet.report.figures import write_figure
from hdet.spec import meant

WIDE = 110
EFFECT = 0.01
LARGEST = 1e9
"""Of slopes and their errors."""


def plan(
    config: Annotated[Path, typer.Argument(help="YAML file that declares the run.")],
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a field, as hdet run does.")
    ] = None,
    windows: Annotated[
        int, typer.Option("--pilot", min=0, help="Train this many windows, for noise, time and memory.")
    ] = 0,
    noise: Annotated[
        list[str] | None,
        typer.Option(metavar="KNOB=STDERR", help="Instead of a pilot: the standard error of a window's slope."),
    ] = None,
    effect: Annotated[
        float | None,
        typer.Option(
            min=1e-12,
            max=LARGEST,
            help=f"With --noise: the slope that is to show, in loss per coordinate unit; by default {EFFECT}.",
        ),
    ] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the plan there: a .pdf, .svg or .png file.")] = None,
) -> None:
    """Show what a run would do before it is run: schedules, levels, windows, cost, and what it could tell.

    Nothing is trained unless --pilot asks for it, and nothing is written but --figure.

    Example: hdet plan examples/quickstart.yaml --pilot 3 --figure plan.png
    """
    if effect is not None and not noise:
        raise ConfigError(
            "--effect is the slope that is to show in a noise given by --noise; say both, or leave it out"
        )
    if figure is not None:
        require_figure(figure)
    declared = RunConfig.load(config, assignments or ())
    engine = Training(declared, declared.workload()).engine
    seen = preview(engine)
    told = _noise(noise or (), list(seen.knobs))
    if windows and told:
        raise ConfigError("--pilot measures the noise and --noise gives it; say one of them")
    if windows > len(seen.windows):
        raise ConfigError(f"--pilot {windows}: the run has {_windows(len(seen.windows))}; give fewer")
    _show(config, seen, engine.home.size)
    if figure is not None:
        with writing(figure, "--figure"):
            write_figure(plan_figure(seen, title=config.stem), figure)
        print(f"{figure} written")
    print(_held(declared, engine))
    needs = [by_noise(knob, stderr, effect or EFFECT, len(seen.windows)) for knob, stderr in told.items()]
    if windows:
        del engine  # the pilot's is its own, and its memory is measured
        measured = pilot(declared, windows)
        _show_cost(measured, declared.steps, seen)
        needs = [by_pilot(knob, measured.windows, len(seen.windows)) for knob in seen.knobs]
    if needs:
        _show_needs(needs)
    else:
        print("cost, memory and noise: not measured; --pilot 3 trains three windows to tell")


def _noise(given: list[str] | tuple[()], knobs: list[str]) -> dict[str, float]:
    told = {}
    for one in given:
        knob, equals, number = one.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not equals or not 0.0 < value <= LARGEST:
            raise ConfigError(
                f"--noise takes KNOB=STDERR with a positive number up to {LARGEST:g}, such as dropout=0.02; got {one!r}"
            )
        if knob not in knobs:
            raise ConfigError(f"--noise: the run explores no knob {knob!r}; it explores {knobs}{meant(knob, knobs)}")
        told[knob] = value
    return told


def _windows(count: int) -> str:
    return f"{count} window{'s' * (count != 1)}"


def _show(config: Path, seen: Preview, replicas: int) -> None:
    lengths = [stop - start for start, stop in seen.windows]
    print(
        f"{config}: {seen.windows[-1][1]} steps in {_windows(len(lengths))} of {min(lengths)} to {max(lengths)} "
        f"steps, {replicas} replica{'s' * (replicas > 1)}"
    )
    for knob in seen.knobs.values():
        base = f"{four_digits(min(knob.bases))} to {four_digits(max(knob.bases))}"
        compared = f"{four_digits(min(knob.low))} and {four_digits(max(knob.high))}"
        print(
            f"\n{one_line(knob.name)}: base {base}, compared between {compared}; {knob.evidence} evidence, moved by "
            f"{knob.controller}"
        )
        print(f"  {line(knob, sys.stdout.encoding or 'utf-8')}")
    print(f"  {ruler(seen)} windows\n")


def _held(declared: RunConfig, engine: Engine) -> str:
    """What the search holds and moves beside plain training, in lines."""
    model, optimizer = engine.home.hosts[0]
    knobs = [knob.spec for knob in engine.knobs]
    if declared.copies:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        explored = any(knob.acts_on == "merge" for knob in knobs)
        parts = held_by_merge(declared.merge, model, optimizer, explored=explored)
        lines = [f"weights: {_bytes(size)} in each of {len(engine.home.hosts)} models that come apart"]
        return "\n".join([*lines, *(f"{part.what}: {_bytes(part.size)}, {part.when}" for part in parts)])
    found = footprint(
        model,
        optimizer,
        knobs,
        guard=declared.guard,
        tail=declared.tail,
        replicas=engine.home.size,
        merge=declared.merge,
    )
    return f"{found}\n"


def _show_cost(measured: Pilot, steps: int, seen: Preview) -> None:
    whole, closing = measured.seconds(steps, len(seen.windows))
    peak = measured.peak_bytes
    memory = f"{_bytes(peak)} at most, of {measured.on}" if peak is not None else "not told by this system"
    print(
        f"time, by a pilot of {_windows(len(measured.windows))}: about {whole:.3g} s, {100 * closing / whole:.1f} % "
        f"of it at windows' ends ({1e3 * measured.step_seconds:.3g} ms a step, "
        f"{1e3 * measured.closing_seconds:.3g} ms an end)\n"
        f"memory: {memory}"
    )


def _show_needs(needs: list[Need]) -> None:
    table = whole_table("knob", "|t| of a window", "can be moved with confidence after")
    for need in needs:
        t = "-" if need.t != need.t else f"{need.t:.2g}"
        table.add_row(*(Text(cell) for cell in (one_line(need.knob), t, need.words)))
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDE).print(table)
    print("Windows on one fixed probe err alike, so these numbers are the least that is needed.")


def _bytes(count: int) -> str:
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"
