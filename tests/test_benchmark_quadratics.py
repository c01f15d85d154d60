"""The two quadratics of the ablations: what they call the truth, and what they say where there is none."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import decay_start
import horizon
import noisy_quadratic


def written(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> dict[str, Any]:
    words = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["benchmark", *words, f"--out={tmp_path}"])
    module.main()
    return json.loads((tmp_path / "result.json").read_text())  # type: ignore[no-any-return]


def test_a_signal_turns_where_its_slope_is_interpolated_to_be_zero() -> None:
    turns = horizon.sign_change(np.log(horizon.RATES / 0.1))
    assert turns == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("slope", [-1.0, 1.0])
def test_a_signal_that_never_turns_has_no_rate(slope: float) -> None:
    assert horizon.sign_change(np.full(len(horizon.RATES), slope)) is None


def test_the_best_rate_is_finer_than_the_grid_it_starts_from(monkeypatch: pytest.MonkeyPatch) -> None:
    task = horizon.Quadratic(0)
    best = horizon.best_rate(task)
    losses = task.loss(*task.run(best * np.exp([-3e-3, 0.0, 3e-3]), horizon.STEPS))
    assert losses[1] < min(losses[0], losses[2])
    monkeypatch.setattr(horizon, "RATES", np.array([0.9, 1.2, 1.5]) * 1e-3)
    with pytest.raises(SystemExit, match="outside"):
        horizon.best_rate(task)


def test_horizon_writes_null_and_counts_it_where_the_signal_never_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(horizon, "best_rate", lambda task: 0.1)
    monkeypatch.setattr(horizon, "slopes", lambda *given: np.full(len(horizon.RATES), -1.0))
    result = written(horizon, tmp_path, monkeypatch)
    assert (result["log_ratio"], result["bias"], result["never"]) == (None, None, 1)
    monkeypatch.setattr(horizon, "slopes", lambda *given: np.log(horizon.RATES / 0.05))
    result = written(horizon, tmp_path, monkeypatch)
    assert result["log_ratio"] == pytest.approx(-math.log(2))
    assert result["bias"] == pytest.approx(math.log(2))
    assert result["never"] == 0


def test_moments_are_those_of_simulated_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over a window's weights, whose covariance is worked out by hand in `judged`."""
    monkeypatch.setattr(horizon, "COORDINATES", 3)
    task = horizon.Quadratic(1)
    rng = np.random.default_rng(0)
    theta = np.repeat(task.start[None], 40000, axis=0)
    total = np.zeros_like(theta)
    for t in range(6):
        noise = horizon.NOISE * np.sqrt(task.curvature) * rng.standard_normal(theta.shape)
        theta = theta - 0.5 * horizon.schedule(t) * (task.curvature * theta + noise)
        total += theta
    simulated = float((0.5 * (total / 6) ** 2 @ task.curvature).mean())
    judged = task.judged(task.start, np.zeros(3), np.array([0.5]), 0, 6, "average")
    assert judged == pytest.approx([simulated], rel=0.01)


def test_almost_without_noise_a_probe_has_the_true_slope_and_a_window_s_mean_loss_a_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noisy_quadratic, "WINDOWS", 60)

    def gain(signal: str, averaging: str) -> float:
        options = {"signal": signal, "averaging": averaging, "noise": 0.01, "spread": 0.02, "window": 5}
        return float(written(noisy_quadratic, tmp_path, monkeypatch, **options)["gain"])

    assert gain("probe", "local") == pytest.approx(1.0, abs=0.02)
    assert 0.3 < gain("training", "local") < 0.8
    # A replica's own progress hardly shrinks the gradient that it shares, so its lead is overstated.
    assert 1.1 < gain("probe", "shared") < 1.2


def test_falling_now_always_looks_better_and_falling_late_is_worse() -> None:
    """What docs/knobs.md says of the start of a schedule's fall."""
    assert all(decay_start.look(0.5, at, ahead) < 1.0 for at in decay_start.LOOKS for ahead in decay_start.AHEAD)
    assert decay_start.final(0.5, 0.05) > decay_start.final(0.5, 0.2) > decay_start.final(0.5, 0.5)


def test_decay_starts_moments_are_those_of_simulated_runs() -> None:
    draws, rates = np.random.default_rng(0), np.linspace(0.5, 0.1, 20)
    theta = np.ones((4000, decay_start.COORDINATES))
    for rate in rates:
        noise = decay_start.NOISE * draws.standard_normal(theta.shape)
        theta = theta - rate * decay_start.CURVATURE * (theta - noise)
    simulated = (0.5 * theta**2 @ decay_start.CURVATURE).mean()
    assert decay_start.loss(decay_start.trained(decay_start.START, rates)) == pytest.approx(simulated, rel=0.01)
