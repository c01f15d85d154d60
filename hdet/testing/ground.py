"""What knobs, evidence and merges are tried on: a model, its optimizer, a loss, and the documented loop."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pickle import UnpicklingError

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from hdet.engine.engine import Engine
from hdet.errors import ConfigError, MatchError
from hdet.history import WindowRecord
from hdet.hparams import Knob, clip_gradients
from hdet.merging import Merge, Outer
from hdet.nn import CrossEntropyLoss, Dropout, MultiheadAttention
from hdet.signals import Objective, Probe
from hdet.testing.law import BreachError, same_generators

HELD_OUT = 1_000_000
AFRESH = 2_000_000
SUB_BATCHES = 4


@dataclass(frozen=True)
class Ground:
    """A small training problem.

    Args:
        make: gives a fresh model and its optimizer, the same at each call.
        loss: `loss(model, step, replica)`, the scalar loss on the batch of a step and a replica; a pure
            function of its arguments (and of the global generator, for dropout), for any whole number as
            the step. Of a model in eval mode it is the held-out loss, without what training alone adds.

    >>> import torch, hdet.testing
    >>> def make():
    ...     model = torch.nn.Linear(2, 1)
    ...     torch.nn.init.ones_(model.weight)
    ...     torch.nn.init.zeros_(model.bias)
    ...     return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> def loss(model, step, replica):
    ...     x = torch.randn(8, 2, generator=torch.Generator().manual_seed(10 * step + replica))
    ...     return model(x).square().mean()
    >>> hdet.testing.check(hdet.LearningRate(), ground=hdet.testing.Ground(make, loss))
    """

    make: Callable[[], tuple[nn.Module, Optimizer]]
    loss: Callable[[nn.Module, int, int], Tensor]

    def probe(self) -> Probe:
        """Held-out sub-batches of the same loss."""
        return Probe(lambda model, batch: self.loss(model, HELD_OUT, batch), list(range(SUB_BATCHES)))

    def objective(self) -> Objective:
        """Training batches of the same loss, other ones in each window."""
        return Objective(
            lambda model, batch: self.loss(model, *batch),
            lambda window: [(AFRESH + window, j) for j in range(SUB_BATCHES)],
        )

    def train(
        self, engine: Engine, until: int, watch: Callable[[int], object] = lambda step: None, same_data: bool = False
    ) -> list[WindowRecord]:
        """The documented loop up to step `until`; `watch` is called in each step before its forward passes.

        With `same_data` all replicas see the batches and the random numbers of replica 0.

        Raises:
            BreachError: the engine used the global generators.
        """
        records = []
        for step in range(engine.step_count, until):
            watch(step)
            losses = []
            for replica in engine.replicas:
                index = 0 if same_data else replica.index
                torch.manual_seed(1000 * step + index)
                with replica:
                    loss = self.loss(replica.model, step, index)
                    loss.backward()
                losses.append(loss.detach())
            engine.share_gradients()
            for optimizer in engine.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with same_generators("engine.step"):
                record = engine.step(losses)
            if record is not None:
                records.append(record)
        return records

    def taken_up(self, make: Callable[[], Engine], middle: int) -> Engine:
        """A fresh engine that a run was stored into as it had come to step `middle`, as numbers and tensors.

        Raises:
            BreachError: the state holds something else.
        """
        first, second, stored = make(), make(), io.BytesIO()
        self.train(first, middle)
        torch.save(first.state_dict(), stored)
        stored.seek(0)
        try:
            state = torch.load(stored, weights_only=True)
        except UnpicklingError as error:
            what = re.search(r"GLOBAL \S+", str(error))
            raise BreachError(f"its state holds more than numbers and tensors: {what[0] if what else error}") from error
        second.load_state_dict(state)
        return second

    def train_plainly(self, steps: int, before: Callable[[nn.Module, Optimizer, int], object]) -> nn.Module:
        """The same training of one model without an engine; `before` may set something in each step."""
        model, optimizer = self.make()
        for step in range(steps):
            before(model, optimizer, step)
            torch.manual_seed(1000 * step)
            self.loss(model, step, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model


class TinyNet(nn.Module):
    """A classifier of short sequences with all that the built-in knobs look for, and parts without effect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.attention = MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
        self.dropout = Dropout(0.1)
        self.norm = nn.BatchNorm1d(4)
        self.outer = nn.Linear(4, 3)
        self.criterion = CrossEntropyLoss(label_smoothing=0.1)
        self.margin = 0.5
        self.idle = nn.Linear(2, 2)
        self.idle_scalar = 0.5

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, 3] to [batch, 3]."""
        x = self.inner(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        out: Tensor = self.margin * self.outer(self.norm(self.dropout(x.mean(dim=1))))
        return out + 0.0 * self.idle.weight.sum()


def _make(kind: Callable[..., Optimizer]) -> tuple[nn.Module, Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TinyNet()
    idle = list(model.idle.parameters())
    taught = [p for p in model.parameters() if all(p is not other for other in idle)]
    return model, kind([{"name": "taught", "params": taught}, {"name": "idle", "params": idle}])


def _loss(model: nn.Module, step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(7919 * step + replica)
    x = torch.randn(16, 4, 3, generator=generator)
    labels = (x.mean(dim=1) + 0.3 * torch.randn(16, 3, generator=generator)).argmax(dim=1)
    if model.training:
        return model.get_submodule("criterion")(model(x), labels)  # type: ignore[no-any-return]
    return nn.functional.cross_entropy(model(x), labels)


ADAMW = Ground(partial(_make, partial(AdamW, lr=0.01, weight_decay=0.05)), _loss)
MOMENTUM = Ground(partial(_make, partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)), _loss)


def _make_clipped() -> tuple[nn.Module, Optimizer]:
    model, optimizer = ADAMW.make()
    clip_gradients(optimizer, norm=0.1)
    return model, optimizer


CLIPPED = Ground(_make_clipped, _loss)


def merge_of(knob: Knob) -> Merge | None:
    """A merge that has what the knob looks for; None where that lives in the replicas."""
    return Outer() if knob.acts_on == "merge" else None


def ground_of(knob: Knob, given: Ground | None) -> Ground:
    """The ground given, or the first built-in one that has what the knob looks for.

    Raises:
        ConfigError: none has it.
    """
    for ground in (given,) if given is not None else (ADAMW, MOMENTUM, CLIPPED):
        try:
            knob.bind(*ground.make())
        except MatchError as error:
            reason = error
        else:
            return ground
    raise ConfigError(
        f"there is nothing that {knob.label} binds to ({reason}); name a model that has it: "
        f"ground=hdet.testing.Ground(make, loss)"
    )
