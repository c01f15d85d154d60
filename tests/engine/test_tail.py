"""The tail: which weights a run ends with, and what they are compared on."""

from __future__ import annotations

import copy
import json
import math
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from tail_parts import (
    CALM,
    PARTS,
    RESTLESS,
    TOTAL,
    WILD,
    WINDOW,
    close,
    engine_of,
    held_out,
    mean,
    mixed,
    noisy,
    walked,
    weights_of,
)
from torch import Tensor, nn

import hdet
from hdet import Engine, TailAverage
from hdet.controllers import Hold
from hdet.replicas import tensors
from hdet.spreads import TwoLevel

# -- which weights it ends with -------------------------------------------------------------------


def astray(step: int, index: int) -> tuple[Tensor, Tensor]:
    """Batches whose targets lead away from the right ones over the last two fifths of the run."""
    x, y = noisy(step, index)
    return x, y if step < 12 else y - 10.0 * x.sum(dim=1, keepdim=True)


def bound(gain: np.ndarray[Any, Any], significance: float) -> float:
    return float(gain.mean() + significance * gain.std(ddof=1) / len(gain) ** 0.5)


def quadratic(losses: dict[tuple[float, ...], float]) -> float:
    """The lowest value, on a fine grid of shares, of the quadratic through the losses at some of them."""
    count = len(next(iter(losses)))

    def terms(shares: Any) -> np.ndarray[Any, Any]:
        return np.stack([shares[..., i] * shares[..., j] for i in range(count) for j in range(i, count)], axis=-1)

    fitted = np.linalg.lstsq(terms(np.array(list(losses))), np.array(list(losses.values())), rcond=None)[0]
    grid = [at for at in product(np.linspace(0, 1, 101), repeat=count) if abs(sum(at) - 1) < 1e-9]
    return float((terms(np.array(grid)) @ fitted).min())


@pytest.mark.parametrize("starts", [(0.2, 0.4, 0.7), (0.4, 0.7), (0.7,), (0.0,), (0.4, 0.45), (0.0, 0.2, 0.4, 0.6)])
@pytest.mark.parametrize("significance", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("batch", [noisy, astray])
def test_it_ends_with_the_mixture_that_the_probe_prefers(
    starts: tuple[float, ...], significance: float, batch: Any, problem: Any, train: Any
) -> None:
    """Of the last weights and one or two parts, which begin with the first window at or after a start."""
    engine = engine_of(problem, tail=TailAverage(starts=starts, significance=significance))
    path: list[list[Tensor]] = []
    train(engine, batch=batch, after_update=lambda step: path.append(weights_of(engine)))
    begins = sorted({next(step for step in range(0, TOTAL, WINDOW) if step >= start * TOTAL) for start in starts})
    parts = list(pairwise([*begins, TOTAL]))
    last = held_out(problem, engine, path[-1])

    def gain(shares: dict[tuple[int, int], float]) -> np.ndarray[Any, Any]:
        told = [{"start": part[0], "stop": part[1], "share": share} for part, share in shares.items()]
        weights = mixed({"last": 1.0 - sum(shares.values()), "parts": told}, path)
        return held_out(problem, engine, weights) - last

    def nodes(of: tuple[Any, ...]) -> dict[tuple[float, ...], np.ndarray[Any, Any]]:
        at = {
            tuple((np.eye(1 + len(of))[[i, j]].sum(axis=0) / 2).tolist())
            for i, j in product(range(1 + len(of)), repeat=2)
        }
        return {shares: gain(dict(zip(of, shares[1:], strict=True))) for shares in at}

    told = engine.history.windows[-1].tail
    lows = {
        of: quadratic({at: float(own.mean()) for at, own in nodes(of).items()})
        for of in combinations(parts, min(2, len(parts)))
    }
    if told == {}:
        assert all(map(torch.equal, weights_of(engine), path[-1]))
    else:
        ended = {(part["start"], part["stop"]): part["share"] for part in told["parts"]}
        assert set(ended) <= set(parts)
        assert close(weights_of(engine), mixed(told, path))
        assert told["difference"] == pytest.approx(gain(ended).mean(), rel=1e-3)
        assert told["stderr"] == pytest.approx(gain(ended).std(ddof=1) / len(last) ** 0.5, rel=1e-3)
        best = min((of for of in lows if set(ended) <= set(of)), key=lambda of: lows[of])
        assert lows[best] <= min(lows.values()) + 1e-3
        bounds = [bound(own, significance) for own in nodes(best).values()]
        assert bound(gain(ended), significance) <= min(0.0, *bounds) + 1e-6
        if significance == 0.0:  # the quadratic is not the loss, but not far from it
            assert gain(ended).mean() < 0.9 * lows[best] < 0.0
    assert (told != {}) == (significance < 100.0)  # both happen here
    assert not any(record.tail for record in engine.history.windows[:-1])


def test_where_more_training_does_harm_it_ends_with_weights_from_before(problem: Any, train: Any) -> None:
    engine = engine_of(problem, tail=TailAverage(starts=(0.2, 0.6)))
    path: list[list[Tensor]] = []
    train(engine, batch=astray, after_update=lambda step: path.append(weights_of(engine)))
    record = engine.history.windows[-1]
    assert record.tail["last"] == 0.0
    assert record.tail["parts"] == [{"start": 4, "stop": 12, "share": 1.0}]
    assert close(weights_of(engine), mean(path[4:12]))
    assert record.ending.startswith("ends with averaged weights (those of steps 4 to 11), whose held-out loss is ")


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
    (part,) = told["parts"]
    lengths = {record.stop - record.start for record in engine.history.windows if record.start >= part["start"]}
    assert len(lengths) > 1
    assert close(weights_of(engine), mixed(told, path))


def test_of_replicas_that_came_apart_it_is_the_mean_of_all(problem: Any, train: Any, assert_alike: Any) -> None:
    knob = hdet.LearningRate(spread=TwoLevel(0.3))
    tail = TailAverage(starts=(0.7,), significance=0.0)
    engine = engine_of(problem, 0.4, n=3, copies=True, knobs=[knob], gradients="local", tail=tail)
    rows: list[list[Tensor]] = []
    train(engine, batch=noisy, after_update=lambda step: rows.append(mean([weights_of(engine, h) for h in range(3)])))
    assert_alike(engine)
    assert close(weights_of(engine), mixed(engine.history.windows[-1].tail, rows))


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
    assert len(seen) >= 3 * 10
    assert all(rate == base for rate, base in seen[-3 * 10 :])
    assert engine.history.windows[-1].values["learning_rate"][0] != engine.history.windows[-1].bases["learning_rate"]


class Counting(nn.Module):
    """A buffer that training changes and BatchNorm does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1.0
        return x


@pytest.mark.parametrize("by_batch", [True, False])
def test_batchnorm_has_the_statistics_of_the_weights_it_ends_with(by_batch: bool, problem: Any, train: Any) -> None:
    """Those of the probe's batches, corrected by what is chance in them; a layer in eval mode keeps its own."""
    rate = WILD if by_batch else 0.1
    engine = engine_of(problem, rate, nn.BatchNorm1d(6, momentum=0.25), Counting(), tail=TailAverage(significance=0.0))
    model = engine.hosts[0][0]
    norm = model[2].train(by_batch)
    last: dict[str, Tensor] = {}
    path: list[list[Tensor]] = []

    def after(step: int) -> None:
        last.update({name: buffer.clone() for name, buffer in model.named_buffers()})
        path.append(weights_of(engine))

    train(engine, batch=noisy, after_update=after)
    told = engine.history.windows[-1].tail
    assert told["parts"]
    ended = weights_of(engine)
    assert close(ended, mixed(told, path))

    def seen(weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), tensors.substituted(tensors.parameters(model), weights):
            inputs = [model[:2](x) for x, _ in problem.probe().batches]
        return sum(x.mean(dim=0) for x in inputs) / len(inputs), sum(x.var(dim=0) for x in inputs) / len(inputs)

    held = dict(model.named_buffers())
    if by_batch:
        (mean_then, variance_then), (mean_now, variance_now) = seen(path[-1]), seen(ended)
        error = 24**-0.5  # of a mean of as many examples, in standard deviations
        off = (last["2.running_mean"] - mean_then) / variance_then.sqrt()
        times = last["2.running_var"] / variance_then
        assert 0 < int((off.abs() > 2 * error).sum()) < len(off)  # by more than two errors is not by chance
        expected = mean_now + variance_now.sqrt() * off.clamp(-2 * error, 2 * error)
        assert torch.allclose(held["2.running_mean"], expected, atol=1e-5)
        limit = math.exp(2 * 2**0.5 * error)
        assert torch.allclose(held["2.running_var"], variance_now * times.clamp(1 / limit, limit), rtol=1e-4)
    assert torch.equal(held["2.running_mean"], last["2.running_mean"]) == (not by_batch)
    for name in ("2.num_batches_tracked", "3.passes"):
        assert torch.equal(held[name], last[name])
    assert (norm.momentum, norm.training) == (0.25, by_batch)
    assert not norm._forward_pre_hooks


def test_where_the_last_weights_stay_their_statistics_do(problem: Any, train: Any) -> None:
    engine = engine_of(problem, WILD, nn.BatchNorm1d(6), tail=TailAverage(significance=100.0))
    model = engine.hosts[0][0]
    last: dict[str, Tensor] = {}
    train(engine, batch=noisy, after_update=lambda step: last.update(copy.deepcopy(model.state_dict())))
    assert engine.history.windows[-1].tail == {}
    assert all(torch.equal(value, last[name]) for name, value in model.state_dict().items())


def test_all_copies_end_with_the_statistics(problem: Any, train: Any, assert_alike: Any) -> None:
    knob = hdet.LearningRate(spread=TwoLevel(0.3))
    tail = TailAverage(starts=(0.4,), significance=0.0)
    engine = engine_of(problem, 0.1, nn.BatchNorm1d(6), n=2, copies=True, knobs=[knob], gradients="local", tail=tail)
    train(engine, batch=noisy)
    assert engine.history.windows[-1].tail["parts"]
    assert_alike(engine)
    one, other = (dict(model.named_buffers()) for model, _ in engine.hosts)
    assert torch.equal(one["2.running_mean"], other["2.running_mean"])


def test_statistics_that_a_batch_of_one_has_none_of_stay(problem: Any, train: Any) -> None:
    """A sub-batch of one example has no variance."""
    alone = [tuple(part[:1] for part in problem.batch(-1, j)) for j in range(4)]
    signal = hdet.Probe(problem.loss, alone)
    engine = engine_of(problem, WILD, nn.BatchNorm1d(6), signal=signal, tail=TailAverage(significance=0.0))
    norm = engine.hosts[0][0][2]
    last: list[Tensor] = []
    train(engine, batch=noisy, after_update=lambda step: last.__setitem__(slice(None), [norm.running_mean.clone()]))
    assert engine.history.windows[-1].tail["parts"]
    assert torch.equal(norm.running_mean, last[0])


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


def test_where_the_last_draw_calls_for_no_mixture_there_is_no_other(problem: Any, train: Any) -> None:
    """Where the last weights are the best by far."""
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
    assert counts[1] == counts[2]
    assert counts[1][0] - counts[0][0] == 3 * 10  # sub-batches, at three parts, the last weights and half-way between


@pytest.mark.parametrize("starts", [(0.4,), (0.4, 0.7), (0.2, 0.4, 0.7), (0.0, 0.2, 0.4, 0.6)])
@pytest.mark.parametrize("draws", [1, 2, 4])
def test_no_more_is_evaluated_than_is_told_beforehand(
    starts: tuple[float, ...], draws: int, problem: Any, train: Any
) -> None:
    """And as much where the best mixture is none of those asked of first."""
    counts, tail = [], TailAverage(starts=starts, draws=draws, significance=0.0)
    for own in (None, tail):
        evaluated: list[Any] = []

        def loss(model: nn.Module, batch: Any, seen: list[Any] = evaluated) -> Tensor:
            seen.append(batch)
            own: Tensor = problem.loss(model, batch)
            return own

        probe = hdet.Probe(loss, lambda window: [problem.batch(-2 - window, j) for j in range(3)])
        engine = engine_of(problem, 0.1, signal=probe, tail=own)
        train(engine, batch=noisy)
        counts.append(len(evaluated))
    told = engine.history.windows[-1].tail
    assert {told["last"], *(part["share"] for part in told["parts"])} - {0.0, 0.5, 1.0}
    assert counts[1] - counts[0] == 3 * tail.most_evaluations(engine.hosts[0][0])


def test_a_mean_that_the_last_draw_alone_finds_better_is_not_taken(problem: Any, train: Any) -> None:
    """The draws before it speak against it; were it for the last one, it would be."""

    def ended(draws: int) -> dict[str, Any]:
        last: list[Tensor] = []

        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            if not last:
                return 0.0 * model[0].weight.sum() + batch.sum()
            away = sum(float((own - end).abs().sum()) for own, end in zip(tensors.parameters(model), last, strict=True))
            better = -1.0 if int(batch[0]) == TOTAL // WINDOW - 1 else 1.0
            return 1.0 + better * away * (1.0 + 0.01 * batch[1]) + 0.0 * model[0].weight.sum()

        def batches(window: int) -> list[Tensor]:
            return [torch.tensor([float(window), float(j)]) for j in range(3)]

        tail = TailAverage(starts=(0.4,), draws=draws)
        engine = engine_of(problem, signal=hdet.Probe(loss, batches), tail=tail)
        train(engine, TOTAL - 1, batch=noisy)
        train(engine, batch=noisy, after_update=lambda step: last.extend(weights_of(engine)))
        return engine.history.windows[-1].tail

    assert ended(1)
    assert not ended(4)


def test_each_mixture_is_compared_with_its_own_batch_statistics(problem: Any, train: Any) -> None:
    """And the last weights, on every draw, with theirs."""

    def batches(window: int) -> list[Any]:
        return [problem.batch(-20 - window, j) for j in range(3)]

    probe = hdet.Probe(problem.loss, batches)
    tail = TailAverage(starts=(0.2, 0.6), significance=0.0, draws=3)
    engine = engine_of(problem, WILD, nn.BatchNorm1d(6, momentum=0.5), signal=probe, tail=tail)
    model = engine.hosts[0][0]
    held: list[dict[str, Tensor]] = []
    train(engine, batch=noisy, after_update=lambda step: held.append(copy.deepcopy(model.state_dict())))
    ended, told = copy.deepcopy(model.state_dict()), engine.history.windows[-1].tail

    def of(state: dict[str, Tensor]) -> np.ndarray[Any, Any]:
        model.load_state_dict(state)
        return np.mean([probe.measure(model, window, kept_statistics=True).numpy() for window in (4, 3, 2)], axis=0)

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
    assert (
        counts[1] - counts[0] == 3 * 11
    )  # sub-batches, at three parts, the last weights, half-way between, and the best


def test_draws_that_are_all_the_same_prove_no_more_than_one(problem: Any, train: Any) -> None:
    told = []
    held = problem.probe().batches
    for batches in (held, lambda window: held):
        engine = engine_of(problem, signal=hdet.Probe(problem.loss, batches))
        train(engine, batch=noisy)
        told.append(engine.history.windows[-1].tail)
    assert told[0] != {}
    assert json.dumps(told[0]) == json.dumps(told[1])


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
    (part,) = record.tail["parts"]
    assert (record.tail["last"], part["share"]) == (0.0, 1.0)
    losses = {start: held_out(problem, engine, mean([*path, last][start:stop])).mean() for start, stop in PARTS}
    assert part["start"] == min(losses, key=lambda start: losses[start])
    assert record.ending.startswith("ends with averaged weights (those ")
    assert record.ending.endswith("), since the held-out loss of the last is not finite")
    assert close(weights_of(engine), mean([*path, last][part["start"] : part["stop"]]))


def test_where_no_loss_is_finite_the_last_weights_stay(problem: Any, train: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        own: Tensor = problem.loss(model, batch)
        return own / 0.0 if engine.step_count == TOTAL else own

    engine = engine_of(problem, signal=hdet.Probe(loss, problem.probe().batches))
    with pytest.warns(UserWarning, match="not finite"):
        path = walked(engine, train)
    assert all(map(torch.equal, weights_of(engine), path[-1]))
    assert engine.history.windows[-1].tail == {}


def compared(
    engine: Engine, probe: hdet.Probe, path: list[list[Tensor]], windows: tuple[int, ...]
) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """What is told of the mixture, and [J] how far its losses, means over windows, lie above the last weights'."""
    told, losses = engine.history.windows[-1].tail, []
    model = engine.hosts[0][0]
    for weights in (mixed(told, path), path[-1]):
        with tensors.substituted(tensors.parameters(model), weights):
            losses.append(
                np.mean([probe.measure(model, window, kept_statistics=True).numpy() for window in windows], axis=0)
            )
    return told, losses[0] - losses[1]


def test_a_sub_batchs_loss_is_its_mean_over_the_draws(problem: Any, train: Any) -> None:
    def batches(window: int) -> list[Any]:
        return [problem.batch(-2 - window, j) for j in range(3)]

    probe = hdet.Probe(problem.loss, batches)
    engine = engine_of(problem, signal=probe, tail=TailAverage(starts=(0.4,), significance=0.0, draws=3))
    told, differences = compared(engine, probe, walked(engine, train), windows=(4, 3, 2))
    assert told["difference"] == pytest.approx(differences.mean(), rel=1e-3)
    assert told["stderr"] == pytest.approx(differences.std(ddof=1) / 3**0.5, rel=1e-3)


def test_draws_with_other_numbers_of_sub_batches_are_left_out(problem: Any, train: Any) -> None:
    def batches(window: int) -> list[Any]:
        return [problem.batch(-2 - window, j) for j in range(3 if window >= 3 else 2)]

    probe = hdet.Probe(problem.loss, batches)
    engine = engine_of(problem, signal=probe, tail=TailAverage(starts=(0.4,), significance=0.0, draws=4))
    told, differences = compared(engine, probe, walked(engine, train), windows=(4, 3))
    assert told["difference"] == pytest.approx(differences.mean(), rel=1e-3)


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
    told = engine.history.windows[-1].tail
    assert 0.0 < told["parts"][0]["share"] < 1.0 == len(told["parts"])
    wide = mixed(told, [[value.float() for value in weights] for weights in path])
    ended = [value.float() for value in weights_of(engine)]
    assert all(torch.allclose(one, other, rtol=2**-8) for one, other in zip(ended, wide, strict=True))
    nearest = [torch.equal(one, other.bfloat16().float()) for one, other in zip(ended, wide, strict=True)]
    assert sum(nearest) >= len(nearest) - 1
