"""The optimizer of a run, as a declaration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, model_validator

from hdet.errors import ConfigError
from hdet.spec import Spec, register

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Optimizer(Spec, family="optimizer"):
    """The root of the optimizers a run can be declared with.

    Attributes:
        lr: the learning rate where the run's schedule stands at its peak.
    """

    lr: float = Field(default=1e-3, gt=0.0, kw_only=False)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The torch optimizer over the parameter groups; what a group sets itself stays."""
        raise NotImplementedError


@register
class AdamW(Optimizer):
    """Decoupled weight decay Adam, `torch.optim.AdamW`.

    Attributes:
        fused: one kernel for all parameters, three times faster than torch's default on a CPU.

    >>> AdamW(3e-4).to_dict()["lr"]
    0.0003
    """

    kind: ClassVar[str] = "adamw"

    weight_decay: float = Field(default=0.01, ge=0.0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0.0)
    fused: bool = True

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, **self.model_dump())


@register
class SGD(Optimizer):
    """Gradient descent with momentum, `torch.optim.SGD`; weight decay is coupled to the gradient."""

    kind: ClassVar[str] = "sgd"

    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    nesterov: bool = False
    weight_decay: float = Field(default=0.0, ge=0.0)

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> SGD:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is a kind of momentum, and momentum is 0; give a momentum or leave it out")
        return self

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, **self.model_dump())


@register
class TorchOptimizer(Optimizer):
    """Any other class of `torch.optim`.

    Attributes:
        name: the class, such as `RMSprop` or `NAdam`.
        options: its further arguments.

    >>> group = {"params": [torch.nn.Parameter(torch.zeros(2))]}
    >>> type(TorchOptimizer(name="NAdam", lr=0.01, options={"eps": 1e-6}).build([group])).__name__
    'NAdam'
    """

    kind: ClassVar[str] = "torch"

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        found = getattr(torch.optim, self.name, None)
        if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
            raise ConfigError(f"torch.optim has no optimizer {self.name!r}; give a class name, such as 'NAdam'")
        make: Callable[..., torch.optim.Optimizer] = found
        try:
            return make(groups, lr=self.lr, **self.options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"torch.optim.{self.name}: {error} (given: {self.options!r})") from None
