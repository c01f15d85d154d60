"""A contender's single most important option, searched over a few values, and the best of them in hindsight."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from search_parts.contender import Contender
from search_parts.outcome import Findings


@dataclass(frozen=True)
class Option:
    """What a contender's authors ask to try first.

    Attributes:
        title: of the option. values: the contender by its values, the default's among them.
    """

    title: str
    values: tuple[Contender, ...]


def named(name: str, value: float, default: float) -> str:
    """A contender's name: at the default the plain one, so that its results are found again."""
    return name if value == default else f"{name}_{value:.3g}"


def in_hindsight(findings: Findings, options: Mapping[str, Option]) -> Findings:
    """The same, and of each option the value that did best on a task, in the mean over its starts and seeds.

    Nobody has this contender: it is told by the test losses which value to take. So it bounds what a search over these
    values could reach, and the search itself is not charged.

    Args:
        options: by the name of the contender at its default.
    """
    contenders, runs = dict(findings.contenders), dict(findings.runs)
    for name, option in options.items():
        best = copy.copy(findings.contenders[name])
        best.name = f"{name}_best"  # type: ignore[misc]
        best.title = f"{best.title}, best of {len(option.values)} ({option.title})"  # type: ignore[misc]
        contenders[best.name] = best
        for task in findings.tasks.values():
            value = min(option.values, key=lambda one: _mean_loss(findings, task.name, one.name))
            for start in task.starts:
                runs[task.name, start.name, best.name] = findings.runs[task.name, start.name, value.name]
    values = {one.name for option in options.values() for one in option.values} - set(options)
    shown = {name: one for name, one in contenders.items() if name not in values}
    return replace(findings, contenders=shown, runs=runs)


def with_values(contenders: Iterable[Contender], options: Mapping[str, Option]) -> dict[str, Contender]:
    """By name: contenders, and those that have an option by all its values."""
    return {
        value.name: value
        for one in contenders
        for value in (options[one.name].values if one.name in options else (one,))
    }


def _mean_loss(findings: Findings, task: str, contender: str) -> float:
    """Of all starts and seeds; infinite where there is none."""
    losses = [loss for start in findings.tasks[task].starts for loss in findings.losses(task, start.name, contender)]
    return float(np.mean(losses)) if losses else float("inf")
