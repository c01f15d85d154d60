"""Scalar: any number the user's model reads, explored by an attribute path or a getter and a setter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field, model_validator
from torch import nn
from torch.optim import Optimizer

from hdet.errors import ConfigError, MatchError
from hdet.hparams.binding import Attribute, Binding, FunctionBinding, ModelBinding
from hdet.hparams.knob import ActsOn, Knob
from hdet.hparams.param_groups import ids_of
from hdet.nn import KnobAttribute, KnobTensor
from hdet.spec import register


@register
class Scalar(Knob):
    """A scalar of the user's own.

    Args:
        name: its name (required).
        path: dotted attribute path from the model, `"head.margin"`: a float, 0-dim tensor or KnobTensor.
        get, set: instead of a path, `get(model) -> float` and `set(model, value)`. Such a knob cannot be
            written as YAML; use `path`, or register a knob class.
        effect: whether it acts on the update or in the forward pass.
        biased: whether its value changes the training loss it would be judged by.

    >>> from hdet.spaces import Linear
    >>> from hdet import Scalar
    >>> Scalar("margin", path="head.margin", space=Linear(), bounds=(0, 1)).label
    'margin'
    """

    name: str = Field(kw_only=False)
    path: str | None = None
    get: Callable[[Any], float] | None = None
    set: Callable[[Any, float], None] | None = None
    effect: ActsOn = "forward"
    biased: bool = True

    @property
    def acts_on(self) -> ActsOn:
        return self.effect

    @property
    def biases_loss(self) -> bool:
        return self.biased

    @property
    def acts_in_eval(self) -> bool:
        return self.effect == "forward"

    def bind(self, model: nn.Module, optimizer: Optimizer) -> Binding:
        if self.get is not None and self.set is not None:
            return FunctionBinding(model, self.name, self.get, self.set)
        assert self.path is not None  # by the validator
        owner, _, attribute = self.path.rpartition(".")
        try:
            module = model.get_submodule(owner)
        except AttributeError as error:
            raise MatchError(
                f"{self.name}: the model has no module {owner!r} ({error}); a path leads through modules, and to a "
                f"value that is held elsewhere, as in a config, lead get= and set="
            ) from None
        if not hasattr(module, attribute):
            raise MatchError(f"{self.name}: {type(module).__name__} {owner!r} has no attribute {attribute!r}")
        descriptor = getattr(type(module), attribute, None)
        if isinstance(descriptor, KnobAttribute):  # hdet.nn.Dropout's `p` stands for its `p_knob`
            attribute = descriptor.slot
        held = getattr(module, attribute)
        scalar = isinstance(held, nn.Parameter) and held.numel() == 1 and held.requires_grad
        if scalar and id(held) in ids_of(optimizer):
            raise ConfigError(
                f"{self.name}: {self.path!r} is a parameter that the optimizer trains, so no knob can hold it; leave "
                f"the knob out, or take the parameter out of the optimizer's groups"
            )
        return ModelBinding([held if isinstance(held, KnobTensor) else Attribute(module, attribute)], self.bounds)

    def to_dict(self) -> dict[str, Any]:
        if self.path is None:
            raise ConfigError(
                f"{self.name}: a getter and a setter cannot be written down; use path=, or register a knob class"
            )
        return super().to_dict()

    @model_validator(mode="after")
    def _one_way(self) -> Scalar:
        if (self.path is None) == (self.get is None) or (self.get is None) != (self.set is None):
            raise ValueError("give either path=, or both get= and set=")
        return self
