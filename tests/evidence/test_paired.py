"""Contrasts of pairs: the same data and the same random numbers at opposite levels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet import Engine
from hdet.controllers import Hold
from hdet.errors import ConfigError
from hdet.evidence import Contrast
from hdet.replicas import Replicas
from hdet.spreads import TwoLevel

SIZE = 12


class Net(nn.Module):
    """Learns from noisy data, with a dropout that matters and a number that does nothing."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(
                nn.Linear(SIZE, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.3)
            )
            self.head = nn.Linear(32, 1)
        self.idle = 0.5

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(inputs))
        return out


def data(seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, SIZE, generator=generator)
    noise = torch.randn(size, 1, generator=generator)
    return inputs, inputs[:, :4].sum(1, keepdim=True) + inputs[:, 4:5] * inputs[:, 5:6] + 0.5 * noise


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


def evidence(**options: Any) -> Contrast:
    return Contrast(**{"paired": True, **options})


def dropout(source: hdet.evidence.Evidence | None = None, width: float = 0.1) -> hdet.Knob:
    return hdet.Dropout(evidence=source or evidence(), controller=Hold(), spread=TwoLevel(width))


def idle(source: hdet.evidence.Evidence | None = None, width: float = 0.1) -> hdet.Knob:
    return hdet.Scalar(
        "idle", path="idle", bounds=(0.1, 1.0), evidence=source or evidence(), controller=Hold(), spread=TwoLevel(width)
    )


def make(
    knobs: list[hdet.Knob] | None = None,
    *,
    n: int = 4,
    home: Callable[..., Replicas] = hdet.micro_batches,
    window: int = 10,
    steps: int = 20,
    seed: int = 0,
) -> Engine:
    model = Net(seed)
    inputs, targets = data(10**9 + seed, 256)
    return Engine(
        home(model, torch.optim.SGD(model.parameters(), lr=0.02), n=n),
        [dropout(), idle()] if knobs is None else knobs,
        window=window,
        signal=hdet.Probe(loss_of, [(inputs[j::8], targets[j::8]) for j in range(8)]),
        total_steps=steps,
        seed=seed,
    )


def train(engine: Engine, until: int | None = None, watch: Callable[[Any], object] = lambda replica: None) -> None:
    last = engine.total_steps if until is None else until
    assert last is not None
    for step in range(engine.step_count, last):
        losses = []
        for replica in engine.replicas:
            with replica:
                watch(replica)
                loss = loss_of(replica.model, data(1000 * step + replica.data_index + 10**6 * engine.plan.seed))
                loss.backward()
            losses.append(loss.detach())
        engine.share_gradients()
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        engine.step(losses)


def parameters(engine: Engine) -> list[Tensor]:
    return [p.detach().clone() for p in engine.replicas[0].model.parameters()]


# -- what it is worth -----------------------------------------------------------------------------


def told(paired: bool, seeds: int) -> dict[str, np.ndarray[Any, Any]]:
    """t in every window of some runs, by knob."""
    t: dict[str, list[float]] = {"dropout": [], "idle": []}
    for seed in range(seeds):
        source = Contrast(paired=paired)
        engine = make([dropout(source), idle(source)], n=2, window=30, steps=600, seed=seed)
        train(engine)
        for record, name in itertools.product(engine.history, t):
            t[name].append(record.estimates[name]["t"])
    return {name: np.array(values) for name, values in t.items()}


@pytest.fixture(scope="module")
def pairs() -> dict[str, np.ndarray[Any, Any]]:
    return told(paired=True, seeds=4)


def test_pairs_see_more(pairs: dict[str, np.ndarray[Any, Any]]) -> None:
    """Less dropout helps here, and at as many passes of the same size they show it more clearly."""
    unpaired, paired = told(paired=False, seeds=2)["dropout"].mean(), pairs["dropout"].mean()
    print(f"t of dropout: unpaired {unpaired:.2f}, paired {paired:.2f}, ratio {paired / unpaired:.2f}")
    assert unpaired > 1.0
    assert paired > 1.5 * unpaired


def test_a_knob_that_does_nothing_is_seen_as_such(pairs: dict[str, np.ndarray[Any, Any]]) -> None:
    """Its standard error is honest: over 80 windows |t| > 2 in about 1 of 20, as 30 steps have it by chance."""
    t = pairs["idle"]
    print(f"t of a placebo: sd {t.std():.2f}, beyond 2 in {(np.abs(t) > 2).mean():.3f}")
    assert len(t) == 80
    assert 0.7 < t.std() < 1.3
    assert (np.abs(t) > 2).mean() < 0.14


def test_alone_a_knob_that_does_nothing_has_no_slope_at_all() -> None:
    """With copies of a model the two gradients of a pair are the same numbers."""
    engine = make([idle()], home=hdet.replicate)
    train(engine)
    for record in engine.history:
        steps = 10
        assert record.estimates["idle"]["slope"] == pytest.approx(0.0, abs=1e-12 * steps)
        assert record.estimates["idle"]["t"] == 0.0


# -- the design -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "knobs"), [(2, 1), (2, 2), (4, 2), (6, 1), (8, 2)])
def test_the_two_of_a_pair_run_at_opposite_levels_in_every_step(n: int, knobs: int) -> None:
    engine = make([dropout(), idle()][:knobs], n=n, window=8, steps=8)
    seen = []
    for step in range(8):
        for knob in engine.knobs:
            assert np.abs(knob.levels).tolist() == pytest.approx([0.1] * n)
            np.testing.assert_array_equal(knob.levels[0::2], -knob.levels[1::2])
        seen.append(tuple(engine.knobs[0].levels[0::2] > 0))
        train(engine, step + 1)
    assert len(set(seen)) > 1


def test_two_replicas_need_no_more_steps_than_knobs() -> None:
    """A pair is balanced by itself, so that eight steps are eight blocks; unpaired they take sixteen."""
    for paired, known in ((True, True), (False, False)):
        engine = make([dropout(Contrast(paired=paired))], n=2, window=8, steps=8)
        train(engine)
        assert (engine.history.windows[0].estimates["dropout"]["t"] != 0.0) == known


# -- data -----------------------------------------------------------------------------------------


def test_who_takes_which_data_is_said() -> None:
    engine = make(n=6)
    assert engine.data_shards == 3
    assert [replica.data_index for replica in engine.replicas] == [0, 0, 1, 1, 2, 2]


def test_unpaired_every_replica_takes_its_own() -> None:
    model = Net()
    home = hdet.micro_batches(model, torch.optim.SGD(model.parameters(), lr=0.02), n=4)
    for paired, shards, indices in ((True, 2, [0, 0, 1, 1]), (False, 4, [0, 1, 2, 3])):
        engine = Engine(
            home,
            [dropout(Contrast(paired=paired))],
            signal=hdet.Probe(loss_of, [data(j) for j in range(2)]),
            total_steps=10,
        )
        assert engine.data_shards == shards
        assert [replica.data_index for replica in engine.replicas] == indices


@pytest.mark.parametrize("n", [1, 3])
def test_an_odd_number_of_replicas_is_refused(n: int) -> None:
    with pytest.raises(ConfigError, match=f"compares replicas two by two, and there are {n}; take an even number"):
        make(n=n)


def test_contrasts_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'dropout': True, 'idle': False.*declare the same for all"):
        make([dropout(), idle(Contrast())])


def test_contrasts_that_differ_otherwise_go_together() -> None:
    """And draw the same numbers as long as one of them explores."""
    engine = make([dropout(evidence(horizon=50)), idle(evidence(refresh=5))])
    train(engine)
    assert [record.estimates["dropout"]["t"] != 0.0 for record in engine.history] == [True, True]


# -- random numbers -------------------------------------------------------------------------------


def drawn(engine: Engine, passes: int = 1) -> dict[int, list[float]]:
    """What each replica draws in the coming step."""
    found: dict[int, list[float]] = {}
    for replica, _ in itertools.product(engine.replicas, range(passes)):
        with replica:
            found.setdefault(replica.index, []).append(float(torch.rand(())))
            loss_of(replica.model, data(replica.data_index)).backward()
    return found


def test_a_pair_draws_the_same_numbers_and_nobody_else_does() -> None:
    engine = make()
    first = drawn(engine)
    assert first[0] == first[1]
    assert first[2] == first[3]
    assert first[0] != first[2]
    engine.share_gradients()
    engine.step([torch.tensor(1.0)] * 4)
    assert drawn(engine)[0] != first[0]


def test_each_pass_of_a_replica_draws_new_numbers_in_common_with_its_partners() -> None:
    found = drawn(make(), passes=3)
    assert found[0] == found[1]
    assert len({number for numbers in found.values() for number in numbers}) == 6


def test_a_pass_that_was_made_again_draws_what_its_partner_draws() -> None:
    engine = make()
    with pytest.raises(MemoryError), engine.replicas[0]:
        raise MemoryError
    found = drawn(engine)
    assert found[0] == found[1]


def test_the_run_decides_on_them_and_the_global_generator_does_not() -> None:
    found = []
    for seed, own in ((0, 0), (0, 1), (1, 0)):
        torch.manual_seed(own)
        found.append(drawn(make(seed=seed)))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_global_generators_are_as_they_were_after_every_pass() -> None:
    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    torch.manual_seed(3)
    before = states()
    engine = make()
    train(engine, 3)
    assert states() == before
    with pytest.raises(ZeroDivisionError), engine.replicas[0]:
        _ = float(torch.rand(())) / 0
    assert states() == before


def test_in_steps_that_explore_nothing_the_two_of_a_pair_differ() -> None:
    """The same pass twice would teach nothing: where a block would be cut short, for one."""
    engine = make([dropout(), idle()], n=2, window=9, steps=18)  # blocks of two steps
    train(engine, 8)
    assert not any(knob.levels.any() for knob in engine.knobs)
    found = drawn(engine)
    assert found[0] != found[1]


def test_without_a_spread_it_is_training_as_it_is() -> None:
    """The global generator's numbers included."""
    engine = make([dropout(width=0.0), idle(width=0.0)])
    torch.manual_seed(5)
    train(engine)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    torch.manual_seed(5)
    for step in range(20):
        for index in (0, 0, 1, 1):
            loss_of(model, data(1000 * step + index)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.25)
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, parameters(engine), [p.detach() for p in model.parameters()]))


@pytest.mark.parametrize("horizon", [0, 30])
def test_a_resume_draws_what_would_have_been_drawn(horizon: int) -> None:
    """Bit for bit, dropout included, whatever the state of the global generator."""

    def run() -> Engine:
        return make([dropout(evidence(horizon=horizon)), idle(evidence(horizon=horizon))])

    whole, first, second = run(), run(), run()
    train(whole)
    train(first, 13)
    torch.manual_seed(12345)
    second.load_state_dict(first.state_dict())
    train(second)
    assert all(map(torch.equal, parameters(whole), parameters(second)))
    assert whole.history.windows[1].estimates == second.history.windows[-1].estimates


def test_copies_and_micro_batches_measure_alike() -> None:
    one, many = make(), make(home=hdet.replicate)
    for engine in (one, many):
        train(engine)
    for ours, theirs in zip(one.history, many.history, strict=True):
        for number in ("slope", "stderr"):
            assert ours.estimates["dropout"][number] == pytest.approx(theirs.estimates["dropout"][number], rel=1e-3)
