"""Between window ends a step calls next to nothing: after operators have filled the caches each call is slow."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

import hdet


class Calls:
    """Counts the Python functions that are called inside the block."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Calls:
        sys.setprofile(self._notice)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _notice(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is not Calls.__exit__.__code__:
            self.names.append(frame.f_code.co_qualname)


@pytest.mark.parametrize(
    ("home", "knobs", "most"),
    [
        (lambda *host: hdet.replicate(*host, n=2), [hdet.LearningRate(), hdet.WeightDecay()], 30),
        (
            lambda *host: hdet.micro_batches(*host, 1),
            [hdet.LearningRate(evidence=hdet.evidence.Line()), hdet.WeightDecay(evidence=hdet.evidence.Analytic())],
            24,
        ),
    ],
    ids=["apart", "update"],
)
def test_a_step_between_window_ends_calls_few_functions(problem: Any, home: Any, knobs: Any, most: int) -> None:
    model = problem.model()
    replicas = home(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    probe = None if replicas.diverge else problem.probe()
    engine = hdet.Engine(replicas, knobs, window=200, total_steps=400, signal=probe, gradients="local")
    for step in range(8):
        calls, losses = Calls(), []
        for replica in engine.replicas:
            with calls:
                replica.__enter__()
            loss = problem.loss(replica.model, problem.batch(step, 0))
            loss.backward()
            with calls:
                replica.__exit__(None, None, None)
            losses.append(loss)
        with calls:
            engine.share_gradients()
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with calls:
            engine.step(losses)
    assert len(calls.names) <= most, calls.names
