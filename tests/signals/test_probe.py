"""A held-out loss: paired, in sub-batches, in eval mode, without a trace on the model."""

from __future__ import annotations

import random
import warnings
import weakref
from itertools import repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

import hdet
from hdet import Engine, Probe
from hdet.errors import ConfigError, StepError
from hdet.signals.batches import number_of
from hdet.spreads import TwoLevel


def test_it_measures_in_eval_mode_without_gradients_and_leaves_no_trace(problem: Any) -> None:
    model = problem.model(nn.BatchNorm1d(6), nn.Dropout(0.5))
    frozen = problem.model(nn.BatchNorm1d(6).eval(), nn.Dropout(0.5))
    model[3].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    probe = problem.probe()
    one, other = (probe.measure(model, 0, kept_statistics=True) for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(probe.measure(frozen, 0), one)
    by_batch = probe.measure(model, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert one.shape == (3,)
    assert one.dtype == torch.float64
    assert not one.requires_grad
    want = [problem.loss(model.eval(), problem.batch(-1, j)).item() for j in range(3)]
    assert one.tolist() == want
    model[2].train()  # and nothing else
    want = [problem.loss(model, problem.batch(-1, j)).item() for j in range(3)]
    assert by_batch.tolist() == pytest.approx(want)


def test_a_loss_that_takes_gradients_of_its_own_says_so() -> None:
    """As of a differential equation's residual: an evaluation runs without gradients."""

    def residual(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        points = inputs.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        return (slope - 1.0).square().mean()

    def enabled(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        assert not held, "the graphs of all batches are kept"
        with torch.enable_grad():
            held.add(loss := residual(model, inputs))
            return loss

    held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    model, points = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), [torch.randn(4, 1) for _ in range(2)]
    with pytest.raises(StepError, match="the probe's loss asks for gradients itself"):
        Probe(residual, points).measure(model, 0)
    losses = Probe(enabled, points).measure(model, 0)
    assert losses.tolist() == pytest.approx([residual(model, own).item() for own in points])
    assert not losses.requires_grad

    def wrong(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)[0].square().mean()

    with pytest.raises(StepError, match=r"of what requires them there \(.*not to have been used in the graph|require"):
        Probe(wrong, points).measure(model, 0)


def test_what_the_loss_draws_outside_of_torch_is_paired_and_leaves_no_trace() -> None:
    def drawn(model: Any, batch: Any) -> torch.Tensor:
        return torch.tensor([random.random(), np.random.uniform(), torch.rand(()).item()])

    probe = Probe(drawn, [0])
    random.seed(1)
    np.random.seed(1)
    untouched = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    one, other, later = (probe.measure(nn.Linear(1, 1), window) for window in (0, 0, 1))
    assert torch.equal(one, other)
    assert not torch.eq(one, later).any()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == untouched  # type: ignore[index]


class Noisy(nn.Module):
    """A layer that draws from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        own = self.generator
        drawn = torch.randn((), generator=own).item() if isinstance(own, torch.Generator) else own.normal()
        return total + drawn


@pytest.mark.parametrize(
    "seeded",
    [
        lambda seed: torch.Generator().manual_seed(seed),
        np.random.default_rng,
        np.random.RandomState,
        lambda seed: np.random.RandomState(np.random.PCG64(seed)),
    ],
)
def test_layers_with_generators_of_their_own_draw_each_its_own_numbers(seeded: Any) -> None:
    """The same in all evaluations of a window, and those of training are as they were."""
    model, twin = (nn.Sequential(*(Noisy(seeded(seed)) for seed in range(64))) for _ in range(2))
    owner = TensorDataset(torch.zeros(1))
    model[0].system, model[0].gone = random.SystemRandom(), weakref.proxy(owner)
    del owner
    probe = Probe(lambda model, batch: torch.stack([layer(torch.zeros(())) for layer in model]).std(), [0, 1])
    one, other, later = (probe.measure(model, window).tolist() for window in (0, 0, 1))
    assert one == other != later
    assert min(one) > 0.5, "numbers that are one and the same have no scatter"
    assert model(torch.zeros(())) == twin(torch.zeros(()))


class Stream(IterableDataset[torch.Tensor]):
    """Held-out data without a length."""

    def __iter__(self) -> Any:
        return iter(torch.arange(8.0))


def test_a_loader_of_a_stream_is_gone_through() -> None:
    probe = Probe(lambda model, x: x.mean(), DataLoader(Stream(), batch_size=4))
    assert probe.measure(nn.Linear(1, 1), 0).tolist() == [1.5, 5.5]


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(lambda: torch.ones(1), None)


class Places:
    """A sampler that does not say how many."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __iter__(self) -> Any:
        return iter(*self.given)


class Counted(BatchSampler):
    def __len__(self) -> int:
        return 2


DATA: Any = torch.arange(8.0)


@pytest.mark.parametrize(
    ("loader", "told"),
    [
        (DataLoader(DATA, batch_size=4, sampler=Places(range(8))), None),
        (DataLoader(DATA, batch_sampler=Places([range(4), range(4, 8)])), None),
        (DataLoader(DATA, batch_size=None, sampler=Places([range(4), range(4, 8)])), None),
        (DataLoader(DATA, batch_sampler=Counted(Places(range(8)), 4, False)), 2),
        (DataLoader(DATA, batch_sampler=[range(4), range(4, 8)]), 2),
        (DataLoader(DATA, batch_size=4), 2),
        (DataLoader(DATA.reshape(2, 4), batch_size=None), 2),
    ],
)
def test_a_loader_is_gone_through_whether_or_not_its_sampler_knows_how_many(
    loader: DataLoader[Any], told: int | None
) -> None:
    assert Probe(lambda model, x: x.mean(), loader).measure(nn.Linear(1, 1), 0).tolist() == [1.5, 5.5]
    assert number_of(loader) == told


ENDLESS = [
    DataLoader(Endless()),
    DataLoader(DATA, batch_size=4, sampler=Places(int, 1)),
    lambda window: DataLoader(DATA, batch_size=4, sampler=Places(int, 1)),
    lambda window: (torch.ones(1) for _ in repeat(0)),
]


@pytest.mark.parametrize("batches", ENDLESS, ids=["stream", "sampler", "function of a loader", "function"])
def test_batches_without_an_end_are_refused(batches: Any) -> None:
    with pytest.raises(StepError, match=r"1000 batches for one window.* and may have no end: give a part of it"):
        Probe(lambda model, x: x.mean(), batches).draw(0)


class Long(Stream):
    """A stream whose length is known."""

    def __iter__(self) -> Any:
        return iter(torch.ones(1001))

    def __len__(self) -> int:
        return 1001


@pytest.mark.parametrize("batches", [[torch.ones(1)] * 1001, DataLoader(Long()), lambda window: [torch.ones(1)] * 1001])
def test_many_batches_whose_number_is_known_are_taken(batches: Any) -> None:
    assert len(Probe(lambda model, x: x.mean(), batches).draw(0)) == 1001


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_batches_of_texts_of_other_lengths_are_measured(layout: torch.layout) -> None:
    batches = [torch.nested.nested_tensor([torch.ones(2), torch.ones(n)], layout=layout) for n in (3, 5)]
    probe = Probe(lambda model, texts: torch.cat(texts.unbind()).sum(), batches)
    assert probe.measure(nn.Linear(1, 1), 0).tolist() == [5.0, 7.0]


def test_modes_come_back_after_an_error(problem: Any) -> None:
    model = problem.model(nn.Dropout(0.5))
    probe = Probe(lambda model, batch: torch.ones(2).reshape(3), [0, 1])
    with pytest.raises(RuntimeError, match=r"^shape"):
        probe.measure(model, 0)
    assert all(module.training for module in model.modules())


def test_one_forward_may_give_all_losses_at_once(problem: Any) -> None:
    model = problem.model()
    with torch.inference_mode():  # as batches may be made
        x, y = (torch.cat(parts) for parts in zip(*(problem.batch(-1, j) for j in range(3)), strict=True))
    whole = Probe(lambda m, b: (m(b[0]) - b[1]).square().reshape(3, -1).mean(dim=1), [(x, y)])
    torch.testing.assert_close(whole.measure(model, 0), problem.probe().measure(model, 0))


def drawn(window: int) -> Any:
    """Batches that take from every global generator."""
    rows = [random.random(), np.random.rand(), float(torch.rand(()))]
    return [(torch.rand(8, 4) + sum(rows), torch.ones(8, 1)) for _ in range(3)]


GENERATOR = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(24, 4, generator=GENERATOR), torch.randn(24, 1, generator=GENERATOR))
RANDOM = {
    "function": drawn,
    "loader": DataLoader(DATA, batch_size=8),
    "shuffled": DataLoader(DATA, batch_size=8, shuffle=True),
    "own generator": DataLoader(DATA, batch_size=8, shuffle=True, generator=GENERATOR),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_what_it_draws_is_the_windows_and_the_trainings_numbers_are_left(kind: str, problem: Any) -> None:
    def states() -> tuple[Any, ...]:
        own = (torch.get_rng_state().tolist(), GENERATOR.get_state().tolist())
        return *own, random.getstate(), str(np.random.get_state())

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (F.dropout(model(batch[0]), 0.5, training=True) - batch[1]).square().mean()

    model, probe, before = problem.model(), Probe(loss, RANDOM[kind]), states()
    measured = probe.measure(model, 0)
    assert states() == before
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert torch.equal(probe.measure(model, 0), measured)
    assert not torch.equal(probe.measure(model, 1), measured)


def test_a_loader_with_a_generator_of_its_own_gives_each_window_other_batches(problem: Any) -> None:
    probe = Probe(problem.loss, RANDOM["own generator"])
    first, again, second = (torch.cat([batch[0] for batch in probe.draw(window)]) for window in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_function_that_gives_no_batch_is_told_of(problem: Any) -> None:
    with pytest.raises(StepError, match="the probe has no batch in this window; its function"):
        Probe(problem.loss, lambda window: []).measure(problem.model(), 0)


def test_a_smaller_last_batch_is_said_once(problem: Any) -> None:
    sizes = {"last": (8, 3), "graphs": (8, 5, 7), "larger": (8, 8, 9), "alike": (8, 8, 8)}
    batches = {name: [(torch.ones(()), torch.ones(n, 1)) for n in own] for name, own in sizes.items()}
    for name in ("graphs", "larger", "alike"):
        Probe(problem.loss, batches[name]).draw(0)
    probe = Probe(problem.loss, batches["last"])
    with pytest.warns(UserWarning, match=r"last batch is smaller than the others \(3 and 8 along .*drop_last=True"):
        probe.draw(0)
    probe.draw(1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: Probe(3, [1, 2]), r"loss must be callable as loss\(model, batch\), got int"),
        (lambda p: Probe(p.loss, []), "a probe needs batches; got none"),
        (lambda p: Probe(p.loss, None), "batches is a list, a DataLoader or a function .* got NoneType; "),
        (lambda p: Probe(p.loss, "validation"), "batches is a list, a DataLoader or a function .* got str; "),
        (lambda p: Probe(p.loss, {"x": 1, "y": 2}), "batches is a list, a DataLoader or a function .* got dict; "),
        (lambda p: p.probe(at="mean"), "at must be 'last' or 'average', got 'mean'"),
        (lambda p: p.probe(at="average", stride="2"), "stride is a number of steps, at least 1; got '2'"),
        (lambda p: p.probe(at="average", stride=True), "stride is a number of steps, at least 1; got True"),
        (lambda p: p.probe(at="average", stride=0), "stride is a number of steps, at least 1; got 0"),
    ],
)
def test_bad_declarations(build: Any, message: str, problem: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        build(problem)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: torch.zeros(2, 2), r"one loss, or a 1-dim tensor of losses; got \(2, 2\)"),
        (lambda m, b: 0.5, "got float"),
        (lambda m, b: torch.ones(()) * 1j, "the probe's loss is complex, and losses are compared by one real number"),
    ],
)
def test_losses_that_are_none(loss: Any, message: str, problem: Any) -> None:
    with pytest.raises(StepError, match=message):
        Probe(loss, [1, 2]).measure(problem.model(), 0)


def test_batches_that_are_written_in_place_are_said_once() -> None:
    """Of a list, which is the same in all windows; fresh ones may be written."""
    model = nn.Linear(2, 1)
    kept = [torch.ones(4, 2), torch.ones(4, 2)]

    def shifted(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return model(batch.sub_(0.5)).square().mean()  # type: ignore[no-any-return]

    probe = Probe(shifted, kept)
    with pytest.warns(UserWarning, match="writes into the probe's batches in place"):
        probe.measure(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe.measure(model, 1)
    Probe(shifted, lambda window: [batch.clone() for batch in kept]).measure(model, 0)


def test_one_sub_batch_has_no_error_to_tell(problem: Any) -> None:
    with pytest.raises(StepError, match=r"1 sub-batch and needs at least 2 .*; split its batch"):
        Probe(problem.loss, [problem.batch(0, 0)]).measure(problem.model(), 0)


def test_batches_are_drawn_once_a_window_and_are_the_same_for_all(problem: Any, train: Any) -> None:
    """A function that draws fresh ones at every call does not undo the pairing."""
    asked: list[int] = []

    def batches(window: int) -> Any:
        asked.append(window)
        return iter([problem.batch(-len(asked), j) for j in range(2)])

    seen: list[list[Any]] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch[0])
        return problem.loss(model, batch)

    model = problem.model()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=3)
    engine = Engine(replicas, [hdet.LearningRate()], window=2, signal=Probe(loss, batches), total_steps=4)
    train(engine)
    assert asked == [0, 1]
    first = seen[:6]
    assert first[0] is first[2] is first[4]
    assert first[1] is first[3] is first[5]


@pytest.mark.parametrize("at", ["last", "average"])
def test_which_weights_are_judged(at: Any, problem: Any, train: Any) -> None:
    """And every replica has its own back for the merge."""
    model = problem.model()
    judged: list[torch.Tensor] = []

    def loss(model: Any, batch: Any) -> torch.Tensor:
        judged.append(model[0].weight.detach().clone())
        return problem.loss(model, batch)

    signal = Probe(loss, [problem.batch(-1, j) for j in range(2)], at=at)
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=2)
    engine = Engine(replicas, [hdet.LearningRate()], window=4, signal=signal, total_steps=4)
    path: list[list[torch.Tensor]] = [[], []]

    def after(step: int) -> None:
        for row, replica in zip(path, engine.replicas, strict=True):
            row.append(replica.model[0].weight.detach().clone())

    train(engine, after_update=after)
    for index in range(2):
        want = torch.stack(path[index]).mean(dim=0) if at == "average" else path[index][-1]
        torch.testing.assert_close(judged[2 * index], want)
    torch.testing.assert_close(model[0].weight.detach(), (path[0][-1] + path[1][-1]) / 2)


def test_a_probe_that_is_not_finite_for_one_replica_is_not_heard(problem: Any, train: Any) -> None:
    model = problem.model()
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=4)
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(0)
        own = problem.loss(model, batch)
        return own * float("nan") if len(calls) in (3, 4) else own

    signal = Probe(loss, [problem.batch(-1, j) for j in range(2)])
    engine = Engine(replicas, [hdet.LearningRate(spread=TwoLevel(0.3))], window=3, signal=signal, total_steps=3)
    (record,) = train(engine)
    assert record.faults == []
    estimate = record.estimates["learning_rate"]
    assert estimate["slope"] == estimate["slope"]
    assert estimate["stderr"] < float("inf")


def test_a_model_that_is_still_to_be_built_is_measured() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    losses = Probe(lambda model, x: model(x).mean(), [torch.ones(2, 3)] * 2).measure(model, 0)
    assert losses.shape == (2,)


def test_batches_that_were_drawn_ahead_are_not_asked_for_again() -> None:
    asked: list[int] = []

    def batches(window: int) -> list[torch.Tensor]:
        asked.append(window)
        return [torch.full((2,), float(len(asked)))] * 2

    probe = hdet.Probe(lambda model, x: x, batches)
    ahead = probe.draw(0, ahead=True)
    assert probe.draw(0) is ahead
    assert asked == [0]
    assert probe.draw(0)[0][0] == 2.0
    probe.draw(0, ahead=True)
    assert probe.draw(1)[0][0] == 4.0
    assert probe.draw(0)[0][0] == 5.0, "others are not kept"


@pytest.mark.parametrize("sort", [False, True])
def test_batches_that_are_less_mixed_than_those_of_training_are_told_of_once(sort: bool) -> None:
    """BatchNorm takes away what all examples of a batch have in common, and so what tells a class."""
    torch.manual_seed(0)
    labels = torch.arange(4).repeat(8) if not sort else torch.arange(4).repeat_interleave(8)
    inputs = 3.0 * F.one_hot(labels, 4).float() + 0.5 * torch.randn(32, 4)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    probe = hdet.Probe(
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        list(zip(inputs.split(8), labels.split(8), strict=True)),
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(100):
            own = torch.randint(32, (16,))
            F.cross_entropy(model(inputs[own]), labels[own]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                for kept in (True, False):
                    probe.measure(model, step // 10, kept_statistics=kept)
    said = [str(one.message) for one in told if "by which it is judged" in str(one.message)]
    assert len(said) == sort


@pytest.mark.parametrize(
    ("layer", "first", "looks"),
    [(nn.BatchNorm1d(1), 0, [2, 4, 8]), (nn.BatchNorm1d(1), 2, []), (nn.Identity(), 0, [])],
)
def test_of_a_search_that_goes_on_it_is_not_known_what_was_learned(
    layer: nn.Module, first: int, looks: list[int]
) -> None:
    """So it does not warn where it would not have in one sitting; and looks are few."""
    asked: list[int] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        asked.append(window)
        return (0.7 if window else 2.0) - 0.3 * model(x).mean()

    probe = Probe(loss, [1.0 + torch.randn(16, 1)] * 2)
    with warnings.catch_warnings(action="error"):
        for window in [*range(first, 9)] * 2:
            probe.measure(layer, window)
    assert [window for window in range(first, 9) if asked.count(window) > 4] == looks
    assert max(map(asked.count, asked)) <= 6


def test_batches_that_differ_much_do_not_prove_it() -> None:
    """Those far from the kept mean cost much and the others nothing."""
    layer, batches = nn.BatchNorm1d(1), [mean + torch.randn(16, 1) for mean in (0.0, 4.0)]
    probe = Probe(lambda model, x: 2.5 - model(x).mean(), batches)
    for window in range(3):
        probe.measure(layer, window)


@pytest.mark.parametrize("trains", [False, True])
def test_batch_norms_statistics_are_as_they_were_in_all_windows(trains: bool, problem: Any) -> None:
    """Of detectors, which return losses in train mode alone, too; and a graph that is held goes backward after."""
    model = problem.model(nn.BatchNorm1d(6))
    probe = Probe(lambda model, batch: problem.loss(model.train(trains), batch), problem.probe().batches)
    held = problem.loss(model, problem.batch(0, 0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for window in range(6):
        probe.measure(model, window)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    held.backward()
