"""The merge as it is declared, and merges of the user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import hdet
from hdet import Engine
from hdet.errors import ConfigError
from hdet.evidence import Harvest, Scene
from hdet.merges import Averager, Mean, Merge
from hdet.spreads import TwoLevel


def test_declared_in_every_way() -> None:
    assert Mean("keep") == Mean(optimizer="keep") == Merge.from_dict({"kind": "mean", "optimizer": "keep"})
    assert Merge.from_dict("mean") == Mean("average")
    with pytest.raises(ConfigError, match=r"mean: optimizer: .*'average', 'keep' or 'reset'.*given: 'halve'"):
        Mean("halve")


def build(problem: Any, merge: Merge) -> Engine:
    model = problem.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    knob = hdet.LearningRate(spread=TwoLevel(0.3))
    replicas = hdet.replicate(model, optimizer, n=4)
    return Engine(replicas, [knob], window=3, merge=merge, gradients="local", total_steps=6)


@pytest.mark.parametrize("policy", ["average", "keep", "reset"])
def test_what_becomes_of_optimizer_state(policy: Any, problem: Any, train: Any, assert_alike: Any) -> None:
    engine = build(problem, Mean(policy))
    held: list[torch.Tensor] = []

    def first(optimizer: Any) -> Any:
        return optimizer.state.get(optimizer.param_groups[0]["params"][0], {}).get("exp_avg")

    def after(step: int) -> None:
        held[:] = [first(optimizer).clone() for optimizer in engine.optimizers]

    train(engine, 3, after_update=after)
    assert_alike(engine)
    now = [first(optimizer) for optimizer in engine.optimizers]
    if policy == "average":
        for moment in now:
            torch.testing.assert_close(moment, torch.stack(held).mean(dim=0))
    elif policy == "keep":
        assert all(torch.equal(a, b) for a, b in zip(now, held, strict=True))
        assert not torch.equal(now[0], now[1])
    else:
        assert now == [None] * 4
    train(engine)
    assert_alike(engine)


def test_a_weighted_mean_without_weights_is_no_plain_mean() -> None:
    class Misspelt(Averager):
        def weigths(self, harvest: Harvest) -> None:
            return None

    with pytest.raises(TypeError, match="weights"):
        Misspelt(None, "average")  # type: ignore[abstract, arg-type]


def test_a_merge_of_ones_own(problem: Any, train: Any) -> None:
    class OfFirst(Averager):
        def weights(self, harvest: Harvest) -> NDArray[np.float64]:
            return np.arange(len(harvest.valid)) == harvest.valid.argmax()

    @hdet.spec.register
    class First(Merge):
        """The first valid replica wins."""

        kind = "first"

        def at_work(self, scene: Scene) -> OfFirst:
            return OfFirst(scene, "keep")

    try:
        engine = build(problem, Merge.from_dict("first"))
        seen: list[torch.Tensor] = []
        train(engine, 3, after_update=lambda step: seen.append(engine.replicas[0].model[0].weight.detach().clone()))
        for replica in engine.replicas:
            assert torch.equal(replica.model[0].weight, seen[-1])
    finally:
        del Merge._members["first"]
