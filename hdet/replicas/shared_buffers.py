"""The buffers that replicas merge one by one: the same in all, or an error names those that are not."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hdet.errors import StepError
from hdet.spec import some


def names_of(models: Sequence[nn.Module]) -> list[list[str]]:
    """The names of each model's buffers, in their order."""
    return [[name for name, _ in model.named_buffers()] for model in models]


def require_same(models: Sequence[nn.Module]) -> None:
    """See that a place in the list of buffers means the same in all copies of one process.

    Raises:
        StepError: a copy has a buffer that another has not.
    """
    names = names_of(models)
    if any(own != names[0] for own in names):
        raise in_some(names)


def in_some(names: Sequence[Sequence[str]]) -> StepError:
    """Replicas hold other buffers: those of one would take the places of another's."""
    each = [set(own) for own in names]
    differing = sorted(set().union(*each) - each[0].intersection(*each))
    which = some(differing) if differing else "the same in another order"
    return StepError(
        f"the replicas do not hold the same buffers ({which}), and these are merged one by one; register the same on "
        f"every rank and in every copy, before training also what is registered when it is first used"
    )
