"""`hdet.merges.Exploit` and `hdet.evidence.Population` beside Ray Tune's PBT, which is told the same scores."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import hdet
from hdet.evidence import Population

sys.path.insert(0, str(Path(hdet.__file__).parent.parent / "benchmarks"))
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'hdet[ray]'")
MEMBERS, ROUNDS, SHARE = 8, 12, 0.25
FACTOR = 1.2
Round = dict[int, tuple[int, float]]
"""By member that was exploited: whom it went on from, and its value over that one's."""


@pytest.fixture(scope="module")
def losses() -> NDArray[np.float64]:
    """[ROUNDS, MEMBERS], in an order of their own each round."""
    return np.random.default_rng(5).permuted(np.tile(np.arange(1.0, MEMBERS + 1), (ROUNDS, 1)), axis=1)


def by_hdet(losses: NDArray[np.float64]) -> list[Round]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = hdet.Engine(
        hdet.replicate(model, optimizer, MEMBERS),
        [
            hdet.LearningRate(
                spread=hdet.spreads.Symmetric(0.5), schedule=hdet.schedules.Constant(0.1), bounds=(1e-9, 1e9)
            )
        ],
        window=1,
        gradients="local",
        evidence=Population(step=math.log(FACTOR), resample=0.0),
        merge=hdet.merges.Exploit("truncation", share=SHARE),
        total_steps=ROUNDS + 1,  # at the end all go on from the best
    )
    found = []
    for told in losses:
        for replica in engine.replicas:
            with replica:
                replica.model(torch.ones(1, 1)).sum().backward()
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        before = [group["lr"] for optimizer in engine.optimizers for group in optimizer.param_groups]
        engine.step(list(told))
        after = [group["lr"] for optimizer in engine.optimizers for group in optimizer.param_groups]
        sources = engine.cycle.collectors[0].sources  # type: ignore[attr-defined]
        found.append({m: (s, after[m] / before[s]) for m, s in enumerate(sources) if s != m})
        kept = [m for m, s in enumerate(sources) if s == m]
        assert [after[m] for m in kept] == pytest.approx([before[m] for m in kept])
    return found


def by_ray(losses: NDArray[np.float64]) -> list[Round]:
    """Ray's scheduler, as the search benchmark drives it."""
    from search_parts.ray_population import RayPopulation

    population = RayPopulation(
        [0.1 * 2.0 ** (number / MEMBERS) for number in range(MEMBERS)],
        drawn=lambda: 0.1,
        quantile_fraction=SHARE,
        resample_probability=0.0,
        perturbation_factors=(FACTOR, 1 / FACTOR),
    )
    found = []
    for told in losses:
        before = population.values
        sources = population.exploited(told.tolist())
        found.append({m: (s, population.values[m] / before[s]) for m, s in sources.items()})
    return found


def test_the_same_members_are_exploited_from_the_same_good_ones(losses: NDArray[np.float64]) -> None:
    ours, theirs = by_hdet(losses), by_ray(losses)
    for told, own, other in zip(losses, ours, theirs, strict=True):
        order = np.argsort(told)
        assert set(own) == set(other) == set(order[-2:].tolist())
        good = set(order[:2].tolist())
        assert {source for source, _ in own.values()} <= good
        assert {source for source, _ in other.values()} <= good
    # Both draw: over the rounds each has taken the best and the second best, and moved up and down.
    for found in (ours, theirs):
        ranks = {int(np.argsort(np.argsort(t))[s]) for t, o in zip(losses, found, strict=True) for s, _ in o.values()}
        assert ranks == {0, 1}
        factors = {round(factor, 6) for exploited in found for _, factor in exploited.values()}
        assert factors == {round(FACTOR, 6), round(1 / FACTOR, 6)}
