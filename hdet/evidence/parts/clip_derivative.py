"""How a parameter group's weights depend on the norm that gradients are clipped to, followed from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from hdet.evidence.parts.preconditioner import at_least_1, decoupled, without_waiting
from hdet.evidence.parts.weight_derivative import LEAST_ROOT, Trace, Value
from hdet.hparams.binding import GroupBinding
from hdet.hparams.clipping import clipping_of
from hdet.replicas import tensors


class ClipTrace(Trace):
    """The recursion of the threshold c in one parameter group.

    With g the clipped gradient, d g / d log c is g where it was clipped, else 0.

    Attributes:
        first: the derivative of the gradient's running mean (Adam), or of the momentum buffer.
        second: the derivative of the squared gradient's running mean; empty for SGD.
        per_log: d log c / d coordinate in the coming step.
    """

    followed = ("first", "second", "direction")
    counted = "per_log"

    def __init__(self, binding: GroupBinding, index: int, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(binding, index, parameters)
        self.first = tensors.clones(self.direction)
        self.second = [] if isinstance(self.optimizer, SGD) else tensors.clones(self.direction)
        self.per_log = 1.0
        self._update: list[tuple[int, Tensor]] = []  # of SGD's coming step, by parameter
        self._stepping: list[int] = []
        self._skipped: Tensor | None = None  # 1 where a fused optimizer leaves out the step, 0 where it makes it
        clipping = clipping_of(self.optimizer)
        assert clipping is not None  # binding the knob has seen to it
        clipping.tell(self)

    @torch.no_grad()
    def open(self, first: Value) -> None:
        for held in (self.direction, self.first, self.second):
            for tensor in held:
                tensor.zero_()
        self.per_log = first.slope / first.value
        self._stepping = []

    @torch.no_grad()
    def clipped(self, is_clipped: Tensor | float, scale: Tensor | None) -> None:
        """The gradients are clipped, and the step is about to be made."""
        self._stepping = [n for n, p in enumerate(self.parameters) if p.grad is not None and p.requires_grad]
        if not self._stepping:
            return
        self._skipped = getattr(self.optimizer, "found_inf", None)
        held = [own[n] for own in (self.first, self.second) if own for n in self._stepping]
        with self._kept_where_skipped(held):
            self._follow_gradients(is_clipped, scale)

    @contextmanager
    def _kept_where_skipped(self, held: Sequence[Tensor]) -> Iterator[None]:
        """What is held is after the block as it was, if the optimizer leaves out the step. Nobody waits to know."""
        before = tensors.clones(held) if self._skipped is not None else []
        yield
        for own, was in zip(held, before, strict=False):
            assert self._skipped is not None
            own.lerp_(was, self._skipped.to(own).reshape(()))

    def _follow_gradients(self, is_clipped: Tensor | float, scale: Tensor | None) -> None:
        """What the running values become by the step's gradients."""
        group = self._group_in_the_step()
        share = is_clipped * self.per_log
        gradients = [tensors.wide(tensors.gradient(self.parameters[n])) for n in self._stepping]
        if scale is not None:
            gradients = list(torch._foreach_div(gradients, scale))
        if self._skipped is not None:
            gradients = [own.nan_to_num(0.0, 0.0, 0.0) for own in gradients]
        changes = list(torch._foreach_mul(gradients, share))
        sign = -1.0 if group["maximize"] else 1.0
        torch._foreach_mul_(changes, sign)
        first = [self.first[n] for n in self._stepping]
        if isinstance(self.optimizer, SGD):
            self._follow_buffer(group, first, changes)
            return
        beta1, beta2 = (float(beta) for beta in group["betas"])
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, changes, alpha=1.0 - beta1)
        second = [self.second[n] for n in self._stepping]
        torch._foreach_mul_(second, beta2)
        squared = list(torch._foreach_mul(gradients, sign))
        if not decoupled(self.optimizer, group):  # what is squared has the decay in it
            weights = [tensors.wide(tensors.local(self.parameters[n].detach())) for n in self._stepping]
            torch._foreach_add_(squared, weights, alpha=float(group["weight_decay"]))
        torch._foreach_addcmul_(second, squared, changes, value=2.0 * (1.0 - beta2))

    def _group_in_the_step(self) -> dict[str, Any]:
        """The group that has the parameters now: while the optimizer steps, groups may stand elsewhere."""
        first = self.parameters[0]
        return next(
            group for group in self.optimizer.param_groups if any(parameter is first for parameter in group["params"])
        )

    def _follow_buffer(self, group: dict[str, Any], first: list[Tensor], changes: list[Tensor]) -> None:
        """SGD: buf' <- mu buf' + (1 - dampening) g', and the first buffer is the gradient itself."""
        momentum = float(group["momentum"])
        torch._foreach_mul_(first, momentum)
        for place, number in enumerate(self._stepping):
            began = self.optimizer.state.get(self.parameters[number], {}).get("momentum_buffer") is not None
            weight = 1.0 - float(group["dampening"]) if momentum and began else 1.0
            first[place].add_(changes[place], alpha=weight)
        if group["nesterov"]:
            torch._foreach_add_(changes, first, alpha=momentum)
        else:
            changes = first
        self._update = list(zip(self._stepping, changes, strict=True))

    @torch.no_grad()
    def follow(self, now: Value, following: Value) -> None:
        self.per_log = following.slope / following.value
        stepped, self._stepping = self._stepping, []
        if not stepped:
            return
        with self._kept_where_skipped([self.direction[n] for n in stepped]):
            self._advance(stepped, self._changes(self.optimizer.param_groups[self.index], stepped))
        self._update = []

    def _changes(self, group: dict[str, Any], stepped: list[int]) -> list[Tensor]:
        """The derivative of the update, which the learning rate multiplies."""
        if isinstance(self.optimizer, SGD):
            return [change for _, change in self._update]
        beta1, beta2 = (float(beta) for beta in group["betas"])
        found = []
        for n in stepped:
            state = self.optimizer.state[self.parameters[n]]
            steps = at_least_1(without_waiting(state["step"]))  # of one whose first step was not made, too
            first, second = 1.0 - beta1**steps, 1.0 - beta2**steps
            root = state["exp_avg_sq"].sqrt().clamp_min_(LEAST_ROOT)  # where there never was a gradient
            scale = root / second**0.5 + group["eps"]
            # (m / (c1 s))' with s = sqrt(v / c2) + eps, s' = v' / (2 sqrt(v c2))
            bent = state["exp_avg"] * self.second[n] / (2.0 * root * second**0.5 * scale)
            found.append((self.first[n] - bent) / (scale * first))
        return found
