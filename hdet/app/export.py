"""`hdet export`: what a run's knobs did, to train by again without hdet."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hdet.app.output import writing
from hdet.app.report import reported_run
from hdet.errors import ConfigError, HdetError
from hdet.files import replace
from hdet.hparams import Knob, LearningRate
from hdet.hparams.recorded import kept_steps, recorded_course
from hdet.record import WindowRecord, knobs_of
from hdet.report.advice import yaml_number
from hdet.spec import meant, members, some

LAMBDA = '''"""{knob} as {run} had it {when}."""

from torch.optim.lr_scheduler import LambdaLR

VALUES = [
{values}
]


def value(step, total_steps=None):
    """The value at an optimizer step; stretched or shrunk to another length where `total_steps` is given."""
    if total_steps is None:
        return VALUES[min(step, len(VALUES) - 1)]
    gaps = max(total_steps - 1, 1)
    before, rest = divmod(min(step, total_steps - 1) * (len(VALUES) - 1), gaps)
    low = VALUES[before]
    return low + (VALUES[before + 1] - low) * (rest / gaps) if rest else low


def scheduler(optimizer, total_steps=None):
    """The optimizer's first group takes these values; every other group keeps its ratio to the first."""
    rates = [float(group["lr"]) or float(group.get("initial_lr", 0.0)) for group in optimizer.param_groups]
    first = next((rate for rate in rates if rate), 0.0)
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = group["initial_lr"] = rate / first if first else 1.0
    return LambdaLR(optimizer, lambda step: value(step, total_steps))
'''


class Form(StrEnum):
    """What `hdet export` writes."""

    yaml = "yaml"
    lambda_lr = "lambda-lr"


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, or the history file of a loop of your own.")],
    form: Annotated[Form, typer.Option("--as", help="All knobs in YAML, or one around LambdaLR.")] = Form.yaml,
    knob: Annotated[str | None, typer.Option(help="The learning rate for lambda-lr, if not the only one.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file; by default it is printed.")] = None,
) -> None:
    """Write the course that a run's knobs took, to train by it again without hdet.

    A history holds each base at every step, and each is written to the last bit.

    Where the run went back to an earlier point, the steps thrown away are left out, the others stretched to its length.

    In Python, hdet.ReplayLR trains by the history itself.

    Example: hdet export runs/quickstart --as lambda-lr --out schedule.py
    """
    if knob is not None and form is Form.yaml:
        raise ConfigError(
            "--knob chooses a rate for --as lambda-lr, and YAML has all knobs; leave it out, or say --as lambda-lr"
        )
    found = reported_run(run)
    if not found.windows:
        raise HdetError(f"{run} has no window that has closed yet, so there is nothing to export")
    if not found.knobs:
        raise HdetError(f"{run} has no knob whose course it could write, so there is nothing to export")
    if form is Form.yaml:
        text = as_yaml(found.windows)
    else:
        text = as_lambda_lr(found.windows, _rate(found.knobs, knob, run), run=found.name)
    if out is None:
        print(text, end="")
        return
    with writing(out, "--out"):
        if out.is_dir():
            raise IsADirectoryError("it is a folder")
        replace(out, text.encode())
    print(f"{out} written")


def _rate(known: Sequence[str], given: str | None, run: Path) -> str:
    """The knob that is the learning rate, which is all that LambdaLR writes.

    Raises:
        ConfigError: there is none, or several; or the one that was given is none.
    """
    if given is not None:
        if given not in known:
            raise ConfigError(f"{run} has no knob {given!r}; it has {some(known)}{meant(given, known)}")
        kind = given.partition("[")[0]
        if kind != LearningRate.kind and kind in members(Knob):
            raise ConfigError(f"LambdaLR writes learning rates, and {given!r} is none; export it with --as yaml")
        return given
    rates = [name for name in known if name.partition("[")[0] == LearningRate.kind]
    if not rates:
        raise ConfigError(
            f"{run} has no learning_rate, and LambdaLR writes nothing else; it has {some(known)}: choose by --knob the "
            f"one that is a learning rate, or export all with --as yaml"
        )
    if len(rates) > 1:
        raise ConfigError(
            f"{run} has several learning rates, {some(rates)}, and LambdaLR would be given one for all groups; export "
            f"all with --as yaml, train by hdet.ReplayLR(optimizer, history, model=model), or choose by --knob the one "
            f"that the first group has, and the others keep their ratio to"
        )
    return rates[0]


def as_yaml(windows: Sequence[WindowRecord]) -> str:
    """By knob, from the step that each piece begins at: a base for each step, or one that holds until the next piece.

    A first line says so where the run went back to an earlier point, and where it ended with averaged weights.

    >>> records = [
    ...     WindowRecord(0, 0, 2, {"lr": 0.2}, {}, [1.0], {}, {}, False, course={"lr": [0.1, 0.2]}),
    ...     WindowRecord(1, 2, 5, {"lr": 0.2}, {}, [1.0], {}, {}, False, course={"lr": [0.2]}),
    ... ]
    >>> print(as_yaml(records), end="")
    "lr":
      total_steps: 5
      bases:
        0: [0.1, 0.2]
        2: 0.2
    """
    as_it_was = len(kept_steps(windows)) == windows[-1].stop and not windows[-1].tail
    lines = [] if as_it_was else [f"# As it was at {_when(windows)}."]
    for knob in knobs_of(windows):
        course = recorded_course(windows, knob)
        lines += [f"{json.dumps(knob)}:", f"  total_steps: {len(course)}", "  bases:"]
        held: float | None = None
        for record in windows:
            bases = course[record.start : record.stop]
            if any(base != bases[0] for base in bases):
                lines.append(f"    {record.start}: [{', '.join(yaml_number(repr(base)) for base in bases)}]")
                held = None
            elif bases[0] != held:
                held = bases[0]
                lines.append(f"    {record.start}: {yaml_number(repr(held))}")
    return "\n".join(lines) + "\n"


def as_lambda_lr(windows: Sequence[WindowRecord], knob: str, *, run: str) -> str:
    """A module with one knob's course and torch's LambdaLR around it."""
    course = recorded_course(windows, knob)
    named = {"knob": ascii(knob)[1:-1], "run": ascii(run)[1:-1]}
    plain = {name: text.replace('"', "'").replace("\\", "/") for name, text in named.items()}
    values = textwrap.fill(", ".join(map(repr, course)) + ",", 116, initial_indent="    ", subsequent_indent="    ")
    return LAMBDA.format(**plain, when=f"at {_when(windows)}", values=values)


def _when(windows: Sequence[WindowRecord]) -> str:
    """Which steps a course is of, and what else the run did with its weights."""
    kept, total = len(kept_steps(windows)), windows[-1].stop
    steps = f"the {kept} steps that led to its final weights, stretched over all {total}"
    if kept == total:
        steps = f"each of its {total} steps"
    averaged = windows[-1].averaged_over
    return f"{steps}; it ended with averaged weights ({averaged})" if averaged else steps
