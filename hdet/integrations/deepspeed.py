"""hdet on a DeepSpeed engine: `hdet.deepspeed.attach(engine, probe=...)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hdet.errors import ConfigError
from hdet.overlay import attach as overlay
from hdet.overlay.search import Search
from hdet.replicas import Replicas, micro_batches
from hdet.replicas.distributed import distribute
from hdet.signals import Probe

FORWARD = ("dropout", "label_smoothing")
"""The recipe's knobs of the forward pass."""
MODEL_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Where DeepSpeed's optimizers keep the model's parameters by group."""


def attach(engine: Any, *, probe: Probe, **options: Any) -> Search:
    """Explore learning rate and weight decay under a DeepSpeed engine: `hdet.attach`, to what the engine trains.

    The loop stays as it is: `engine(...)`, `engine.backward(loss)`, `engine.step()`. Under ZeRO stages 1 and 2, and
    with master weights, the optimizer that DeepSpeed steps holds parts of the model on each rank. Nothing diverges, so
    it need not be whole: every rank multiplies the same factor into its part, and the probe reads the model's weights.

    | stage | learning rate, weight decay | dropout and other knobs of the forward pass | guard |
    |---|---|---|---|
    | 0, float32 | yes | yes | yes |
    | 0, bf16; 1; 2 | yes | refused: gradients leave a pass in parts | yes, master weights and moments included |
    | 3 | refused: no rank holds a whole parameter | refused | |

    Args:
        engine: what `deepspeed.initialize` returned first.
        probe: held-out loss, called with `engine.module`.
        options: of `hdet.attach`. `scheduler=` is left out: what the engine's own scheduler writes is followed, and not
            looked ahead at. Without a scheduler the recipe's own schedule drives the rate, and needs `total_steps=`.

    Raises:
        ConfigError: the engine runs ZeRO stage 3; or knobs were given that need a pass's own gradient where it does
            not exist; or what `hdet.attach` refuses.

    >>> engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)  # doctest: +SKIP
    >>> search = hdet.deepspeed.attach(engine, probe=probe, total_steps=1000)  # doctest: +SKIP
    """
    stage = engine.zero_optimization_stage()
    if stage >= 3:
        raise ConfigError(
            f"the DeepSpeed engine runs ZeRO stage {stage}, under which no rank holds a whole parameter outside of a "
            f"layer's forward and backward, so hdet cannot put weights along a window's update in their place; use "
            f"stage 1 or 2, or torch's fully_shard, under which hdet.attach works"
        )
    optimizer = engine.optimizer
    whole = isinstance(optimizer, Optimizer)
    if not whole:
        _refuse_forward(options.get("knobs", ()), stage, type(optimizer).__name__)
        options["exclude"] = sorted({*options.get("exclude", ()), *FORWARD})
        optimizer = EngineOptimizer.of(engine)
    if engine.lr_scheduler is not None:
        options.setdefault("schedule", None)
    if "replicas" not in options:
        options["replicas"] = _home(engine, optimizer)
    return overlay.attach(engine.module, optimizer, probe=probe, **options)


class EngineOptimizer(Optimizer):
    """DeepSpeed's partitioned optimizer as one that holds the model's parameters, and is stepped by the engine.

    Its groups hold what DeepSpeed's inner optimizer holds; what is written into them acts in the engine's step and is
    taken out after it. Its state is this rank's: master weights, and the inner optimizer's state, in their own memory.

    Args:
        wrapped: `engine.optimizer`, whose `step` this one's takes the place of.
        groups: the model's parameters by group.
    """

    gradients_elsewhere = True
    """A pass leaves no gradients in the parameters."""

    def __init__(self, wrapped: Any, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self.wrapped = wrapped
        self.inner: Optimizer = wrapped.optimizer
        self.found_inf = torch.zeros(())
        self._seen: list[dict[str, Any]] = [{} for _ in groups]
        super().__init__([{"params": list(group)} for group in groups], {})
        self._step = wrapped.step
        wrapped.step = self.step
        # Before any other hook: what is known of a step before it is made is not what the one before it came to.
        self.register_step_pre_hook(self._forget_skipped)
        self._link_state()

    @classmethod
    def of(cls, engine: Any) -> EngineOptimizer:
        """The one that stands for an engine's optimizer, made where there is none yet.

        Raises:
            ConfigError: the optimizer keeps the model's parameters where hdet does not know to look.
        """
        wrapped = engine.optimizer
        earlier = getattr(wrapped.step, "__self__", None)
        if isinstance(earlier, cls):
            return earlier
        groups = next((getattr(wrapped, name) for name in MODEL_GROUPS if hasattr(wrapped, name)), None)
        inner = getattr(wrapped, "optimizer", None)
        if groups is None or not isinstance(inner, Optimizer) or len(groups) != len(inner.param_groups):
            raise ConfigError(
                f"hdet does not know where DeepSpeed's {type(wrapped).__name__} keeps the model's parameters; use ZeRO "
                f"stage 0, 1 or 2 with an optimizer of torch.optim"
            )
        return cls(wrapped, groups)

    @property  # type: ignore[override]
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with what the inner optimizer was given since they were last looked at."""
        for own, seen, real in zip(self._groups, self._seen, self.inner.param_groups, strict=False):
            for key, value in real.items():
                if key != "params" and (key not in seen or seen[key] != value):
                    own[key] = seen[key] = value
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The engine's step, with what the groups hold."""
        theirs = [dict(real) for real in self.inner.param_groups]
        for own, real in zip(self.param_groups, self.inner.param_groups, strict=True):
            real.update({key: own[key] for key in real if key != "params"})
        try:
            self._step()
        finally:
            for real, before in zip(self.inner.param_groups, theirs, strict=True):
                real.update({key: value for key, value in before.items() if key != "params"})
        self.found_inf.fill_(float(bool(getattr(self.wrapped, "overflow", False))))
        self._link_state()

    def _forget_skipped(self, *_: Any) -> None:
        self.found_inf.zero_()

    def _link_state(self) -> None:
        """The first parameter of each group has all of this rank's state of the group."""
        for own, real in zip(self._groups, self.inner.param_groups, strict=True):
            held: dict[str, Any] = {}
            for number, part in enumerate(real["params"]):
                held[f"master.{number}"] = part.data
                held.update({f"{key}.{number}": value for key, value in self.inner.state.get(part, {}).items()})
            self.state[own["params"][0]] = held


def _refuse_forward(knobs: Sequence[Any], stage: int, kind: str) -> None:
    """Knobs that are judged by a pass's own gradient, or set replicas apart."""
    for knob in knobs:
        if knob.acts_on == "forward":
            raise ConfigError(
                f"{knob.label} is judged by the gradient of each pass, and under ZeRO stage {stage} ({kind}) gradients "
                f"leave a pass averaged over ranks and in parts; use stage 0 in float32, or leave the knob out"
            )


def _home(engine: Any, optimizer: Optimizer) -> Replicas:
    """Micro-batches of this rank, and of the others, which DeepSpeed averages gradients over."""
    seats = engine.gradient_accumulation_steps()
    if dist.is_initialized() and dist.get_world_size() > 1:
        return distribute(engine.module, optimizer, micro_batches=seats)
    return micro_batches(engine.module, optimizer, seats)
