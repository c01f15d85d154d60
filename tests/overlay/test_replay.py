"""`hdet.schedules.Replay` and `hdet.ReplayLR`: a plain run under the course that a search took."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from attach_parts import STEPS, adamw, batch, loop, loss_of, network, probe
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import hdet
from hdet.app.export import as_lambda_lr, as_yaml
from hdet.controllers import Gated
from hdet.errors import ConfigError, HdetError
from hdet.hparams.recorded import kept_steps, stretched
from hdet.record import WindowRecord

Held = tuple[float, float, float]
KNOBS = (hdet.LearningRate(), hdet.WeightDecay(), hdet.Dropout())


def in_force(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    dropout = next(module for module in model.modules() if isinstance(module, nn.Dropout))
    group = optimizer.param_groups[0]
    return group["lr"], group["weight_decay"], dropout.p


def optimizer_of(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Held]]:
    """A search in which every knob changes: its history's file, and the bases of every step as they were in force."""
    path = tmp_path_factory.mktemp("search") / "history.jsonl"
    torch.manual_seed(0)
    model = network()
    optimizer = optimizer_of(model)
    bases: list[Held] = []
    knobs = [
        hdet.LearningRate(),
        hdet.WeightDecay(controller=Gated(gate=0.0)),
        hdet.Dropout(schedule=hdet.schedules.LinearDecay(0.3, total_steps=STEPS)),
    ]
    with hdet.attach(
        model, optimizer, knobs=knobs, total_steps=STEPS, probe=probe(), quiet=True, window=5, history=path
    ) as search:
        bound = {knob.name: knob for knob in search.engine.knobs}

        def note(*_: object) -> None:
            step = search.engine.step_count
            bases.append(tuple(bound[knob.label].base(step) for knob in KNOBS))  # type: ignore[arg-type]
            assert optimizer.param_groups[0]["lr"] == bases[-1][0]

        optimizer.register_step_pre_hook(note)
        for step in range(STEPS):
            search.loss(loss_of(model, batch(step, 0))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(len(set(values)) > 1 for values in zip(*bases, strict=True)), "every knob changes"
    return path, bases


def test_a_plain_run_has_the_searchs_bases_at_every_step_to_the_last_bit(searched: tuple[Path, list[Held]]) -> None:
    path, bases = searched
    model = network()
    optimizer = optimizer_of(model, lr=1.0)
    scheduler = hdet.ReplayLR(optimizer, hdet.History(path), KNOBS, model=model)
    held = []
    for step in range(STEPS):
        held.append(in_force(model, optimizer))
        assert scheduler.get_last_lr() == [held[-1][0]]
        loss_of(model, batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert held == bases
    assert in_force(model, optimizer) == bases[-1]  # held past the end


def test_torchs_own_scheduler_has_them_too(searched: tuple[Path, list[Held]]) -> None:
    path, bases = searched
    optimizer = optimizer_of(network(), lr=1.0)
    scheduler = LambdaLR(optimizer, hdet.schedules.Replay.of(hdet.History(path), "learning_rate"))
    for rate, _, _ in bases:
        assert optimizer.param_groups[0]["lr"] == rate
        optimizer.step()
        scheduler.step()


def test_over_another_length_the_course_keeps_its_ends_and_its_shape(searched: tuple[Path, list[Held]]) -> None:
    path, bases = searched
    rates = [rate for rate, _, _ in bases]
    twice = hdet.schedules.Replay.of(hdet.History(path), "learning_rate", 2 * STEPS - 1)
    assert list(twice.values[::2]) == rates
    half = hdet.schedules.Replay.of(hdet.History(path), "learning_rate", STEPS // 2)
    assert (half.values[0], half.values[-1]) == (rates[0], rates[-1])
    assert min(rates) <= min(half.values) <= max(half.values) <= max(rates)


def test_it_is_resumed_as_any_scheduler_is(searched: tuple[Path, list[Held]]) -> None:
    path, bases = searched
    model = network()
    first = hdet.ReplayLR(optimizer_of(model), hdet.History(path), KNOBS, model=model)
    for _ in range(7):
        first.optimizer.step()
        first.step()
    other = network()
    optimizer = optimizer_of(other, lr=1.0)
    again = hdet.ReplayLR(optimizer, hdet.History(path), KNOBS, model=other)
    again.load_state_dict(first.state_dict())
    assert in_force(other, optimizer) == bases[7]
    assert again.get_last_lr() == [bases[7][0]]


def test_groups_keep_their_ratios(searched: tuple[Path, list[Held]]) -> None:
    path, bases = searched
    rates = {1.0: nn.Linear(2, 2), 0.5: nn.Linear(2, 1)}
    optimizer = torch.optim.SGD([{"params": layer.parameters(), "lr": rate} for rate, layer in rates.items()])
    scheduler = hdet.ReplayLR(optimizer, hdet.History(path))
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [bases[1][0], 0.5 * bases[1][0]]


def records() -> list[WindowRecord]:
    return [
        WindowRecord(0, 0, 2, {"rate": 0.2}, {}, [1.0], {}, {"rate": 0.0}, False, course={"rate": [0.1, 0.2]}),
        WindowRecord(1, 2, 5, {"rate": 0.2}, {}, [1.0], {}, {"rate": 0.0}, False, course={"rate": [0.2]}),
    ]


@pytest.mark.parametrize(
    ("windows", "knob", "said"),
    [
        (records(), "rat", "did you mean 'rate'"),
        (records()[1:], "rate", "the history begins at step 2, so the course of 'rate'"),
        ([dataclasses.replace(one, course={}) for one in records()], "rate", "at windows' ends only"),
        ([], "rate", "no window yet"),
    ],
)
def test_what_cannot_be_replayed_is_named(windows: list[WindowRecord], knob: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hdet.schedules.Replay.of(windows, knob)


def test_a_model_is_asked_for_where_a_knob_lives_in_it() -> None:
    with pytest.raises(ConfigError, match="such knobs live in the model; give model="):
        hdet.ReplayLR(optimizer_of(network()), records(), [hdet.Dropout()])


def test_a_path_in_place_of_a_history_is_named() -> None:
    with pytest.raises(ConfigError, match=r"give hdet\.History\('runs/history\.jsonl'\)"):
        hdet.ReplayLR(optimizer_of(network()), Path("runs/history.jsonl"))  # type: ignore[arg-type]


def test_a_length_of_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        hdet.schedules.Replay.of(records(), "rate", 0)
    assert hdet.schedules.Replay.of(records(), "rate", 1).values == (0.1,)


def gone_back(*points: tuple[int, str, int]) -> list[WindowRecord]:
    """Five windows of two steps at rates 0, 1, 2, ...; by window its fault, and the step that was gone back to."""
    faults = {window: [{"kind": kind, "step": step}] for window, kind, step in points}
    return [
        WindowRecord(
            window=w,
            start=2 * w,
            stop=2 * w + 2,
            bases={"rate": 2.0 * w + 1},
            values={},
            losses=[1.0],
            estimates={},
            moves={"rate": 0.0},
            merged=False,
            course={"rate": [2.0 * w, 2.0 * w + 1]},
            faults=faults.get(w, [{"kind": "non_finite", "step": 0}]),
        )
        for w in range(5)
    ]


@pytest.mark.parametrize(
    ("points", "kept"),
    [
        ([], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ([(1, "restarted", 0)], [4, 5, 6, 7, 8, 9]),
        ([(2, "rewound", 2)], [0, 1, 6, 7, 8, 9]),
        ([(2, "rewound", 2), (3, "rewound", 2)], [0, 1, 8, 9]),
        ([(1, "restored", 2), (3, "restored", 6)], [0, 1, 4, 5, 8, 9]),
        ([(1, "rewound", 2), (3, "restarted", 0)], [8, 9]),
        ([(4, "rewound", 4)], [0, 1, 2, 3]),
    ],
)
def test_steps_that_were_thrown_away_are_not_replayed(points: list[tuple[int, str, int]], kept: list[int]) -> None:
    """What led to the final weights is stretched over the run's length; other faults throw nothing away."""
    windows = gone_back(*points)
    replayed = hdet.schedules.Replay.of(windows, "rate")
    assert kept_steps(windows) == kept
    assert replayed.values == stretched([float(step) for step in kept], 10)
    assert (replayed.values[0], replayed.values[-1]) == (kept[0], kept[-1])
    assert hdet.schedules.Replay.of(windows, "rate", len(kept)).values == tuple(kept)
    said = f"the {len(kept)} steps that led to its final weights, stretched over all 10"
    for exported in (as_yaml(windows), as_lambda_lr(windows, "rate", run="a run")):
        assert (said in exported) == bool(points)


def test_an_export_says_where_the_run_ended_with_averaged_weights() -> None:
    windows = gone_back()
    for stop, told in ((None, None), (10, "from step 4 on"), (8, "of steps 4 to 7")):
        if stop is not None:
            part = {"start": 4, "stop": stop, "share": 0.75}
            windows[-1].tail.update(last=0.25, parts=[part], difference=-0.1, stderr=0.01)
        for exported in (as_yaml(windows), as_lambda_lr(windows, "rate", run="a run")):
            assert ("it ended with averaged weights" in exported) == (told is not None)
            assert told is None or f"it ended with averaged weights (75 % {told}, 25 % the last)" in exported


def test_a_run_that_ended_where_it_began_has_no_course() -> None:
    with pytest.raises(ConfigError, match="so no step led to its final weights"):
        hdet.schedules.Replay.of(gone_back((4, "restored", 0)), "rate")


def of_each(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    """The rate and the decay of each parameter, by its name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


HALVES = {"first": "0.*", "last": ["3.*"]}


@pytest.mark.parametrize(
    ("rates", "chained"), [*product(["matrices", "groups", HALVES], [False, True]), ("optimizers", True)]
)
def test_several_learning_rates_are_each_where_the_search_had_them(rates: Any, chained: bool) -> None:
    """With the decay, whose groups are cut as well."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        if not chained:
            return model, adamw(model)
        kind = torch.optim.RMSprop if rates == "optimizers" else torch.optim.AdamW
        first = kind(model[0].parameters(), lr=3e-3, weight_decay=0.1)
        return model, hdet.ChainedOptimizer(first, torch.optim.AdamW(model[3].parameters(), lr=1e-3, weight_decay=0.0))

    model, optimizer = made()
    knobs = [hdet.WeightDecay(controller=Gated(gate=0.0))]
    options: dict[str, Any] = {"knobs": knobs, "exclude": "dropout", "tail": None, "quiet": True, "window": 5}
    search = hdet.attach(model, optimizer, rates=rates, probe=probe(), total_steps=STEPS, **options)
    held: list[dict[str, tuple[float, float]]] = []
    optimizer.register_step_pre_hook(lambda *_: held.append(of_each(model, optimizer)))
    torch.manual_seed(1)
    loop(model, optimizer, search=search)
    assert len({rate for rate, _ in held[-2].values()}) >= 2
    assert len({decay for one in held for _, decay in one.values()}) > 3

    other, optimizer = made()
    replayed = [hdet.LearningRate(), hdet.WeightDecay()]
    patterns = rates if isinstance(rates, dict) else None
    scheduler = hdet.ReplayLR(optimizer, search.history, replayed, model=other, rates=patterns)
    torch.manual_seed(1)
    for step in range(STEPS):
        assert of_each(other, optimizer) == held[step]
        loop(other, optimizer, scheduler, start=step, stop=step + 1)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    again, optimizer = made()
    resumed = hdet.ReplayLR(optimizer, search.history, replayed, model=again, rates=patterns)
    optimizer.load_state_dict(scheduler.optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def several(*names: str) -> list[WindowRecord]:
    bases = {f"learning_rate[{name}]": 0.1 for name in names}
    return [WindowRecord(0, 0, 2, bases, {}, [1.0], {}, {}, False, course={knob: [0.1] for knob in bases})]


@pytest.mark.parametrize(
    ("names", "model", "rates", "said"),
    [
        (("0.weight", "others"), False, None, "no groups of this optimizer are called so; give ReplayLR model="),
        (("first", "last"), True, None, "the optimizer holds no parameter called 'first', 'last'; give it all that"),
        (("0.weight", "others"), True, None, "the search had no learning rate of the matrices '3.weight', which are"),
        (("0.weight", "3.weight"), True, "matrices", "rates must be of type Mapping"),
        (("first", "last"), True, {}, "names no group"),
        (("0.weight", "3.weight"), True, None, "would be cut into '0.weight', '3.weight', 'others'"),
        (("first", "last"), True, {"first": "0.*"}, "would be cut into 'first', 'others'"),
    ],
)
def test_other_groups_than_the_searchs_are_refused(names: tuple[str, ...], model: bool, rates: Any, said: str) -> None:
    own = network()
    optimizer = optimizer_of(own)
    with pytest.raises(HdetError, match=said):
        hdet.ReplayLR(optimizer, several(*names), model=own if model else None, rates=rates)
    assert len(optimizer.param_groups) == 1


def test_what_fails_after_groups_were_cut_leaves_them_whole() -> None:
    model = network()
    optimizer = optimizer_of(model)
    windows = several("0.weight", "3.weight", "others")
    with pytest.raises(ConfigError, match="has no knob 'weight_decay'"):
        hdet.ReplayLR(optimizer, windows, [hdet.LearningRate(), hdet.WeightDecay()], model=model)
    assert len(optimizer.param_groups) == 1
    hdet.ReplayLR(optimizer, windows, model=model)
    assert len(optimizer.param_groups) == 3


def test_patterns_that_nothing_asks_for_are_refused(searched: tuple[Path, list[Held]]) -> None:
    model = network()
    with pytest.raises(ConfigError, match="which parameters have which of several learning rates, and one is replayed"):
        hdet.ReplayLR(optimizer_of(model), hdet.History(searched[0]), model=model, rates={"first": "0.*"})


def test_groups_that_a_search_has_cut_are_not_cut_again() -> None:
    model = network()
    optimizer = optimizer_of(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True)
    windows = several("0.weight", "3.weight", "others")
    with pytest.raises(ConfigError, match="a search is attached to this optimizer, and would not know the groups"):
        hdet.ReplayLR(optimizer, windows, model=model)
    search.detach()
    hdet.ReplayLR(optimizer, windows, model=model)


def test_a_tied_matrix_and_rates_that_are_tensors_are_replayed() -> None:
    model = nn.ModuleDict({"in": nn.Embedding(6, 4), "out": nn.Linear(4, 6)})
    model["out"].weight = model["in"].weight
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "name": "all"}], lr=torch.tensor(1.0))
    hdet.ReplayLR(optimizer, several("in.weight", "others"), model=model)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert all(isinstance(rate, torch.Tensor) for rate in rates)
    assert rates[0] is not rates[1]
    assert [float(rate) for rate in rates] == pytest.approx([0.1, 0.1])


def test_the_one_course_of_several_rates_is_asked_for_by_its_name() -> None:
    windows = several("0.weight", "others")
    with pytest.raises(ConfigError, match="the run had 2 knobs of 'learning_rate', each with a course of its own"):
        hdet.schedules.Replay.of(windows, "learning_rate")
    assert hdet.schedules.Replay.of(windows, "learning_rate[others]").values == (0.1, 0.1)
