"""Attacks on a folder of checkpoints: forged, damaged and incomplete ones; nothing that a file names is run."""

from __future__ import annotations

import copy
import io
import json
import multiprocessing
import os
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import hdet
from hdet.checkpoints import folder
from hdet.checkpoints.manifest import content, publish
from hdet.checkpoints.stateful import unpacked
from hdet.errors import CheckpointError, ConfigError


class Forged:
    """Leaves a file behind where a pickle of it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.trace)!r}, 'w').close()",))


def sign(checkpoint: Path) -> None:
    """A forger who can write files writes their checksums too."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        manifest["files"][name] = vars(content(checkpoint / name))
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def start(problem: Any) -> Callable[[], hdet.Engine]:
    def make() -> hdet.Engine:
        model = problem.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return hdet.Engine(
            hdet.replicate(model, optimizer, n=2), [hdet.LearningRate()], window=4, gradients="local", total_steps=12
        )

    return make


@pytest.fixture
def saved(start: Callable[[], hdet.Engine], train: Any, tmp_path: Path) -> Path:
    engine = start()
    train(engine, 4)
    return hdet.checkpoints.CheckpointFolder(tmp_path / "checkpoints").save(engine)


def refusal(saved: Path, engine: hdet.Engine, assert_same: Any) -> str:
    """What a resume says, which changes nothing."""
    before = engine.state_dict()
    with pytest.raises(CheckpointError) as caught:
        hdet.checkpoints.CheckpointFolder(saved.parent).resume(engine)
    assert_same(engine.state_dict(), before)
    return str(caught.value)


def test_a_manifest_names_every_file_with_its_size_and_checksum(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    assert set(manifest["files"]) | {"manifest.json"} == {path.name for path in saved.iterdir()}
    assert manifest["files"][".metadata"]["bytes"] == (saved / ".metadata").stat().st_size


@pytest.mark.parametrize("signed", [False, True], ids=["as it is", "with its manifest"])
@pytest.mark.parametrize("place", ["metadata", "entry"])
def test_a_forged_file_runs_nothing(
    place: str, signed: bool, saved: Path, start: Callable[[], hdet.Engine], assert_same: Any, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    if place == "metadata":
        (saved / ".metadata").write_bytes(pickle.dumps(Forged(trace)))
    else:
        forged = io.BytesIO()
        torch.save(Forged(trace), forged)
        metadata = pickle.loads((saved / ".metadata").read_bytes())
        (index,) = [index for index in metadata.storage_data if index.fqn == "hdet.control"]
        where = metadata.storage_data[index]
        data = saved / where.relative_path
        where.offset, where.length = data.stat().st_size, len(forged.getvalue())
        data.write_bytes(data.read_bytes() + forged.getvalue())
        (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    if signed:
        sign(saved)
    said = refusal(saved, start(), assert_same)
    assert not trace.exists()
    assert "forged or damaged" in said or "no plain data" in said or "is not as it was saved" in said
    assert ("is not as it was saved" in said) != signed


def test_metadata_cannot_point_outside_of_its_checkpoint(
    saved: Path, start: Callable[[], hdet.Engine], assert_same: Any
) -> None:
    shutil.copy(saved / "__0_0.distcp", saved.parent / "elsewhere")
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for where in metadata.storage_data.values():
        where.relative_path = "../elsewhere"
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    sign(saved)
    assert "points to '../elsewhere', which its manifest does not name" in refusal(saved, start(), assert_same)


@pytest.mark.parametrize(
    ("control", "message"),
    [
        (lambda c: [1], "is a list, no mapping"),
        (lambda c: {**c, "config": None}, "does not say what engine wrote it"),
        (lambda c: {name: value for name, value in c.items() if name != "groups"}, "control.groups: Field required"),
        (
            lambda c: {**c, "window": "two"},
            "the checkpoint is no state of an engine: control.window: Input should be a valid integer, got 'two'",
        ),
        (lambda c: {**c, "knobs": {}}, "cannot be loaded"),
        (lambda c: {**c, "knobs": {"learning_rate": {"shift": "up"}}}, "knobs.learning_rate.shift"),
        (lambda c: {**c, "replicas": 3}, "control.replicas"),
    ],
)
def test_plain_numbers_of_odd_types_are_refused(
    control: Callable[[dict[str, Any]], Any],
    message: str,
    start: Callable[[], hdet.Engine],
    train: Any,
    assert_same: Any,
) -> None:
    engine = start()
    train(engine, 4)
    state = hdet.checkpoints.Stateful(engine).state_dict()
    changed = io.BytesIO()
    torch.save(control(torch.load(io.BytesIO(state["control"]), weights_only=True)), changed)
    fresh = start()
    before = fresh.state_dict()
    with pytest.raises(CheckpointError, match=message):
        hdet.checkpoints.Stateful(fresh).load_state_dict({**state, "control": changed.getvalue()})
    with pytest.raises(CheckpointError, match="control cannot be read"):
        hdet.checkpoints.Stateful(fresh).load_state_dict({**state, "control": b"rubbish"})
    assert_same(fresh.state_dict(), before)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "has another SHA-256"),
        (lambda content: content[:-1], r"has \d+ bytes instead of \d+"),
        (lambda content: None, "is missing"),
    ],
    ids=["a flipped bit", "cut short", "removed"],
)
def test_damage_is_named_before_anything_is_read(
    name: str,
    harm: Callable[[bytes], bytes | None],
    message: str,
    saved: Path,
    start: Callable[[], hdet.Engine],
    assert_same: Any,
) -> None:
    harmed = harm((saved / name).read_bytes())
    if harmed is None:
        (saved / name).unlink()
    else:
        (saved / name).write_bytes(harmed)
    said = refusal(saved, start(), assert_same)
    assert re.search(f"is not as it was saved: {re.escape(name)} {message}", said)


@pytest.mark.parametrize(
    "manifest",
    ["", "[]", '{"format": 1}', '{"format": 1, "run": "x", "files": {".metadata": 3}}', '{"format": 2}', "\ud800"],
)
def test_a_broken_manifest_is_refused(
    manifest: str, saved: Path, start: Callable[[], hdet.Engine], assert_same: Any
) -> None:
    (saved / "manifest.json").write_bytes(manifest.encode("utf-8", "surrogatepass"))
    assert "manifest" in refusal(saved, start(), assert_same)


def test_a_checkpoint_without_a_manifest_is_not_passed_over(
    saved: Path, start: Callable[[], hdet.Engine], assert_same: Any
) -> None:
    """Another version's, say: to begin anew without a word would lose the run."""
    (saved / "manifest.json").unlink()
    said = refusal(saved, start(), assert_same)
    assert "has no manifest.json, so nothing in it can be checked" in said
    assert "hdet.checkpoints.Stateful" in said


def test_a_save_cut_short_does_not_count_and_is_cleared_away(
    saved: Path, start: Callable[[], hdet.Engine], train: Any
) -> None:
    cut = saved.with_name("step_00000008.part")
    shutil.copytree(saved, cut)
    (cut / ".metadata").unlink()
    checkpoints = hdet.checkpoints.CheckpointFolder(saved.parent)
    engine = start()
    assert checkpoints.resume(engine) == 4
    train(engine, 8)
    checkpoints.save(engine)
    assert sorted(path.name for path in saved.parent.iterdir()) == ["step_00000004", "step_00000008"]


def test_of_two_runs_that_save_at_once_neither_takes_the_others_files_for_its_own(
    start: Callable[[], hdet.Engine], train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(), start()
    train(first, 4)
    train(second, 4)

    def killed(*_: Any) -> None:
        raise OSError("killed")

    def interrupted(*given: Any) -> None:
        monkeypatch.setattr(folder, "publish", killed)
        with pytest.raises(CheckpointError, match="killed"):
            hdet.checkpoints.CheckpointFolder(tmp_path).save(second)
        publish(*given)

    monkeypatch.setattr(folder, "publish", interrupted)
    with pytest.raises(CheckpointError, match="No such file"):
        hdet.checkpoints.CheckpointFolder(tmp_path).save(first)
    assert hdet.checkpoints.CheckpointFolder(tmp_path).latest() is None


def test_the_end_of_a_run_that_was_ended_early_is_saved_beside_the_point_it_ended_at(
    saved: Path, start: Callable[[], hdet.Engine], train: Any, assert_same: Any
) -> None:
    engine, checkpoints = start(), hdet.checkpoints.CheckpointFolder(saved.parent)
    checkpoints.resume(engine)
    engine.finish()
    assert checkpoints.save(engine) == checkpoints.save(engine) == saved.with_name("step_00000004.ended")
    assert saved.exists()
    assert checkpoints.latest() == saved.with_name("step_00000004.ended")
    again = start()
    assert hdet.checkpoints.CheckpointFolder(saved.parent).resume(again) == 4
    assert again.finished
    assert_same(again.replicas[1].model.state_dict(), engine.replicas[0].model.state_dict())
    goes_on = start()
    shutil.rmtree(saved.with_name("step_00000004.ended"))
    checkpoints.resume(goes_on)
    train(goes_on, 12)
    assert checkpoints.save(goes_on).name == "step_00000012"  # the end that was planned


class Scaled(torch.nn.Module):
    """Whose first parameter has no dimensions, as CLIP's `logit_scale`; the others have as many shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))

    def forward(self, inputs: Any) -> Any:
        return self.scale * self.layers(inputs)


@pytest.mark.parametrize("stepped", [4, 6])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor])
def test_a_state_that_differs_from_shape_to_shape_is_resumed(
    optimizer: Any, stepped: int, problem: Any, train: Any, tmp_path: Path, assert_same: Any
) -> None:
    def make() -> hdet.Engine:
        torch.manual_seed(0)
        model = Scaled()
        replicas = hdet.replicate(model, optimizer(model.parameters(), lr=0.01), n=2)
        return hdet.Engine(replicas, [hdet.LearningRate()], window=4, gradients="local", total_steps=12)

    whole, first, second = make(), make(), make()
    train(whole)
    train(first, stepped)
    hdet.checkpoints.CheckpointFolder(tmp_path).save(first)
    assert hdet.checkpoints.CheckpointFolder(tmp_path).resume(second) == 4
    train(second)
    assert_same(second.replicas[0].model.state_dict(), whole.replicas[0].model.state_dict())


def test_replicas_that_differ_in_what_is_not_stored_are_stored_once(start: Callable[[], hdet.Engine]) -> None:
    engine = start()
    for index, (model, _) in enumerate(engine.hosts):
        model.register_buffer("cache", torch.ones(index + 1), persistent=False)
    assert "replicas" not in hdet.checkpoints.Stateful(engine).point(each=True)
    engine.hosts[1][0].register_buffer("stored", torch.ones(1))
    engine.hosts[0][0].register_buffer("stored", torch.zeros(1))
    assert "replicas" in hdet.checkpoints.Stateful(engine).point(each=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_numpys_numbers_in_parameter_groups_can_be_resumed(
    start: Callable[[], hdet.Engine], train: Any, tmp_path: Path
) -> None:
    """As a decay taken from `np.logspace`: such a number is none of those that a resume reads."""
    engine, again = start(), start()
    for each in (engine, again):
        for optimizer in each.optimizers:
            optimizer.param_groups[0].update(weight_decay=np.float64(0.25), betas=(np.float32(0.5), 0.75))
    train(engine, 4)
    hdet.checkpoints.CheckpointFolder(tmp_path).save(engine)
    assert hdet.checkpoints.CheckpointFolder(tmp_path).resume(again) == 4
    assert again.optimizers[0].param_groups[0]["betas"] == (0.5, 0.75)
    assert again.optimizers[0].param_groups[0]["weight_decay"] == 0.25


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("odd", [lambda: 1.0, np.ones(2)], ids=["a function", "an array"])
def test_a_save_that_no_resume_could_read_is_refused(
    odd: Any, start: Callable[[], hdet.Engine], tmp_path: Path
) -> None:
    engine = start()
    engine.optimizers[0].param_groups[0]["odd"] = odd
    with pytest.raises(CheckpointError, match=r"parameter group 0 holds 'odd', a .* which no resume could read"):
        hdet.checkpoints.CheckpointFolder(tmp_path).save(engine)
    assert not any(tmp_path.iterdir())


def test_plain_numbers_of_an_accelerator_are_read_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rate that is a tensor on a GPU."""
    held = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        torch.save({"lr": torch.tensor(0.5)}, held)
    assert unpacked(held.getvalue())["lr"].device == torch.device("cpu")


def test_a_number_of_checkpoints_is_a_whole_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep must be at least 1 and an integer, got 1\.5"):
        hdet.checkpoints.CheckpointFolder(tmp_path, keep=1.5)  # type: ignore[arg-type]


def test_an_old_checkpoint_that_is_damaged_is_left_there_and_told(
    saved: Path, start: Callable[[], hdet.Engine], train: Any
) -> None:
    engine, checkpoints = start(), hdet.checkpoints.CheckpointFolder(saved.parent, keep=1)
    checkpoints.resume(engine)
    (saved / "manifest.json").write_text("[]")
    train(engine, 8)
    with pytest.warns(UserWarning, match="step_00000004 is no longer needed and cannot be removed") as caught:
        checkpoints.save(engine)
    assert [warning.filename for warning in caught] == [__file__]
    assert saved.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_in_the_background_gets_its_name_without_anybody_waiting(
    start: Callable[[], hdet.Engine], train: Any, tmp_path: Path
) -> None:
    """A kill long after it must find it whole."""
    engine = start()
    train(engine, 4)
    folder = copy.deepcopy(hdet.checkpoints.CheckpointFolder(tmp_path))  # holds no thread between saves
    target = folder.save(engine, wait=False)
    end = time.monotonic() + 60
    while not target.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert hdet.checkpoints.CheckpointFolder(tmp_path).resume(start()) == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("background", [True, False])
def test_a_save_waits_for_one_in_the_background_to_the_same_folder(
    start: Callable[[], hdet.Engine],
    train: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
) -> None:
    """Whose unfinished files it would take for those of a save that was cut short."""

    written = threading.Event()

    def slowly(*arguments: Any) -> None:
        written.set()
        time.sleep(1.0)
        publish(*arguments)

    monkeypatch.setattr(folder, "publish", slowly)
    engine = start()
    first, second = (hdet.checkpoints.CheckpointFolder(tmp_path / path) for path in ("", "../" + tmp_path.name))
    train(engine, 4)
    first.save(engine, wait=False)
    assert written.wait(60)
    train(engine, 8)
    second.save(engine, wait=not background)
    first.wait()
    second.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000004", "step_00000008"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("asked", ["wait", "save", "another"])
def test_a_child_that_was_forked_in_mid_save_is_told_so(
    asked: str, start: Callable[[], hdet.Engine], train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes is its parent's, and it would wait for ever."""
    written, told = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> None:
        written.set()
        told.wait(60)
        publish(*arguments)

    monkeypatch.setattr(folder, "publish", slowly)
    engine = start()
    train(engine, 4)
    first, second = (hdet.checkpoints.CheckpointFolder(tmp_path) for _ in range(2))
    target = first.save(engine, wait=False)
    assert written.wait(60)

    def child() -> None:
        with pytest.raises(CheckpointError, match="in the background when this one was forked from it"):
            first.wait() if asked == "wait" else (first if asked == "save" else second).save(engine)

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    forked.join(30)
    forked.kill()
    told.set()
    first.wait()
    assert forked.exitcode == 0
    assert (target / "manifest.json").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_last_save_is_whole_when_it_returns(
    start: Callable[[], hdet.Engine], train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is over, and may take down what a save in the background needs."""

    def slowly(*arguments: Any) -> None:
        time.sleep(0.5)
        publish(*arguments)

    monkeypatch.setattr(folder, "publish", slowly)
    engine = start()
    train(engine, 12)
    assert engine.finished
    assert (hdet.checkpoints.CheckpointFolder(tmp_path).save(engine, wait=False) / "manifest.json").exists()


def begun(frozen: bool, merge: hdet.merges.Merge) -> hdet.Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    model[0].requires_grad_(not frozen)
    replicas = hdet.replicate(model, torch.optim.AdamW(model.parameters(), lr=0.01), n=2)
    return hdet.Engine(replicas, [], window=4, gradients="local", total_steps=12, merge=merge)


def train_thawing(engine: hdet.Engine, until: int) -> None:
    """The first layer is thawed at step 4."""
    while engine.step_count < until:
        losses = []
        for replica in engine.replicas:
            replica.model[0].requires_grad_(engine.step_count >= 4)
            drawn = torch.Generator().manual_seed(10 * engine.step_count + replica.index)
            with replica:
                loss = replica.model(torch.randn(4, 4, generator=drawn)).square().mean()
                loss.backward()
            losses.append(loss.detach())
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        engine.step(losses)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("at", [4, 8])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("merge", [hdet.merges.Mean(), hdet.merges.Mean("keep")])
def test_a_layer_that_is_thawed_in_the_run_may_be_frozen_or_not_as_it_is_resumed(
    merge: hdet.merges.Merge, frozen: bool, at: int, tmp_path: Path, assert_same: Any
) -> None:
    """The optimizer's state is that which was saved, whoever is trained when it is loaded."""

    whole, first, second = begun(True, merge), begun(True, merge), begun(frozen, merge)
    train_thawing(whole, 12)
    train_thawing(first, at)
    hdet.checkpoints.CheckpointFolder(tmp_path).save(first)
    assert hdet.checkpoints.CheckpointFolder(tmp_path).resume(second) == at
    train_thawing(second, 12)
    assert_same(second.replicas[0].model.state_dict(), whole.replicas[0].model.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("frozen", [True, False])
def test_a_bare_state_says_whose_optimizer_state_it_leaves_out(frozen: bool, tmp_path: Path) -> None:
    saved, again = begun(True, hdet.merges.Mean()), begun(frozen, hdet.merges.Mean())
    train_thawing(saved, 8)
    dcp.save({"hdet": hdet.checkpoints.Stateful(saved)}, checkpoint_id=tmp_path)
    match = r"state of '0\.bias', '0\.weight' is in this checkpoint and was not asked for"
    with pytest.warns(UserWarning, match=match) if frozen else nullcontext():
        dcp.load({"hdet": hdet.checkpoints.Stateful(again)}, checkpoint_id=tmp_path)
    assert again.step_count == 8


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_buffer_that_cannot_be_written_over_leaves_the_others_their_names(
    problem: Any, train: Any, tmp_path: Path
) -> None:
    """As an expanded mask that is not saved, before statistics that are and a cache that is not."""

    def made(mean: float) -> hdet.Engine:
        model = problem.model()
        model.register_buffer("mask", torch.zeros(1).expand(3), persistent=False)
        model.register_buffer("mean", torch.full((3,), mean))
        model.register_buffer("cache", torch.full((3,), -1.0), persistent=False)
        replicas = hdet.replicate(model, torch.optim.AdamW(model.parameters(), lr=0.01), n=2)
        return hdet.Engine(replicas, [hdet.LearningRate()], window=4, total_steps=12)

    engine, again = made(5.0), made(0.0)
    train(engine, 6)  # within a window it is the anchor that is saved
    hdet.checkpoints.CheckpointFolder(tmp_path).save(engine)
    assert hdet.checkpoints.CheckpointFolder(tmp_path).resume(again) == 4
    assert again.replicas[0].model.mean.tolist() == [5.0] * 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_how_replicas_open_a_window_is_looked_at_as_it_is_resumed(problem: Any, train: Any, tmp_path: Path) -> None:
    """Saved within a first window that opened apart, copies set out alike; in an engine that has begun, too."""

    def made() -> hdet.Engine:
        model = problem.model()
        replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01), n=2)
        hdet.perturb(replicas, noise=0.3)
        return hdet.Engine(
            replicas,
            [hdet.LearningRate()],
            window=4,
            gradients="local",
            total_steps=12,
            merge=hdet.merges.Outer(),
        )

    saved, again = made(), made()
    for engine in (saved, again):
        train(engine, 2)
    hdet.checkpoints.CheckpointFolder(tmp_path).save(saved)
    assert hdet.checkpoints.CheckpointFolder(tmp_path).resume(again) == 0
    train(again, 4)
    assert again.cycle.merger.state_dict()["optimizer"]["state"]  # the outer step was made
