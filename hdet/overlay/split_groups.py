"""An optimizer's parameter groups, cut where patterns on parameter names ask for a learning rate of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hdet.errors import ConfigError, MatchError
from hdet.nn.names import named_modules

OTHERS = "others"
Patterns = Mapping[str, str | Sequence[str]]


class SplitGroups:
    """Parameter groups of an optimizer, none of which holds parameters of two names.

    A group that does is cut: its first part stays in its place, the others follow after all groups, with the same
    settings. The optimizer's state belongs to parameters and is not touched.

    Args:
        patterns: by name one shell pattern on parameter names, or several (`"blocks.*.attention.*"`; `*` matches dots
            too). The first name that matches a parameter has it; parameters that none matches are called `OTHERS`.

    Attributes:
        indices: by name, the groups that hold its parameters.

    Raises:
        MatchError: a pattern matches no parameter that the optimizer holds.
        ConfigError: a group would have to be cut that a torch scheduler drives, which counts groups.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, patterns: Patterns) -> None:
        self._optimizer = optimizer
        self._before = [list(group["params"]) for group in optimizer.param_groups]
        names = _named(model, optimizer, patterns)
        parts = [_parted(own, names) for own in self._before]
        _refuse_scheduled(optimizer, parts)
        self.indices: dict[str, list[int]] = {name: [] for name in (*patterns, OTHERS)}
        for index, cut in enumerate(parts):
            for number, (name, own) in enumerate(cut.items()):
                group = optimizer.param_groups[index]
                if number == 0:
                    group["params"] = own
                    self.indices[name].append(index)
                else:
                    self.indices[name].append(len(optimizer.param_groups))
                    optimizer.param_groups.append({**group, "params": own})
        self.indices = {name: held for name, held in self.indices.items() if held}

    def undo(self) -> None:
        """The groups are again as they were; the first part's settings are those of the whole.

        A group that was added since by somebody else stays.
        """
        groups = self._optimizer.param_groups
        for group, own in zip(groups, self._before, strict=False):
            group["params"] = own
        cut = {id(parameter) for own in self._before for parameter in own}
        first = len(self._before)
        groups[first:] = [group for group in groups[first:] if not cut.intersection(map(id, group["params"]))]


def _named(model: nn.Module, optimizer: Optimizer, patterns: Patterns) -> dict[int, str]:
    """The name that each of the optimizer's parameters goes by, by its id."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = [(name, parameter) for name, parameter in _parameters(model) if id(parameter) in held]
    found: dict[int, str] = {}
    for name, given in patterns.items():
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise ConfigError(f"rates= names each group by a printable string, got {name!r}")
        for pattern in (given,) if isinstance(given, str) else given:
            matched = [parameter for path, parameter in known if fnmatchcase(path, pattern)]
            if not matched:
                raise MatchError(
                    f"rates={{{name!r}: ...}}: no parameter that the optimizer holds matches {pattern!r}; there are "
                    f"{', '.join(path for path, _ in known[:8])}{', ...' if len(known) > 8 else ''}"
                )
            for parameter in matched:
                found.setdefault(id(parameter), name)
    return found


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter by every name it has, free of what wrappers put in between."""
    for path, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{path}.{name}" if path else name, parameter


def _parted(own: Sequence[nn.Parameter], names: Mapping[int, str]) -> dict[str, list[nn.Parameter]]:
    parts: dict[str, list[nn.Parameter]] = {}
    for parameter in own:
        parts.setdefault(names.get(id(parameter), OTHERS), []).append(parameter)
    return parts


def _refuse_scheduled(optimizer: Optimizer, parts: Sequence[Mapping[str, Any]]) -> None:
    for index, cut in enumerate(parts):
        if len(cut) > 1 and "initial_lr" in optimizer.param_groups[index]:
            raise ConfigError(
                f"the optimizer's group {index} holds parameters of {', '.join(map(repr, cut))}, and a torch scheduler "
                f"drives it (it holds 'initial_lr'), which cannot follow when the group is cut; give the optimizer one "
                f'group for each name before you make the scheduler, and hdet.attach rates="groups"'
            )
