"""The parameters whose gradients replicas share: the same in all, or an error names those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from torch import nn

from hdet.errors import StepError
from hdet.replicas.walk import Walk
from hdet.spec import some


class SharedParameters:
    """Which parameters the copies of one model train, in all of them the same.

    Args:
        models: the copies.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._walks = [Walk(model) for model in models]

    def trained(self) -> tuple[list[bool], list[list[nn.Parameter]]]:
        """Which of the parameters with elements are trained, and those of each copy: a place means the same in all.

        Raises:
            StepError: some copies train parameters that others do not.
        """
        every = [walk.parameters() for walk in self._walks]
        flags = [[parameter.requires_grad for parameter in own] for own in every]
        if any(own != flags[0] for own in flags):
            raise not_in_all(self._models[0], [len(set(own)) > 1 for own in zip(*flags, strict=True)])
        return flags[0], [list(compress(own, flags[0])) for own in every]


def not_in_all(model: nn.Module, differing: Sequence[bool]) -> StepError:
    """Replicas differ in whether some parameters with elements are trained."""
    every = [name for name, parameter in model.named_parameters() if parameter.numel()]
    names = list(compress(every, differing))
    return StepError(
        f"{some(names)} took gradients in some replicas and not in others, and replicas share gradients parameter by "
        f"parameter; freeze and thaw alike in all of them, on every rank: "
        f"for model, _ in engine.hosts: model.get_parameter(...).requires_grad_(...)"
    )
