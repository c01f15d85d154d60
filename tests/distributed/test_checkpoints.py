"""Checkpoints of distributed runs: the converged point, by any number of ranks; real processes."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import free_port, launch, start
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import difference, network, optimizer_of, probe, train

import hdet
from hdet.checkpoints import folder as checkpoint_folder
from hdet.checkpoints.manifest import publish
from hdet.errors import CheckpointError
from hdet.merges import Mean

Found = dict[str, Any]
STOP = 6
"""In the middle of the second window, which opened at step 4."""


def ddp_engine() -> hdet.Engine:
    model = DistributedDataParallel(network())
    return cases.engine_of(hdet.distribute(model, optimizer_of(model), exact=True))


def kept_engine() -> hdet.Engine:
    """Replicas that keep moments of their own, and so differ at every opening."""
    model = DistributedDataParallel(network())
    home = hdet.distribute(model, optimizer_of(model), exact=True)
    return cases.engine_of(home, gradients="local", merge=Mean("keep"))


def noisy_engine() -> hdet.Engine:
    model = DistributedDataParallel(network())
    home = hdet.distribute(model, optimizer_of(model), exact=True)
    hdet.perturb(home, noise=0.3)
    return cases.engine_of(home)


def hsdp_engine(shape: tuple[int, int]) -> tuple[hdet.Engine, int]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    model = cases.sharded_over(mesh)(network())
    return cases.engine_of(hdet.distribute(model, optimizer_of(model), mesh=mesh)), mesh.get_local_rank("dp_shard")


def four_ranks(folder: Path) -> Found:
    found: Found = {}
    # Saved in mid-window, by DDP: the window's opening is what is kept, and the run goes on from there.
    engine = ddp_engine()
    train(engine, STOP)
    checkpoints = hdet.checkpoints.CheckpointFolder(folder / "ddp")
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

    # A state that rank 1 alone cannot load, which shows only while it loads: all go back, and go on.
    again = ddp_engine()
    train(again, STOP)
    knob = next(iter(own["knobs"]))
    broken = {**own["knobs"][knob], "controller": {}} if dist.get_rank() == 1 else own["knobs"][knob]
    try:
        again.load_state_dict({**own, "knobs": {**own["knobs"], knob: broken}})
    except CheckpointError as error:
        found["one cannot"] = str(error)
    train(again, cases.STEPS)
    found["one could not"] = cases.outcome(again)

    # In the background, beside training that goes on; two, so that an older one is dropped.
    engine = ddp_engine()
    background = hdet.checkpoints.CheckpointFolder(folder / "async", keep=1)
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
    dcp.save({"mine": {"note": "x"}, "hdet": hdet.checkpoints.Stateful(engine)}, checkpoint_id=folder / "fresh")
    dcp.load({"hdet": hdet.checkpoints.Stateful(engine)}, checkpoint_id=folder / "fresh")
    train(engine, cases.STEPS)
    found["fresh"] = cases.outcome(engine)

    # Shards.
    engine, part = hsdp_engine((2, 2))
    train(engine, STOP, parts=(part,), each=2)
    sharded = hdet.checkpoints.CheckpointFolder(folder / "hsdp")
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
    except CheckpointError as error:
        found["full"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    found["after full"] = checkpoints.latest()
    train(engine, cases.STEPS)  # the failed save does no harm
    found["full whole"] = cases.outcome(engine)
    # Halves last: where some ranks have made more groups than others, torch from 2.14 on makes none of all ranks.
    return {**found, "apart": apart(folder), "background": full_in_the_background(folder), "half": halves(folder)}


def apart(folder: Path) -> Found:
    """Checkpoints of replicas that differ at a window's opening."""
    found: Found = {}
    for name, make in (("kept", kept_engine), ("noisy", noisy_engine)):
        for stop in (4, 6) if name == "kept" else (0, 2):
            engine = make()
            train(engine, stop)
            checkpoints = hdet.checkpoints.CheckpointFolder(folder / f"{name} {stop}")
            checkpoints.save(engine)
            if stop == 6:  # any use of torch.distributed.checkpoint holds the first place's point, not a mix
                dcp.save({"hdet": hdet.checkpoints.Stateful(engine)}, checkpoint_id=folder / "kept bare")
            train(engine, cases.STEPS)
            found[f"{name} {stop} whole"] = cases.outcome(engine)
            engine = make()
            checkpoints.resume(engine)
            train(engine, cases.STEPS)
            found[f"{name} {stop}"] = cases.outcome(engine)
    engine = kept_engine()
    dcp.load({"hdet": hdet.checkpoints.Stateful(engine)}, checkpoint_id=folder / "kept bare")
    found["bare"] = engine.optimizers[0].state_dict()["state"]
    raw = {"hdet": {"model": {name: torch.empty_like(value) for name, value in network().state_dict().items()}}}
    dcp.load(raw, checkpoint_id=folder / "noisy 2" / "step_00000000")
    found["raw"] = raw["hdet"]["model"]
    found["own"] = {name: p.detach().clone() for name, p in noisy_engine().hosts[0][0].named_parameters()}
    return found


def halves(folder: Path) -> Found:
    """Two runs at once, each on two of four ranks; the second saves once more, for itself."""
    half = dist.get_rank() // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][half]

    def start() -> hdet.Engine:
        model = network(half)
        return cases.engine_of(hdet.distribute(model, optimizer_of(model), group=group))

    engine = start()
    checkpoints = hdet.checkpoints.CheckpointFolder(folder / f"half {half}")
    train(engine, 4)
    checkpoints.save(engine)
    if half == 1:
        train(engine, 8)
        checkpoints.save(engine, wait=False)
        checkpoints.wait()
    again = start()
    at = checkpoints.resume(again)
    train(engine, cases.STEPS)
    train(again, cases.STEPS)
    return {"at": at, "whole": cases.outcome(engine), "resumed": cases.outcome(again)}


def full_in_the_background(folder: Path) -> str:
    """The second rank's disk fills up under an asynchronous save."""
    engine, part = hsdp_engine((2, 2))
    checkpoints = hdet.checkpoints.CheckpointFolder(folder / "full")
    train(engine, 4, parts=(part,), each=2)
    checkpoints.save(engine)
    train(engine, 8, parts=(part,), each=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    checkpoints.save(engine, wait=False)
    told = ""
    try:
        checkpoints.wait()
    except CheckpointError as error:
        told = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    newest = checkpoints.latest()
    return f"{newest.name if newest else None}: {told}"


def two_ranks(folder: Path) -> Found:
    engine = ddp_engine()
    found: Found = {
        "at": hdet.checkpoints.CheckpointFolder(folder / "ddp").resume(engine),
        "before": cases.outcome(engine),
    }
    train(engine, cases.STEPS)
    found["ddp"] = cases.outcome(engine)
    engine, _ = hsdp_engine((2, 1))
    hdet.checkpoints.CheckpointFolder(folder / "hsdp").resume(engine)
    found["hsdp before"] = cases.outcome(engine)
    train(engine, cases.STEPS, parts=(0, 1), each=2)
    found["hsdp"] = cases.outcome(engine)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four(folder: Path) -> list[Found]:
    return launch(four_ranks, 4, folder, limit=200.0)


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


def test_where_one_rank_cannot_load_its_state_all_go_back_and_are_told(four: list[Found]) -> None:
    told = [found["one cannot"] for found in four]
    assert "has the fields" in told.pop(1)
    assert set(told) == {"another process cannot load its state; this one's engine is as it was"}
    for found in four:
        same_end(found["one could not"], found["whole"])


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


def test_a_full_disk_of_another_rank_in_the_background_too(four: list[Found]) -> None:
    for found in four:
        assert found["background"].startswith("step_00000004: ")
        assert "could not be written" in found["background"]


@pytest.mark.parametrize("name", ["kept 4", "kept 6", "noisy 0", "noisy 2"])
def test_replicas_that_differ_at_an_opening_resume_each_from_its_own(four: list[Found], name: str) -> None:
    for found in four:
        same_end(found["apart"][name], found["apart"][f"{name} whole"])


def test_a_bare_checkpoint_of_such_replicas_is_the_first_places_and_no_mix(four: list[Found]) -> None:
    first = four[0]["apart"]
    assert all(torch.equal(first["raw"][name], value) for name, value in first["own"].items())
    assert difference(list(four[3]["apart"]["own"].values()), list(first["own"].values())) > 0.01
    for found in four:
        for number, entries in found["apart"]["bare"].items():
            for key, value in entries.items():
                assert torch.equal(value, first["bare"][number][key])


def test_one_process_takes_up_replicas_that_differ(folder: Path, four: list[Found]) -> None:
    torch.set_num_threads(1)
    for n, same in ((4, True), (2, False)):
        model = network()
        home = hdet.replicate(model, optimizer_of(model), n=n)
        engine = cases.engine_of(home, gradients="local", merge=Mean("keep"))
        assert hdet.checkpoints.CheckpointFolder(folder / "kept 6").resume(engine) == 4
        moments = [optimizer.state_dict()["state"][0]["exp_avg"] for optimizer in engine.optimizers]
        assert torch.equal(moments[0], moments[1]) != same
        train(engine, cases.STEPS)
        if same:
            same_end(cases.outcome(engine), four[0]["apart"]["kept 6 whole"])


def test_runs_on_groups_of_ranks_save_and_resume_by_themselves(four: list[Found]) -> None:
    assert [found["half"]["at"] for found in four] == [4, 4, 8, 8]
    for found in four:
        assert difference(found["half"]["whole"]["weights"], found["half"]["resumed"]["weights"]) < 1e-6
        assert found["half"]["whole"]["bases"] == pytest.approx(found["half"]["resumed"]["bases"])
    assert difference(four[0]["half"]["whole"]["weights"], four[2]["half"]["whole"]["weights"]) > 0.01


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
    assert hdet.checkpoints.CheckpointFolder(folder / "ddp").resume(engine) == 4
    train(engine, cases.STEPS)
    same_end(cases.outcome(engine), four[0]["whole"])


def test_a_checkpoint_of_another_declaration_is_refused(folder: Path, four: list[Found]) -> None:
    model = network()
    engine = cases.engine_of(hdet.replicate(model, optimizer_of(model), n=4), seed=7)
    with pytest.raises(CheckpointError, match="seed"):
        hdet.checkpoints.CheckpointFolder(folder / "ddp").resume(engine)


def one_process(seed: int = 0, **options: Any) -> hdet.Engine:
    torch.set_num_threads(1)
    model = network(seed)
    return cases.engine_of(hdet.replicate(model, optimizer_of(model), n=2), **options)


def test_where_nothing_is_to_resume_the_run_and_its_history_begin(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    train(one_process(history=path), 5)  # killed after a window, before its first checkpoint
    engine = one_process(history=hdet.History(path))
    assert hdet.checkpoints.CheckpointFolder(tmp_path / "none").resume(engine) is None
    assert engine.step_count == 0
    train(engine, cases.STEPS)
    assert [record.window for record in hdet.History(path)] == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_refused_resume_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    saved = one_process(seed=1)
    train(saved, 6)
    hdet.checkpoints.CheckpointFolder(tmp_path / "folder").save(saved)
    dcp.save({"hdet": hdet.checkpoints.Stateful(saved)}, checkpoint_id=tmp_path / "bare")
    model = network()
    engine = cases.engine_of(hdet.replicate(model, optimizer_of(model), n=2), seed=7)
    train(engine, 5)
    before = [tensor.clone() for tensor in engine.cycle.anchor.held]
    with pytest.raises(CheckpointError, match="seed=0, this engine has 7"):
        hdet.checkpoints.CheckpointFolder(tmp_path / "folder").resume(engine)
    with pytest.raises(CheckpointError, match="seed=0, this engine has 7"):
        dcp.load({"hdet": hdet.checkpoints.Stateful(engine)}, checkpoint_id=tmp_path / "bare")
    assert all(map(torch.equal, before, engine.cycle.anchor.held))
    assert engine.step_count == 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_outer_optimizer_goes_on_from_a_folder_and_begins_anew_from_a_bare_state(tmp_path: Path) -> None:
    def engine() -> hdet.Engine:
        model = network()
        home = hdet.replicate(model, optimizer_of(model), n=2)
        return hdet.Engine(home, [hdet.LearningRate()], window=3, merge=hdet.merges.Outer(), total_steps=12)

    saved = engine()
    train(saved, 6)
    hdet.checkpoints.CheckpointFolder(tmp_path / "folder").save(saved)
    dcp.save({"hdet": hdet.checkpoints.Stateful(saved)}, checkpoint_id=tmp_path / "bare")
    outer = saved.cycle.merger.state_dict()["optimizer"]["state"]
    assert outer

    resumed = engine()
    assert hdet.checkpoints.CheckpointFolder(tmp_path / "folder").resume(resumed)
    again = resumed.cycle.merger.state_dict()["optimizer"]["state"]
    assert all(torch.equal(outer[key]["momentum_buffer"], again[key]["momentum_buffer"]) for key in outer)

    anew = engine()
    with pytest.warns(UserWarning, match="leaves out what a merge remembers: the outer optimizer begins anew"):
        dcp.load({"hdet": hdet.checkpoints.Stateful(anew)}, checkpoint_id=tmp_path / "bare")
    assert anew.step_count == 6
    assert not anew.cycle.merger.state_dict()["optimizer"]["state"]


def test_a_folder_of_another_run_is_not_saved_over(tmp_path: Path) -> None:
    checkpoints = hdet.checkpoints.CheckpointFolder(tmp_path)
    old = one_process()
    for step in (4, 8):
        train(old, step)
        checkpoints.save(old)
        assert checkpoints.save(old) == tmp_path / f"step_{step:08d}"  # nothing new: nothing written
    fresh = one_process(seed=3)
    train(fresh, 4)
    with pytest.raises(CheckpointError, match="holds step_00000008, from which this engine has not gone on"):
        checkpoints.save(fresh)
    train(fresh, 8)
    with pytest.raises(CheckpointError, match="step_00000008 is another run's"):
        checkpoints.save(fresh)
    train(fresh, cases.STEPS)
    checkpoints.save(fresh)
    # It is the newest, and dropped nothing of the other run.
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step_{step:08d}" for step in (4, 8, 12)]


def test_a_resumed_run_goes_on_in_its_folder(tmp_path: Path) -> None:
    engine = one_process()
    train(engine, 8)
    hdet.checkpoints.CheckpointFolder(tmp_path, keep=1).save(engine)
    again = one_process()
    checkpoints = hdet.checkpoints.CheckpointFolder(tmp_path, keep=1)
    assert checkpoints.resume(again) == 8
    train(again, cases.STEPS)
    checkpoints.save(again)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000012"]


def test_a_folder_that_cannot_be_cleared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = one_process()
    train(engine, 4)
    (tmp_path / "step_00000004.part").mkdir()  # cut short by a kill

    def refuse(path: Path) -> None:
        raise PermissionError(f"{path} is not yours")

    monkeypatch.setattr("hdet.checkpoints.folder.shutil.rmtree", refuse)
    with pytest.raises(CheckpointError, match="is not yours"):
        hdet.checkpoints.CheckpointFolder(tmp_path).save(engine)


def test_a_guard_looks_for_the_best_point_anew_after_a_sharded_checkpoint(tmp_path: Path) -> None:
    options: Found = {"signal": probe(), "guard": hdet.Rewind()}
    engine = one_process(**options)
    train(engine, cases.WINDOW)
    assert engine.cycle.watch is not None
    assert engine.cycle.watch.bases
    checkpoints = hdet.checkpoints.CheckpointFolder(tmp_path)
    checkpoints.save(engine)
    checkpoints.resume(engine)
    assert not engine.cycle.watch.bases
    train(engine, 2 * cases.WINDOW)
    assert engine.cycle.watch.bases


def leaves_while_it_is_written(rank: int, ranks: int, port: int, folder: Path) -> None:
    """A run without an end of its own, that nobody waits for."""

    def slowly(*arguments: Any) -> None:
        time.sleep(1.0)
        publish(*arguments)

    checkpoint_folder.publish = slowly  # type: ignore[attr-defined]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with hdet.process_group("gloo", timeout=30.0):
        model = DistributedDataParallel(network())
        engine = hdet.Engine(hdet.distribute(model, optimizer_of(model)), [hdet.LearningRate()], window=4)
        train(engine, 4)
        hdet.checkpoints.CheckpointFolder(folder).save(engine, wait=False)


def test_the_groups_end_waits_for_a_checkpoint_in_the_background(tmp_path: Path) -> None:
    processes = start(leaves_while_it_is_written, 2, free_port(), tmp_path)
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_00000004"]
