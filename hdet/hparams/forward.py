"""Knobs that act in the forward pass: dropout, attention temperature, label smoothing."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import ClassVar

from pydantic import Field
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from hdet.controllers import Controller, Gated
from hdet.errors import ConfigError, MatchError
from hdet.hparams.binding import Attribute, ModelBinding
from hdet.hparams.knob import ActsOn, Knob
from hdet.hparams.space import Arcsine, Log, Space
from hdet.hparams.spread import Spread, TwoLevel
from hdet.nn import KnobTensor, knob_tensors, named_modules
from hdet.spec import register

Cells = dict[str, KnobTensor | Attribute]


class ModuleKnob(Knob):
    """A knob whose scalars are the `hdet.nn.KnobTensor`s of one role in the model.

    Args:
        pattern: a shell pattern on module names (`"blocks.*.attention"`; `*` matches dots too), or several.
            The prefixes that torch.compile and DistributedDataParallel put before a name are left out.
    """

    role: ClassVar[str]

    pattern: str | tuple[str, ...] = "*"

    @property
    def acts_on(self) -> ActsOn:
        return "forward"

    @property
    def biases_loss(self) -> bool:
        return True

    @property
    def default_controller(self) -> Controller:
        # Small steps on evidence that adds up: an angle of 0.0032 a step at most.
        paced = Gated(0.08, gate=1.0, saturation=3.0, window_steps=25, max_scale=1.0, until=0.85)
        if self.acts_in_eval:
            return paced
        # A regulariser has a bound to go to, so a short run may go there faster; what has none would overshoot.
        return paced.replace(run_steps=600, pretrained_boost=2.5, pretrained_reach=self.spread.width)

    @property
    def label(self) -> str:
        if self.name or self.pattern == "*":
            return super().label
        return f"{self.kind}[{','.join(self._patterns)}]"

    @property
    def _patterns(self) -> tuple[str, ...]:
        return (self.pattern,) if isinstance(self.pattern, str) else self.pattern

    def bind(self, model: nn.Module, optimizer: Optimizer) -> ModelBinding:
        chosen: Cells = {}
        for pattern in self._patterns:
            found = self.cells(model, pattern)
            if not found:
                held = sorted(self.cells(model, "*"))
                raise MatchError(
                    f"{self.label}: no module that matches {pattern!r} holds a {self.role}; "
                    + (f"there are {held}" if held else "none does: build the model from hdet.nn, or hdet.nn.swap it")
                )
            chosen.update(found)
        return ModelBinding(list(chosen.values()), self.bounds)

    def cells(self, model: nn.Module, pattern: str) -> Cells:
        """The scalars in modules whose name matches a pattern, by name."""
        return dict(knob_tensors(model, self.role, pattern))


@register
class Dropout(ModuleKnob):
    """The rate of all the model's dropouts, or of those a pattern selects.

    Plain `nn.Dropout` is written too, but refused in a compiled model, where each new rate would recompile.
    """

    role: ClassVar[str] = "dropout"

    space: Space = Arcsine()
    bounds: tuple[float, float] = (0.0, 0.9)
    spread: Spread = TwoLevel(0.15)
    authority: float = Field(default=1.6, ge=0)

    def cells(self, model: nn.Module, pattern: str) -> Cells:
        found = super().cells(model, pattern)
        plain = {
            f"{name}.p": Attribute(module, "p")
            for name, module in named_modules(model)
            if isinstance(module, _DropoutNd) and not hasattr(module, "p_knob") and fnmatchcase(name, pattern)
        }
        compiled = any(
            hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) for module in model.modules()
        )
        if plain and compiled:
            raise ConfigError(
                f"{self.label}: the model is compiled and {sorted(plain)} are plain nn.Dropout, which would recompile "
                f"at every new rate; call hdet.nn.swap(model) before torch.compile"
            )
        return {**found, **plain}


@register
class AttentionTemperature(ModuleKnob):
    """The temperature that attention logits are divided by."""

    role: ClassVar[str] = "temperature"

    @property
    def acts_in_eval(self) -> bool:
        return True

    space: Space = Log()
    bounds: tuple[float, float] = (0.1, 10.0)
    spread: Spread = TwoLevel(0.15)
    authority: float = Field(default=1.0, ge=0)


@register
class LabelSmoothing(ModuleKnob):
    """The label smoothing of `hdet.nn.CrossEntropyLoss` modules inside the model."""

    role: ClassVar[str] = "label_smoothing"

    space: Space = Arcsine()
    bounds: tuple[float, float] = (0.0, 0.9)
    spread: Spread = TwoLevel(0.15)
    authority: float = Field(default=1.6, ge=0)
