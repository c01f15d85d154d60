"""The gradient noise scale of a quadratic whose gradient's covariance is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import hdet
from hdet.engine.noise_scale import NoiseScale, scale_of
from hdet.errors import ConfigError, StepError

DIMENSIONS, EXAMPLES = 20, 4
WEIGHT, NOISE = 1.0, 3.0
TRUE = NOISE**2 / EXAMPLES / WEIGHT**2
"""trace(covariance) / |G|^2 = (d sigma^2 / examples) / (d w^2), in micro-batches."""


class Quadratic(nn.Module):
    """w^2 / 2 + <w, z>, with z of standard deviation NOISE in each dimension: the gradient is w + mean(z)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((DIMENSIONS,), WEIGHT))

    def forward(self, z: Tensor) -> Tensor:
        """[examples, DIMENSIONS] to [examples]."""
        return 0.5 * self.w.square().sum() + z @ self.w


def engine_of(
    n: int = 4, steps: int = 200, noise_scale: bool = True, model: nn.Module | None = None, windows: int = 1
) -> hdet.Engine:
    model = model or Quadratic()
    optimizer = SGD(model.parameters(), lr=1e-4)
    knob = hdet.LearningRate(spread=hdet.spreads.TwoLevel(0.0), evidence=hdet.evidence.Line())
    probe = hdet.Probe(lambda model, z: model(z).mean(1), [torch.zeros(2, 1, DIMENSIONS)])
    return hdet.Engine(
        hdet.micro_batches(model, optimizer, n),
        [knob.replace(controller=hdet.controllers.Hold())],
        window=steps,
        signal=probe,
        total_steps=windows * steps,
        noise_scale=noise_scale,
    )


def train(
    engine: hdet.Engine,
    seed: int = 0,
    divided: float = 1.0,
    left_out: int = -1,
    until: int | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """The last step's record, if a window ended with it."""
    generator = generator or torch.Generator().manual_seed(seed)
    assert engine.total_steps is not None
    for step in range(engine.step_count, until or engine.total_steps):
        losses = []
        for replica in engine.replicas:
            if step == left_out and replica.index:
                continue
            with replica:
                z = NOISE * torch.randn(EXAMPLES, DIMENSIONS, generator=generator)
                loss = replica.model(z).mean()
                (loss / divided).backward()
            losses.append(loss.detach())
        engine.share_gradients()
        dense = [p for p in engine.hosts[0][0].parameters() if p.grad is not None and not p.grad.is_sparse]
        nn.utils.clip_grad_norm_(dense, 1.0)  # comes after what is read
        engine.optimizers[0].step()
        engine.optimizers[0].zero_grad()
        record = engine.step(losses if step != left_out else None, complete=step != left_out)
    return record


@pytest.mark.parametrize("n", [2, 4])
def test_it_is_that_of_the_quadratic(n: int) -> None:
    engine = engine_of(n)
    record = train(engine)
    found = engine.noise_scale
    assert found is not None
    assert found.scale is not None
    assert found.stderr is not None
    assert found.scale == pytest.approx(TRUE, abs=3 * found.stderr)
    assert found.stderr < 0.2 * TRUE
    assert found.gradient == pytest.approx(DIMENSIONS * WEIGHT**2, abs=3 * found.gradient_stderr)
    assert NoiseScale(**record.noise_scale) == found  # type: ignore[arg-type]


def test_the_standard_error_is_the_scatter_over_runs() -> None:
    found = []
    for seed in range(60):
        draws = np.random.default_rng(seed)
        z = WEIGHT + NOISE / math.sqrt(EXAMPLES) * draws.standard_normal((100, 4, DIMENSIONS))
        rows = np.stack([(z[:, 0] ** 2).sum(1), (z.sum(1) ** 2).sum(1)], axis=1)
        found.append(scale_of(rows, 4))
    scales = np.array([one.scale for one in found if one is not None])
    errors = np.array([one.stderr for one in found if one is not None])
    assert len(scales) == 60
    assert scales.mean() == pytest.approx(TRUE, abs=4 * errors.mean() / math.sqrt(60))
    assert 0.7 < scales.std() / errors.mean() < 1.4


def test_a_loss_that_the_loop_divides_changes_nothing() -> None:
    whole, divided = engine_of(), engine_of()
    train(whole)
    train(divided, divided=4.0)
    assert whole.noise_scale is not None
    assert divided.noise_scale is not None
    assert divided.noise_scale.scale == pytest.approx(whole.noise_scale.scale, rel=1e-4)


def test_a_step_with_a_short_accumulation_is_left_out() -> None:
    engine = engine_of(steps=10)
    train(engine, left_out=4)
    assert engine.noise_scale is not None
    assert engine.noise_scale.steps == 9


def test_where_the_gradient_is_lost_in_noise_no_scale_is_given() -> None:
    draws = np.random.default_rng(0)
    z = draws.standard_normal((20, 4, DIMENSIONS))
    found = scale_of(np.stack([(z[:, 0] ** 2).sum(1), (z.sum(1) ** 2).sum(1)], axis=1), 4)
    assert found is not None
    assert found.scale is None
    assert "not told from noise in 20 steps" in str(found)


def test_attached_it_is_read_once_passes_are_counted() -> None:
    model = Quadratic()
    optimizer = SGD(model.parameters(), lr=1e-4)
    probe = hdet.Probe(lambda model, z: model(z).mean(1), [torch.zeros(2, 1, DIMENSIONS)])
    search = hdet.attach(model, optimizer, probe=probe, total_steps=41, window=20, noise_scale=True, quiet=True)
    generator = torch.Generator().manual_seed(0)
    for _ in range(41):
        for _ in range(4):
            loss = model(NOISE * torch.randn(EXAMPLES, DIMENSIONS, generator=generator)).mean()
            (search.loss(loss) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert search.noise_scale is not None
    assert search.noise_scale.scale == pytest.approx(TRUE, rel=0.6)
    assert search.history.windows[0].noise_scale


def test_without_it_nothing_is_read() -> None:
    engine = engine_of(steps=5, noise_scale=False)
    assert train(engine).noise_scale == {}
    assert engine.noise_scale is None


def test_a_loop_without_the_blocks_is_told() -> None:
    engine = engine_of(steps=5)
    with pytest.raises(StepError, match="the gradient noise scale is read there"):
        engine.step()


def test_micro_batches_of_the_same_data_are_refused() -> None:
    model = nn.Sequential(hdet.nn.Dropout(0.1), nn.Linear(2, 1))
    home = hdet.micro_batches(model, SGD(model.parameters(), lr=0.1), 4)
    probe = hdet.Probe(lambda model, x: model(x).square().mean(1), [torch.ones(8, 2)])
    knob = hdet.Dropout(evidence=hdet.evidence.Contrast(paired=True))
    with pytest.raises(ConfigError, match=r"Contrast\(paired=True\) has two of them take the same"):
        hdet.Engine(home, [knob], signal=probe, noise_scale=True)


def test_one_micro_batch_and_copies_are_refused() -> None:
    with pytest.raises(ConfigError, match="compares at least 2 micro-batches of a step, and there is 1"):
        engine_of(n=1)
    model = Quadratic()
    home = hdet.replicate(model, SGD(model.parameters(), lr=0.1), n=2)
    with pytest.raises(ConfigError, match="compares the micro-batches of one model in one process"):
        hdet.Engine(home, [hdet.LearningRate()], noise_scale=True)


def test_a_parameter_thawed_on_the_way_counts_from_the_next_window_on() -> None:
    """The same gradients, seen by a meter that was made before one of them was asked for."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Quadratic(), Quadratic()

        def forward(self, z: Tensor) -> Tensor:
            return self.first(z) + self.second(z)  # type: ignore[no-any-return]

    found = []
    for frozen in (False, True):
        model = Two()
        model.second.w.requires_grad_(not frozen)
        engine = engine_of(steps=20, model=model, windows=2)
        model.second.w.requires_grad_(True)
        train(engine)
        found.append(engine.noise_scale)
    frozen_first, throughout = (vars(one) for one in found)
    assert frozen_first == pytest.approx(throughout, rel=1e-5)


def test_a_resume_in_mid_window_knows_the_steps_before() -> None:
    whole, begun, resumed = (engine_of(steps=100) for _ in range(3))
    generator = torch.Generator().manual_seed(0)
    record = train(whole)
    train(begun, until=80, generator=generator)
    resumed.load_state_dict(begun.state_dict())
    assert train(resumed, generator=generator).noise_scale == pytest.approx(record.noise_scale)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("until", [20, 25])
@pytest.mark.parametrize("folder", [True, False])
def test_a_resumed_run_knows_the_scale_of_the_window_before(folder: bool, until: int, tmp_path: Path) -> None:
    begun, resumed = engine_of(steps=20, windows=2), engine_of(steps=20, windows=2)
    train(begun, until=until)
    if folder:
        hdet.checkpoints.CheckpointFolder(tmp_path).save(begun)
        hdet.checkpoints.CheckpointFolder(tmp_path).resume(resumed)
    else:
        resumed.load_state_dict(begun.state_dict())
    assert resumed.noise_scale == begun.noise_scale is not None
    older = {key: value for key, value in begun.state_dict().items() if key != "noise_scale"}
    resumed.load_state_dict(older)
    assert resumed.noise_scale is None


def test_sparse_gradients_are_read_by_what_they_hold() -> None:
    class Table(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.rows = nn.Embedding(8, DIMENSIONS, sparse=sparse)
            nn.init.constant_(self.rows.weight, WEIGHT)

        def forward(self, z: Tensor) -> Tensor:
            w = self.rows(torch.tensor([0, 0, 3]))
            return 0.5 * w.square().sum() + z @ w.sum(0)  # type: ignore[no-any-return]

    first = []
    for kind in (False, True):
        engine = engine_of(steps=2, model=Table(kind))
        train(engine, until=1)
        first.append(engine.state_dict()["open"]["noise"]["norms"])
    assert torch.allclose(*first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_half_precision_have_norms_of_full_precision(dtype: torch.dtype) -> None:
    """In bfloat16 the norm of 257 ones is 16, and its square 256."""
    model = Quadratic()
    model.w = nn.Parameter(torch.ones(257, dtype=dtype))
    engine = engine_of(n=2, steps=2, model=model)
    for replica in engine.replicas:
        with replica:
            model.w.sum().backward()
    engine.share_gradients()
    engine.step()
    norms = engine.state_dict()["open"]["noise"]["norms"]
    assert norms.square().tolist() == [[pytest.approx(257.0), pytest.approx(4 * 257.0)]]
