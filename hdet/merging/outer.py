"""DiLoCo: an optimizer of its own steps the last converged point by what the window moved it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, field_validator
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import CheckpointError, ConfigError
from hdet.evidence.parts.losses_at import Write
from hdet.evidence.scene import Harvest, Scene
from hdet.hparams.param_groups import parameters_of
from hdet.merging.mean import Mean
from hdet.merging.merge import Merge, Merger
from hdet.replicas import alike, tensors
from hdet.replicas.made_state import made_state
from hdet.replicas.replicas import present
from hdet.spec import register

Option = str | bool | int | float | tuple[float, ...] | None


def _pairs(given: object) -> object:
    return tuple(given.items()) if isinstance(given, Mapping) else given


Options = Annotated[tuple[tuple[str, Option], ...], BeforeValidator(_pairs), PlainSerializer(lambda pairs: dict(pairs))]
"""A mapping, held as pairs so that a declaration can be a key."""


@register
class Outer(Merge):
    """theta <- theta_a + step(theta_a - theta_m), an outer optimizer's step with the window's displacement as gradient.

    theta_a are the weights at the window's opening, theta_m what the inner merge made of the replicas at its end. The
    replicas go on from the result with the inner optimizer's state, which is kept. SGD at rate 1 without momentum is
    the inner merge itself, bit for bit. Below 1 and with one replica it is Lookahead (Zhang et al. 2019,
    arXiv 1907.08610). With `gradients="local"` and long windows it is DiLoCo (Douillard et al. 2023, arXiv 2311.08105).

    Its settings can be knobs: `hdet.merges.OuterLearningRate`, `OuterMomentum`, judged by `hdet.evidence.OuterLine`.

    Memory: the outer optimizer's state, and three or four copies of the weights while it steps; every process holds its
    own. So Lookahead has no slow weights of its own: they are the window's opening, which an engine holds anyway. The
    first window's merge is the inner one alone where replicas did not open it alike (`hdet.perturb`), since their
    displacement has no common origin. A run that goes back to an earlier point begins with a new outer state.

    With `hdet.distribute(..., overlap=k)` the outer step is made as the mean arrives, k steps later. Until then this
    holds a copy of the opening. docs/populations.md says how the replicas are moved.

    Args:
        lr: the outer rate.
        optimizer: a class of `torch.optim` by its name, or "module:class".
        options: its other arguments. It sees displacements, not weights, so weight decay is refused.
        merge: the inner merge.

    >>> import hdet
    >>> hdet.merges.Outer() == hdet.merges.Outer(0.7, optimizer="SGD", options={"momentum": 0.9, "nesterov": True})
    True
    """

    is_mean: ClassVar[bool] = False

    lr: float = Field(default=0.7, gt=0, kw_only=False)
    optimizer: str = "SGD"
    options: Options = (("momentum", 0.9), ("nesterov", True))
    merge: Merge = Mean("keep")

    @field_validator("merge")
    @classmethod
    def _makes_alike(cls, merge: Merge) -> Merge:
        if not merge.makes_alike:
            raise ValueError(
                f"the outer step goes from one merged model, and {merge.kind} leaves the replicas apart; give a mean"
            )
        return merge

    @field_validator("options")
    @classmethod
    def _no_decay(cls, options: Options) -> Options:
        if dict(options).get("weight_decay"):
            raise ValueError(
                "the outer optimizer steps displacements, which it would shrink instead of weights; give the decay to "
                "the inner optimizer"
            )
        return options

    def at_work(self, scene: Scene) -> OuterMerger:
        return OuterMerger(self, scene)

    def outer_optimizer(self) -> Optimizer:
        """One of no weights."""
        return self.made([nn.Parameter(torch.empty(0))])

    def tried(self, device: torch.device, dtype: torch.dtype) -> None:
        """Step once a dense matrix of such.

        Raises:
            ConfigError: such an optimizer does not step by gradients alone, or not there.
        """
        one = nn.Parameter(torch.zeros(2, 2, device=device, dtype=dtype))
        one.grad = torch.zeros_like(one)
        try:
            self.made([one]).step()
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"Outer cannot step by {self.optimizer!r} ({error}); name an optimizer whose step takes dense "
                f"gradients and no closure"
            ) from error

    def made(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The outer optimizer of some parameters.

        Raises:
            ConfigError: there is no such class, or it does not take these options.
        """
        module, _, name = self.optimizer.rpartition(":")
        try:
            kind = getattr(import_module(module or "torch.optim"), name)
            found = kind(parameters, lr=self.lr, **dict(self.options))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"Outer cannot make the optimizer {self.optimizer!r} with lr={self.lr:g} and options "
                f"{dict(self.options)} ({error}); name a class of torch.optim, or 'module:class', and its arguments"
            ) from error
        if not isinstance(found, Optimizer):
            raise ConfigError(f"Outer was given {self.optimizer!r}, which makes no torch optimizer; name one that does")
        return found


class OuterMerger(Merger):
    """The outer optimizer at work.

    Its parameters stand for displacements from the window's opening. They, and the optimizer, are made for each step:
    in between there is its state alone.

    Attributes:
        state: what the outer optimizer knows of each parameter that moves.
        settings: an optimizer of no weights, whose group holds what the outer one keeps there.
    """

    moves_alike: ClassVar[bool] = True

    def __init__(self, spec: Outer, scene: Scene) -> None:
        super().__init__(scene)
        self.spec = spec
        self.inner = spec.merge.at_work(replace(scene, outer=()))
        for parameter in scene.moving.parameters[0][:1]:
            spec.tried(parameter.device, tensors.wide_type(parameter.dtype))
        self._opened: list[Tensor] = []
        self._displaced: list[Tensor] = []
        self.state: dict[nn.Parameter, dict[str, Any]] = {}
        self.settings = scene.outer[0] if scene.outer else spec.outer_optimizer()

    def _made(
        self, moving: Sequence[nn.Parameter] | None = None, *, on_trial: bool = False
    ) -> tuple[Optimizer, list[nn.Parameter]]:
        """The optimizer of some parameters, with what is known of them; and its own parameters.

        Args:
            moving: by default those that move now.
            on_trial: what is known is copied, since a step writes over it.
        """
        moving = self.scene.moving.parameters[0] if moving is None else moving
        displacements = [_displacement(parameter) for parameter in moving]
        optimizer = self.spec.made(displacements)
        optimizer.param_groups[0].update(_settings(self.settings))
        for parameter, displacement in zip(moving, displacements, strict=True):
            if parameter in self.state:
                known = self.state[parameter]
                optimizer.state[displacement] = copy.deepcopy(known) if on_trial else known
        return optimizer, displacements

    def _keep(self, optimizer: Optimizer, moving: Sequence[nn.Parameter], displacements: list[nn.Parameter]) -> None:
        pairs = zip(moving, displacements, strict=True)
        self.state = {parameter: optimizer.state[own] for parameter, own in pairs if own in optimizer.state}
        self.settings.param_groups[0].update(_settings(optimizer))

    def open_apart(self) -> None:
        self.inner.open_apart()
        self._opened = [alike.mark(*host) for host in self.scene.replicas.hosts]

    def merge(self, harvest: Harvest) -> None:
        self.inner.merge(harvest)
        self.inner.step()
        if not self._has_common_origin():
            return
        own = self.scene.moving.values()
        opening = [value.to(now.device) for value, now in zip(self.scene.opening(), own, strict=True)]
        if self.scene.replicas.in_flight:  # the next window's opening takes the place of this one's
            self.scene.replicas.on_arrival(partial(self._arrived, tensors.clones(opening)))
        else:
            self._displaced = _between(opening, own)

    def _arrived(self, opening: list[Tensor], mean: list[Tensor]) -> list[Tensor]:
        """Where the outer step leads to, made as the replicas' mean has arrived."""
        self._displaced = _between(opening, mean)
        return list(torch._foreach_add(self._stepped(), [tensors.wide(value) for value in mean]))

    @property
    def steps(self) -> bool:
        return bool(self._displaced)

    def _has_common_origin(self) -> bool:
        replicas = self.scene.replicas
        if not self._opened:
            return True
        marks = replicas.gather(torch.stack([self._opened[replica.host] for replica in replicas.local]))
        self._opened = []
        own = marks[present(marks)]
        return bool((own == own[:1]).all())

    def _change(self, optimizer: Optimizer, displacements: list[nn.Parameter]) -> list[Tensor]:
        """Let the outer optimizer step; what that adds to the weights."""
        for displacement, gradient in zip(displacements, self._displaced, strict=True):
            displacement.grad = torch.zeros_like(displacement)
            tensors.local(displacement.grad).copy_(gradient)
        optimizer.step()
        change = [tensors.local(displacement.detach()) for displacement in displacements]
        torch._foreach_add_(change, self._displaced)  # 0, exactly, after a step of rate 1
        return change

    def _stepped(self) -> list[Tensor]:
        """Let it step, and keep what it knows then; what that adds to the weights."""
        optimizer, displacements = self._made()
        change = self._change(optimizer, displacements)
        self._keep(optimizer, self.scene.moving.parameters[0], displacements)
        self._displaced = []
        return change

    def at(self, settings: Mapping[str, float]) -> Write:
        return partial(self._write, settings)

    @torch.no_grad()
    def _write(self, settings: Mapping[str, float], live: Sequence[Tensor]) -> None:
        optimizer, displacements = self._made(on_trial=True)
        optimizer.param_groups[0].update(settings)
        change = self._change(optimizer, displacements)
        torch._foreach_add_(change, [tensors.wide(value) for value in live])
        tensors.copy_(live, change)

    @torch.no_grad()
    def step(self) -> None:
        if not self.steps:
            return
        moving = self.scene.moving
        merged = self._stepped()
        for host, (_, inner) in enumerate(self.scene.replicas.hosts):
            states = [inner.state.get(parameter, {}) for parameter in moving.parameters[host]]
            for change, state in zip(merged, states, strict=True):
                if moving.evaluates_average and "z" in state:  # z comes along, and x with both
                    tensors.local(state["z"]).add_(change)
        torch._foreach_add_(merged, [tensors.wide(value) for value in moving.values()])
        for host in range(len(self.scene.replicas.hosts)):
            tensors.copy_(moving.values(host), merged)

    def forget(self) -> None:
        self.inner.forget()
        self.state = {}
        self.settings.param_groups[0].update(_settings(self.spec.outer_optimizer()))

    def restored(self) -> list[int] | None:
        self.forget()
        return self.inner.restored()

    def state_dict(self) -> dict[str, Any]:
        optimizer, _ = self._made()
        return {
            "inner": self.inner.state_dict(),
            "optimizer": copy.deepcopy(optimizer.state_dict()),
            "opened": tensors.clones(self._opened),
            "moving": list(self.scene.moving.flags),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, opened = state["optimizer"], state["opened"]
        moving = self._moved(state)
        optimizer, displacements = self._made(moving)
        known = parameters_of(optimizer)
        for number, entries in saved["state"].items():
            zeros = torch.zeros_like(known[number])
            wanted = made_state(optimizer, optimizer.param_groups[0], zeros) or {}
            for key, value in entries.items():
                like = wanted.get(key, zeros)
                if isinstance(value, Tensor) and value.dim() and value.shape != like.shape:
                    raise CheckpointError(
                        f"the checkpoint's outer {key} is {list(value.shape)}, and the model's would be "
                        f"{list(like.shape)}; build the model as it was"
                    )
        self.inner.load_state_dict(state["inner"])
        optimizer.load_state_dict(copy.deepcopy(saved))
        self._keep(optimizer, moving, displacements)
        # Of another number of replicas nothing is known but that they open alike.
        self._opened = list(opened) if len(opened) == len(self.scene.replicas.hosts) else []

    def _moved(self, state: dict[str, Any]) -> list[nn.Parameter]:
        """The parameters that moved at the save, of which the outer optimizer's state is.

        Raises:
            CheckpointError: the state does not tell which.
        """
        # Others may move now, and the loop may thaw parameters after it has loaded. States of older versions lack it.
        own = self.scene.moving.flags
        flags = state.get("moving", own)
        known = sum(len(group["params"]) for group in state["optimizer"]["param_groups"])
        fits = isinstance(flags, list) and len(flags) == len(own) and all(isinstance(flag, bool) for flag in flags)
        if not fits or sum(flags) != known:
            raise CheckpointError(
                f"the checkpoint's outer optimizer is of {known} parameters, and which of {len(own)} those are "
                f"cannot be told from {flags!r:.60}; build the model as it was, or resume from another one"
            )
        return self.scene.moving.flagged(flags)


def _between(opening: Sequence[Tensor], merged: Sequence[Tensor]) -> list[Tensor]:
    """opening - merged, in float32 at least."""
    return list(torch._foreach_sub([tensors.wide(t) for t in opening], [tensors.wide(t) for t in merged]))


def _displacement(parameter: nn.Parameter) -> nn.Parameter:
    """None yet, of a parameter: sharded as it is, in float32 at least."""
    return nn.Parameter(torch.zeros_like(parameter.detach(), dtype=tensors.wide_type(parameter.dtype)))


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
