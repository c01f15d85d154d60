"""timm's schedulers, which a loop tells the number of the update or of the epoch: looked ahead at by hdet.attach."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec, module_from_spec
from typing import Any

import pytest
import torch
from classified import HELD, batch
from torch import nn
from torch.nn import functional as F

import hdet
from hdet.errors import ConfigError, StepError

STEPS, EACH = 40, 5


@pytest.fixture(scope="module")
def timm() -> Iterator[Any]:
    """timm.scheduler, without timm's models, which need torchvision."""
    loaded = set(sys.modules)
    spec = find_spec("timm")
    assert spec is not None
    sys.modules["timm"] = module_from_spec(spec)
    yield importlib.import_module("timm.scheduler")
    for name in set(sys.modules) - loaded:
        if name.startswith("timm"):
            del sys.modules[name]


def loss_of(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(given[0]), given[1])


class Job:
    """A model whose layers have rates of their own, as by `layer_decay=`, and a scheduler of timm's."""

    def __init__(self, timm: Any, *, by_epochs: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
        layers = [
            {"params": self.model[place].parameters(), "lr_scale": scale} for place, scale in ((0, 0.5), (3, 1.0))
        ]
        self.optimizer = torch.optim.AdamW(layers, lr=3e-3, weight_decay=0.1)
        options = {"num_epochs": STEPS // EACH, "warmup_epochs": 2, "warmup_lr": 1e-5, **options}
        self.scheduler, _ = timm.create_scheduler_v2(
            self.optimizer, step_on_epochs=by_epochs, updates_per_epoch=EACH, **options
        )
        self.by_epochs = by_epochs
        self.search: hdet.Search | None = None

    def attach(self, **options: Any) -> hdet.Search:
        if self.by_epochs:
            options = {"scheduler_every": EACH, **options}
        probe = hdet.Probe(loss_of, [batch(1000 + part) for part in range(8)])
        options = {"probe": probe, "total_steps": STEPS, "window": 4, "quiet": True, **options}
        self.search = hdet.attach(self.model, self.optimizer, scheduler=self.scheduler, **options)
        return self.search

    def train(
        self, told: Callable[[int], int] = lambda count: count, start: int = 0, stop: int = STEPS
    ) -> dict[str, torch.Tensor]:
        """As timm's train.py; `told` is what the scheduler is told of a count of updates or epochs."""
        for step in range(start, stop):
            torch.manual_seed(step)
            loss = loss_of(self.model, batch(step))
            if self.search is not None:
                self.search.loss(loss)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step_update(told(step + 1))
            if (step + 1) % EACH == 0:
                self.scheduler.step(told((step + 1) // EACH))
        return self.model.state_dict()


@pytest.mark.parametrize("by_epochs", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
def test_held_it_is_the_loop_without_it_bit_for_bit(timm: Any, by_epochs: bool, lag: int, assert_same: Any) -> None:
    """Told of an update or epoch as it ends, by the coming one's number (timm's own loop), or by its own (others')."""

    def told(count: int) -> int:
        return count - lag

    plain = Job(timm, by_epochs=by_epochs, noise=(0.4, 0.9)).train(told)
    held = Job(timm, by_epochs=by_epochs, noise=(0.4, 0.9))
    search = held.attach(knobs=HELD, guard=None, tail=None)
    assert_same(held.train(told), plain)
    assert search.finished


@pytest.mark.parametrize("by_epochs", [False, True])
def test_it_is_looked_ahead_at(timm: Any, by_epochs: bool) -> None:
    job = Job(timm, by_epochs=by_epochs)
    search = job.attach()
    assert search.engine.knobs[0].schedule.nominal_peak() > 1e-3  # where it begins at 1e-5
    job.train()
    assert search.finished
    assert search.shifts["learning_rate"].factor != 1.0


@pytest.mark.parametrize("by_epochs", [False, True])
def test_a_resume_in_the_warm_up_is_the_same_run(timm: Any, by_epochs: bool, assert_same: Any) -> None:
    """What the optimizer holds then is not what the scheduler began with."""
    whole = Job(timm, by_epochs=by_epochs, warmup_epochs=3, warmup_prefix=True)
    search = whole.attach(warmup_steps=18)
    whole.train(stop=16)
    saved = copy.deepcopy([whole.model.state_dict(), whole.optimizer.state_dict(), search.state_dict()])
    again = Job(timm, by_epochs=by_epochs, warmup_epochs=3, warmup_prefix=True)
    again.model.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    resumed = again.attach(warmup_steps=18)
    resumed.load_state_dict(saved[2])
    schedules = [one.engine.knobs[0].schedule for one in (search, resumed)]
    assert [schedules[0](step) for step in range(16, STEPS)] == [schedules[1](step) for step in range(16, STEPS)]
    assert_same(whole.train(start=16), again.train(start=16))


def test_one_that_is_under_way_is_told_the_ways_out(timm: Any) -> None:
    job = Job(timm, by_epochs=False)
    job.train()
    job.scheduler.step_update(36)
    job.attach()
    with pytest.raises(StepError, match=r"timm's CosineLRScheduler foretold .* Where training was under way, load"):
        job.train(lambda count: 36 + count)


def test_what_cannot_be_foreseen_is_refused(timm: Any) -> None:
    with pytest.raises(ConfigError, match="CosineLRScheduler goes by epochs; give scheduler_every="):
        Job(timm, by_epochs=True).attach(scheduler_every=1)
    with pytest.raises(ConfigError, match="CosineLRScheduler goes by updates; leave out scheduler_every="):
        Job(timm, by_epochs=False).attach(scheduler_every=5)
    with pytest.raises(ConfigError, match="scheduler_every must be at least 1"):
        Job(timm, by_epochs=True).attach(scheduler_every=0)
    other = Job(timm, by_epochs=False)
    other.scheduler = Job(timm, by_epochs=False).scheduler
    with pytest.raises(ConfigError, match="the scheduler belongs to another optimizer"):
        other.attach()
    with pytest.warns(FutureWarning):
        plateau = Job(timm, by_epochs=True, sched="plateau")
    with pytest.raises(ConfigError, match="waits for a metric, so nobody knows where it goes; give schedule=None"):
        plateau.attach()
