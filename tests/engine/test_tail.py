"""The tail: which weights a run ends with, and that all else is as it was."""

from __future__ import annotations

import copy
import json
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import schedulefree
import torch
from torch import Tensor, nn

import hdet
from hdet import Engine, TailAverage
from hdet.controllers import Hold
from hdet.engine.tail import Tail
from hdet.errors import CheckpointError, ConfigError
from hdet.record import WindowRecord
from hdet.replicas import tensors
from hdet.spreads import TwoLevel

WINDOW, TOTAL = 4, 20
CALM, RESTLESS, WILD = 0.02, 0.15, 0.2
"""Rates at which the last weights are still on their way, and at which they are those of the last few batches."""


def engine_of(
    problem: Any, rate: float = RESTLESS, *middle: nn.Module, n: int = 1, copies: bool = False, **options: Any
) -> Engine:
    model = problem.model(*middle)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    home = (hdet.replicate if copies else hdet.micro_batches)(model, optimizer, n=n)
    knobs = options.pop("knobs", [hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())])
    given = {"window": WINDOW, "signal": problem.probe(), "total_steps": TOTAL, "tail": TailAverage(), **options}
    return Engine(home, knobs, **given)


def weights_of(engine: Engine, host: int = 0) -> list[Tensor]:
    return tensors.clones(tensors.parameters(engine.hosts[host][0]))


def noisy(step: int, index: int) -> tuple[Tensor, Tensor]:
    """Eight examples with so much noise that a step in ten goes the wrong way."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    x = torch.randn(8, 4, generator=generator)
    return x, x.sum(dim=1, keepdim=True) + 3.0 * torch.randn(8, 1, generator=generator)


def walked(engine: Engine, train: Any, until: int | None = None, **options: Any) -> list[list[Tensor]]:
    """Train; the weights after each update."""
    path: list[list[Tensor]] = []
    train(engine, until, batch=noisy, after_update=lambda step: path.append(weights_of(engine)), **options)
    return path


def mean(path: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(same).double().mean(dim=0).float() for same in zip(*path, strict=True)]


def close(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.allclose(*pair, atol=1e-6) for pair in zip(some, others, strict=True))


def held_out(problem: Any, engine: Engine, weights: list[Tensor]) -> np.ndarray[Any, Any]:
    """[J] losses of the probe at some weights."""
    with tensors.substituted(tensors.parameters(engine.hosts[0][0]), weights):
        losses: np.ndarray[Any, Any] = problem.probe().measure(engine.hosts[0][0], 0).numpy()
        return losses


# -- which weights it ends with -------------------------------------------------------------------


def astray(step: int, index: int) -> tuple[Tensor, Tensor]:
    """Batches whose targets lead away from the right ones over the last two fifths of the run."""
    x, y = noisy(step, index)
    return x, y if step < 12 else y - 10.0 * x.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("starts", [(0.2, 0.4, 0.7), (0.4, 0.7), (0.7,), (0.0,), (0.4, 0.45), (0.0, 0.2, 0.4, 0.6)])
@pytest.mark.parametrize("significance", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("batch", [noisy, astray])
def test_it_ends_with_the_mean_that_the_probe_prefers(
    starts: tuple[float, ...], significance: float, batch: Any, problem: Any, train: Any
) -> None:
    """Of all stretches of parts, which begin with the first window at or after a start; else with the last weights."""
    engine = engine_of(problem, tail=TailAverage(starts=starts, significance=significance))
    path: list[list[Tensor]] = []
    train(engine, batch=batch, after_update=lambda step: path.append(weights_of(engine)))
    begins = sorted({next(step for step in range(0, TOTAL, WINDOW) if step >= start * TOTAL) for start in starts})
    means = {(first, stop): mean(path[first:stop]) for first, stop in combinations([*begins, TOTAL], 2)}
    last = held_out(problem, engine, path[-1])
    gains = {stretch: held_out(problem, engine, weights) - last for stretch, weights in means.items()}
    bounds = {own: gain.mean() + significance * gain.std(ddof=1) / len(gain) ** 0.5 for own, gain in gains.items()}
    best = min(bounds, key=lambda own: bounds[own])
    told = engine.history.windows[-1].tail
    if bounds[best] < 0.0:
        assert (told["start"], told["stop"]) == best
        assert close(weights_of(engine), means[best])
        assert told["difference"] == pytest.approx(gains[best].mean(), rel=1e-3)
        assert told["stderr"] == pytest.approx(gains[best].std(ddof=1) / len(last) ** 0.5, rel=1e-3)
    else:
        assert told == {}
        assert all(map(torch.equal, weights_of(engine), path[-1]))
    assert (bounds[best] < 0.0) == (significance < 100.0)  # both happen here
    assert not any(record.tail for record in engine.history.windows[:-1])


def test_where_more_training_does_harm_it_ends_with_weights_from_before(problem: Any, train: Any) -> None:
    engine = engine_of(problem, tail=TailAverage(starts=(0.2, 0.6)))
    path: list[list[Tensor]] = []
    train(engine, batch=astray, after_update=lambda step: path.append(weights_of(engine)))
    record = engine.history.windows[-1]
    assert (record.tail["start"], record.tail["stop"]) == (4, 12)
    assert close(weights_of(engine), mean(path[4:12]))
    assert record.ending.startswith("ends with the mean of the weights of steps 4 to 11, whose held-out loss is ")


def test_where_the_last_weights_are_better_they_stay(problem: Any, train: Any) -> None:
    engine = engine_of(problem, CALM, tail=TailAverage(significance=0.0))
    path: list[list[Tensor]] = []
    train(engine, after_update=lambda step: path.append(weights_of(engine)))
    assert all(map(torch.equal, weights_of(engine), path[-1]))
    assert engine.history.windows[-1].tail == {}


def test_until_the_end_training_is_what_it_was_bit_for_bit(problem: Any, train: Any) -> None:
    paths = []
    for tail in (None, TailAverage()):
        engine = engine_of(problem, tail=tail)
        paths.append(walked(engine, train))
    for one, other in zip(*paths, strict=True):
        assert all(map(torch.equal, one, other))
    assert not all(map(torch.equal, weights_of(engine), paths[0][-1]))


def test_windows_count_by_their_lengths(problem: Any, train: Any) -> None:
    """And a run that ends before its time has its tail, too."""
    window = hdet.windows.GrowingWindow(fraction=0.3, minimum=2)
    engine = engine_of(problem, window=window, total_steps=30, tail=TailAverage(starts=(0.4,)))
    path = walked(engine, train, until=28)
    engine.finish()
    told = engine.history.windows[-1].tail
    lengths = {record.stop - record.start for record in engine.history.windows if record.start >= told["start"]}
    assert len(lengths) > 1
    assert close(weights_of(engine), mean(path[int(told["start"]) :]))


def test_of_replicas_that_came_apart_it_is_the_mean_of_all(problem: Any, train: Any, assert_alike: Any) -> None:
    knob = hdet.LearningRate(spread=TwoLevel(0.3))
    tail = TailAverage(starts=(0.7,), significance=0.0)
    engine = engine_of(problem, 0.4, n=3, copies=True, knobs=[knob], gradients="local", tail=tail)
    rows: list[list[Tensor]] = []
    train(engine, batch=noisy, after_update=lambda step: rows.append(mean([weights_of(engine, h) for h in range(3)])))
    assert_alike(engine)
    assert close(weights_of(engine), mean(rows[int(engine.history.windows[-1].tail["start"]) :]))


def test_knobs_are_at_their_bases_while_means_are_compared(problem: Any, train: Any) -> None:
    """At the last step each replica had a level of its own."""
    seen: list[tuple[float, float]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if engine.finished or engine.step_count == TOTAL:
            seen.append((engine.hosts[0][1].param_groups[0]["lr"], engine.knobs[0].base(TOTAL)))
        own: Tensor = problem.loss(model, batch)
        return own

    signal = hdet.Probe(loss, problem.probe().batches)
    knob = hdet.LearningRate(spread=TwoLevel(0.3))
    engine = engine_of(problem, 0.4, n=2, copies=True, knobs=[knob], gradients="local", signal=signal)
    train(engine, batch=noisy)
    assert len(seen) >= 3 * 7
    assert all(rate == base for rate, base in seen[-3 * 7 :])
    assert engine.history.windows[-1].values["learning_rate"][0] != engine.history.windows[-1].bases["learning_rate"]


def test_running_statistics_are_averaged_and_other_buffers_stay(problem: Any, train: Any) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.passes += 1.0
            return x

    engine = engine_of(problem, WILD, nn.BatchNorm1d(6, momentum=0.5), Counting())
    model = engine.hosts[0][0]
    ends: list[dict[str, Tensor]] = []

    def after(step: int) -> None:
        if (step + 1) % WINDOW == 0:
            ends.append({name: buffer.clone() for name, buffer in model.named_buffers()})

    train(engine, batch=noisy, after_update=after)
    told = engine.history.windows[-1].tail
    averaged = ends[int(told["start"]) // WINDOW : int(told["stop"]) // WINDOW]
    held = dict(model.named_buffers())
    for name in ("2.running_mean", "2.running_var"):
        assert torch.allclose(held[name], torch.stack([end[name] for end in averaged]).mean(dim=0), atol=1e-6)
        assert not torch.equal(held[name], ends[-1][name])
    for name in ("2.num_batches_tracked", "3.passes"):
        assert torch.equal(held[name], ends[-1][name])


# -- what it compares on --------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [1, 3, 99])
def test_it_compares_on_the_batches_of_the_last_windows(draws: int, problem: Any, train: Any) -> None:
    """Each drawn once for all weights."""
    asked: list[int] = []

    def batches(window: int) -> list[Any]:
        asked.append(window)
        return [problem.batch(-2 - window, j) for j in range(3)]

    engine = engine_of(problem, signal=hdet.Probe(problem.loss, batches), tail=TailAverage(draws=draws))
    train(engine, TOTAL - 1, batch=noisy)
    asked.clear()
    train(engine, batch=noisy)
    last, compared = TOTAL // WINDOW - 1, min(draws, TOTAL // WINDOW)
    assert [window for window in asked if window != last] == list(range(last + 1 - compared, last))


def test_what_the_last_draw_finds_worse_is_compared_on_no_others(problem: Any, train: Any) -> None:
    """Where the last weights are the best by far they are alone asked of once, each mean once."""
    asked: list[int] = []

    def batches(window: int) -> list[Any]:
        asked.append(window)
        return [problem.batch(-2 - window, j) for j in range(3)]

    counts = []
    for tail in (None, TailAverage(draws=1), TailAverage(draws=4)):
        evaluated: list[Any] = []

        def loss(model: nn.Module, batch: Any, seen: list[Any] = evaluated) -> Tensor:
            seen.append(batch)
            own: Tensor = problem.loss(model, batch)
            return own

        engine = engine_of(problem, CALM, signal=hdet.Probe(loss, batches), tail=tail)
        asked.clear()
        train(engine)
        counts.append((len(evaluated), len(asked)))
        assert engine.history.windows[-1].tail == {}
    assert counts[1] == counts[2] != counts[0]


@pytest.mark.parametrize(("worse", "draws"), [(0.1, 4), (0.9, 4), (1.1, 1)])
def test_a_mean_that_loses_by_less_than_is_asked_for_is_compared_on_all(
    worse: float, draws: int, problem: Any, train: Any
) -> None:
    """Of the last draw alone it loses by some standard errors, of the three before it wins by far."""
    last: list[Tensor] = []
    asked: list[int] = []
    scatter = torch.tensor([-1.0, 0.0, 1.0])  # whose standard error over three is 1 / sqrt(3)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if not last:
            return 0.0 * model[0].weight.sum() + batch.sum()
        at, j = int(batch[0]), int(batch[1])
        is_last = all(map(torch.equal, tensors.parameters(model), last))
        asked.append(at)
        gained = worse / 3**0.5 + float(scatter[j]) if at == TOTAL // WINDOW - 1 else -9.0 + 0.1 * float(scatter[j])
        return 1.0 + (0.0 if is_last else gained) + 0.0 * model[0].weight.sum()

    def batches(window: int) -> list[Tensor]:
        return [torch.tensor([float(window), float(j)]) for j in range(3)]

    engine = engine_of(problem, signal=hdet.Probe(loss, batches), tail=TailAverage(starts=(0.4,)))
    train(engine, TOTAL - 1, batch=noisy)
    train(engine, batch=noisy, after_update=lambda step: last.extend(weights_of(engine)))
    assert len(set(asked)) == draws
    assert (engine.history.windows[-1].tail != {}) == (draws > 1)


def test_each_mean_is_compared_with_its_own_batch_statistics(problem: Any, train: Any) -> None:
    """And the last weights, on every draw, with theirs."""

    def batches(window: int) -> list[Any]:
        return [problem.batch(-2 - window, j) for j in range(3)]

    probe = hdet.Probe(problem.loss, batches)
    tail = TailAverage(starts=(0.2, 0.6), significance=0.0, draws=3)
    engine = engine_of(problem, WILD, nn.BatchNorm1d(6, momentum=0.5), signal=probe, tail=tail)
    model = engine.hosts[0][0]
    held: list[dict[str, Tensor]] = []
    train(engine, batch=noisy, after_update=lambda step: held.append(copy.deepcopy(model.state_dict())))
    ended, told = copy.deepcopy(model.state_dict()), engine.history.windows[-1].tail

    def of(state: dict[str, Tensor]) -> np.ndarray[Any, Any]:
        model.load_state_dict(state)
        return np.mean([probe.measure(model, window).numpy() for window in (4, 3, 2)], axis=0)

    assert told["difference"] == pytest.approx((of(ended) - of(held[-1])).mean(), rel=1e-4)


def test_of_parameters_that_can_change_no_more_there_is_no_mean(problem: Any, train: Any) -> None:
    """Of a layer that the optimizer does not hold, frozen within the window after which the run is ended."""
    model = problem.model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=RESTLESS)
    knob = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())
    home = hdet.micro_batches(model, optimizer, n=1)
    tail = TailAverage(starts=(0.4,), significance=0.0)
    engine = Engine(home, [knob], window=WINDOW, signal=problem.probe(), total_steps=TOTAL, tail=tail)
    path = walked(engine, train, until=14)
    model[0].requires_grad_(False)
    path += walked(engine, train, until=16)
    engine.finish()
    assert all(map(torch.equal, weights_of(engine), path[-1]))


def test_batches_in_a_list_are_compared_on_once(problem: Any, train: Any) -> None:
    counts = []
    for tail in (None, TailAverage()):
        evaluated: list[Any] = []

        def loss(model: nn.Module, batch: Any, seen: list[Any] = evaluated) -> Tensor:
            seen.append(batch)
            own: Tensor = problem.loss(model, batch)
            return own

        signal = hdet.Probe(loss, [problem.batch(-1, j) for j in range(3)])
        train(engine_of(problem, signal=signal, tail=tail), batch=noisy)
        counts.append(len(evaluated))
    assert counts[1] - counts[0] == 3 * 7  # sub-batches, at the last weights and at six stretches of three parts


def test_draws_that_are_all_the_same_prove_no_more_than_one(problem: Any, train: Any) -> None:
    told = []
    held = problem.probe().batches
    for batches in (held, lambda window: held):
        engine = engine_of(problem, signal=hdet.Probe(problem.loss, batches))
        train(engine, batch=noisy)
        told.append(engine.history.windows[-1].tail)
    assert told[0] == pytest.approx(told[1])


@pytest.mark.parametrize("gone", [KeyError, StopIteration])
def test_batches_that_a_function_gives_once_are_done_without(gone: type[Exception], problem: Any, train: Any) -> None:
    """The run ends, and says on what its end was judged."""

    def batches(window: int) -> Any:
        if window < engine.cycle.window.index:
            raise gone(window)
        return problem.probe().batches

    engine = engine_of(problem, signal=hdet.Probe(problem.loss, batches))
    with pytest.warns(UserWarning, match=f"batches of earlier windows again .{gone.__name__}"):
        train(engine, batch=noisy)
    listed = engine_of(problem)
    train(listed, batch=noisy)
    assert engine.finished
    assert engine.history.windows[-1].tail == listed.history.windows[-1].tail != {}


def test_a_mean_whose_losses_are_not_finite_is_not_taken(problem: Any, train: Any) -> None:
    """The last weights stay, though they are no better."""
    probe = problem.probe()
    last: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own: Tensor = problem.loss(model, batch)
        return own if last and all(map(torch.equal, tensors.parameters(model), last)) else own * float("nan")

    engine = engine_of(problem, signal=hdet.Probe(loss, probe.batches), tail=TailAverage(significance=0.0))
    with pytest.warns(UserWarning, match="not finite"):
        train(engine, batch=noisy, after_update=lambda step: last.__setitem__(slice(None), weights_of(engine)))
    assert all(map(torch.equal, weights_of(engine), last))


def test_last_weights_whose_losses_are_not_finite_are_not_kept(problem: Any, train: Any) -> None:
    last: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own: Tensor = problem.loss(model, batch)
        return own / 0.0 if last and all(map(torch.equal, tensors.parameters(model), last)) else own

    engine = engine_of(problem, signal=hdet.Probe(loss, problem.probe().batches))
    path = walked(engine, train, until=TOTAL - 1)
    with pytest.warns(UserWarning, match="not finite"):
        train(engine, batch=noisy, after_update=lambda step: last.extend(weights_of(engine)))
    record = engine.history.windows[-1]
    assert record.tail == {"start": 16, "stop": 20}
    assert (
        record.ending
        == "ends with the mean of the weights from step 16 on, since the held-out loss of the last is not finite"
    )
    assert close(weights_of(engine), mean([*path[16:], last]))


def test_where_no_loss_is_finite_the_last_weights_stay(problem: Any, train: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        own: Tensor = problem.loss(model, batch)
        return own / 0.0 if engine.step_count == TOTAL else own

    engine = engine_of(problem, signal=hdet.Probe(loss, problem.probe().batches))
    with pytest.warns(UserWarning, match="not finite"):
        path = walked(engine, train)
    assert all(map(torch.equal, weights_of(engine), path[-1]))
    assert engine.history.windows[-1].tail == {}


def test_a_sub_batchs_loss_is_its_mean_over_the_draws(problem: Any, train: Any) -> None:
    def batches(window: int) -> list[Any]:
        return [problem.batch(-2 - window, j) for j in range(3)]

    probe = hdet.Probe(problem.loss, batches)
    engine = engine_of(problem, signal=probe, tail=TailAverage(starts=(0.4,), significance=0.0, draws=3))
    path = walked(engine, train)
    gained = []
    for weights in (mean(path[8:]), path[-1]):
        with tensors.substituted(tensors.parameters(engine.hosts[0][0]), weights):
            gained.append(np.mean([probe.measure(engine.hosts[0][0], w).numpy() for w in (4, 3, 2)], axis=0))
    told, differences = engine.history.windows[-1].tail, gained[0] - gained[1]
    assert told["difference"] == pytest.approx(differences.mean(), rel=1e-3)
    assert told["stderr"] == pytest.approx(differences.std(ddof=1) / 3**0.5, rel=1e-3)


@pytest.mark.parametrize("keep", ["host", "device"])
def test_half_precision_is_averaged_in_single(keep: Any, problem: Any, train: Any) -> None:
    """And rounded once, at the end."""
    model = problem.model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=RESTLESS)
    knob = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())
    home = hdet.micro_batches(model, optimizer, n=1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own: Tensor = problem.loss(model, tuple(part.bfloat16() for part in batch)).float()
        return own

    signal = hdet.Probe(loss, problem.probe().batches)
    tail = TailAverage(starts=(0.4,), significance=0.0, keep=keep)
    engine = Engine(home, [knob], window=1, signal=signal, total_steps=TOTAL, tail=tail)
    path = walked(engine, train, loss=loss)
    assert engine.history.windows[-1].tail["start"] == 8
    assert all(map(torch.equal, weights_of(engine), [value.bfloat16() for value in mean(path[8:])]))


# -- a run that is stopped, goes back, or trains other parameters ---------------------------------


@pytest.mark.parametrize("stop", [6, 8, 14, 17, 19])
def test_stopped_at_any_step_and_resumed_it_ends_the_same(
    stop: int, problem: Any, train: Any, assert_same: Any, tmp_path: Any
) -> None:
    norm = nn.BatchNorm1d(6)
    whole = engine_of(problem, WILD, copy.deepcopy(norm))
    train(whole, batch=noisy)
    assert whole.history.windows[-1].tail
    begun = engine_of(problem, WILD, copy.deepcopy(norm))
    train(begun, stop, batch=noisy)
    torch.save(begun.state_dict(), tmp_path / "state.pt")
    resumed = engine_of(problem, WILD, copy.deepcopy(norm))
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    train(resumed, batch=noisy)
    assert resumed.history.windows[-1].tail == whole.history.windows[-1].tail
    assert_same(resumed.hosts[0][0].state_dict(), whole.hosts[0][0].state_dict())


def test_a_state_of_a_run_that_is_over_has_no_tail(problem: Any, train: Any, assert_same: Any) -> None:
    engine = engine_of(problem)
    train(engine, batch=noisy)
    state = copy.deepcopy(engine.state_dict())
    assert state["tail"] == []
    other = engine_of(problem)
    other.load_state_dict(state)
    assert_same(other.hosts[0][0].state_dict(), engine.hosts[0][0].state_dict())


def test_a_state_without_a_tail_begins_it_anew(problem: Any, train: Any) -> None:
    """As of a sharded checkpoint, or of an engine that had none; and an engine without one takes no notice of it."""
    engine = engine_of(problem, tail=TailAverage(starts=(0.4,), significance=0.0))
    path = walked(engine, train, until=12)
    state = copy.deepcopy(engine.state_dict())
    alone = engine_of(problem, tail=None)
    alone.load_state_dict(copy.deepcopy(state))
    assert all(map(torch.equal, weights_of(alone), path[-1]))
    del state["tail"]
    engine.load_state_dict(state)
    path += walked(engine, train)
    assert engine.history.windows[-1].tail["start"] == 12
    assert close(weights_of(engine), mean(path[12:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part["values"].pop(),
        lambda part: part.update(values=[value[:1] for value in part["values"]]),
        lambda part: part.update(flags=[not flag for flag in part["flags"]]),
    ],
)
def test_a_tail_of_other_parameters_is_begun_anew(change: Any, problem: Any, train: Any) -> None:
    engine = engine_of(problem, tail=TailAverage(starts=(0.4,), significance=0.0))
    train(engine, 12, batch=noisy)
    state = copy.deepcopy(engine.state_dict())
    change(state["tail"][0])
    engine.load_state_dict(state)
    train(engine, batch=noisy)
    assert engine.history.windows[-1].tail["start"] == 12


@pytest.mark.parametrize("lacking", ["start", "stop", "steps", "flags", "values", "buffers"])
def test_a_state_whose_tail_lacks_something_is_refused(lacking: str, problem: Any, train: Any) -> None:
    engine = engine_of(problem)
    train(engine, 13, batch=noisy)
    state = copy.deepcopy(engine.state_dict())
    del state["tail"][0][lacking]
    with pytest.raises(CheckpointError, match=f"tail.0.{lacking}"):
        engine.load_state_dict(state)
    assert engine.step_count == 13


def test_a_window_in_which_all_failed_is_left_out(problem: Any, train: Any) -> None:
    """The run goes on from the weights that the means lead to."""
    engine = engine_of(problem, tail=TailAverage(starts=(0.0,)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own: Tensor = problem.loss(model, batch)
        return own * float("nan") if 8 <= engine.step_count < 12 else own

    path = walked(engine, train, loss=loss)
    assert engine.history.windows[2].faults[-1]["kind"] == "restored"
    assert engine.history.windows[-1].tail["start"] == 0
    assert close(weights_of(engine), mean([*path[:8], *path[12:]]))


def test_where_a_guard_goes_back_it_begins_anew(problem: Any, train: Any) -> None:
    class Once(hdet.engine.guard.Rewind):
        kind = "once"

        def watch(self, scene: Any) -> Any:
            watch = super().watch(scene)
            look = watch.look
            watch.look = lambda harvest, *told: "rewound" if harvest.window.index == 2 else look(harvest, *told)
            return watch

    engine = engine_of(problem, tail=TailAverage(starts=(0.0,), significance=0.0), guard=Once(overshoot=None))
    path = walked(engine, train)
    assert engine.history.windows[2].faults[-1]["kind"] == "rewound"
    assert engine.history.windows[-1].tail["start"] == 12
    assert close(weights_of(engine), mean(path[12:]))


def test_where_all_failed_in_the_last_window_the_restored_weights_stay(problem: Any, train: Any) -> None:
    engine = engine_of(problem)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own: Tensor = problem.loss(model, batch)
        return own * float("nan") if engine.step_count >= 16 else own

    path = walked(engine, train, loss=loss)
    assert all(map(torch.equal, weights_of(engine), path[15]))
    assert engine.history.windows[-1].tail == {}


def test_where_other_parameters_can_change_it_begins_anew(problem: Any, train: Any) -> None:
    """A parameter thawed within a window counts from the next one on."""
    model = problem.model()
    first, last = model[0], model[2]
    optimizer = torch.optim.SGD(last.parameters(), lr=RESTLESS)
    for parameter in first.parameters():
        parameter.requires_grad_(False)
    knob = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())
    home = hdet.micro_batches(model, optimizer, n=1)
    tail = TailAverage(starts=(0.0,), significance=0.0)
    engine = Engine(home, [knob], window=WINDOW, signal=problem.probe(), total_steps=TOTAL, tail=tail)
    walked(engine, train, until=8)
    for parameter in first.parameters():
        parameter.requires_grad_(True)
    walked(engine, train, until=TOTAL - 1)
    (part,) = engine.state_dict()["tail"]
    assert (part["start"], part["steps"]) == (12, 4)


def test_of_buffers_that_grow_there_is_no_mean(problem: Any, train: Any) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.running_mean = torch.cat([self.running_mean, torch.ones(1)])
            return x

    engine = engine_of(problem, RESTLESS, Growing())
    path = walked(engine, train)
    told = engine.history.windows[-1].tail
    assert told["start"] in (8, 16)
    assert close(weights_of(engine), mean(path[int(told["start"]) :]))
    assert torch.equal(engine.hosts[0][0][2].running_mean, torch.ones(TOTAL))  # type: ignore[index]


# -- where there is none, and what is refused -----------------------------------------------------


def test_a_run_of_unknown_length_has_none(problem: Any, train: Any) -> None:
    knob = hdet.LearningRate(evidence=hdet.evidence.Line(preview=0.0), controller=Hold())
    engine = engine_of(problem, knobs=[knob], total_steps=None)
    path = walked(engine, train, until=WINDOW * 4 + 2)
    assert engine.state_dict()["tail"] == []
    engine.finish()
    assert all(map(torch.equal, weights_of(engine), path[-1]))


@pytest.mark.parametrize("stop", [7, 8, 10, 12, 14, 16])
def test_a_run_that_ends_before_its_time_ends_with_as_much_as_there_is(stop: int, problem: Any, train: Any) -> None:
    """None before its first start; between two windows it is told in the record of the one that has closed."""
    engine = engine_of(problem, tail=TailAverage(starts=(0.4,), significance=0.0))
    path = walked(engine, train, until=stop)
    engine.finish()
    told = engine.history.windows[-1].tail
    better = stop > 8 and held_out(problem, engine, mean(path[8:])).mean() < held_out(problem, engine, path[-1]).mean()
    assert told.get("start") == (8 if better else None)
    assert close(weights_of(engine), mean(path[8:]) if better else path[-1])
    assert [record.window for record in engine.history.windows] == list(range(-(-stop // WINDOW)))


def test_a_schedule_free_optimizer_has_none(problem: Any, train: Any) -> None:
    model = problem.model()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer.train()
    knob = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())
    home = hdet.micro_batches(model, optimizer, n=1)
    engine = Engine(home, [knob], window=WINDOW, signal=problem.probe(), total_steps=TOTAL, tail=TailAverage())
    path = walked(engine, train)
    assert all(map(torch.equal, weights_of(engine), path[-1]))


def test_without_evidence_that_averages_it_keeps_its_own_mean(problem: Any, train: Any) -> None:
    knob = hdet.Momentum(evidence=hdet.evidence.Recursion(), controller=Hold())
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    home = hdet.micro_batches(model, optimizer, n=1)
    engine = Engine(home, [knob], window=WINDOW, signal=problem.probe(), total_steps=TOTAL, tail=TailAverage())
    path = walked(engine, train)
    assert close(weights_of(engine), mean(path[int(engine.history.windows[-1].tail["start"]) :]))


@pytest.mark.parametrize("starts", [(), (0.7, 0.4), (0.4, 0.4), (-0.1,), (1.0,), (float("nan"),)])
def test_starts_are_shares_of_the_run_that_rise(starts: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="starts"):
        TailAverage(starts=starts)


def test_a_tail_needs_a_probe_and_one_model(problem: Any) -> None:
    with pytest.raises(ConfigError, match=r"tail=TailAverage\(\) compares the held-out loss"):
        engine_of(problem, knobs=[hdet.LearningRate(spread=TwoLevel(0.1))], n=2, copies=True, signal=None)
    with pytest.raises(ConfigError, match="tail must be of type Tail"):
        engine_of(problem, tail=0.4)
    members = [hdet.LearningRate(evidence=hdet.evidence.Population())]
    with pytest.raises(ConfigError, match="give tail=None"):
        engine_of(problem, knobs=members, n=4, copies=True, merge=hdet.merges.Exploit(), gradients="local")


def test_a_record_tells_of_it_in_json(problem: Any, train: Any) -> None:
    engine = engine_of(problem)
    train(engine, batch=noisy)
    record = engine.history.windows[-1]
    assert sorted(record.tail) == ["difference", "start", "stderr", "stop"]
    assert WindowRecord.from_json(record.to_json()).tail == record.tail
    assert json.loads(record.to_json())["tail"]["start"] in (8, 16)


def test_it_is_declared_by_its_kind() -> None:
    assert TailAverage.kind == "tail_average"
    assert Tail.from_dict({"kind": "tail_average", "starts": [0.5]}) == TailAverage(starts=(0.5,))
