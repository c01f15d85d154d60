"""OneCycleHDET with something to explore: the engine's cycle under torch's loop."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import prodigyopt
import pytest
import schedulefree
import torch
from scheduler_job import QUIET, TOTAL, WINDOW, WRAPS, Job, cycle_end, first_rates, one_cycle, optimizer
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import hdet
from hdet.errors import ConfigError, StepError
from hdet.replicas.optimizer_numbers import kept_in_groups

pytestmark = QUIET


def test_replicas_fan_out_from_the_first_step_and_converge_every_window() -> None:
    job = Job(one_cycle)
    plain = OneCycleLR(Job(lambda made, home: None).home.hosts[0][1], [0.1, 0.05], total_steps=TOTAL)
    bases = [[group["lr"] for group in plain.optimizer.param_groups]]
    for _ in range(8):
        plain.step()
        bases.append([group["lr"] for group in plain.optimizer.param_groups])
    rates = np.array(job.train(until=8))  # [step, replica, group]
    ratios = rates / np.array(bases)[:8, None, :]
    np.testing.assert_allclose(np.sort(ratios, axis=1), np.broadcast_to([[0.8], [1.0], [1.2]], (8, 3, 2)), rtol=1e-12)
    # constant within a window, redrawn for each, group by group
    assert (np.ptp(ratios[:4], axis=0) < 1e-12).all()
    assert (np.ptp(ratios[4:8], axis=0) < 1e-12).all()
    # all alike at a window's end, apart within it
    first, *others = [model.state_dict() for model, _ in job.home.hosts]
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)
    job.train(until=9)
    weight, other = (model.state_dict()["0.weight"] for model, _ in job.home.hosts[:2])
    assert not torch.equal(weight, other)


def test_permutations_of_the_groups_are_independent() -> None:
    orders = set()
    for seed in range(20):
        job = Job(lambda made, home, seed=seed: one_cycle(made, home, seed=seed), n=2)
        rates = np.array(job.train(until=1))[0]
        orders.add(tuple((rates[0] > rates[1]).tolist()))
    assert len(orders) == 4


def test_momentum_goes_on_cycling_in_every_replica() -> None:
    job = Job(one_cycle)
    plain = OneCycleLR(optimizer(), 0.1, total_steps=TOTAL)
    for step in range(TOTAL):
        for _, made in job.home.hosts:
            assert [group["momentum"] for group in made.param_groups] == [
                plain.optimizer.param_groups[0]["momentum"]
            ] * 2
        job.train(until=step + 1)
        plain.step()
    job = Job(one_cycle, kind="adamw")
    job.train(until=7)
    assert len({made.param_groups[0]["betas"] for _, made in job.home.hosts}) == 1
    assert job.home.hosts[1][1].param_groups[0]["betas"][0] != 0.95


def test_control_begins_after_the_warm_up_and_holds_the_base_within_a_window() -> None:
    job = Job(one_cycle)
    rates = np.array(job.train(until=TOTAL)).mean(axis=1)  # the levels sum to zero, so this is the base
    history = job.scheduler.engine.history.windows
    moves = [[record.moves[name] for name in record.moves] for record in history]
    assert moves[0] == [0.0, 0.0]
    assert all(move != 0.0 for move in moves[1])  # the window that ends at step 8
    for start in range(8, 20, WINDOW):
        np.testing.assert_allclose(
            rates[start : start + WINDOW], np.broadcast_to(rates[start], (WINDOW, 2)), rtol=1e-12
        )
    assert rates[20, 0] < rates[8, 0]
    assert job.scheduler.engine.finished


def test_the_history_holds_what_was_in_force() -> None:
    job = Job(one_cycle)
    rates = np.array(job.train(until=TOTAL))
    for record in job.scheduler.engine.history:
        np.testing.assert_allclose(np.array(list(record.values.values())).T, rates[record.stop - 1], rtol=1e-12)


def test_without_a_loss_it_fans_out_and_converges_and_does_not_control() -> None:
    job = Job(one_cycle)
    job.train(until=TOTAL, told=False)
    history = job.scheduler.engine.history.windows
    assert all(record.merged for record in history)
    assert not any(move for record in history for move in record.moves.values())
    assert all(loss is None for record in history for loss in record.losses)
    assert not any(record.faults for record in history)
    assert job.scheduler.bases == pytest.approx(
        {f"learning_rate[{g}]": rate for g, rate in enumerate(cycle_end([0.1, 0.05]))}
    )


def test_without_auto_lr_the_base_is_the_cycle() -> None:
    job = Job(lambda made, home: one_cycle(made, home, auto_lr=False))
    job.train(until=TOTAL)
    assert list(job.scheduler.bases.values()) == pytest.approx(cycle_end([0.1, 0.05]))


def test_after_the_last_step_everything_is_merged_and_a_step_more_is_an_error() -> None:
    job = Job(one_cycle)
    job.train(until=TOTAL)
    first, *others = [model.state_dict() for model, _ in job.home.hosts]
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)
    with pytest.raises(ValueError, match="Tried to step 24 times"):
        job.scheduler.step([torch.zeros(())] * 3)


def test_finish_merges_before_the_end() -> None:
    job = Job(one_cycle)
    job.train(until=10)
    job.scheduler.finish()
    first, *others = [model.state_dict() for model, _ in job.home.hosts]
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)
    with pytest.raises(StepError, match="the run is over"):
        job.scheduler.step([torch.zeros(())] * 3)


def test_exploring_it_cannot_jump() -> None:
    job = Job(one_cycle)
    with pytest.raises(StepError, match="explore the whole chain"):
        job.scheduler.step(3)


def test_tensor_rates_are_explored_in_place() -> None:
    model = nn.Linear(2, 1)
    made = AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True)
    held = made.param_groups[0]["lr"]
    scheduler = hdet.OneCycleHDET(
        made, 0.5, total_steps=20, spread=0.1, window=2, replicas=hdet.replicate(model, made, n=2)
    )
    plain = OneCycleLR(optimizer(), 0.5, total_steps=20)
    for _ in range(5):
        assert made.param_groups[0]["lr"] is held
        base = plain.optimizer.param_groups[0]["lr"]
        values = sorted(first_rates(scheduler.engine.optimizers))
        assert float(held) == pytest.approx(base)
        assert values == pytest.approx([0.9 * base, 1.1 * base], rel=1e-6)
        scheduler.step([torch.zeros(())] * 2)
        plain.step()


@pytest.mark.parametrize("kind", [schedulefree.AdamWScheduleFree, prodigyopt.Prodigy])
def test_what_an_optimizer_keeps_in_its_groups_is_each_replica_s_own(kind: Callable[..., Any]) -> None:
    model = nn.Linear(2, 1)
    made = kind(model.parameters(), lr=0.1)
    if isinstance(made, schedulefree.AdamWScheduleFree):
        made.train()
    home = hdet.replicate(model, made, n=3)
    merge = hdet.merges.Mean(optimizer="average")
    scheduler = hdet.explore(CosineAnnealingLR(made, 20), window=10, replicas=home, gradients="local", merge=merge)
    for _ in range(3):
        losses = []
        for replica in home.local:
            with replica:
                losses.append((replica.model(torch.ones(4, 2)) - replica.index).square().mean())
                losses[-1].backward()
        for _, each in home.hosts:
            each.step()
            each.zero_grad()
        kept = [{key: each.param_groups[0][key] for _, key in kept_in_groups(each)} for _, each in home.hosts]
        assert kept[0] != kept[1] != kept[2]
        scheduler.step(losses)
        for (_, each), own in zip(home.hosts, kept, strict=True):
            assert {key: each.param_groups[0][key] for key in own} == own


def step_unshared(job: Job, *, share: Callable[[], None] = lambda: None) -> None:
    losses = []
    for replica in job.home.local:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(replica.index))
        losses.append((replica.model(x) - 1).square().mean())
        losses[-1].backward()
    share()
    for _, made in job.home.hosts:
        made.step()
        made.zero_grad()
    job.scheduler.step(losses)


@pytest.mark.parametrize("wrap", ["one_cycle", "cosine"])
def test_gradients_that_were_to_be_shared_and_were_not_are_refused(wrap: str) -> None:
    job = Job(WRAPS[wrap])
    with pytest.raises(StepError, match=r"gradients of the 3 replicas differ in step 0.*engine\.share_gradients\(\)"):
        step_unshared(job)
    assert job.scheduler.last_epoch == 0
    for share in ("engine", "home"):
        job = Job(WRAPS[wrap])
        step_unshared(job, share={"engine": job.scheduler.engine, "home": job.home}[share].share_gradients)
    job = Job(lambda made, home: one_cycle(made, home, gradients="local"))
    for _ in range(3):
        step_unshared(job)


def test_the_same_data_everywhere_hides_it_for_a_step_only() -> None:
    job = Job(one_cycle)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def step() -> None:
        for replica in job.home.local:
            (replica.model(x) - 1).square().mean().backward()
        for _, made in job.home.hosts:
            made.step()
            made.zero_grad()
        job.scheduler.step()

    step()
    with pytest.raises(StepError, match="differ in step 1"):
        step()


def test_within_a_replica_s_block_every_step_is_watched() -> None:
    job = Job(one_cycle)
    job.train(until=5)
    losses = []
    for replica in job.scheduler.engine.replicas:
        with replica:
            losses.append(replica.model(torch.ones(4, 4) * torch.arange(4.0)[:, None]).square().mean())
            losses[-1].backward()
    for _, made in job.home.hosts:
        made.step()
    with pytest.raises(StepError, match=r"engine\.share_gradients\(\) was not called in step 5"):
        job.scheduler.step(losses)


def test_gradients_are_looked_at_in_the_first_steps_only() -> None:
    job = Job(one_cycle)
    hooks = [made._optimizer_step_pre_hooks for _, made in job.home.hosts]
    before = [len(own) for own in hooks]
    job.train(until=2)
    assert [len(own) for own in hooks] == [many - 1 for many in before]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda job: pickle.loads(pickle.dumps(job))])
def test_a_copy_looks_at_gradients_in_as_many_steps(again: Callable[[Any], Any]) -> None:
    made = Job(one_cycle)
    made.train(until=1)
    job = again(made)
    hooks = [made._optimizer_step_pre_hooks for _, made in job.home.hosts]
    before = [len(own) for own in hooks]
    job.train(until=2)
    assert [len(own) for own in hooks] == [many - 1 for many in before]
    unshared = again(made)
    with pytest.raises(StepError, match="the gradients of the 3 replicas differ in step 1"):
        step_unshared(unshared)


def test_a_group_at_rest_stays_at_rest() -> None:
    job = Job(lambda made, home: hdet.OneCycleHDET(
        made, [0.1, 0.0], total_steps=TOTAL, spread=0.2, window=WINDOW, auto_lr_warmup=8, replicas=home
    ))  # fmt: skip
    rates = np.array(job.train(until=TOTAL))
    assert (rates[:, :, 1] == 0.0).all()
    assert len(set(rates[0, :, 0])) == 3


def test_a_cycle_that_ends_at_zero_is_explored_but_not_controlled() -> None:
    def wrap(**options: Any) -> Callable[..., Any]:
        return lambda made, home: one_cycle(made, home, final_div_factor=math.inf, **options)

    with pytest.raises(ConfigError, match="ends at a rate of 0"):
        Job(wrap())
    job = Job(wrap(auto_lr=False))
    assert (np.array(job.train(until=TOTAL))[-1] == 0.0).all()


@pytest.mark.parametrize("wrap", ["one_cycle", "cosine"])
def test_between_steps_the_optimizer_holds_what_the_scheduler_wrote(wrap: str) -> None:
    job = Job(WRAPS[wrap])
    makes = {
        "one_cycle": lambda made: OneCycleLR(made, [0.1, 0.05], total_steps=TOTAL),
        "cosine": lambda made: CosineAnnealingLR(made, TOTAL),
    }
    plain = makes[wrap](Job(lambda made, home: None).home.hosts[0][1])
    for step in range(TOTAL):
        written = [group["lr"] for group in plain.optimizer.param_groups]
        for _, made in job.home.hosts:
            assert [group["lr"] for group in made.param_groups] == written
        assert job.scheduler.get_last_lr() == written
        [inside] = job.train(until=step + 1)
        assert inside[0] != written or inside[1] != written
        plain.step()
    assert any(knob.shift for knob in job.scheduler.engine.knobs)


def test_a_second_one_on_the_same_optimizer_ends_the_first() -> None:
    """As where a notebook's cell runs twice."""
    job = Job(one_cycle)
    job.train(until=3)
    again = one_cycle(job.home.hosts[0][1], job.home)
    seen = first_rates(again.engine.optimizers)
    assert sorted(seen) == pytest.approx([0.8 * 0.004, 0.004, 1.2 * 0.004])
    assert [group["lr"] for group in job.home.hosts[0][1].param_groups] == pytest.approx([0.004, 0.002])
