"""`hdet export`: what a run's knobs did, to train by again without hdet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hdet.app.report import reported_run
from hdet.errors import ConfigError, HdetError
from hdet.files import replace
from hdet.record import WindowRecord
from hdet.spec import meant

LAMBDA = '''"""{knob} as {run} had it: {count} steps at which a window ended, straight lines between them."""

from bisect import bisect_right

from torch.optim.lr_scheduler import LambdaLR

STEPS = {steps}
VALUES = {values}


def value(step, total_steps=None):
    """The value at an optimizer step; over another length where `total_steps` is given."""
    at = step if total_steps is None else step * (STEPS[-1] + 1) / total_steps
    after = bisect_right(STEPS, at)
    if after in (0, len(STEPS)):
        return VALUES[min(after, len(STEPS) - 1)]
    before = after - 1
    share = (at - STEPS[before]) / (STEPS[after] - STEPS[before])
    return VALUES[before] + share * (VALUES[after] - VALUES[before])


def scheduler(optimizer, total_steps=None):
    """For an optimizer made with lr=1.0: LambdaLR multiplies by that."""
    return LambdaLR(optimizer, lambda step: value(step, total_steps))
'''


class Form(StrEnum):
    """What `hdet export` writes."""

    yaml = "yaml"
    lambda_lr = "lambda-lr"


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, or the history file of a loop of your own.")],
    form: Annotated[Form, typer.Option("--as", help="All knobs in YAML, or one around LambdaLR.")] = Form.yaml,
    knob: Annotated[str | None, typer.Option(help="The knob for lambda-lr; by default the learning rate.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file; by default it is printed.")] = None,
) -> None:
    """Write the course that a run's knobs took, to train by it again without hdet.

    A history holds each base at the last step of every window. These numbers are kept to the last bit; between
    them are straight lines.

    Example: hdet export runs/quickstart --as lambda-lr --out schedule.py
    """
    found = reported_run(run)
    if not found.windows:
        raise HdetError(f"{run} has no window that has closed yet, so there is nothing to export")
    if form is Form.yaml:
        text = as_yaml(found.windows)
    else:
        known = found.knobs
        chosen = knob or next((name for name in known if name.startswith("learning_rate")), known[0])
        if chosen not in known:
            raise ConfigError(f"{run} has no knob {chosen!r}; it has {known}{meant(chosen, known)}")
        text = as_lambda_lr(found.windows, chosen, run=found.name)
    if out is None:
        print(text, end="")
        return
    try:
        replace(out, text.encode())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}; choose another --out") from None
    print(f"{out} written")


def as_yaml(windows: Sequence[WindowRecord]) -> str:
    """By knob, the steps at which windows ended and the bases there.

    >>> record = WindowRecord(0, 0, 5, {"learning_rate": 0.1}, {}, [1.0], {}, {}, False)
    >>> print(as_yaml([record]), end="")
    "learning_rate":
      steps: [4]
      values: [0.1]
    """
    lines = []
    for knob in dict.fromkeys(name for record in windows for name in record.bases):
        steps, values = _course(windows, knob)
        lines += [f"{json.dumps(knob)}:", f"  steps: {steps}", f"  values: [{', '.join(map(_written, values))}]"]
    return "\n".join(lines) + "\n"


def as_lambda_lr(windows: Sequence[WindowRecord], knob: str, *, run: str) -> str:
    """A module with one knob's course and torch's LambdaLR around it."""
    steps, values = _course(windows, knob)
    named = {"knob": ascii(knob)[1:-1], "run": ascii(run)[1:-1]}
    plain = {name: text.replace('"', "'").replace("\\", "/") for name, text in named.items()}
    return LAMBDA.format(**plain, count=len(steps), steps=steps, values=values)


def _course(windows: Sequence[WindowRecord], knob: str) -> tuple[list[int], list[float]]:
    there = [record for record in windows if knob in record.bases]
    return [record.stop - 1 for record in there], [record.bases[knob] for record in there]


def _written(value: float) -> str:
    """As YAML 1.1 reads it back: `1e-05` would be a string there."""
    mantissa, e, exponent = repr(value).partition("e")
    return (mantissa if "." in mantissa else f"{mantissa}.0") + e + exponent if e else mantissa
