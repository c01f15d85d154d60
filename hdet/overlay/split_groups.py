"""An optimizer's parameter groups, cut for the time of a step where parameters have a learning rate of their own."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hdet.errors import CheckpointError, ConfigError, MatchError, StepError
from hdet.evidence.parts.scale import spectral_gain
from hdet.hparams.knob import Knob
from hdet.hparams.param_groups import ids_of
from hdet.hparams.update import GroupKnob, Groups, LearningRate
from hdet.nn.names import named_modules, named_parameters
from hdet.replicas import tensors
from hdet.replicas.chained_optimizer import OWNER, ChainedOptimizer, chained
from hdet.replicas.held_optimizer import OF_GRADIENTS
from hdet.replicas.optimizer_numbers import kept_in_groups
from hdet.spec import some

OTHERS = "others"
OF_PARAMETERS = ("params", "param_names")
"""Entries of a group that hold something for each parameter."""
OF_ONE_PART = frozenset({*OF_PARAMETERS, "lr"})
"""Entries in which parts of a group differ."""
MOST_MATRICES = 300
"""Matrices from which on one rate is kept by default: each with its own takes the host some 30 µs a step."""
COMPARED = (SGD, Adam, AdamW)
"""Optimizers with which a rate for each matrix was measured, and Adam, which is AdamW but for decay."""
PLAIN = (bool, int, float, str)
_ABSENT = object()
Patterns = Mapping[str, str | Sequence[str]]
Group = dict[str, Any]


class SplitGroups:
    """Parameter groups of an optimizer, none of which holds parameters of two names while they are cut.

    A cut group's first part stands in its place, the others follow after all groups. Parts have the settings that their
    group has whenever they are put in. The optimizer's state belongs to parameters and is not touched. Groups are whole
    wherever a loop, a scheduler or a checkpoint looks at them, as long as these do so between `take_out` and `put_in`.

    Where an optimizer steps a group in one call, parts of one rate are one group while it steps (`join`).

    Args:
        names: of parameters, by their id (`by_pattern`, `by_matrix`). Those that are not in it are called `OTHERS`.

    Attributes:
        indices: by name, the parts that hold its parameters.
        owners: by part, the place of the group that it is cut from.
        in_force: whether the optimizer holds the parts.

    Raises:
        ConfigError: a name is that of the others too.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        if OTHERS in names.values() and not names.keys() >= ids_of(optimizer):
            raise ConfigError(
                f"rates= calls a group {OTHERS!r}, and so hdet calls the parameters that no pattern matches; give it "
                f"another name, or patterns that match all"
            )
        self._optimizer = optimizer
        self._wholes = list(optimizer.param_groups)
        self._held = [list(whole["params"]) for whole in self._wholes]
        self._known: list[dict[str, tuple[Any, int]]] = [{} for _ in self._wholes]
        first: list[tuple[str, Group]] = []
        others: list[tuple[str, Group]] = []
        apart: list[int] = []
        for index, whole in enumerate(self._wholes):
            leading, *following = _parted(whole, names).items()
            first.append(leading)
            others += following
            apart += [index] * len(following)
        self._parts = [part for _, part in (*first, *others)]
        self.owners = (*range(len(first)), *apart)
        self.indices: dict[str, list[int]] = {name: [] for name in (*names.values(), OTHERS)}
        for place, (name, part) in enumerate((*first, *others)):
            self.indices[name] += [place] if part["params"] else []
        self.indices = {name: held for name, held in self.indices.items() if held}
        self._list = optimizer.param_groups
        self._list_of_parts: list[Group] = []
        self._joined: list[tuple[Group, list[Group]]] = []
        self._cut = [
            (name, owner, _places(part["params"], self._held[owner]))
            for name, held in self.indices.items()
            for owner, part in ((self.owners[place], self._parts[place]) for place in held)
        ]
        self.in_force = False

    @property
    def wholes(self) -> list[Group]:
        """The groups as the loop knows them."""
        return self._wholes if self.in_force else self._optimizer.param_groups

    def follow(self, knob: Knob) -> Knob:
        """A knob of groups that are cut is one of all their parts, but for a learning rate, which is of one part."""
        if isinstance(knob, LearningRate) or not isinstance(knob, GroupKnob) or knob.groups is None:
            return knob
        chosen = knob.groups if isinstance(knob.groups, tuple) else (knob.groups,)
        whole = [part for own in chosen for part in (self._parts_of(own) if isinstance(own, int) else (own,))]
        return knob if whole == list(chosen) else knob.replace(groups=tuple(whole), name=knob.label)

    def refuse_other_parameters(self, step: int) -> None:
        """The groups are those that were cut.

        Raises:
            StepError: one of them has other parameters, of which no part would be stepped.
        """
        for index, (whole, held) in enumerate(zip(self.wholes, self._held, strict=False)):
            now = whole["params"]
            if len(now) != len(held) or not all(map(operator.is_, now, held)):
                raise StepError(
                    f"the optimizer's group {index} has other parameters at step {step} ({len(now)} now, {len(held)} "
                    f"before), and rates= had cut those that it had when hdet was attached; attach anew, or give the "
                    f"optimizer all parameters from the start and train some of them later: "
                    f"parameter.requires_grad_(False)"
                )

    def put_in(self) -> None:
        """The optimizer holds the parts. What was written into a group since is written into all of its parts.

        Raises:
            StepError: a group was taken out since.
        """
        if self.in_force:
            return
        if len(self._optimizer.param_groups) < len(self._wholes):
            raise taken_out(len(self._optimizer.param_groups))
        self._list = self._optimizer.param_groups
        count, kept = len(self._wholes), set(kept_in_groups(self._optimizer))
        self._wholes, added = self._list[:count], self._list[count:]
        written = [
            _written_since(whole, known, {key for key in whole if (index, key) in kept} if kept else ())
            for index, (whole, known) in enumerate(zip(self._wholes, self._known, strict=True))
        ]
        for owner, part in zip(self.owners, self._parts, strict=True):
            for key in written[owner]:
                _pass_on(part, key, self._wholes[owner])
        # A list of their own, so that whoever goes through one meanwhile goes through it to its end.
        self._list_of_parts[:] = self._parts + added
        self._optimizer.param_groups = self._list_of_parts
        self.in_force = True

    def join(self) -> None:
        """Parts of a group that are alike in all but their parameters are one group, until `part`.

        Only where that saves something and changes nothing: an optimizer of torch's own, which steps each parameter by
        itself, and mostly all of a group in one call. Others may keep something of a group, or go by its place.
        """
        parts = self._optimizer.param_groups
        together = all(type(each) in OF_GRADIENTS for each in chained(self._optimizer)) and any(
            map(_in_one_call, parts)
        )
        if not together:
            return
        owners = (*self.owners, *range(len(self.owners), len(parts)))  # what was added since is nobody's part
        keys = list(zip(owners, map(_rate, parts), strict=True))
        if len(set(keys)) == len(parts):
            return
        alike: dict[Any, list[Group]] = {}
        told: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for place, (key, part) in enumerate(zip(keys, parts, strict=True)):
            very_same = tuple([(name, id(entry)) for name, entry in part.items() if name not in OF_ONE_PART])
            settings = told[very_same] = told.get(very_same) or _settings(part)  # most parts hold the same objects
            alike.setdefault((key, settings) if _in_one_call(part) else place, []).append(part)
        groups = [_joint(own) if len(own) > 1 else own[0] for own in alike.values()]
        self._joined = list(zip(groups, alike.values(), strict=True))
        self._optimizer.param_groups = groups

    def part(self) -> None:
        """The optimizer holds the parts again. What changed in a group that some of them were has changed in them."""
        if not self._joined:
            return
        self._list_of_parts += self._optimizer.param_groups[len(self._joined) :]
        for group, own in self._joined:
            changed = [key for key in {**own[0], **group} if group.get(key, _ABSENT) is not own[0].get(key, _ABSENT)]
            for key, part in product(changed, own):
                _pass_on(part, key, group)
        self._joined = []
        self._optimizer.param_groups = self._list_of_parts

    def take_out(self) -> None:
        """The optimizer holds its own groups again, in place of the parts.

        What changed in the first part meanwhile has changed in its group. If that is a setting, the other parts follow
        when they are put in next. A group that was added since by somebody else stays.
        """
        if not self.in_force:
            return
        groups, count = self._optimizer.param_groups, len(self._parts)
        self._parts = groups[:count]  # an optimizer that was loaded holds others
        self._list[len(self._wholes) :] = groups[count:]
        kept = set(kept_in_groups(self._optimizer))
        self._known = []
        for index, (whole, part) in enumerate(zip(self._wholes, self._parts, strict=False)):
            changed = set()
            for key, entry in part.items():
                if whole.get(key, _ABSENT) is entry and not isinstance(entry, Tensor):
                    continue
                if (index, key) not in kept and isinstance(entry, PLAIN) and whole.get(key) != entry:
                    changed.add(key)
                _pass_on(whole, key, part)
            for key in [key for key in whole if key not in part]:  # as a step count, where the run began anew
                del whole[key]
            self._known.append({key: (entry, _version(entry)) for key, entry in whole.items() if key not in changed})
        self._optimizer.param_groups = self._list
        if isinstance(self._optimizer, ChainedOptimizer) and not self._optimizer.stepping:
            self._optimizer.hand_out()
        self.in_force = False

    def state_dict(self) -> dict[str, Any]:
        """What each part holds, and what the optimizer keeps of it as state in its groups, while they are cut."""
        parts = self._optimizer.param_groups
        numbers = [
            (index, key, parts[index][key])
            for index, key in kept_in_groups(self._optimizer)
            if not isinstance(parts[index][key], bool)  # as a mode, which is the whole optimizer's
        ]
        return {"cut": self._cut, "kept": numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, while they are cut."""
        for index, key, value in state["kept"]:
            _pass_on(self._optimizer.param_groups[index], key, {key: value})

    def require(self, state: Mapping[str, Any] | None) -> None:
        """Whether a state is of the same cut.

        Raises:
            CheckpointError: it is of other parts.
        """
        if state is not None and [tuple(one) for one in state["cut"]] != self._cut:
            raise CheckpointError(
                "the state is of a search whose rates= put other parameters together; give the same patterns to resume "
                "or, for a rate of each matrix, the optimizer the same parameters"
            )

    def _parts_of(self, group: int) -> list[int]:
        return [part for part, owner in enumerate(self.owners) if owner == group] or [group]


def _places(parameters: Sequence[nn.Parameter], among: Sequence[nn.Parameter]) -> list[int]:
    places = {id(parameter): place for place, parameter in enumerate(among)}
    return [places[id(parameter)] for parameter in parameters]


def _in_one_call(group: Group) -> bool:
    """Whether torch may step a group's parameters together: it is told to, or they do not lie on a CPU."""
    if group.get("fused") or group.get("foreach"):
        return True
    first = next(iter(group["params"]), None)
    return group.get("foreach") is None and first is not None and first.device.type != "cpu"


def _rate(part: Group) -> Any:
    """The learning rate to 12 digits: rates that were moved alike in another order differ by their last bits."""
    rate = part.get("lr")
    return float(f"{rate:.12g}") if isinstance(rate, float) else _told_apart_by(rate)


def _settings(part: Group) -> tuple[Any, ...]:
    """All but the rate and the parameters, of which parts that are stepped together have the same."""
    return tuple([(key, _told_apart_by(entry)) for key, entry in part.items() if key not in OF_ONE_PART])


def _told_apart_by(entry: Any) -> Any:
    """An entry's value where it is a plain one, or several; else which object it is."""
    if isinstance(entry, tuple):
        return tuple(map(_told_apart_by, entry))
    return entry if entry is None or isinstance(entry, PLAIN) else id(entry)


def _joint(parts: Sequence[Group]) -> Group:
    """One group in place of some that are alike."""
    of_parameters = {key: [own for part in parts for own in part[key]] for key in OF_PARAMETERS if key in parts[0]}
    return {**parts[0], **of_parameters}


def _written_since(whole: Group, known: Mapping[str, tuple[Any, int]], kept: Collection[str]) -> list[str]:
    """The entries that somebody has written, or taken away, since they were known.

    A tensor that is a setting counts as written, since a write through `.data` leaves no trace.

    Args:
        kept: entries that are the optimizer's state.
    """
    gone = [key for key in known if key not in whole]
    return gone + [
        key
        for key, entry in whole.items()
        if (isinstance(entry, Tensor) and key not in kept) or not _same(entry, *known.get(key, (None, -1)))
    ]


def _same(entry: Any, known: Any, version: int) -> bool:
    """Whether an entry is the known one, or one like it that was loaded in its place."""
    if not isinstance(known, Tensor):
        alike = entry is known or (isinstance(entry, PLAIN) and type(entry) is type(known) and entry == known)
        return alike and version == 0
    if entry is known:
        return version == _version(entry)
    alike = isinstance(entry, Tensor) and version == _version(known) and entry.dtype == known.dtype
    return alike and entry.shape == known.shape and torch.equal(entry, known.to(entry.device))


def _version(entry: Any) -> int:
    return entry._version if isinstance(entry, Tensor) else 0


def _pass_on(group: Group, key: str, source: Mapping[str, Any]) -> None:
    """A group has what another has under a key; a tensor by its value, in one of its own."""
    if key in OF_PARAMETERS:
        return
    if key not in source:
        group.pop(key, None)
        return
    entry, held = source[key], group.get(key)
    if isinstance(entry, Tensor) and isinstance(held, Tensor) and entry.shape == held.shape:
        with torch.no_grad():
            held.copy_(entry)
    else:
        group[key] = entry.detach().clone() if isinstance(entry, Tensor) else entry


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
    known = _parameters(model, optimizer)
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
                    f"{some([path for path, _ in known])}"
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
    """The name in the model of each matrix that the optimizer holds, by its id.

    Filters, stacks of matrices and frozen matrices count too: a run that freezes or thaws, and is resumed, has the same
    groups whenever it does. What has one row, or one column, is a vector.

    Raises:
        ConfigError: there is none.
    """
    found: dict[int, str] = {}
    for name, parameter in _matrices(model, optimizer):
        found.setdefault(id(parameter), name)
    if not found:
        raise ConfigError('rates="matrices" finds no matrix that this optimizer holds; give rates="together"')
    return found


def by_name(model: nn.Module, optimizer: Optimizer, names: Collection[str]) -> dict[int, str]:
    """The name that each of the optimizer's parameters goes by, by its id, of those that have one of these names.

    Raises:
        MatchError: a name is that of no parameter that the optimizer holds.
    """
    found: dict[int, str] = {}
    for name, parameter in _parameters(model, optimizer):
        if name in names:
            found.setdefault(id(parameter), name)
    lacking = sorted(set(names) - set(found.values()))
    if lacking:
        raise MatchError(
            f"the optimizer holds no parameter called {some(lacking)}; give it all that the search's had, of groups "
            f"that were made by patterns the patterns: rates=, and of kinds of optimizers a chain of these kinds"
        )
    return found


def refuse_other_matrices(model: nn.Module, optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Every matrix that is trained has one of some names.

    Raises:
        MatchError: one has none, and would be trained as the vectors are.
    """
    others = [name for name, own in _matrices(model, optimizer) if own.requires_grad and id(own) not in names]
    if others:
        raise MatchError(
            f"the search had no learning rate of the matrices {some(others)}, which are trained here; give the model "
            f"and the optimizer that the search had, and of groups that were made by patterns the patterns: rates="
        )


def group_names(optimizer: Optimizer) -> dict[Groups, str]:
    """What the optimizer's groups are called, by their place: as they say, where all do; else by their number."""
    names = [group.get("name") for group in optimizer.param_groups]
    told = all(isinstance(name, str) and name.isprintable() for name in names) and len(set(names)) == len(names)
    return {index: str(name) if told else str(index) for index, name in enumerate(names)}


def kinds_of_optimizers(optimizer: Optimizer) -> dict[Groups, str]:
    """The groups that each kind of optimizer in a chain steps, and the kind's name; all together where there is one."""
    if not isinstance(optimizer, ChainedOptimizer):
        return {None: ""}
    found: dict[type[Optimizer], list[int]] = {}
    for index, group in enumerate(optimizer.param_groups):
        found.setdefault(type(optimizer.optimizers[group[OWNER]]), []).append(index)
    if len(found) < 2:
        return {None: ""}
    short = [kind.__name__ for kind in found]
    return {
        tuple(indices): kind.__name__ if short.count(kind.__name__) == 1 else f"{kind.__module__}.{kind.__qualname__}"
        for kind, indices in found.items()
    }


def matrices_by_default(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether each matrix of a model has a learning rate of its own where nobody says: one of several, and not many.

    It is told by what a run that is resumed has as well. Rates that are not alike, which somebody has thought of, or
    that are tensors, parameters that are sharded or mostly frozen, names that cannot be a knob's, and optimizers other
    than `COMPARED` keep one factor.
    """
    given = [(group["lr"], group.get("initial_lr")) for group in optimizer.param_groups]
    if type(optimizer) not in COMPARED or any(isinstance(rate, Tensor) for rate, _ in given) or len(set(given)) > 1:
        return False
    named = _matrices(model, optimizer)
    if not all(name.isprintable() and name != OTHERS for name, _ in named):
        return False
    matrices = {id(parameter): parameter for _, parameter in named}.values()
    whole = all(tensors.local(parameter) is parameter for parameter in matrices)
    trained = sum(parameter.requires_grad for parameter in matrices)
    return whole and 2 <= len(matrices) <= min(MOST_MATRICES, 2 * trained)


def _matrices(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The matrices among `_parameters`."""
    return [(name, parameter) for name, parameter in _parameters(model, optimizer) if spectral_gain(parameter) > 0.0]


def _parameters(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """What an optimizer holds of a model, each by every name that it has, free of what wrappers put in between."""
    held = ids_of(optimizer)
    return [
        (f"{path}.{name}" if path else name, parameter)
        for path, module in named_modules(model)
        for name, parameter in named_parameters(module, recurse=False)
        if id(parameter) in held
    ]


def _parted(whole: Group, names: Mapping[int, str]) -> dict[str, Group]:
    """By name, what a part of a group has of its own: the entries that are of its parameters."""
    keys = [key for key in OF_PARAMETERS if key in whole]
    parts: dict[str, Group] = {}
    for place, parameter in enumerate(whole["params"]):
        part = parts.setdefault(names.get(id(parameter), OTHERS), {key: [] for key in keys})
        for key in keys:
            part[key].append(whole[key][place])
    return parts or {OTHERS: {key: [] for key in keys}}


def taken_out(left: int) -> StepError:
    """What is raised where the optimizer has fewer groups than knobs go by, and so many are left."""
    return StepError(
        f"a parameter group was taken out of the optimizer in the middle of a pass, and {left} are left; knobs go by "
        f"the number of a group: call search.detach() before that and hdet.attach after it"
    )
