"""`hdet.torchft`: replica groups that are killed and come back, in real processes under a real lighthouse."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import free_port

import hdet

pytestmark = [
    pytest.mark.skipif(find_spec("torchft") is None, reason="pip install 'hdet[torchft]'"),
    pytest.mark.timeout(600),  # five processes, each of which imports torch
]
HERE = Path(__file__).parent
Found = dict[str, Any]
LIGHTHOUSE = Path(sys.executable).parent / "torchft_lighthouse"
STEPS, WINDOW, GROUPS = 60, 10, 3  # torchft_job.py's and the example's


@contextmanager
def lighthouse(folder: Path, groups: int = 2) -> Iterator[str]:
    """torchft's lighthouse, which lets a window open when all groups are there."""
    port = free_port()
    options = ("--bind", f"[::]:{port}", "--min_replicas", str(groups), "--join_timeout_ms", "500")
    with (folder / "lighthouse.txt").open("w") as told:
        process = subprocess.Popen(
            [str(LIGHTHOUSE), *options, "--heartbeat_timeout_ms", "2000"], stdout=told, stderr=subprocess.STDOUT
        )
        try:
            yield f"http://localhost:{port}"
        finally:
            process.kill()
            process.wait()


def group(number: int, folder: Path, address: str, *given: object, job: str = "job") -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RUST_LOG": "warn", "TORCHFT_LIGHTHOUSE": address}
    with (folder / f"group{number}.txt").open("a") as told:
        return subprocess.Popen(
            [sys.executable, str(HERE / f"torchft_{job}.py"), str(number), str(folder), *map(str, given)],
            env={**os.environ, **environment},
            stdout=told,
            stderr=subprocess.STDOUT,
        )


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What three groups found, of which the second was killed in the third window, and in the fifth's end."""
    folder = tmp_path_factory.mktemp("torchft")
    with lighthouse(folder, GROUPS) as address:
        groups = [group(number, folder, address, *((30, "window") if number == 1 else ())) for number in range(GROUPS)]
        try:
            assert groups[1].wait(150) == -signal.SIGKILL, told(folder)
            groups[1] = group(1, folder, address, 50, "meeting")
            assert groups[1].wait(150) == -signal.SIGKILL, told(folder)
            groups[1] = group(1, folder, address)
            assert [process.wait(150) for process in groups] == [0] * GROUPS, told(folder)
        finally:
            for process in groups:
                process.kill()
    return [torch.load(folder / f"group{number}.pt", weights_only=False) for number in range(GROUPS)]


def told(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.txt")))


def test_killed_groups_come_back_and_end_with_equal_bases_and_weights(ends: list[Found], assert_same: Any) -> None:
    one, *others = ends
    assert one["learned"] > 1e-4
    for other in others:
        assert one["bases"] == other["bases"]
        assert one["learned"] == other["learned"]
        assert_same(one["weights"], other["weights"])
        assert_same(one["moments"], other["moments"])


def test_a_group_killed_in_a_window_is_a_replica_without_a_loss(ends: list[Found]) -> None:
    window = json.loads(ends[0]["windows"][2])
    assert (window["start"], window["stop"]) == (20, 30)
    assert [loss is None for loss in window["losses"]] == [False, True, False]
    assert window["faults"] == [{"kind": "absent", "replica": 1, "step": 29}]


def test_a_window_at_whose_end_a_group_is_killed_is_thrown_away_and_made_again(ends: list[Found]) -> None:
    assert ends[0]["thrown_away"] == ends[2]["thrown_away"] == [50]
    window = json.loads(ends[0]["windows"][4])
    assert (window["start"], window["stop"], window["faults"]) == (40, 50, [])
    assert None not in window["losses"]


def test_until_a_group_is_killed_it_is_the_run_of_copies_in_one_process(
    ends: list[Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = imported(monkeypatch)
    torch.manual_seed(0)
    model = example.made()
    engine = hdet.Engine(
        hdet.replicate(model, torch.optim.AdamW(model.parameters(), lr=1e-4), GROUPS), **example.declared(2 * WINDOW)
    )
    while not engine.finished:
        trained(engine, example)
    for record, line in zip(engine.history, ends[0]["windows"][: len(engine.history)], strict=True):
        found = json.loads(line)
        assert found["losses"] == pytest.approx(record.losses, rel=1e-6)
        assert found["bases"] == pytest.approx(record.bases, rel=1e-6)


def test_what_cannot_do_without_a_replica_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchft

    example = imported(monkeypatch)
    model = example.made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with lighthouse(tmp_path) as address:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        manager = example.managed(0, store)
        try:
            with pytest.raises(
                hdet.errors.ConfigError, match="group= is the number of this replica group, from 0 to 1; got 2"
            ):
                hdet.torchft.distribute(manager, model, optimizer, group=2, groups=2)
            for message, options in {
                "managed replica groups meet at the ends of windows only": {"gradients": "shared"},
                "line evidence needs numbers of every replica": {"evidence": hdet.evidence.Line()},
                "a guard goes by the first replica": {"guard": hdet.Rewind()},
                "a tail is judged at the first replica": {"tail": hdet.TailAverage()},
                "Exploit copies single replicas": {"merge": hdet.merges.Exploit()},
            }.items():
                replicas = hdet.torchft.distribute(manager, model, optimizer, group=0, groups=2)
                engine = hdet.Engine(replicas, **{**example.declared(WINDOW), **options})
                with pytest.raises(hdet.errors.ConfigError, match=message):
                    hdet.torchft.ManagedEngine(engine)
            alone = hdet.Engine(hdet.replicate(model, optimizer, n=2), **example.declared(WINDOW))
            with pytest.raises(hdet.errors.ConfigError, match=r"a managed engine needs replicas of hdet\.torchft"):
                hdet.torchft.ManagedEngine(alone)
            shared, stepped = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, optimizer)
            probe = example.declared(WINDOW)["signal"]
            for message, options in {
                "guard= cannot be had under torchft": {"guard": hdet.Rewind()},
                "tail= cannot be had under torchft": {"tail": hdet.TailAverage()},
                "noise_scale= cannot be had under torchft": {"noise_scale": True},
                "dropout is judged by the gradient of each pass, and under torchft": {"knobs": [hdet.Dropout()]},
                "no such option": {"windows": 3},
            }.items():
                with pytest.raises(hdet.errors.ConfigError, match=message):
                    hdet.torchft.attach(manager, shared, stepped, probe=probe, total_steps=STEPS, **options)
            another = example.made()
            steps_another = torch.optim.AdamW(another.parameters(), lr=1e-4)
            both = [(shared, stepped), (torchft.DistributedDataParallel(manager, another), steps_another)]
            search = hdet.torchft.attach(manager, *both[0], probe=probe, total_steps=STEPS, quiet=True)
            with pytest.raises(hdet.errors.ConfigError, match="carries another search or managed engine"):
                hdet.torchft.attach(manager, *both[1], probe=probe, total_steps=STEPS, quiet=True)
            assert not steps_another._optimizer_step_pre_hooks
            search.detach()
            assert not optimizer._optimizer_step_pre_hooks
            for given in both:
                hdet.torchft.attach(manager, *given, probe=probe, total_steps=STEPS, quiet=True).detach()
            with pytest.raises(hdet.errors.CheckpointError, match="has a search attached, and this one has none"):
                manager._load_state_dict_fns["hdet"]({"search": {}})
            for message, given in {
                "torchft steps this optimizer where": (model, stepped),
                "the model is in torchft's DistributedDataParallel": (shared, optimizer),
            }.items():
                with pytest.raises(hdet.errors.ConfigError, match=message):
                    hdet.attach(*given, probe=probe, total_steps=STEPS, quiet=True)
        finally:
            manager.shutdown(wait=False)


def test_a_group_that_declares_another_run_takes_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_alone(managed: Any) -> None:
        managed._kept = managed.engine.state_dict()

    monkeypatch.setattr(hdet.torchft.ManagedEngine, "_open", open_alone)
    example = imported(monkeypatch)
    model = example.made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with lighthouse(tmp_path) as address:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        managers, groups = [], []
        try:
            for group, seed in enumerate((0, 7)):
                store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
                managers.append(example.managed(group, store))
                replicas = hdet.torchft.distribute(managers[-1], model, optimizer, group=group, groups=2)
                groups.append(hdet.torchft.ManagedEngine(hdet.Engine(replicas, **example.declared(WINDOW), seed=seed)))
            with pytest.raises(
                hdet.errors.CheckpointError, match="the replica groups disagree on seed: seed is 7 here and 0 in"
            ):
                groups[1].take_over(groups[0].state())
            state = groups[0].state()
            optimizer.param_groups[0]["weight_decay"] = 0.5  # as a scheduler of the loop may
            groups[0].take_over(state)
        finally:
            for manager in managers:
                manager.shutdown(wait=False)


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What two groups found in loops of torchft's own, and in the same with hdet."""
    folder = tmp_path_factory.mktemp("loops")
    with lighthouse(folder) as address:
        groups = [group(number, folder, address, job="loops_job") for number in range(2)]
        try:
            assert [process.wait(250) for process in groups] == [0, 0], told(folder)
        finally:
            for process in groups:
                process.kill()
    return [torch.load(folder / f"loops{number}.pt", weights_only=False) for number in range(2)]


def test_held_replicas_are_torchfts_local_sgd_bit_for_bit(loops: list[Found], assert_same: Any) -> None:
    for found in loops:
        assert_same(found["held replicas"], found["local sgd"])


def test_held_under_shared_gradients_it_is_the_run_without_it_bit_for_bit(loops: list[Found], assert_same: Any) -> None:
    for found in loops:
        assert [stop for _, stop, _ in found["held"]["windows"]] == [10, 20, 30, 40]
        assert_same(found["held"]["left"], found["plain"]["left"])


def test_lost_steps_and_a_group_that_comes_back_in_mid_window_leave_the_same_run(
    loops: list[Found], assert_same: Any
) -> None:
    for found in loops:
        assert found["searched"]["shifts"] == loops[0]["searched"]["shifts"]
        assert found["searched"]["shifts"]["learning_rate"] > 1
        assert found["searched"]["history"] == loops[0]["searched"]["history"]
        assert_same(found["searched"]["left"], loops[0]["searched"]["left"])
        assert_same(found["came back"], found["searched"])


def test_groups_that_would_learn_different_rates_go_by_their_mean(loops: list[Found], assert_same: Any) -> None:
    one, other = (found["apart"] for found in loops)
    assert one["shifts"] != loops[0]["searched"]["shifts"]
    assert_same(one["left"], other["left"])
    assert [x["moves"] for x in one["history"]] != [x["moves"] for x in other["history"]]
    for own, others in zip(one["history"], other["history"], strict=True):
        assert (own["bases"], own["course"], own["losses"]) == (others["bases"], others["course"], others["losses"])
        assert [x["opened"] for x in own["learned"].values()] == [x["opened"] for x in others["learned"].values()]
    for found in (one, other):
        for knob, moved in found["moved"].items():
            assert sum(record["moves"][knob] for record in found["history"]) == pytest.approx(moved, abs=1e-12)


def test_a_search_is_detached_and_another_attached_in_the_same_loop(loops: list[Found], assert_same: Any) -> None:
    for found in loops:
        anew = found["anew"]
        assert anew["served"] == {}
        assert anew["own_loss"] == anew["heard_after_detach"]
        assert [stop for _, stop, _ in anew["windows"]] == [WINDOW, 2 * WINDOW]
        assert_same(anew["left"], loops[0]["anew"]["left"])
        assert anew["history"] == loops[0]["anew"]["history"]


def test_a_loop_that_tells_no_loss_is_told_so_in_its_first_step(loops: list[Found]) -> None:
    for found in loops:
        assert "no training loss was told in step 0, which opens a window" in found["untold"]


def test_the_outer_merge_is_torchfts_diloco(loops: list[Found], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nesterov SGD over AdamW: to float tolerance, the same anchors window by window."""
    theirs = [found["anchors"] for found in loops]
    example = imported(monkeypatch)
    torch.manual_seed(0)
    model = example.made()
    started = [parameter.detach().clone() for parameter in model.parameters()]
    engine = hdet.Engine(
        hdet.replicate(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 2),
        [hdet.LearningRate(spread=hdet.spreads.TwoLevel(0.0))],
        window=WINDOW,
        gradients="local",
        merge=hdet.merges.Outer(0.7, options={"momentum": 0.9, "nesterov": True}),
        total_steps=4 * WINDOW,
    )
    anchors = []
    while not engine.finished:
        if trained(engine, example) is not None:
            anchors.append([parameter.detach().clone() for parameter in model.parameters()])
    assert len(anchors) == len(theirs[0]) == len(theirs[1]) == 4
    for own, one, other in zip(anchors, *theirs, strict=True):
        torch.testing.assert_close(own, one, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    moved = [float((now - then).abs().max()) for now, then in zip(anchors[-1], started, strict=True)]
    assert min(moved) > 0.1  # so that the tolerance says something


def trained(engine: hdet.Engine, example: Any) -> hdet.history.WindowRecord | None:
    """One step of an engine's copies in this process."""
    losses = []
    for replica in engine.replicas:
        with replica:
            loss = example.loss_of(replica.model, example.batch(engine.step_count, replica.data_index))
            loss.backward()
        losses.append(loss)
    for optimizer in engine.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return engine.step(losses)


def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(HERE.parent.parent / "examples")
    return importlib.import_module("torchft_replicas")


def test_a_group_that_comes_back_has_the_whole_history(ends: list[Found]) -> None:
    assert len(ends[0]["windows"]) == STEPS // WINDOW
    stops, restarted = [json.loads(line)["stop"] for line in ends[1]["windows"]], ends[1]["windows"]
    assert stops == list(range(WINDOW, STEPS + 1, WINDOW))
    decided = [{key: json.loads(line)[key] for key in ("bases", "losses", "moves")} for line in restarted]
    assert decided == [
        {key: json.loads(line)[key] for key in ("bases", "losses", "moves")} for line in ends[0]["windows"]
    ]
