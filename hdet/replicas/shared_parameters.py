"""The parameters whose gradients replicas share: the same in all, or an error names those that are not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from torch import nn

from hdet.errors import StepError
from hdet.replicas import tensors


def with_elements(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter of a model that has elements, frozen ones included: what stays when some are frozen."""
    tensors.reshard(model)
    return [parameter for parameter in model.parameters() if parameter.numel()]


def trained_in_all(models: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """`tensors.trained` of each copy of a model, in which a place means the same parameter in all.

    Raises:
        StepError: some copies train parameters that others do not.
    """
    every = [with_elements(model) for model in models]
    chosen = [[parameter.requires_grad for parameter in own] for own in every]
    if any(own != chosen[0] for own in chosen):
        raise not_in_all(models[0], [len(set(flags)) > 1 for flags in zip(*chosen, strict=True)])
    return [list(compress(own, chosen[0])) for own in every]


def not_in_all(model: nn.Module, differing: Sequence[bool]) -> StepError:
    """Replicas differ in whether some of `with_elements(model)` are trained."""
    every = [name for name, parameter in model.named_parameters() if parameter.numel()]
    names = list(compress(every, differing))
    shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return StepError(
        f"{shown} took gradients in some replicas and not in others, and replicas share gradients parameter by "
        f"parameter; freeze and thaw alike in all of them, on every rank: "
        f"for model, _ in engine.hosts: model.get_parameter(...).requires_grad_(...)"
    )
