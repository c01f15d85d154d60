"""Which tasks and contenders there are: the files in tasks/ and contenders/."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

from search_parts import contenders, tasks
from search_parts.contender import Contender
from search_parts.option import Option
from search_parts.task import Task

Kind = TypeVar("Kind")


def all_tasks() -> dict[str, Task]:
    """By name, those that settings were chosen on first."""
    found = [module.TASK for module in _modules(tasks)]
    return {task.name: task for task in sorted(found, key=lambda task: (not task.development, task.name))}


def all_contenders() -> dict[str, Contender]:
    """By name, in the order of tables."""
    found = [module.CONTENDER for module in _modules(contenders)]
    return {contender.name: contender for contender in sorted(found, key=lambda one: (one.order, one.name))}


def all_options() -> dict[str, Option]:
    """What some contenders' authors ask to try first, by the contender's name."""
    return {module.CONTENDER.name: module.OPTION for module in _modules(contenders) if hasattr(module, "OPTION")}


def chosen(there: Mapping[str, Kind], names: Iterable[str] | None, what: str) -> dict[str, Kind]:
    """Those of some names; without names all whose packages are installed.

    Raises:
        ValueError: there is no such.
    """
    if names is None:
        return {name: one for name, one in there.items() if _installed(getattr(one, "needs", None))}
    unknown = sorted(set(names) - set(there))
    if unknown:
        raise ValueError(f"no {what} is called {', '.join(unknown)}; there are {', '.join(there)}")
    return {name: there[name] for name in there if name in set(names)}


def _modules(package: ModuleType) -> list[ModuleType]:
    return [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    ]


def _installed(package: str | None) -> bool:
    return package is None or find_spec(package) is not None
