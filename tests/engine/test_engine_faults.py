"""Replicas that become non-finite: left out, restarted, reported; and all of them at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet import Engine
from hdet.controllers import Hold
from hdet.errors import DivergedError
from hdet.merges import Mean
from hdet.spreads import TwoLevel

N = 4


def build(problem: Any, *middle: nn.Module, **options: Any) -> Engine:
    model = problem.model(*middle)
    optimizer = torch.optim.AdamW([own for own in model.parameters() if own.requires_grad], lr=0.01)
    knob = hdet.LearningRate(spread=TwoLevel(0.3), controller=Hold())
    settings: dict[str, Any] = {"window": 5, "total_steps": 20, "gradients": "local", **options}
    return Engine(hdet.replicate(model, optimizer, n=N), [knob], **settings)


def nan_loss(at: int, replicas: Any) -> Any:
    def report(step: int, losses: list[torch.Tensor]) -> list[torch.Tensor]:
        bad = torch.tensor(math.nan)
        return [bad if step == at and index in replicas else loss for index, loss in enumerate(losses)]

    return report


def poison(engine: Engine, at: int, replicas: Any, value: float = math.nan) -> Any:
    """Write a non-finite weight into some replicas after the update of a step."""

    def after(step: int) -> None:
        for index in replicas:
            if step == at:
                with torch.no_grad():
                    engine.replicas[index].model[0].weight[0, 0] = value

    return after


def test_a_nan_loss_leaves_its_replica_out_of_merge_and_estimate(problem: Any, train: Any, assert_alike: Any) -> None:
    engine = build(problem)
    members: list[torch.Tensor] = []

    def after(step: int) -> None:
        if step == 4:
            members.extend(replica.model[0].weight.detach().clone() for replica in engine.replicas)

    (record,) = train(engine, 5, report=nan_loss(2, [1]), after_update=after)
    assert record.losses[1] is None
    assert all(record.losses[index] is not None for index in (0, 2, 3))
    assert record.faults == [{"kind": "non_finite", "replica": 1, "step": 2, "where": "loss"}]
    assert record.merged
    assert math.isfinite(record.estimates["learning_rate"]["slope"])
    assert_alike(engine)
    merged = engine.replicas[0].model[0].weight.detach()
    torch.testing.assert_close(merged, torch.stack([members[index] for index in (0, 2, 3)]).mean(dim=0))
    (following,) = train(engine, 10)
    assert following.faults == []
    assert None not in following.losses


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 3])
def test_a_non_finite_parameter_restarts_its_replica_from_the_merged_model(
    index: int, value: float, problem: Any, train: Any, assert_alike: Any
) -> None:
    """At the window's last update, so that no loss has shown it; in replica 0, the user's own model, too."""
    engine = build(problem)
    (record,) = train(engine, 5, after_update=poison(engine, 4, [index], value))
    assert [(fault["kind"], fault["replica"], fault["step"]) for fault in record.faults] == [("non_finite", index, 4)]
    assert record.losses[index] is None
    assert_alike(engine)
    for replica in engine.replicas:
        assert all(p.isfinite().all() for p in replica.model.parameters())
        for state in replica.optimizer.state.values():
            assert all(value.isfinite().all() for value in state.values())
    rates = [optimizer.param_groups[0]["lr"] for optimizer in engine.optimizers]
    assert rates == engine.knobs[0].values(5, range(N))
    records = train(engine)
    assert all(record.faults == [] for record in records)


@pytest.mark.parametrize("optimizer", ["average", "keep", "reset"])
def test_a_restarted_replica_has_sound_optimizer_state(optimizer: Any, problem: Any, train: Any) -> None:
    engine = build(problem, merge=Mean(optimizer))

    def after(step: int) -> None:
        if step == 4:
            for state in engine.optimizers[2].state.values():
                state["exp_avg"].fill_(math.nan)
            poison(engine, 4, [2])(step)

    train(engine, 5, after_update=after)
    for state in engine.optimizers[2].state.values():
        assert state["exp_avg"].isfinite().all()
    records = train(engine)
    assert all(record.faults == [] for record in records)


def test_if_all_fail_the_last_converged_point_comes_back(
    problem: Any, train: Any, assert_same: Any, assert_alike: Any
) -> None:
    engine = build(problem, nn.BatchNorm1d(6))
    train(engine, 5)
    converged = engine.state_dict()["converged"]
    (record,) = train(engine, 10, after_update=poison(engine, 7, range(N)))
    assert [fault["step"] for fault in record.faults if fault["kind"] == "non_finite"] == [8] * N
    assert record.faults[-1] == {"kind": "restored", "step": 5}
    assert record.losses == [None] * N
    assert not record.merged
    assert record.estimates == {}
    assert record.moves == {"learning_rate": 0.0}
    assert_alike(engine)
    assert_same(engine.replicas[0].model.state_dict(), converged["model"])
    assert_same(engine.optimizers[3].state_dict()["state"], converged["optimizer"]["state"])
    assert engine.step_count == 10
    records = train(engine)
    assert all(record.faults == [] for record in records)


@pytest.mark.parametrize("failing", [range(N), [1]])
def test_a_users_scheduler_goes_on_as_if_nothing_had_failed(failing: Any, problem: Any, train: Any) -> None:
    """A chainable one, which reads the rate that it wrote last."""
    model = problem.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    knob = hdet.WeightDecay(spread=TwoLevel(0.3), controller=Hold())
    engine = Engine(hdet.replicate(model, optimizer, n=N), [knob], window=5, total_steps=20, gradients="local")
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(own, 0.96) for own in engine.optimizers]
    poisoned = poison(engine, 7, failing)

    def after(step: int) -> None:
        poisoned(step)
        for scheduler in schedulers:
            scheduler.step()

    records = train(engine, after_update=after)
    assert records[1].faults
    for own in engine.optimizers:
        assert own.param_groups[0]["lr"] == pytest.approx(0.01 * 0.96**20, rel=1e-12)


def test_a_restored_point_lies_in_the_tensors_there_were(problem: Any, train: Any) -> None:
    """Captured graphs and references see it."""
    engine = build(problem)
    train(engine, 5)
    live = [own.state[p]["exp_avg"] for own in engine.optimizers for p in own.param_groups[0]["params"]]
    train(engine, 15, after_update=poison(engine, 7, range(N)))
    after = [own.state[p]["exp_avg"] for own in engine.optimizers for p in own.param_groups[0]["params"]]
    assert all(one is other for one, other in zip(live, after, strict=True))


def test_the_anchor_may_lie_on_the_host(problem: Any, train: Any, assert_same: Any) -> None:
    engine = build(problem, anchor="host")
    train(engine, 5)
    converged = engine.state_dict()["converged"]
    train(engine, 10, after_update=poison(engine, 7, range(N)))
    assert_same(engine.replicas[0].model.state_dict(), converged["model"])


def test_under_shared_gradients_one_nan_gradient_fails_all_and_the_run_goes_on(problem: Any, train: Any) -> None:
    engine = build(problem, gradients="shared")

    def batch(step: int, index: int) -> Any:
        x, y = problem.batch(step, index)
        return (x * math.nan if (step, index) == (2, 1) else x), y

    records = train(engine, batch=batch)
    assert records[0].faults[0] == {"kind": "non_finite", "replica": 0, "step": 3, "where": "loss"}
    assert records[0].faults[1] == {"kind": "non_finite", "replica": 1, "step": 2, "where": "loss"}
    assert records[0].faults[-1]["kind"] == "restored"
    assert all(record.faults == [] for record in records[1:])


def test_failing_again_and_again_is_an_error_and_the_model_is_sound(problem: Any, train: Any, tmp_path: Any) -> None:
    engine = build(problem, window=2, history=tmp_path / "history.jsonl")
    train(engine, 2)
    good = {name: value.clone() for name, value in engine.replicas[0].model.state_dict().items()}
    with pytest.raises(DivergedError, match=r"4 windows on end.*step 8.*Start from lower values.*learning_rate"):
        train(engine, report=lambda step, losses: [torch.tensor(math.nan)] * N)
    assert engine.step_count == 10
    for name, value in engine.replicas[0].model.state_dict().items():
        assert torch.equal(value, good[name])
    # What happened is on record, the window that raised included.
    assert [record.faults[-1]["kind"] for record in hdet.History(tmp_path / "history.jsonl").windows[1:]] == [
        "restored"
    ] * 4
    # Whoever catches it may go on.
    records = train(engine, 14)
    assert all(record.faults == [] for record in records)


@pytest.mark.parametrize(
    ("first", "said"), [(0, "before any update, so lower values would not help"), (1, "Start from lower values")]
)
def test_a_loss_that_is_not_finite_to_begin_with_is_no_matter_of_rates(
    problem: Any, train: Any, first: int, said: str
) -> None:
    engine = build(problem, window=2)
    with pytest.raises(DivergedError, match=said):
        train(engine, report=lambda step, losses: [torch.tensor(math.nan)] * N if step % 2 >= first else losses)


def test_a_good_window_in_between_starts_the_count_anew(problem: Any, train: Any) -> None:
    engine = build(problem, window=1)
    for step in range(20):
        fails = step % 4 != 0
        train(engine, step + 1, report=lambda step, losses, f=fails: [torch.tensor(math.nan)] * N if f else losses)
    assert engine.finished


def test_an_all_failed_last_window_still_ends_the_run(problem: Any, train: Any, assert_alike: Any) -> None:
    engine = build(problem, total_steps=10)
    records = train(engine, after_update=poison(engine, 9, range(N)))
    assert records[-1].faults[-1]["kind"] == "restored"
    assert engine.finished
    assert_alike(engine)
    assert all(p.isfinite().all() for p in engine.replicas[0].model.parameters())


def test_half_precision_weights_are_not_taken_for_infinite(train: Any) -> None:
    """Their sum overflows float16 although none of them does."""
    model = nn.Linear(100, 100, bias=False).half()
    nn.init.constant_(model.weight, 100.0)
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=1e-3), n=2)
    engine = Engine(replicas, [hdet.LearningRate()], window=1)
    record = engine.step([torch.tensor(1.0), torch.tensor(1.0)])
    assert record is not None
    assert record.faults == []


def spike(engine: Engine, at: int, replicas: Any, size: float = 1e22) -> Any:
    """One gradient of some replicas is finite, and its square is not."""

    def before_update(optimizer: Any) -> None:
        if engine.step_count == at and engine.optimizers.index(optimizer) in replicas:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].grad[0, 0] = size

    return before_update


def sound(engine: Engine) -> bool:
    held = [t for own in engine.optimizers for state in own.state.values() for t in state.values()]
    return all(
        t.isfinite().all() for t in (*held, *(t for m, _ in engine.hosts for t in (*m.parameters(), *m.buffers())))
    )


@pytest.mark.parametrize("replicas", [[0], [2], range(N)])
def test_a_moment_that_overflows_does_not_end_the_run(replicas: Any, problem: Any, train: Any) -> None:
    """Plain AdamW survives it; a mean of moments of which one is infinite is NaN everywhere."""
    engine, plain = build(problem), build(problem)
    records = train(engine, before_update=spike(engine, 7, replicas))
    faults = [fault for fault in records[1].faults if fault["kind"] == "non_finite"]
    assert faults == [
        {"kind": "non_finite", "replica": index, "step": 9, "where": "optimizer state"} for index in replicas
    ]
    assert [fault["kind"] for fault in records[1].faults[len(faults) :]] == ["restored"] * (len(faults) == N)
    assert all(record.faults == [] for record in (*records[:1], *records[2:]))
    assert sound(engine)
    undisturbed = train(plain)
    assert records[-1].loss < 1.5 * undisturbed[-1].loss


def test_a_shared_model_whose_moment_overflows_goes_back_too(problem: Any, train: Any) -> None:
    model = problem.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = hdet.recommended(model, optimizer, total_steps=40, probe=problem.probe(), micro_batches=2, quiet=True)
    records = train(engine, before_update=spike(engine, 7, [0]))
    assert [fault for record in records for fault in record.faults if fault["kind"] != "restored"] == [
        {"kind": "non_finite", "replica": index, "step": fault_step, "where": "optimizer state"}
        for record in records
        if record.start <= 7 < record.stop
        for index in (0, 1)
        for fault_step in [record.stop - 1]
    ]
    assert sound(engine)


def test_a_batch_statistic_that_overflows_reaches_no_other_replica(problem: Any, train: Any, assert_alike: Any) -> None:
    engine = build(problem, nn.BatchNorm1d(6))

    def after(step: int) -> None:
        if step == 7:
            engine.replicas[2].model[2].running_var[0] = math.inf  # type: ignore[index, union-attr, operator]

    records = train(engine, after_update=after)
    assert records[1].faults == [{"kind": "non_finite", "replica": 2, "step": 9, "where": "buffers"}]
    assert sound(engine)
    assert_alike(engine)


def test_masks_of_infinities_and_caches_are_no_faults(problem: Any, train: Any) -> None:
    model = problem.model()
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    engine = Engine(
        hdet.replicate(model, torch.optim.AdamW(model.parameters(), lr=0.01), n=N),
        [hdet.LearningRate(spread=TwoLevel(0.3))],
        window=5,
        total_steps=10,
    )

    def after(step: int) -> None:
        for replica in engine.replicas:
            replica.model.cache.fill_(math.inf)  # type: ignore[operator, union-attr]
            if step == 3:
                replica.model.register_buffer("late", torch.full((1,), -math.inf))

    records = train(engine, after_update=after)
    assert [record.faults for record in records] == [[], []]
    assert all(torch.equal(r.model.mask, torch.full((3, 3), -math.inf).triu(1)) for r in engine.replicas)  # type: ignore[arg-type]


def test_where_the_first_point_was_not_finite_the_error_says_so(problem: Any, train: Any) -> None:
    engine = build(problem, window=1)
    for own in engine.optimizers:
        for parameter in own.param_groups[0]["params"]:
            own.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.full_like(parameter, math.inf),
            }
    engine.cycle.anchor.take(0)
    with pytest.raises(DivergedError, match=r"4 windows on end.*set out from, which is not finite itself"):
        train(engine)


def test_complex_weights_that_are_not_finite_come_back_too() -> None:
    """As of spectral layers: the last backward of a window shows in no loss."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.full((9,), 0.1 + 0.1j))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.weights, n=16)

    def loss_of(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    model, x = Spectral(), torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rate = hdet.LearningRate(evidence=hdet.evidence.Line(), controller=Hold())
    probe = hdet.Probe(loss_of, [x[:4], x[4:]])
    engine = Engine(hdet.micro_batches(model, optimizer, n=1), [rate], window=5, signal=probe, total_steps=20)
    for step in range(20):
        with engine.replicas[0]:
            loss = loss_of(model, x)
            loss.backward()
        if step == 9:
            model.weights.grad[0] = math.nan  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()
        engine.step([loss.detach()])
    assert [[fault["kind"] for fault in record.faults] for record in engine.history] == [
        [],
        ["non_finite", "restored"],
        [],
        [],
    ]
    assert bool(torch.view_as_real(model.weights).isfinite().all())


def test_a_frozen_infinity_is_not_averaged_away(problem: Any, train: Any) -> None:
    """A mean of infinities is NaN: where replicas merge, a model that holds one is at fault, and stays as it is."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden

    engine = build(problem, Masked())
    (record,) = train(engine, 5)
    assert {fault["kind"] for fault in record.faults} >= {"non_finite"}
    for replica in engine.replicas:
        masks = [own for own in replica.model.parameters() if not own.requires_grad]
        assert [own.tolist() for own in masks] == [[0.0, -math.inf]]
