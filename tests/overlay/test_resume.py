"""Schedulers that explore, saved and taken up again."""

import copy
import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduler_job import QUIET, TOTAL, WINDOW, WRAPS, Job, one_cycle, optimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

import hdet
from hdet.errors import CheckpointError, HdetError

pytestmark = QUIET


def cosine(made: Optimizer, home: hdet.replicas.Replicas, **options: Any) -> hdet.overlay.explore.Explored:
    return hdet.explore(CosineAnnealingLR(made, TOTAL), window=WINDOW, replicas=home, total_steps=TOTAL, **options)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_resume_at_any_step_is_the_same_run_bit_for_bit(wrap: str, kind: str) -> None:
    whole = Job(WRAPS[wrap], kind=kind)
    states, rates = [], []
    for step in range(TOTAL):
        buffer = io.BytesIO()
        torch.save(whole.scheduler.state_dict(), buffer)
        states.append(buffer.getvalue())
        rates += whole.train(until=step + 1)
    for step in range(0, TOTAL, 3 if kind == "sgd" else 7):
        resumed = Job(WRAPS[wrap], kind=kind)
        resumed.train(until=min(step, 5))  # whatever it did before must not matter
        resumed.scheduler.load_state_dict(torch.load(io.BytesIO(states[step]), weights_only=True))
        resumed.step_count = step
        assert resumed.scheduler.last_epoch == step
        assert resumed.train(until=TOTAL) == rates[step:], step
        for own, other in zip(resumed.weights(), whole.weights(), strict=True):
            assert torch.equal(own, other)
        assert resumed.scheduler.bases == whole.scheduler.bases


@pytest.mark.parametrize("n", [2, 4])
def test_a_resume_with_another_number_of_replicas_goes_on_from_the_converged_point(n: int) -> None:
    job = Job(one_cycle)
    job.train(until=12)
    bases, converged = job.scheduler.bases, job.model.state_dict()["0.weight"].clone()
    job.train(until=14)
    other = Job(one_cycle, n=n)
    with pytest.warns(UserWarning, match=r"goes on from step 12, .* not from step 14") as caught:
        other.scheduler.load_state_dict(copy.deepcopy(job.scheduler.state_dict()))
    assert caught[0].filename == __file__
    assert other.scheduler.last_epoch == 12
    assert other.scheduler.bases == bases
    for model, _ in other.home.hosts:
        assert torch.equal(model.state_dict()["0.weight"], converged)
    other.step_count = 12
    other.train(until=TOTAL)
    assert other.scheduler.engine.finished


def test_a_resume_with_one_replica_keeps_what_was_learned() -> None:
    job = Job(one_cycle)
    job.train(until=12)
    bases = job.scheduler.bases
    job.train(until=13)
    alone = Job(one_cycle, n=1)
    alone.train(until=2)
    with pytest.warns(UserWarning, match="goes on from step 12"):
        alone.scheduler.load_state_dict(copy.deepcopy(job.scheduler.state_dict()))
    assert alone.scheduler.last_epoch == 12
    assert alone.scheduler.bases == bases
    alone.step_count = 12
    rates = alone.train(until=TOTAL)
    assert rates[0] == rates[-1] == [list(bases.values())]  # one replica learns nothing more


def plain_state(epochs: int = 10) -> dict[str, Any]:
    plain = OneCycleLR(optimizer(), [0.1, 0.05], total_steps=TOTAL)
    for _ in range(epochs):
        plain.step()
    return plain.state_dict()


def test_a_plain_state_starts_exploring_at_its_step() -> None:
    job = Job(one_cycle)
    job.train(until=2)
    with torch.no_grad():
        job.model[0].weight.fill_(0.5)  # as loaded by the user, who sees the first replica only
    job.scheduler.load_state_dict(plain_state())
    assert job.scheduler.last_epoch == 10
    assert list(job.scheduler.bases.values()) == pytest.approx(plain_state()["_last_lr"], rel=1e-12)
    first, *others = [model.state_dict() for model, _ in job.home.hosts]
    assert (first["0.weight"] == 0.5).all()
    assert all(torch.equal(first[key], other[key]) for other in others for key in first)
    job.step_count = 10
    job.train(until=TOTAL)
    assert job.scheduler.engine.finished
    assert job.scheduler.engine.total_steps == TOTAL - 10


def test_a_state_of_exploration_that_began_late_fits_a_fresh_scheduler() -> None:
    job = Job(one_cycle)
    job.scheduler.load_state_dict(plain_state())
    job.step_count = 10
    job.train(until=13)
    other = Job(one_cycle)
    other.scheduler.load_state_dict(copy.deepcopy(job.scheduler.state_dict()))
    other.step_count = 13
    assert other.train(until=TOTAL) == job.train(until=TOTAL)
    assert all(torch.equal(own, same) for own, same in zip(other.weights(), job.weights(), strict=True))


def test_an_exploring_state_needs_an_exploring_scheduler() -> None:
    job = Job(one_cycle)
    with pytest.raises(CheckpointError, match="spread=0"):
        hdet.OneCycleHDET(optimizer(), 0.1, total_steps=TOTAL).load_state_dict(job.scheduler.state_dict())


def test_a_state_of_another_version_is_refused_by_name() -> None:
    state = Job(one_cycle).scheduler.state_dict()
    del state["hdet"]["course"]
    with pytest.raises(CheckpointError, match="which held the scheduler's rates in another way"):
        Job(one_cycle).scheduler.load_state_dict(state)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("wrap", ["one_cycle", "cosine"])
def test_a_state_that_is_refused_changes_nothing(wrap: str, late: bool) -> None:
    """Another seed; of an exploration that began where this one did, or later (which is built to be looked at)."""
    make = {"one_cycle": one_cycle, "cosine": cosine}[wrap]
    other = Job(lambda made, home: make(made, home, seed=9))
    other.train(until=6)
    if late:
        own = other.scheduler.state_dict()
        other.scheduler.load_state_dict({key: value for key, value in own.items() if key != "hdet"})
        other.step_count = 6
    other.train(until=10)
    job, twin = Job(make), Job(make)
    for each in (job, twin):
        each.train(until=6)
    history = copy.deepcopy(job.scheduler.engine.history.windows)
    with pytest.raises(CheckpointError, match="seed"):
        job.scheduler.load_state_dict(copy.deepcopy(other.scheduler.state_dict()))
    assert job.scheduler.last_epoch == 6
    assert job.scheduler.engine.history.windows == history
    assert job.train(until=TOTAL) == twin.train(until=TOTAL)
    assert all(torch.equal(own, same) for own, same in zip(job.weights(), twin.weights(), strict=True))


@pytest.mark.parametrize("given", [Path, hdet.History])
@pytest.mark.parametrize("make", [one_cycle, cosine])
def test_beside_a_file_that_holds_windows_no_other_exploration_begins(make: Any, given: Any, tmp_path: Path) -> None:
    """A plain scheduler's state would begin one, and the one under way goes on."""
    job, twin = (Job(partial(make, history=given(tmp_path / name))) for name in ("own", "same"))
    for each in (job, twin):
        each.train(until=10)
    plain = {key: value for key, value in job.scheduler.state_dict().items() if key != "hdet"}
    told = ": a run that goes on there is given" if given is Path else ", and window 0 is to be run"
    with pytest.raises(HdetError, match=f"already holds windows up to 1{told}"):
        job.scheduler.load_state_dict(plain)
    assert job.train(until=TOTAL) == twin.train(until=TOTAL)
    assert all(torch.equal(own, same) for own, same in zip(job.weights(), twin.weights(), strict=True))
    own, same = (hdet.History(tmp_path / name).windows for name in ("own", "same"))
    assert [(record.window, record.loss) for record in own] == [(record.window, record.loss) for record in same]


def test_alone_a_state_that_is_refused_changes_nothing() -> None:
    job, alone = Job(lambda made, home: one_cycle(made, home, seed=9)), Job(one_cycle, n=1)
    job.train(until=10)
    before, rates = alone.scheduler.state_dict(), alone.train(until=1)
    alone = Job(one_cycle, n=1)
    with pytest.raises(CheckpointError, match="seed"):
        alone.scheduler.load_state_dict(job.scheduler.state_dict())
    assert alone.scheduler.state_dict() == before
    assert alone.train(until=1) == rates


@pytest.mark.parametrize("wrap", WRAPS)
def test_pickled_in_mid_run_it_is_the_same_run(wrap: str) -> None:
    if wrap == "warm-up from zero":
        pytest.skip("torch's LambdaLR with a lambda is not pickled")
    job = Job(WRAPS[wrap])
    job.train(until=10)
    again = pickle.loads(pickle.dumps(job))
    assert again.train(until=TOTAL) == job.train(until=TOTAL)
    assert all(torch.equal(own, same) for own, same in zip(again.weights(), job.weights(), strict=True))
    assert again.scheduler.bases == job.scheduler.bases
    copied = copy.deepcopy(job.scheduler)
    assert copied.bases == job.scheduler.bases
    assert copied.engine is not job.scheduler.engine


# -- explore, over one and many processes -------------------------------------------------------------


def test_explored_one_replica_keeps_what_several_have_learned() -> None:
    job = Job(cosine)
    job.train(until=12)
    shifts = [knob.shift for knob in job.scheduler.engine.knobs]
    assert all(shifts)
    alone = Job(cosine, n=1)
    alone.train(until=3)
    alone.scheduler.load_state_dict(copy.deepcopy(job.scheduler.state_dict()))
    alone.step_count = 12
    assert alone.scheduler.last_epoch == 12
    assert torch.equal(alone.weights()[0], job.weights()[0])
    plain = Job(lambda made, home: CosineAnnealingLR(made, TOTAL)).scheduler
    for _ in range(12):
        plain.step()
    for (rates,) in alone.train(until=TOTAL):
        assert rates == pytest.approx([r * (1 + s) for r, s in zip(plain.get_last_lr(), shifts, strict=True)])
        plain.step()

    several = Job(cosine, n=2)  # and back
    several.scheduler.load_state_dict(copy.deepcopy(alone.scheduler.state_dict()))
    assert [knob.shift for knob in several.scheduler.engine.knobs] == shifts


def test_explored_several_replicas_begin_where_one_process_was() -> None:
    alone = hdet.explore(CosineAnnealingLR(optimizer(lr=0.1), TOTAL), total_steps=TOTAL)
    for _ in range(10):
        alone.step()
    for state in (alone.state_dict(), alone.scheduler.state_dict()):
        job = Job(cosine)
        job.train(until=2)
        job.scheduler.load_state_dict(copy.deepcopy(state))
        assert job.scheduler.last_epoch == 10
        assert list(job.scheduler.bases.values()) == pytest.approx(alone.get_last_lr())
        job.step_count = 10
        job.train(until=13)
        again = Job(cosine)
        again.scheduler.load_state_dict(copy.deepcopy(job.scheduler.state_dict()))
        again.step_count = 13
        assert again.train(until=TOTAL) == job.train(until=TOTAL)
        assert job.scheduler.engine.finished
