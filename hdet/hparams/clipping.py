"""Gradient clipping inside the optimizer's step, and the knob that is its threshold."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.controllers import Controller, Gated
from hdet.errors import ConfigError, MatchError
from hdet.hparams.binding import GroupBinding
from hdet.hparams.param_groups import parameters_of
from hdet.hparams.spread import Spread, TwoLevel
from hdet.hparams.update import GroupKnob
from hdet.spec import register

ENTRY = "clip_norm"
"""Where the threshold stands in the optimizer's parameter groups."""


MARK = "hdet_clips"
"""An attribute of the optimizer, which hdet's copies have too. A threshold in a saved state is no wish to clip."""


class Clipped(Protocol):
    """Who wants to know when a gradient has been clipped."""

    def clipped(self, is_clipped: Tensor | float, scale: Tensor | None) -> None:
        """The gradients are as the optimizer will see them.

        Args:
            is_clipped: 1 where their norm was above the threshold, else 0; on their device.
            scale: what a fused optimizer will divide them by; `None` where they are as they will be used.
        """


class Clipping:
    """The clipping of one optimizer's gradients, made by `clip_gradients`.

    Attributes:
        total_norm: the norm of all gradients before they were clipped in the last step, 0-dim; `None` before the first.
    """

    def __init__(self, optimizer: Optimizer, norm: float) -> None:
        self.given = norm
        self._optimizer = ref(optimizer)
        self.total_norm: Tensor | None = None
        self._told: WeakSet[Clipped] = WeakSet()
        self._order = {id(p): place for place, p in enumerate(parameters_of(optimizer))}
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def tell(self, listener: Clipped) -> None:
        """Tell somebody of each clipped gradient from now on, for as long as they live."""
        self._told.add(listener)

    def come_last(self) -> None:
        """Clip after all hooks that the optimizer has now: one of them may put another threshold in force."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._handle.remove()
            self._handle = optimizer.register_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Clip no more; the optimizer is as it was."""
        self._handle.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            _clippings.pop(optimizer, None)
            vars(optimizer).pop(MARK, None)
            for entries in (optimizer.defaults, *optimizer.param_groups):
                entries.pop(ENTRY, None)

    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        # The optimizer itself is the first of the arguments.
        by_name = "closure" in keywords
        closure = keywords["closure"] if by_name else arguments[1] if len(arguments) > 1 else None
        if closure is None:
            self._clip(optimizer)
            return None

        def clipped() -> Any:
            loss = closure()
            self._clip(optimizer)
            return loss

        if by_name:
            return arguments, {**keywords, "closure": clipped}
        return (arguments[0], clipped, *arguments[2:]), keywords

    def complete(self, optimizer: Optimizer) -> None:
        """Give the threshold to groups that lack it: a loaded state may be of a time without clipping."""
        for group in optimizer.param_groups:
            group.setdefault(ENTRY, self.given)

    def _clip(self, optimizer: Optimizer) -> None:
        self.complete(optimizer)
        norm = optimizer.param_groups[0][ENTRY]
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer takes it out by itself
        # In one order, whether or not groups are cut for the step: a sum of norms is rounded by it.
        parameters = sorted(parameters_of(optimizer), key=lambda p: self._order.setdefault(id(p), len(self._order)))
        limit = norm if scale is None else norm * scale
        total = nn.utils.clip_grad_norm_(parameters, limit)
        self.total_norm = total if scale is None else total / scale
        if self._told:
            is_clipped = (total > limit).to(total.dtype)
            for listener in list(self._told):
                listener.clipped(is_clipped, scale)


_clippings: WeakKeyDictionary[Optimizer, Clipping] = WeakKeyDictionary()


def clip_gradients(optimizer: Optimizer, norm: float) -> Clipping:
    """Clip the optimizer's gradients to a norm in each `optimizer.step()`, by a threshold that `ClipNorm` can move.

    It does what `torch.nn.utils.clip_grad_norm_(parameters, norm)` before the step does, to the last bit, over all
    parameters of the optimizer; call it in place of that, once, before `hdet.attach` or an engine is made. The
    threshold stands in the parameter groups under `"clip_norm"`, is saved with the optimizer's state and may be
    written there. Under a GradScaler gradients are clipped after they are unscaled, or where a fused optimizer unscales
    them by a threshold that is as many times larger.

    A deep copy of the optimizer clips where hdet made it (`hdet.replicate`); for one of your own call this again.

    Args:
        norm: the threshold, above 0.

    Returns:
        The clipping, with the last norm (`total_norm`) and `remove()`.

    Raises:
        ConfigError: `norm` is no number above 0, or the optimizer none of torch's.

    >>> import torch, hdet
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> clipping = hdet.clip_gradients(optimizer, norm=0.5)
    >>> before = model.weight.item()
    >>> (3.0 * model.weight).sum().backward()
    >>> optimizer.step()
    >>> round(before - model.weight.item(), 4), clipping.total_norm.item()
    (0.5, 3.0)
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not (isinstance(norm, (int, float)) and not isinstance(norm, bool) and 0.0 < norm < math.inf):
        raise ConfigError(
            f"norm={norm!r} is no threshold that gradients could be clipped to; give a number above 0, as you gave "
            f"torch.nn.utils.clip_grad_norm_"
        )
    optimizer.defaults[ENTRY] = float(norm)  # for groups that are added later
    for group in optimizer.param_groups:
        group[ENTRY] = float(norm)
    setattr(optimizer, MARK, True)
    clipping = _clippings.get(optimizer)
    if clipping is None:
        clipping = _clippings[optimizer] = Clipping(optimizer, float(norm))
    clipping.given = float(norm)
    return clipping


def clipping_of(optimizer: Optimizer) -> Clipping | None:
    """The clipping of an optimizer; of a copy that hdet made too."""
    if optimizer not in _clippings and getattr(optimizer, MARK, False):
        _clippings[optimizer] = Clipping(optimizer, float(optimizer.param_groups[0][ENTRY]))
    return _clippings.get(optimizer)


@register
class ClipNorm(GroupKnob):
    """The norm that gradients are clipped to by `clip_gradients`.

    Where a gradient is clipped, the update is proportional to it; a threshold that no gradient reaches has no effect,
    and nothing can be learned of it. `Recursion` evidence follows what the clipped gradients have moved.

    >>> from hdet import ClipNorm
    >>> ClipNorm().label
    'clip_norm'
    """

    key: ClassVar[str] = ENTRY

    bounds: tuple[float, float] = (1e-4, 1e4)
    spread: Spread = TwoLevel(0.3)
    authority: float = Field(default=5.0, ge=0)

    @property
    def default_controller(self) -> Controller:
        # Of the few gradients that are clipped in a window chance decides, so that several windows have to agree.
        return Gated(0.4, gate=1.0, memory=0.8, window_steps=30, max_scale=4.0, until=0.85)

    def bind(self, model: nn.Module, optimizer: Optimizer) -> GroupBinding:
        clipping = clipping_of(optimizer)
        if clipping is None:
            raise MatchError(
                f"{self.label}: no gradient is clipped where hdet could move the threshold; call "
                f"hdet.clip_gradients(optimizer, norm=1.0) in place of torch.nn.utils.clip_grad_norm_"
            )
        clipping.complete(optimizer)
        return super().bind(model, optimizer)

    @model_validator(mode="after")
    def _of_all_groups(self) -> ClipNorm:
        if self.groups is not None:
            raise ValueError("one norm is that of all parameters, so leave groups= out")
        return self
