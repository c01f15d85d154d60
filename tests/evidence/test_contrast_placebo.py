"""Contrast on knobs that do nothing: its t has the spread that it claims."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from contrast_parts import STANDS_STILL
from torch import nn

import hdet
import hdet.testing
from hdet import Engine, Probe
from hdet.controllers import Context, Estimate, Gated, Hold
from hdet.designs import Design, Fixed
from hdet.evidence import Contrast
from hdet.evidence.contrast import ContrastCollector


class Flat(nn.Module):
    """Sixteen weights whose gradients are whatever is put there, and a scalar nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(16))
        self.idle = 0.5


def placebo_ts(n: int, windows: int, shards: float = 0.0, design: Design | None = None, horizon: int = 0) -> np.ndarray:
    """The t of each window; with a horizon the evidence begins anew in each, or one would be nearly the next."""
    return np.array([estimate["t"] for estimate in placebo(n, windows, shards, design, horizon, anew=horizon > 0)])


def placebo(
    n: int, windows: int, shards: float = 0.0, design: Design | None = None, horizon: int = 0, anew: bool = False
) -> list[dict[str, Any]]:
    """Of a scalar nobody reads. Replica r's gradients have a mean of their own, `shards` times their noise."""
    blocks = 16 if horizon else 12
    window = blocks * max(1, 4 // n)
    model = Flat()
    engine = Engine(
        hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=1e-3), n=n),
        [
            hdet.Scalar(
                "idle",
                path="idle",
                bounds=(0.01, 10.0),
                evidence=Contrast(refresh=10_000, horizon=horizon),
                controller=Hold(),
            )
        ],
        window=window,
        signal=Probe(lambda m, batch: m.w.sum() + batch, [0.0, 0.5]),
        total_steps=windows * window,
    )
    (collector,) = engine.cycle.collectors
    assert isinstance(collector, ContrastCollector)
    collector.design = design or collector.design  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(n)
    own = torch.randn(n, 16, generator=generator) * shards
    noise = torch.randn(windows * window, n, 16, generator=generator)
    zeros = [0.0] * n
    found = []
    for step in range(windows * window):
        model.w.grad = torch.zeros(16)
        for replica in engine.replicas:
            with replica:
                model.w.grad += noise[step, replica.index] + own[replica.index]
        engine.share_gradients()
        record = engine.step(zeros)
        if record is not None:
            found.append(record.estimates["idle"])
            if anew:
                collector.forget()
    return found


@STANDS_STILL
@pytest.mark.parametrize(("n", "shards", "windows"), [(1, 0.0, 200), (8, 0.0, 250), (2, 3.0, 200)])
def test_a_knob_without_effect_has_a_t_of_unit_spread(n: int, shards: float, windows: int) -> None:
    """Student's t with 11 degrees of freedom: sd 1.11, and |t| > 2 in 7 % of windows."""
    ts = placebo_ts(n, windows, shards)
    assert len(ts) == windows
    assert 0.8 < ts.std() < 1.3
    assert abs(ts.mean()) < 0.3
    assert 0.02 < (np.abs(ts) > 2.0).mean() < 0.13


@STANDS_STILL
@pytest.mark.parametrize(("n", "shards", "windows"), [(4, 3.0, 250), (1, 3.0, 150)])
def test_traces_of_a_knob_without_effect_have_students_spread(n: int, shards: float, windows: int) -> None:
    """Of eight groups: 7 degrees of freedom, sd 1.18, and |t| > 2.365 in 5 % of windows."""
    ts = placebo_ts(n, windows, shards, horizon=400)
    assert len(ts) == windows
    assert 0.9 < ts.std() < 1.5
    assert abs(ts.mean()) < 0.3
    assert 0.01 < (np.abs(ts) > 2.365).mean() < 0.11


@STANDS_STILL
def test_windows_that_share_their_traces_are_not_taken_for_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 25 windows each remembers nearly all of the one before; kept apart by group, sums tell their own error."""
    monkeypatch.setattr(hdet.Scalar, "acts_in_eval", False)  # nothing of the probe's own is added
    rule = Gated(memory=0.8)
    taus: dict[str, list[float]] = {"by group": [], "independent": []}
    for windows in (placebo(n, 40, horizon=400) for n in (2, 4, 8)):
        for name, found in taus.items():
            state = rule.start()
            for told in windows:
                slopes = tuple(told["slopes"]) if name == "by group" else ()
                estimate = Estimate(told["slope"], stderr=told["stderr"], slopes=slopes)
                _, state = rule.step(state, estimate, Context())
                found.append(state.tau)
    sizes = {name: math.sqrt(np.mean(np.square(found))) for name, found in taus.items()}
    assert sizes["by group"] < 1.4
    assert sizes["independent"] > 1.5 * sizes["by group"]


@STANDS_STILL
def test_signs_that_stay_the_same_would_take_shards_for_an_effect() -> None:
    """The law above can fail: this is what it is there to see."""
    ts = placebo_ts(4, 50, 3.0, design=Fixed())
    assert (np.abs(ts) > 2.0).mean() > 0.9


class Stuck(Contrast):
    """The same signs in every step."""

    kind = "stuck_for_tests"

    def collect(self, scene: Any, knobs: Any) -> ContrastCollector:
        collector = super().collect(scene, knobs)
        collector.design = Fixed()  # type: ignore[assignment]
        return collector


class Biased(Contrast):
    """Every slope three standard errors too high: believable each time, and never right."""

    kind = "biased_for_tests"

    def collect(self, scene: Any, knobs: Any) -> ContrastCollector:
        collector = super().collect(scene, knobs)
        close = collector.close

        def raised(harvest: Any) -> dict[str, Estimate]:
            found = close(harvest)
            return {
                name: replace(e, slope=e.slope + 3 * e.stderr) if e.known and e.stderr < math.inf else e
                for name, e in found.items()
            }

        collector.close = raised  # type: ignore[method-assign]
        return collector


@pytest.mark.parametrize("evidence", [Stuck(), Biased()])
def test_the_conformance_suite_sees_an_effect_where_there_is_none(evidence: Contrast) -> None:
    (law,) = [law for law in hdet.testing.laws(evidence) if "placebo" in str(law)]
    with pytest.raises(hdet.testing.LawError, match="without effect"):
        law()
