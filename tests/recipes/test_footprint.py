"""What a search is foretold to hold, and what it holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.errors import ConfigError
from hdet.merges import Outer, OuterLearningRate
from hdet.recipes.footprint import footprint
from hdet.replicas import tensors

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import footprint as benchmark

ACTIVATIONS = 64 * 128 * 4
"""Bytes of the probe's own forward pass, which any evaluation takes."""


@pytest.mark.parametrize("row", benchmark.ROWS)
def test_it_is_what_a_real_run_holds(row: str) -> None:
    """Within 10 %, on the device and on the host; and nothing of parameters that are frozen."""
    frozen, options = benchmark.ROWS[row]
    counted, told = benchmark.searched(128, frozen, options), benchmark.foretold(128, frozen, options)
    assert counted.held - counted.kept == pytest.approx(told.bytes("device"), rel=0.1, abs=4096)
    assert counted.kept == pytest.approx(told.bytes("host"), rel=0.1, abs=4096)
    assert counted.momentary <= 1.1 * told.momentary + ACTIVATIONS


@pytest.mark.parametrize("row", ["recipe, no forward knob", "recipe on LoRA adapters"])
def test_late_in_a_run_it_holds_the_tail_too(row: str) -> None:
    frozen, options = benchmark.ROWS[row]
    counted = benchmark.searched(128, frozen, options, windows=benchmark.LATE)
    told = benchmark.foretold(128, frozen, options)
    assert counted.held - counted.kept == pytest.approx(told.bytes("device"), rel=0.1, abs=4096)
    assert counted.kept == pytest.approx(told.bytes("host", late=True), rel=0.1, abs=4096)
    assert told.bytes("host", late=True) == told.bytes("host") + 3 * told.parameters


@pytest.mark.parametrize("row", ["recipe, no forward knob", "rates of groups, no forward knob"])
def test_for_a_moment_one_more_set_of_weights_is_held(row: str) -> None:
    """Besides it only what is made of a tensor or three."""
    frozen, options = benchmark.ROWS[row]
    counted, told = benchmark.searched(512, frozen, options, windows=2), benchmark.foretold(512, frozen, options)
    assert counted.momentary <= (1.0 + 4.0 / benchmark.LAYERS) * told.parameters


def test_of_large_tensors_it_is_one_set_whatever_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are worked on a stretch at a time; here of a sixty-fourth of each, as of those of billions."""
    for name in ("PASSING", "STRETCH"):
        monkeypatch.setattr(tensors, name, 2**12)
    frozen, options = benchmark.ROWS["recipe, no forward knob"]
    counted, told = benchmark.searched(512, frozen, options, windows=2), benchmark.foretold(512, frozen, options)
    assert told.momentary == pytest.approx(told.parameters, rel=0.01)
    assert counted.momentary == pytest.approx(told.parameters, rel=0.01)


def test_70_billion_parameters_take_no_memory() -> None:
    told = benchmark.large(80, 8192)
    sketches = 64 * 2**20
    assert told.parameters > 2 * 60e9
    assert told.bytes("device") < 3.0 * told.parameters + sketches  # of which the average is in float32
    assert told.momentary < told.parameters + sketches
    assert "the best point" in str(told)


def pair(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = nn.Linear(64, 64, bias=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


@pytest.mark.parametrize(("options", "moments"), [({}, 2), ({"amsgrad": True}, 3), ({"fused": True}, 2)])
def test_the_optimizers_state_is_known_before_its_first_step(options: Any, moments: int) -> None:
    model, optimizer = pair(**options)
    told = footprint(model, optimizer, [hdet.LearningRate()])
    assert told.bytes("host") == pytest.approx((1 + moments) * told.parameters, abs=64)
    assert not optimizer.state


def test_averages_and_anchor_on_the_host_leave_the_device_nothing() -> None:
    told = footprint(*pair(), [hdet.LearningRate(), hdet.WeightDecay()], anchor="host", averages="host")
    assert told.bytes("device") == 0
    # The weights of the opening, their average, weights on their way to it, the best point.
    assert told.bytes("host") == pytest.approx(6 * told.parameters, abs=64)
    assert told.bytes("host", early=True) == pytest.approx(7 * told.parameters, abs=64)


def test_without_a_guard_the_anchor_holds_the_optimizers_state() -> None:
    told = footprint(*pair(), [hdet.LearningRate()], guard=None)
    assert told.bytes("device") == pytest.approx(4 * told.parameters, abs=64)
    assert told.bytes("host") == 0


@pytest.mark.parametrize(("width", "said"), [(64, "trained: 16.0 KiB"), (512, "trained: 1.0 MiB")])
def test_it_is_shown_in_a_unit_in_which_it_is_more_than_nothing(width: int, said: str) -> None:
    model = nn.Linear(width, width, bias=False)
    shown = str(footprint(model, torch.optim.AdamW(model.parameters()), [hdet.LearningRate()]))
    assert said in shown
    assert len({line.split()[-3] for line in shown.splitlines() if line.endswith(" P")}) == 1


def test_traffic_takes_the_time_that_bandwidths_say() -> None:
    told = footprint(*pair(), [hdet.LearningRate()])
    p = told.parameters
    assert told.seconds({"memory": p, "host link": p}, "step") == pytest.approx(3.0)
    assert told.seconds({"memory": p, "host link": p}, "window") == pytest.approx(6.0, rel=1e-2)
    with pytest.raises(ConfigError, match="travels over the host link, whose bandwidth was not given"):
        told.seconds({"memory": p}, "window")


def test_what_comes_apart_is_refused() -> None:
    with pytest.raises(ConfigError, match="compares replicas that come apart"):
        footprint(*pair(), [hdet.LearningRate(evidence=hdet.evidence.Divergent())])


def test_an_outer_step_is_counted_by_its_optimizers_state() -> None:
    p = footprint(*pair(), []).parameters
    for merge, moments in ((Outer(1.0, options={}), 0), (Outer(), 1), (Outer(0.1, optimizer="Adam", options={}), 2)):
        told = footprint(*pair(), [OuterLearningRate()], guard=None, merge=merge)
        plain = footprint(*pair(), [], guard=None)
        assert told.bytes("device") - plain.bytes("device") == pytest.approx(moments * p, abs=64)
        assert told.momentary == pytest.approx((5 + moments) * p, abs=64)
        assert footprint(*pair(), [], guard=None, merge=merge).momentary == 4 * p


def test_an_outer_rate_without_an_outer_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="the merge mean has none"):
        footprint(*pair(), [OuterLearningRate()])


def test_a_tail_beside_evidence_that_averages_nothing_has_a_mean_of_its_own() -> None:
    told, without = (footprint(*pair(), [], tail=tail) for tail in (hdet.TailAverage(starts=(0.5,)), None))
    assert told.bytes("device") - without.bytes("device") == told.parameters
    assert told.bytes("host", late=True) - without.bytes("host", late=True) == told.parameters


def test_of_buffers_a_tail_has_none() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told, without = (footprint(model, optimizer, [], tail=tail) for tail in (hdet.TailAverage(starts=(0.5,)), None))
    assert told.bytes("host", late=True) - without.bytes("host", late=True) == told.parameters


def test_an_optimizer_that_cannot_be_tried_is_named() -> None:
    model, _ = pair()
    with pytest.raises(ConfigError, match="what LBFGS holds cannot be known before its first step"):
        footprint(model, torch.optim.LBFGS(model.parameters()), [hdet.LearningRate()])
