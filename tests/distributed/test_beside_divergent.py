"""Evidence that goes by the optimizer's moments, beside replicas that come apart: ranks judge as one process does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from launch import launch
from torch import nn
from training import WIDTH, batch, loss_of, told

import hdet
from hdet.controllers import Hold
from hdet.evidence import Analytic, Contrast, Divergent, MixedDifference
from hdet.spreads import TwoLevel

STEPS = 24  # a window
Told = tuple[float, float]

APART: dict[str, Callable[[], hdet.Knob]] = {
    "learning rate": lambda: hdet.LearningRate(evidence=Divergent(), spread=TwoLevel(0.5), controller=Hold()),
    "beta2": lambda: hdet.Beta2(evidence=Divergent(), spread=TwoLevel(0.5), controller=Hold()),
}
JUDGED: dict[str, Callable[[], hdet.Knob]] = {
    "mixed": lambda: hdet.Dropout(evidence=MixedDifference(), controller=Hold()),
    "dots": lambda: hdet.Dropout(evidence=Contrast(refresh=8), controller=Hold()),
    "traces": lambda: hdet.Dropout(evidence=Contrast(horizon=30, groups=4), controller=Hold()),
    "decay": lambda: hdet.WeightDecay(evidence=Analytic(), controller=Hold()),
}
CASES = [("learning rate", "dots"), ("learning rate", "traces"), ("learning rate", "decay"), ("beta2", "mixed")]


def estimate(home: Callable[..., hdet.replicas.Replicas], apart: str, judged: str) -> Told:
    """Slope and standard error of the knob that is judged beside replicas that come apart, in the first window."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), hdet.nn.Dropout(0.3), nn.LayerNorm(16), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=0.3, foreach=False)
    knob = JUDGED[judged]()
    engine = hdet.Engine(
        home(model, optimizer),
        [APART[apart](), knob],
        window=STEPS,
        total_steps=STEPS + 1,  # of its last window nothing is learned any more
        signal=hdet.Probe(loss_of, [batch(-1 - j, 99) for j in range(4)]),
        objective=hdet.Objective(loss_of, lambda window: [batch(50 + window, 10 + j) for j in range(6)]),
    )
    for step in range(STEPS):
        losses = []
        for replica in engine.replicas:
            with replica:
                torch.manual_seed(100 * step + replica.index)
                loss = loss_of(replica.model, batch(step, replica.index))
                loss.backward()
            losses.append(loss.detach())
        engine.share_gradients()
        for own in engine.optimizers:
            own.step()
            own.zero_grad()
        engine.step(losses)
    found: dict[str, float] = told(engine)[0]["estimates"][knob.label]
    return found["slope"], found["stderr"]


def on_ranks() -> list[Told]:
    return [estimate(hdet.distribute, *case) for case in CASES]


@pytest.fixture(scope="module")
def ranks() -> list[list[Told]]:
    return launch(on_ranks, 2)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_judge_by_the_numbers_of_one_process(ranks: list[list[Told]], case: tuple[str, str]) -> None:
    here, there = (found[CASES.index(case)] for found in ranks)
    assert here == there
    slope, error = estimate(partial(hdet.replicate, n=2), *case)
    assert 0.0 < error < float("inf")
    assert here[0] == pytest.approx(slope, abs=0.02 * error)
    assert here[1] == pytest.approx(error, rel=0.02)
