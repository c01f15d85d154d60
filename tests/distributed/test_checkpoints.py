"""Checkpoints of distributed runs: the converged point, by any number of ranks; real processes."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import difference, network, optimizer_of, train

import hdet

Found = dict[str, Any]
STOP = 6
"""In the middle of the second window, which opened at step 4."""


def ddp_engine() -> hdet.Engine:
    model = DistributedDataParallel(network())
    return cases.engine_of(hdet.distribute(model, optimizer_of(model), exact=True))


def hsdp_engine(shape: tuple[int, int]) -> tuple[hdet.Engine, int]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    model = cases.sharded_over(mesh)(network())
    return cases.engine_of(hdet.distribute(model, optimizer_of(model), mesh=mesh)), mesh.get_local_rank("dp_shard")


def four_ranks(folder: Path) -> Found:
    found: Found = {}
    # Saved in mid-window, by DDP: the window's opening is what is kept, and the run goes on from there.
    engine = ddp_engine()
    train(engine, STOP)
    checkpoints = hdet.CheckpointFolder(folder / "ddp")
    checkpoints.save(engine)
    own = engine.state_dict()
    train(engine, cases.STEPS)
    found["whole"] = cases.outcome(engine)
    resumed = ddp_engine()
    found["at"] = checkpoints.resume(resumed)
    train(resumed, cases.STEPS)
    found["resumed"] = cases.outcome(resumed)

    # Each rank's own state, window under way included; and the first rank's for all, which cannot have it.
    again = ddp_engine()
    again.load_state_dict(own)
    found["own at"] = again.step_count
    train(again, cases.STEPS)
    found["own"] = cases.outcome(again)
    box = [own]
    dist.broadcast_object_list(box, src=0)
    again = ddp_engine()
    again.load_state_dict(box[0])
    found["first's at"] = again.step_count
    train(again, cases.STEPS)
    found["first's"] = cases.outcome(again)

    # In the background, beside training that goes on; two, so that an older one is dropped.
    engine = ddp_engine()
    background = hdet.CheckpointFolder(folder / "async", keep=1)
    train(engine, 5)
    background.save(engine, wait=False)
    train(engine, 9)
    background.save(engine, wait=False)
    train(engine, 11)
    background.wait()
    resumed = ddp_engine()
    found["async at"] = background.resume(resumed)
    dist.barrier()
    found["kept"] = sorted(entry.name for entry in (folder / "async").iterdir())
    train(resumed, cases.STEPS)
    found["async"] = cases.outcome(resumed)

    # Without hdet's folder: any use of torch.distributed.checkpoint.
    engine = ddp_engine()
    dcp.save({"mine": {"note": "x"}, "hdet": hdet.Stateful(engine)}, checkpoint_id=folder / "fresh")
    dcp.load({"hdet": hdet.Stateful(engine)}, checkpoint_id=folder / "fresh")
    train(engine, cases.STEPS)
    found["fresh"] = cases.outcome(engine)

    # Shards.
    engine, part = hsdp_engine((2, 2))
    train(engine, STOP, parts=(part,), each=2)
    sharded = hdet.CheckpointFolder(folder / "hsdp")
    sharded.save(engine)
    train(engine, cases.STEPS, parts=(part,), each=2)
    found["hsdp whole"] = cases.outcome(engine)
    engine, part = hsdp_engine((2, 2))
    sharded.resume(engine)
    train(engine, cases.STEPS, parts=(part,), each=2)
    found["hsdp resumed"] = cases.outcome(engine)

    # A disk that is full on one rank.
    engine = ddp_engine()
    train(engine, 9)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        checkpoints.save(engine)
    except hdet.CheckpointError as error:
        found["full"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    found["after full"] = checkpoints.latest()
    train(engine, cases.STEPS)  # the failed save does no harm
    found["full whole"] = cases.outcome(engine)
    return found


def two_ranks(folder: Path) -> Found:
    engine = ddp_engine()
    found: Found = {"at": hdet.CheckpointFolder(folder / "ddp").resume(engine), "before": cases.outcome(engine)}
    train(engine, cases.STEPS)
    found["ddp"] = cases.outcome(engine)
    engine, _ = hsdp_engine((2, 1))
    hdet.CheckpointFolder(folder / "hsdp").resume(engine)
    found["hsdp before"] = cases.outcome(engine)
    train(engine, cases.STEPS, parts=(0, 1), each=2)
    found["hsdp"] = cases.outcome(engine)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four(folder: Path) -> list[Found]:
    return launch(four_ranks, 4, folder)


@pytest.fixture(scope="module")
def two(folder: Path, four: list[Found]) -> list[Found]:
    return launch(two_ranks, 2, folder)


def same_end(found: Found, expected: Found) -> None:
    assert difference(found["weights"], expected["weights"]) == 0.0
    assert found["bases"] == expected["bases"]


@pytest.mark.parametrize("rank", range(4))
def test_a_resumed_run_ends_as_the_uninterrupted_one(four: list[Found], rank: int) -> None:
    found = four[rank]
    assert found["at"] == 4  # the window's opening: a converged point
    same_end(found["resumed"], found["whole"])
    assert found["resumed"]["history"][-1] == found["whole"]["history"][-1]


def test_each_ranks_own_state_resumes_in_mid_window(four: list[Found]) -> None:
    assert [found["own at"] for found in four] == [STOP] * 4
    for found in four:
        same_end(found["own"], found["whole"])


def test_one_ranks_state_for_all_resumes_from_the_windows_opening(four: list[Found]) -> None:
    assert [found["first's at"] for found in four] == [4] * 4
    for found in four:
        same_end(found["first's"], found["whole"])


def test_a_save_in_the_background_holds_the_point_of_its_time(four: list[Found]) -> None:
    for found in four:
        assert found["async at"] == 8
        same_end(found["async"], found["whole"])
        assert found["kept"] == ["step_00000008"]


def test_a_run_saved_before_its_first_step_starts_there(four: list[Found]) -> None:
    for found in four:
        same_end(found["fresh"], found["whole"])


def test_shards_resume(four: list[Found]) -> None:
    for found in four:
        same_end(found["hsdp resumed"], found["hsdp whole"])


def test_a_full_disk_is_told_on_every_rank_and_leaves_the_last_checkpoint(four: list[Found]) -> None:
    for found in four:
        assert "could not be written" in found["full"]
        assert found["after full"].name == "step_00000004"
        same_end(found["full whole"], found["whole"])


def test_fewer_ranks_take_up_the_converged_model_and_its_bases(four: list[Found], two: list[Found]) -> None:
    for found in two:
        assert found["at"] == 4
        assert len(found["ddp"]["history"][-1]["losses"]) == 2
        same_end(found["ddp"], two[0]["ddp"])
    moves = four[0]["whole"]["history"][0]["moves"]
    assert any(moves.values())  # a base that had been moved came along
    assert two[0]["before"]["bases"] != pytest.approx({"learning_rate": 0.02, "weight_decay": 0.05})


def test_shards_are_cut_anew_for_another_mesh(four: list[Found], two: list[Found]) -> None:
    # The same two replicas of two parts each, now on a rank each: only the order of sums differs.
    for found in two:
        assert difference(found["hsdp"]["weights"], four[0]["hsdp whole"]["weights"]) < 2e-5


def test_one_process_takes_up_a_run_of_four_ranks(folder: Path, four: list[Found]) -> None:
    torch.set_num_threads(1)
    model = network()
    engine = cases.engine_of(hdet.replicate(model, optimizer_of(model), n=4))
    assert hdet.CheckpointFolder(folder / "ddp").resume(engine) == 4
    train(engine, cases.STEPS)
    same_end(cases.outcome(engine), four[0]["whole"])


def test_a_checkpoint_of_another_declaration_is_refused(folder: Path, four: list[Found]) -> None:
    model = network()
    engine = cases.engine_of(hdet.replicate(model, optimizer_of(model), n=4), seed=7)
    with pytest.raises(hdet.CheckpointError, match="seed"):
        hdet.CheckpointFolder(folder / "ddp").resume(engine)


def test_an_empty_folder_has_nothing_to_resume(tmp_path: Path) -> None:
    model = network()
    engine = cases.engine_of(hdet.replicate(model, optimizer_of(model), n=4))
    assert hdet.CheckpointFolder(tmp_path / "none").resume(engine) is None
    assert engine.step_count == 0
