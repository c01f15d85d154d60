"""A plain training run under the course that a search has found: no replicas, no evidence, no probe."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.engine.admission import declared
from hdet.errors import ConfigError
from hdet.hparams import Knob, LearningRate, Replay
from hdet.overlay.attach import searched
from hdet.overlay.split_groups import (
    OTHERS,
    Patterns,
    SplitGroups,
    by_name,
    by_pattern,
    group_names,
    kinds_of_optimizers,
    refuse_other_matrices,
)
from hdet.record import WindowRecord, knobs_of
from hdet.spec import some


class ReplayLR(LRScheduler):
    """A torch scheduler that puts every knob where a search had it, step by step, to the last bit.

    It is used as any scheduler is: `scheduler.step()` after `optimizer.step()`. Past its end it holds the last values.
    What the search explored and is not named in `knobs` stays as the user sets it. Where the search went back to an
    earlier point, the steps that were thrown away are left out, and the others are stretched over its length.

    Where the search had several learning rates, `learning_rate[head]` and the like, one that is asked for without a
    group stands for all of them. If they are not those of the optimizer's groups, these are cut, for good: each
    matrix that had a rate of its own is a group by itself. Make this scheduler before any other of the optimizer's, and
    before the optimizer's state is loaded.

    Args:
        optimizer: with the groups that the search's had; their rates keep their ratios.
        history: the search's windows: `hdet.History("history.jsonl")`.
        knobs: which to replay, as they were declared; by default the learning rate. A knob's label is its name in the
            history.
        model: needed for knobs that live in the model, such as `hdet.Dropout()`, and for rates of matrices.
        rates: the patterns that the search was given, where it was given some.
        total_steps: stretch or shrink the courses to this many steps; by default they have the run's.

    Raises:
        ConfigError: the history does not hold a knob's base at every step, a knob needs the model, or the rates of
            other groups were found.
        MatchError: the model or optimizer has nothing that a knob selects.

    >>> import hdet, torch
    >>> rates = [0.1, 0.3, 0.2]
    >>> window = hdet.history.WindowRecord(
    ...     0, 0, 3, {"learning_rate": 0.2}, {}, [1.0], {}, {}, False, course={"learning_rate": rates}
    ... )
    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    >>> scheduler = hdet.ReplayLR(optimizer, [window])
    >>> for _ in range(4):
    ...     print(optimizer.param_groups[0]["lr"])
    ...     optimizer.step()
    ...     scheduler.step()
    0.1
    0.3
    0.2
    0.2
    """

    def __init__(
        self,
        optimizer: Optimizer,
        history: Iterable[WindowRecord],
        knobs: Sequence[Knob] = (LearningRate(),),
        *,
        model: nn.Module | None = None,
        rates: Patterns | None = None,
        total_steps: int | None = None,
    ) -> None:
        if isinstance(history, (str, os.PathLike)):
            raise ConfigError(f"history is a search's windows; give hdet.History({os.fspath(history)!r})")
        homeless = [knob.label for knob in knobs if model is None and knob.acts_on == "forward"]
        if homeless:
            raise ConfigError(f"{', '.join(homeless)}: such knobs live in the model; give model= too")
        declared("rates", rates, Mapping, type(None))
        windows = list(history)
        with ExitStack() as undo:
            knobs = _each(knobs, knobs_of(windows), optimizer, model, rates, undo)
            self.courses = {knob.label: Replay.of(windows, knob.label, total_steps) for knob in knobs}
            place = model if model is not None else nn.Module()
            self._bindings = {knob.label: knob.bind(place, optimizer) for knob in knobs}
            super().__init__(optimizer)
            undo.pop_all()

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the groups at the step that `last_epoch` counts to; puts the other knobs in force too."""
        for label, binding in self._bindings.items():
            binding.write(self.courses[label](self.last_epoch))
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Where it stands. The courses are the history's, and are not kept here."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`, and put every knob where it was."""
        super().load_state_dict(state_dict)
        self._last_lr = [float(rate) for rate in self.get_lr()]


def _each(
    knobs: Sequence[Knob],
    held: Sequence[str],
    optimizer: Optimizer,
    model: nn.Module | None,
    rates: Patterns | None,
    undo: ExitStack,
) -> list[Knob]:
    """The knobs, and in place of one learning rate those of several groups where these are what a history holds.

    Raises:
        ConfigError: the optimizer has other groups, and cannot be cut as the search's was.
    """
    asked = next((k for k in knobs if isinstance(k, LearningRate) and k.groups is None and k.label not in held), None)
    prefix = f"{asked.label}[" if asked is not None else ""
    names = [name.removeprefix(prefix)[:-1] for name in held if prefix and name.startswith(prefix)]
    if asked is None or not names:
        if rates is not None:
            raise ConfigError("rates= says which parameters have which of several learning rates, and one is replayed")
        return list(knobs)
    split = None
    known = [group_names(optimizer), kinds_of_optimizers(optimizer)]
    called = [{name: groups for groups, name in each.items()} for each in known]
    places = next((own for own in called if own.keys() == set(names)), {})
    if rates is not None or not places:
        split = _cut(optimizer, names, model, rates)
        undo.callback(split.take_out)
        split.put_in()
        places = {name: tuple(indices) for name, indices in split.indices.items()}
    own = [asked.replace(groups=places[name], name=f"{prefix}{name}]") for name in names]
    others = [knob if split is None else split.follow(knob) for knob in knobs if knob is not asked]
    return [*own, *others]


def _cut(optimizer: Optimizer, names: Sequence[str], model: nn.Module | None, rates: Patterns | None) -> SplitGroups:
    """The optimizer's groups, to be cut as those of the search were, whose learning rates have these names."""
    if model is None:
        raise ConfigError(
            f"the history has the learning rates of {some(names)}, and no groups of this optimizer are called so; "
            f"give ReplayLR model= too, whose parameters are, or a chain of these kinds of optimizers"
        )
    if searched(optimizer):
        raise ConfigError(
            "a search is attached to this optimizer, and would not know the groups that a replay cuts; detach it first"
        )
    if rates is not None:
        found = by_pattern(model, optimizer, rates)
    else:
        found = by_name(model, optimizer, set(names) - {OTHERS})
        refuse_other_matrices(model, optimizer, found)
    split = SplitGroups(optimizer, found)
    if split.indices.keys() != set(names):
        raise ConfigError(
            f"the history has the learning rates of {some(names)}, and this optimizer's parameters would be cut into "
            f"{some(list(split.indices))}; give it those that the search's had, and the search's patterns"
        )
    return split
