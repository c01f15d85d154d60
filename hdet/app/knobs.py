"""`hdet knobs`: what can be declared, with its fields; or what a model of yours has to explore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from inspect import getdoc, signature
from typing import Annotated, Any

import torch
import typer
from torch import nn

from hdet.app.modules import imported
from hdet.app.run.optimizer import Optimizer
from hdet.app.run.signal import Signal
from hdet.app.tasks import Task
from hdet.controllers import Controller, Rule, Veto
from hdet.controllers.estimators import Estimator
from hdet.engine.guard import Guard
from hdet.engine.tail import Tail
from hdet.errors import ConfigError
from hdet.evidence import Evidence
from hdet.hparams import Design, Knob, Schedule, Space, Spread
from hdet.merging import Merge
from hdet.recipes.recommended import choose, describe
from hdet.spec import Spec, meant, members
from hdet.windows import Windows

ROOTS: tuple[type[Spec], ...] = (
    *(Task, Optimizer, Signal, Knob, Space, Spread, Design, Schedule, Evidence, Estimator),
    *(Controller, Rule, Veto, Windows, Merge, Guard, Tail),
)
FAMILIES = {root.family: root for root in ROOTS}
STEPS = 1000
"""Of a run that is only looked at: the recipe's schedule needs a length, and its choices do not depend on it."""


def knobs(
    family: Annotated[str | None, typer.Argument(help=f"One of: {', '.join(FAMILIES)}; by default all.")] = None,
    modules: Annotated[
        list[str] | None, typer.Option("--import", metavar="MODULE", help="Import first: your own knobs, say.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Look at the model and optimizer that this function returns."),
    ] = None,
) -> None:
    """List what a run can be declared with: kinds, fields and defaults, plugins included.

    With --model, say what hdet.recommended would explore in a model, and why it leaves the rest.

    Example: hdet knobs controller
    """
    for name in modules or ():
        imported(name, asked_by="--import")
    if model is not None:
        if family is not None:
            raise ConfigError(f"--model looks at a model, and {family!r} lists a family; say one of them")
        own, optimizer = _made(model)
        print(describe(choose(own, optimizer, STEPS)))
        return
    if family is not None and family not in FAMILIES:
        raise ConfigError(f"there is no family {family!r}; there are {list(FAMILIES)}{meant(family, FAMILIES)}")
    chosen = FAMILIES if family is None else {family: FAMILIES[family]}
    print("\n\n".join("\n".join(listed(root)) for root in chosen.values()))


def listed(root: type[Spec]) -> Iterator[str]:
    """A family's members: kind and first sentence, and below it each field with its default."""
    yield f"{root.family}:"
    for kind, member in sorted(members(root).items()):
        summary = (getdoc(member) or "").split("\n\n")[0].replace("\n", " ")
        yield f"  {kind}: {summary}"
        for name, field in member.model_fields.items():
            default = "required" if field.is_required() else _written(field.get_default(call_default_factory=True))
            yield f"    {name}: {default}"


def _written(value: Any) -> str:
    return json.dumps(value, default=lambda one: one.to_dict() if isinstance(one, Spec) else str(one))


def _made(path: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    module_name, colon, function_name = path.partition(":")
    if not colon:
        raise ConfigError(f"--model takes module:function, such as my_model:build; got {path!r}")
    module = imported(module_name, asked_by="--model")
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"--model: module {module_name!r} has no function {function_name!r}{meant(function_name, vars(module))}"
        )
    try:
        signature(function).bind()
    except TypeError as error:
        raise ConfigError(
            f"--model: {path} is called without arguments: {error}; name a function that needs none"
        ) from None
    made = function()
    pair = made if isinstance(made, tuple) else (made,)
    if len(pair) != 2 or not isinstance(pair[0], nn.Module) or not isinstance(pair[1], torch.optim.Optimizer):
        raise ConfigError(f"--model: {path} must return a model and its optimizer; got {type(made).__name__}")
    return pair
