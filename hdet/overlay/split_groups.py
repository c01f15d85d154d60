"""An optimizer's parameter groups, cut where patterns on parameter names ask for a learning rate of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import ConfigError, MatchError
from hdet.evidence.parts.scale import spectral_gain
from hdet.hparams.knob import Knob
from hdet.hparams.update import GroupKnob, LearningRate
from hdet.nn.names import named_modules

OTHERS = "others"
OF_PARAMETERS = ("params", "param_names")
"""Entries of a group that hold something for each parameter."""
MOST_NAMED = 8
"""Names in a message."""
Patterns = Mapping[str, str | Sequence[str]]


class SplitGroups:
    """Parameter groups of an optimizer, none of which holds parameters of two names.

    A group that does is cut: its first part stays in its place, the others follow after all groups, with the same
    settings. The optimizer's state belongs to parameters and is not touched.

    Args:
        names: of parameters, by their id (`by_pattern`, `by_matrix`). Those that are not in it are called `OTHERS`.

    Attributes:
        indices: by name, the groups that hold its parameters.

    Raises:
        ConfigError: a name is that of the others too; or a group would have to be cut that a torch scheduler drives,
            which counts groups.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._before = [
            {key: list(group[key]) for key in OF_PARAMETERS if key in group} for group in optimizer.param_groups
        ]
        if OTHERS in names.values() and not names.keys() >= _held(optimizer):
            raise ConfigError(
                f"rates= calls a group {OTHERS!r}, and so hdet calls the parameters that no pattern matches; give it "
                f"another name, or patterns that match all"
            )
        parts = [_parted(own, names) for own in self._before]
        _refuse_scheduled(optimizer, parts)
        self.indices: dict[str, list[int]] = {name: [] for name in (*names.values(), OTHERS)}
        self._parts: dict[int, tuple[int, ...]] = {}
        for index, cut in enumerate(parts):
            group, first, *others = optimizer.param_groups[index], *cut.values()
            places = (index, *range(len(optimizer.param_groups), len(optimizer.param_groups) + len(others)))
            optimizer.param_groups += [{**group, **own} for own in others]
            group.update(first)
            self._parts[index] = places
            for name, place in zip(cut, places, strict=True):
                self.indices[name].append(place)
        self.indices = {name: held for name, held in self.indices.items() if held}
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def follow(self, knob: Knob) -> Knob:
        """A knob of groups that were cut is one of all their parts, but for a learning rate, which is of one part."""
        if isinstance(knob, LearningRate) or not isinstance(knob, GroupKnob) or knob.groups is None:
            return knob
        chosen = knob.groups if isinstance(knob.groups, tuple) else (knob.groups,)
        whole = [part for own in chosen for part in (self._parts.get(own, (own,)) if isinstance(own, int) else (own,))]
        return knob if whole == list(chosen) else knob.replace(groups=tuple(whole), name=knob.label)

    def pass_on(self) -> None:
        """Parts that have the first one's rate follow it: the loop may know of that group alone."""
        groups = self._optimizer.param_groups
        for index, (_, *others) in self._parts.items():
            rate = groups[index]["lr"]
            if isinstance(rate, Tensor) or rate == self._rates[index]:
                continue
            for other in others:
                if groups[other]["lr"] == self._rates[other] == self._rates[index]:
                    groups[other]["lr"] = rate
        self._rates = [group["lr"] for group in groups]

    def undo(self) -> None:
        """The groups are again as they were; the first part's settings are those of the whole.

        A group that was added since by somebody else stays.
        """
        groups = self._optimizer.param_groups
        for group, own in zip(groups, self._before, strict=False):
            group.update(own)
        cut = {id(parameter) for own in self._before for parameter in own["params"]}
        first = len(self._before)
        groups[first:] = [group for group in groups[first:] if not cut.intersection(map(id, group["params"]))]


def by_pattern(model: nn.Module, optimizer: Optimizer, patterns: Patterns) -> dict[int, str]:
    """The name that each of the optimizer's parameters goes by, by its id; those that no pattern matches have none.

    Args:
        patterns: by name one shell pattern on parameter names, or several (`"blocks.*.attention.*"`; `*` matches dots
            too). The first name that matches a parameter has it.

    Raises:
        MatchError: a pattern matches no parameter that the optimizer holds.
        ConfigError: there is no name, or one that no parameter has.
    """
    if not patterns:
        raise ConfigError('rates={} names no group; give names with patterns on parameter names, or rates="together"')
    held = _held(optimizer)
    known = [(name, parameter) for name, parameter in _parameters(model) if id(parameter) in held]
    found: dict[int, str] = {}
    for name, given in patterns.items():
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise ConfigError(f"rates= names each group by a printable string, got {name!r}")
        given = (given,) if isinstance(given, str) else given
        if not isinstance(given, Collection) or not all(isinstance(pattern, str) for pattern in given):
            raise ConfigError(
                f"rates={{{name!r}: ...}} takes a pattern on parameter names or a list of them, got {given!r}"
            )
        for pattern in given:
            matched = [parameter for path, parameter in known if fnmatchcase(path, pattern)]
            if not matched:
                raise MatchError(
                    f"rates={{{name!r}: ...}}: no parameter that the optimizer holds matches {pattern!r}; there are "
                    f"{', '.join(path for path, _ in known[:MOST_NAMED])}{', ...' if len(known) > MOST_NAMED else ''}"
                )
            for parameter in matched:
                found.setdefault(id(parameter), name)
        if name not in found.values():
            raise ConfigError(
                f"rates={{{name!r}: ...}} is left with no parameter, since names before it have all that its patterns "
                f"match; put it before them, or leave it out"
            )
    return found


def by_matrix(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """The name in the model of each trained matrix that the optimizer holds, by its id.

    Filters and stacks of matrices count too; what has one row, or one column, is a vector.

    Raises:
        ConfigError: there is none.
    """
    held = _held(optimizer)
    found: dict[int, str] = {}
    for name, parameter in _parameters(model):
        if id(parameter) in held and parameter.requires_grad and spectral_gain(parameter) > 0.0:
            found.setdefault(id(parameter), name)
    if not found:
        raise ConfigError('rates="matrices" finds no matrix that this optimizer trains; give rates="together"')
    return found


def _held(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter by every name it has, free of what wrappers put in between."""
    for path, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{path}.{name}" if path else name, parameter


def _parted(own: Mapping[str, list[Any]], names: Mapping[int, str]) -> dict[str, dict[str, list[Any]]]:
    """By name, the part of a group's entries that is of its parameters."""
    parts: dict[str, dict[str, list[Any]]] = {}
    for place, parameter in enumerate(own["params"]):
        part = parts.setdefault(names.get(id(parameter), OTHERS), {key: [] for key in own})
        for key, each in own.items():
            part[key].append(each[place])
    return parts or {OTHERS: {key: [] for key in own}}


def _refuse_scheduled(optimizer: Optimizer, parts: Sequence[Mapping[str, Any]]) -> None:
    for index, cut in enumerate(parts):
        if len(cut) > 1 and "initial_lr" in optimizer.param_groups[index]:
            names = f"{', '.join(map(repr, list(cut)[:MOST_NAMED]))}{', ...' if len(cut) > MOST_NAMED else ''}"
            raise ConfigError(
                f"the optimizer's group {index} holds parameters of {names}, and a torch scheduler drives it (it holds "
                f"'initial_lr'), which cannot follow when the group is cut; give the optimizer one group for each name "
                f'before you make the scheduler, and hdet.attach rates="groups"'
            )
