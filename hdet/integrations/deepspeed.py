"""hdet on a DeepSpeed engine: `hdet.deepspeed.attach(engine, probe=...)`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hdet.engine.admission import listed
from hdet.errors import CheckpointError, ConfigError
from hdet.integrations.zero_three import Shards
from hdet.overlay import attach as overlay
from hdet.overlay.search import Search
from hdet.overlay.surroundings import home
from hdet.overlay.told_schedule import bare, writes_into
from hdet.recipes.recommended import FORWARD, excluding
from hdet.replicas import Replicas, micro_batches
from hdet.replicas.distributed import distribute
from hdet.signals import Probe

MODEL_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""Where DeepSpeed's optimizers keep the model's parameters by group."""


def attach(engine: Any, *, probe: Probe, **options: Any) -> Search:
    """Explore learning rate and weight decay under a DeepSpeed engine: `hdet.attach`, to what the engine trains.

    The loop stays as it is: `engine(...)`, `engine.backward(loss)`, `engine.step()`. Under ZeRO, and with master
    weights, the optimizer that DeepSpeed steps holds parts of the model on each rank. Nothing diverges, so it need not
    be whole: every rank multiplies the same factor into its part, and the probe reads the model's weights.

    | stage | learning rate, weight decay | dropout and other knobs of the forward pass | guard | tail |
    |---|---|---|---|---|
    | 0, float32 | yes | yes | yes | yes |
    | 0, bf16; 1; 2; 3 | yes | refused: gradients leave a pass in parts | yes, master weights and moments too | no |

    (A tail's mean of the weights would be the model's alone, and master weights are what DeepSpeed saves.)

    Under stage 3 the probe's points are written into each rank's partitions, and gathered by layers as in training.

    Args:
        engine: what `deepspeed.initialize` returned first.
        probe: held-out loss, called with `engine.module`.
        options: of `hdet.attach`. The engine's own scheduler is found, and looked ahead at where it is one of torch's
            and `total_steps=` is given; else what it writes is followed. Without a scheduler the recipe's own schedule
            drives the rate, and needs `total_steps=`.

    Raises:
        ConfigError: knobs need a pass's own gradient where it does not exist; `rates=` cuts a flat tensor; stage 3
            keeps parameters elsewhere (offloading, hpZ, MiCS, quantized weights); or what `hdet.attach` refuses.

    >>> engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)  # doctest: +SKIP
    >>> search = hdet.deepspeed.attach(engine, probe=probe, total_steps=1000)  # doctest: +SKIP
    """
    stage = engine.zero_optimization_stage()
    model, optimizer = engine.module, engine.optimizer
    if not isinstance(optimizer, Optimizer):
        _refuse_forward(options.get("knobs", ()), stage, type(optimizer).__name__)
        _refuse_rates(options.get("rates", "together"), stage, type(optimizer).__name__)
        if options.setdefault("tail", None) is not None:
            raise ConfigError(
                f"a tail's mean of the weights would be the model's alone, and DeepSpeed's {type(optimizer).__name__} "
                f"saves its own master weights; leave tail= out"
            )
        options["exclude"] = excluding(options.get("exclude", ()), *FORWARD)
        optimizer = EngineOptimizer.of(engine)
        if optimizer.shards is not None:
            model, probe = optimizer.shards, _of_module(probe)
    if engine.lr_scheduler is not None and not {"scheduler", "schedule"} & options.keys():
        foreseen = "total_steps" in options and foreseeable(engine.lr_scheduler, engine)
        options.update({"scheduler": engine.lr_scheduler} if foreseen else {"schedule": None})
    if "replicas" not in options:
        options["replicas"] = _home(model, optimizer, engine.gradient_accumulation_steps())
    return overlay.attach(model, optimizer, probe=probe, **options)


class EngineOptimizer(Optimizer):
    """DeepSpeed's partitioned optimizer as one that holds the model's parameters, and is stepped by the engine.

    Its groups hold what DeepSpeed's inner optimizer holds; what is written into them acts in the engine's step and is
    taken out after it. Its state is this rank's: master weights, and the inner optimizer's state, in their own memory.

    Args:
        wrapped: `engine.optimizer`, whose `step` this one's takes the place of.
        groups: the model's parameters by group; under stage 3 their shards.
        masters: by group, what the inner optimizer steps.
        shards: the model under stage 3.
    """

    gradients_elsewhere = True
    """A pass leaves no gradients in the parameters."""
    state_in_parts = True
    """Its state is this rank's alone, in shapes of its own."""

    def __init__(
        self,
        wrapped: Any,
        groups: Sequence[Sequence[nn.Parameter]],
        masters: Callable[[], Sequence[Sequence[Tensor]]],
        shards: Shards | None = None,
    ) -> None:
        self.wrapped = wrapped
        self.inner: Optimizer = wrapped.optimizer
        self.shards = shards
        self._masters = masters
        self.found_inf = torch.zeros((), device="cpu")
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
        inner = getattr(wrapped, "optimizer", None)
        if isinstance(inner, Optimizer) and hasattr(wrapped, "fp32_partitioned_groups_flat"):
            shards = Shards(engine)
            held = [shards.of(group) for group in _by_group(wrapped, wrapped.fp16_groups)]
            flat = [[part] for part in wrapped.fp32_partitioned_groups_flat]
            return cls(wrapped, held, lambda: _by_group(wrapped, flat), shards)
        groups = next((getattr(wrapped, name) for name in MODEL_GROUPS if hasattr(wrapped, name)), None)
        if groups is None or not isinstance(inner, Optimizer) or len(groups) != len(inner.param_groups):
            raise ConfigError(
                f"hdet does not know where DeepSpeed's {type(wrapped).__name__} keeps the model's parameters; use ZeRO "
                f"with an optimizer of torch.optim"
            )
        return cls(wrapped, groups, lambda: [group["params"] for group in inner.param_groups])

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

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Put this rank's state back where DeepSpeed has it, in its own types; groups are the user's.

        Raises:
            CheckpointError: a part is of another size.
        """
        for group, masters in zip(state_dict["param_groups"], self._masters(), strict=True):
            held = state_dict["state"].get(group["params"][0], {}) if group["params"] else {}
            for key, value in held.items():
                name, _, number = key.rpartition(".")
                part = masters[int(number)]
                self._put_back(part, name, value)
        self._link_state()

    def _put_back(self, part: Tensor, name: str, value: Any) -> None:
        live = part.data if name == "master" else self.inner.state[part].get(name)
        if not isinstance(value, Tensor) or not isinstance(live, Tensor):
            self.inner.state[part][name] = copy.deepcopy(value)
            return
        if live.shape != value.shape:
            raise CheckpointError(
                f"the checkpoint's {name} of a part of DeepSpeed's optimizer has {value.numel()} elements, and here it "
                f"has {live.numel()}; resume on as many ranks, under the same ZeRO stage"
            )
        live.copy_(value)

    def _forget_skipped(self, *_: Any) -> None:
        self.found_inf.zero_()

    def _link_state(self) -> None:
        """The first parameter of each group has all of this rank's state of the group."""
        for own, masters in zip(self._groups, self._masters(), strict=True):
            held: dict[str, Any] = {}
            for number, part in enumerate(masters):
                held[f"master.{number}"] = part.data
                held.update({f"{key}.{number}": value for key, value in self.inner.state.get(part, {}).items()})
            if held:
                self.state[own["params"][0]] = held


def foreseeable(scheduler: Any, engine: Any) -> bool:
    """Whether a scheduler is one of torch's that can be looked ahead at, and writes into what the engine steps."""
    simulated = isinstance(bare(scheduler), LRScheduler) and not isinstance(bare(scheduler), ReduceLROnPlateau)
    stepped = engine.optimizer
    return simulated and (
        writes_into(scheduler, stepped) or writes_into(scheduler, getattr(stepped, "optimizer", None))
    )


def _by_group(wrapped: Any, parts: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """What stage 3 holds by sub-group, by the optimizer's groups."""
    found: list[list[Any]] = [[] for _ in wrapped.optimizer.param_groups]
    for number, part in enumerate(parts):
        found[wrapped.sub_group_to_group_id[number]] += part
    return found


def _of_module(probe: Probe) -> Probe:
    """The probe, its loss called with the module below the shards."""

    def loss(shards: Shards, batch: Any) -> Tensor:
        return probe.loss(shards.module, batch)

    return replace(probe, loss=loss)


def _refuse_forward(knobs: Sequence[Any], stage: int, kind: str) -> None:
    """Knobs that are judged by a pass's own gradient, or set replicas apart."""
    listed(knobs)
    for knob in knobs:
        if knob.acts_on == "forward":
            raise ConfigError(
                f"{knob.label} is judged by the gradient of each pass, and under ZeRO stage {stage} ({kind}) gradients "
                f"leave a pass averaged over ranks and in parts; use stage 0 in float32, or leave the knob out"
            )


def _refuse_rates(rates: Any, stage: int, kind: str) -> None:
    """Rates of parts of a flat tensor."""
    if isinstance(rates, Mapping) or rates == "matrices":
        raise ConfigError(
            f"rates= with patterns, or by matrices, cuts the optimizer's groups, and under ZeRO stage {stage} ({kind}) "
            f"a group is one flat tensor; give deepspeed.initialize an optimizer with a group for each name, and "
            f'hdet.deepspeed.attach rates="groups"'
        )


def _home(model: nn.Module, optimizer: Optimizer, seats: int) -> Replicas:
    """Micro-batches of this rank, and of the others, which DeepSpeed averages gradients over."""
    if isinstance(model, Shards):
        return home(model, optimizer, seats)
    if dist.is_initialized() and dist.get_world_size() > 1:
        return distribute(model, optimizer, micro_batches=seats)
    return micro_batches(model, optimizer, seats)
