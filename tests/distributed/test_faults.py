"""Ranks that are killed, stopped or slow, in each phase of a window; real processes and signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attached_cases
import cases
import pytest
import torch
import torch.distributed as dist
from launch import survivors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import batch, difference, loss_of, network, optimizer_of, train

import hdet
from hdet.checkpoints import leader
from hdet.errors import LostRankError
from hdet.replicas.distributed.exchange import Exchange

VICTIM = 1
FATAL = 6
"""The step in which it happens: in mid-window, after the checkpoint of step 4."""


class Struck(nn.Module):
    """A model in whose forward pass, at one step, the victim is struck."""

    def __init__(self, blow: Callable[[], None]) -> None:
        super().__init__()
        self.inner = network()
        self.blow = blow
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.calls == FATAL and dist.is_initialized() and dist.get_rank() == VICTIM:
            self.blow()
        self.calls += 1
        found: torch.Tensor = self.inner(inputs)
        return found


def strike(sign: int) -> None:
    os.kill(os.getpid(), sign)
    time.sleep(0.2)


def engine_of(blow: Callable[[], None], gradients: str, wrapped: bool) -> hdet.Engine:
    model: nn.Module = Struck(blow)
    if wrapped:
        model = DistributedDataParallel(model)
    return cases.engine_of(hdet.distribute(model, optimizer_of(model), exact=True), gradients=gradients)


def in_forward(folder: Path, gradients: str, wrapped: bool) -> None:
    engine = engine_of(partial(strike, signal.SIGKILL), gradients, wrapped)
    checkpoints = hdet.checkpoints.CheckpointFolder(folder)
    train(engine, 4)
    checkpoints.save(engine)
    train(engine, cases.STEPS)


def in_merge(folder: Path) -> None:
    engine = engine_of(lambda: None, "local", True)
    checkpoints = hdet.checkpoints.CheckpointFolder(folder)
    train(engine, 4)
    checkpoints.save(engine)
    plain = Exchange.reduce

    def reduce(*arguments: object, **options: object) -> None:
        plain(*arguments, **options)  # type: ignore[arg-type]
        if dist.get_rank() == VICTIM:
            strike(signal.SIGKILL)

    Exchange.reduce = reduce  # type: ignore[method-assign]
    train(engine, cases.STEPS)


def in_save(folder: Path) -> None:
    engine = engine_of(lambda: None, "local", True)
    checkpoints = hdet.checkpoints.CheckpointFolder(folder)
    train(engine, 4)
    checkpoints.save(engine)
    train(engine, 9)
    if dist.get_rank() == VICTIM:
        hdet.checkpoints.Stateful.point = lambda self, **options: strike(signal.SIGKILL) or {}  # type: ignore[method-assign]
    checkpoints.save(engine)


def in_phase(folder: Path, phase: str) -> None:
    """The victim is killed as it comes to a phase, which the other rank has entered or is about to."""

    def fatal(plain: Callable[..., object]) -> Callable[..., object]:
        def struck(*arguments: object, **options: object) -> object:
            if dist.get_rank() == VICTIM:
                strike(signal.SIGKILL)
            return plain(*arguments, **options)

        return struck

    engine = engine_of(lambda: None, "shared", False)
    checkpoints = hdet.checkpoints.CheckpointFolder(folder)
    train(engine, 4)
    checkpoints.save(engine)
    if phase == "gather":
        Exchange.gather = fatal(Exchange.gather)  # type: ignore[method-assign, assignment]
    elif phase == "gradients":
        Exchange.reduce = fatal(Exchange.reduce)  # type: ignore[method-assign, assignment]
    else:
        hdet.checkpoints.Stateful.template = fatal(hdet.checkpoints.Stateful.template)  # type: ignore[method-assign, assignment]
        checkpoints.resume(engine)
    train(engine, cases.STEPS)


def in_probe_of_shards() -> None:
    """One replica on two ranks, of which one is killed while both evaluate it at a window's end."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = cases.sharded_over(mesh)(network())

    def held_out(model: nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if dist.get_rank() == VICTIM:
            strike(signal.SIGKILL)
        return loss_of(model, given)

    signal_of = hdet.Probe(held_out, [batch(-1 - j, 99) for j in range(4)])
    knob = hdet.LearningRate(evidence=hdet.evidence.Line())
    home = hdet.distribute(model, optimizer_of(model), mesh=mesh)
    train(cases.engine_of(home, knobs=[knob], signal=signal_of), cases.STEPS)


def slowly(folder: Path) -> None:
    engine = engine_of(partial(time.sleep, 1.5), "shared", True)
    train(engine, cases.STEPS)
    hdet.checkpoints.CheckpointFolder(folder).save(engine)


def resumes_whole(folder: Path) -> None:
    """The last checkpoint is whole, and a run from it ends as one that was never struck."""
    torch.set_num_threads(1)
    model = Struck(lambda: None)
    assert (newest := hdet.checkpoints.CheckpointFolder(folder).latest()) is not None
    assert newest.name == "step_00000004"
    engine = cases.engine_of(hdet.replicate(model, optimizer_of(model), n=2), gradients="local")
    assert hdet.checkpoints.CheckpointFolder(folder).resume(engine) == 4
    train(engine, cases.STEPS)
    other = Struck(lambda: None)
    whole = cases.engine_of(hdet.replicate(other, optimizer_of(other), n=2), gradients="local")
    train(whole, cases.STEPS)
    ours, theirs = cases.outcome(engine), cases.outcome(whole)
    assert difference(ours["weights"], theirs["weights"]) == 0.0
    assert ours["bases"] == theirs["bases"]


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_killed_rank_ends_the_others_with_a_clear_error(tmp_path: Path, gradients: str, wrapped: bool) -> None:
    found = survivors(in_forward, 2, tmp_path, gradients, wrapped)
    assert set(found) == {0}
    assert found[0].startswith("LostRankError: rank 0, ")
    assert "resume from the last checkpoint" in found[0]
    if gradients == "local" and wrapped:
        resumes_whole(tmp_path)


def test_a_leader_that_is_terminated_ends_those_that_wait_to_hear_of_it(tmp_path: Path) -> None:
    found = survivors(leading, 2, tmp_path)
    assert set(found) == {1}
    assert found[1].startswith("LostRankError: rank 1, hearing of the leading rank: ")


def leading(folder: Path) -> None:
    """Rank 0, which hosts the store that ranks meet by, ends when the other needs it no more."""
    met = folder / "met"

    def act() -> None:
        wait_for(met)
        strike(signal.SIGTERM)

    dist.barrier()
    if dist.get_rank() == VICTIM:
        met.touch()
    leader.led(dist.group.WORLD, act)


def test_a_silent_rank_counts_as_lost_after_the_groups_timeout(tmp_path: Path) -> None:
    """It is silent until the other has ended, so that the group's timeout alone can end that one."""
    found = survivors(silent, 2, tmp_path / "ended", timeout=2.0)
    assert found[0].startswith("LostRankError: rank 0, ")
    assert "Timed out waiting 2000ms" in found[0]


def test_so_it_does_in_the_collective_that_comes_after(tmp_path: Path) -> None:
    found = survivors(silent_twice, 2, tmp_path / "ended", timeout=2.0)
    assert found[0].startswith("LostRankError")
    assert "pair closure" in found[0]


def silent_twice(ended: Path) -> None:
    if dist.get_rank() == VICTIM:
        wait_for(ended)
        return
    model = network()
    try:
        with pytest.raises(LostRankError):
            hdet.distribute(model, optimizer_of(model))
        hdet.distribute(model, optimizer_of(model))
    finally:
        ended.touch()


def silent(ended: Path) -> None:
    try:
        train(engine_of(partial(wait_for, ended), "shared", True), cases.STEPS)
    finally:
        ended.touch()


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_a_rank_killed_in_mid_merge_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    found = survivors(in_merge, 2, tmp_path)
    assert found[0].startswith("LostRankError: rank 0, ")
    resumes_whole(tmp_path)


def test_a_rank_killed_in_mid_save_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    found = survivors(in_save, 2, tmp_path)
    assert set(found) == {0}
    assert found[0].split(":")[0] in ("LostRankError", "CheckpointError")
    resumes_whole(tmp_path)


@pytest.mark.parametrize("phase", ["gather", "gradients", "load"])
def test_a_rank_killed_in_another_phase_ends_the_others_too(tmp_path: Path, phase: str) -> None:
    found = survivors(in_phase, 2, tmp_path, phase)
    assert set(found) == {0}
    assert found[0].startswith("LostRankError: rank 0, ")
    assert (newest := hdet.checkpoints.CheckpointFolder(tmp_path).latest()) is not None
    assert newest.name == "step_00000004"


def test_a_rank_killed_in_the_probe_of_a_sharded_model_ends_the_others_too() -> None:
    found = survivors(in_probe_of_shards, 2)
    assert set(found) == {0}
    assert found[0].startswith("LostRankError: rank 0, ")


def test_a_rank_killed_as_a_searchs_state_is_gathered_ends_the_others_too() -> None:
    found = survivors(in_gathering, 2)
    assert set(found) == {0}
    assert found[0].startswith("LostRankError: rank 0, gathering a search's state: ")


def in_gathering() -> None:
    model, optimizer, search = attached_cases._attached()
    attached_cases.loop(model, optimizer, search, 1, quiet=False, alike=False, steps=range(3))
    if dist.get_rank() == VICTIM:
        strike(signal.SIGKILL)
    search.all_ranks.state_dict()


def test_a_slow_rank_slows_the_run_and_changes_nothing(tmp_path: Path) -> None:
    found = survivors(slowly, 2, tmp_path)
    assert found == {0: "", 1: ""}
    torch.set_num_threads(1)
    model = Struck(lambda: None)
    engine = cases.engine_of(hdet.replicate(model, optimizer_of(model), n=2))
    assert hdet.checkpoints.CheckpointFolder(tmp_path).resume(engine) == cases.STEPS
    other = Struck(lambda: None)
    whole = cases.engine_of(hdet.replicate(other, optimizer_of(other), n=2))
    train(whole, cases.STEPS)
    assert difference(cases.outcome(engine)["weights"], cases.outcome(whole)["weights"]) == 0.0


def test_the_errors_of_user_code_stay_as_they_are() -> None:
    found = survivors(wrong_shape, 2)
    assert found[0].startswith("RuntimeError: ")
    assert "mat1 and mat2 shapes" in found[0]


def wrong_shape() -> None:
    engine = engine_of(lambda: None, "local", True)
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out"), engine.replicas[0]:
        raise RuntimeError("DataLoader timed out after 5 seconds")
    with engine.replicas[0] as replica:
        loss_of(replica.model, (torch.ones(2, 3), batch(0, 0)[1]))
