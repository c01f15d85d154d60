"""What many tests need: a problem small enough to train in milliseconds, and the documented training loop."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Sequence
from typing import Any

import explicit_loop
import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet import Engine, Probe
from hdet.history import WindowRecord

torch.set_num_threads(1)

# A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A run of the suite says the same as the one before; HYPOTHESIS_PROFILE=default looks for new cases.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_runtest_setup() -> None:
    """Fixtures draw the same random numbers, whichever test ran before in their process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_runtest_call() -> None:
    """And so does every test, whichever fixtures were made for it alone."""
    pytest_runtest_setup()


LONGEST = ("test_launching.py", "test_examples.py", "test_conformance.py", "test_ablate.py", "test_benchmark_search.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first: at the end no worker is left with one of them while the others are idle."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not search it in every test."""
    gc.collect()
    gc.freeze()


Batch = tuple[Tensor, Tensor]


def make_batch(step: int, index: int) -> Batch:
    """Eight examples of a noisy linear rule, other ones for each step and replica."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    x = torch.randn(8, 4, generator=generator)
    noise = torch.randn(8, 1, generator=generator)
    return x, x.sum(dim=1, keepdim=True) + 0.1 * noise


def mean_squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Problem:
    """A regression of four numbers on one."""

    batch = staticmethod(make_batch)
    loss = staticmethod(mean_squared_error)

    def model(self, *middle: nn.Module, seed: int = 0) -> nn.Sequential:
        """Two layers with `middle` between them, the same for the same seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *middle, nn.Linear(6, 1))

    def probe(self, **options: Any) -> Probe:
        """Three held-out sub-batches."""
        return Probe(self.loss, [self.batch(-1, j) for j in range(3)], **options)


class Loop:
    """The training loop of the docs, with the places at which real ones differ."""

    def __init__(self) -> None:
        self.problem = Problem()

    def __call__(
        self,
        engine: Engine,
        until: int | None = None,
        *,
        loss: Callable[[nn.Module, Any], Tensor] = mean_squared_error,
        batch: Callable[[int, int], Any] = make_batch,
        before_update: Callable[[Optimizer], object] = lambda optimizer: None,
        after_update: Callable[[int], object] = lambda step: None,
        report: Callable[[int, list[Tensor]], Any] = lambda step, losses: losses,
    ) -> list[WindowRecord]:
        """Train from where the engine is to step `until` (its end, where not given)."""
        return explicit_loop.train(
            engine,
            until,
            loss=lambda model, step, index: loss(model, batch(step, index)),
            before_update=before_update,
            stepped=after_update,
            tell=report,
        )


@pytest.fixture(scope="session")
def problem() -> Problem:
    return Problem()


@pytest.fixture(scope="session")
def train() -> Loop:
    return Loop()


def flatten(state: object) -> list[object]:
    """The leaves of nested state, in order."""
    if isinstance(state, dict):
        return [leaf for key in state for leaf in (key, *flatten(state[key]))]
    if isinstance(state, Sequence) and not isinstance(state, str):
        return [leaf for item in state for leaf in flatten(item)]
    return [state]


@pytest.fixture(scope="session")
def assert_same() -> Callable[[object, object], None]:
    """Nested state is equal, tensors bit for bit."""

    def check(one: object, other: object) -> None:
        left, right = flatten(one), flatten(other)
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            if isinstance(a, Tensor):
                assert isinstance(b, Tensor)
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
            else:
                assert a == b

    return check


@pytest.fixture(scope="session")
def assert_alike() -> Callable[[Engine], None]:
    """All replicas of an engine hold the same parameters and buffers, bit for bit."""

    def check(engine: Engine) -> None:
        first = engine.replicas[0].model.state_dict()
        for replica in engine.replicas[1:]:
            for name, value in replica.model.state_dict().items():
                assert torch.equal(value, first[name]), (replica.index, name)

    return check
