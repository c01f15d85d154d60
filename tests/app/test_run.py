"""Whole runs: what they write, that they resume exactly, that without a spread they are plain training."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

import hdet
from hdet.app.run import Run, RunConfig, RunFolder, Watcher
from hdet.app.run.plain import train_plain
from hdet.errors import CheckpointError, ConfigError, HdetError, MatchError, MissingExtraError
from hdet.files import replace
from hdet.history import WindowRecord

DIGITS: dict[str, Any] = {
    "task": {"kind": "digits", "width": 16, "dropout": 0.3, "label_noise": 0.2, "probe_examples": 8},
    "steps": 33,
    "batch_size": 8,
    "replicas": 4,
    "gradients": "local",
    "optimizer": {"kind": "sgd", "lr": 0.05},
    "schedule": "cosine",
    "window": 6,
    "knobs": ["learning_rate", {"kind": "dropout", "controller": {"kind": "gated", "gate": 0.0}}],
}
CONFIG = RunConfig.from_dict(DIGITS)
FILES = [".run.lock", "bases.png", "checkpoint.pt", "config.yaml", "history.jsonl", "model.pt", "result.json"]


class KilledAt(Watcher):
    """Ends the run as a kill would, after a number of steps."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, done: int, losses: object) -> None:
        if done == self.last:
            raise KeyboardInterrupt


def model_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "model.pt", weights_only=True)  # type: ignore[no-any-return]


def windows_of(folder: Path) -> list[dict[str, Any]]:
    """The history without what a clock decides."""
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "closing")} for line in lines]


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one["bases"] == two["bases"] and all(torch.equal(one["model"][k], two["model"][k]) for k in one["model"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    Run(CONFIG, folder)()
    return folder


def test_the_folder_holds_everything(finished: Path) -> None:
    assert sorted(path.name for path in finished.iterdir()) == FILES
    assert RunConfig.load(finished / "config.yaml") == CONFIG
    assert [(w["start"], w["stop"]) for w in windows_of(finished)][-2:] == [(24, 30), (30, 33)]
    assert (finished / "bases.png").read_bytes().startswith(b"\x89PNG")


def test_the_kept_model_with_its_bases_gives_the_reported_loss(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    workload = CONFIG.task.build(seed=0, batch_size=8)
    model = workload.model()
    model.load_state_dict(model_of(finished)["model"])
    assert workload.test_loss(model) == result["test_loss"]
    assert set(model_of(finished)["bases"]) == {"learning_rate", "dropout"}
    assert result["facts"] == dict(workload.facts)
    assert [knob["knob"] for knob in result["knobs"]] == ["learning_rate", "dropout"]
    assert result["plain"] is None


def test_a_knobs_course_is_told_at_the_peak_of_its_schedule(finished: Path) -> None:
    knob = json.loads((finished / "result.json").read_text())["knobs"][0]
    moves = sum(window["moves"]["learning_rate"] for window in windows_of(finished))
    assert knob["start"] == 0.05
    assert sum(sign * (knob[way] or {"move": 0})["move"] for way, sign in (("up", 1), ("down", -1))) == pytest.approx(
        moves
    )
    assert knob["end"] == pytest.approx(0.05 * 2.718281828459045**moves)


def test_the_same_run_again_is_the_same(finished: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    Run(CONFIG, tmp_path / "again")()
    assert torch.equal(torch.get_rng_state(), before), "a run must give the caller's generator back"
    assert same(model_of(tmp_path / "again"), model_of(finished))
    assert windows_of(tmp_path / "again") == windows_of(finished)


def test_another_seed_is_another_run(finished: Path, tmp_path: Path) -> None:
    Run(CONFIG.replace(seed=1), tmp_path / "other")()
    assert not same(model_of(tmp_path / "other"), model_of(finished))


@pytest.mark.parametrize("step", [1, 5, 6, 7, 20, 32])
def test_a_killed_run_resumes_as_if_nothing_had_happened(finished: Path, tmp_path: Path, step: int) -> None:
    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        Run(CONFIG, folder)(watcher=KilledAt(step))
    assert not (folder / "result.json").exists()
    Run(CONFIG, folder, resume=True)()
    assert same(model_of(folder), model_of(finished))
    assert windows_of(folder) == windows_of(finished)
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_a_kill_after_the_last_step_only_leaves_the_results_to_write(finished: Path, tmp_path: Path) -> None:
    class KilledAtTheEnd(Watcher):
        def end(self) -> None:
            raise KeyboardInterrupt

    folder = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        Run(CONFIG, folder)(watcher=KilledAtTheEnd())
    assert not (folder / "model.pt").exists()
    Run(CONFIG, folder, resume=True)(watcher=KilledAt(1))
    assert same(model_of(folder), model_of(finished))
    assert windows_of(folder) == windows_of(finished)


@pytest.mark.parametrize("window", [0, 2])
def test_a_kill_between_history_and_checkpoint_is_survived(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    saved = 0
    save = RunFolder.save_checkpoint

    def killed(self: RunFolder, state: dict[str, Any]) -> None:
        nonlocal saved
        if saved == window:
            raise KeyboardInterrupt
        saved += 1
        save(self, state)

    folder = tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            Run(CONFIG, folder)()
    assert len(windows_of(folder)) == window + 1
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"window": 3, "sta')  # torn
    Run(CONFIG, folder, resume=True)()
    assert windows_of(folder) == windows_of(finished)
    assert same(model_of(folder), model_of(finished))


def test_checkpoints_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.save_checkpoint({"n": 1})

    def torn(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(CheckpointError, match=r"could not be written \(disk full\); the one before it is whole"):
        folder.save_checkpoint({"n": 2})
    assert folder.load_checkpoint() == {"n": 1}


class Blocking(Watcher):
    """Puts a folder where the history is, once a step is made."""

    def __init__(self, history: Path, step: int) -> None:
        self.history, self.at = history, step

    def step(self, done: int, losses: object) -> None:
        if done == self.at:
            self.history.rename(self.history.with_suffix(".away"))
            self.history.mkdir()


@pytest.mark.filterwarnings("ignore:the history .* could not be written")
def test_no_checkpoint_is_ahead_of_a_history_that_cannot_be_written(tmp_path: Path) -> None:
    """So that the run can go on from the one before."""
    Run(CONFIG, tmp_path / "whole")()
    folder = tmp_path / "run"
    history = folder / "history.jsonl"
    with pytest.raises(HdetError, match="lacks windows that could not be written, and a checkpoint would be ahead"):
        Run(CONFIG, folder)(watcher=Blocking(history, 8))
    history.rmdir()
    history.with_suffix(".away").rename(history)
    Run(CONFIG, folder, resume=True)()
    assert windows_of(folder) == windows_of(tmp_path / "whole")
    assert same(model_of(folder), model_of(tmp_path / "whole"))


def test_a_checkpoint_that_does_not_fit_says_whether_there_is_one_before_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    state = {"weights": torch.zeros(10_000)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for told in ("there is none before it", "the one before it is whole"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=rf"checkpoint\.pt could not be written.*{told}"):
                folder.save_checkpoint(state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        folder.save_checkpoint(state)
    found = folder.load_checkpoint()
    assert found is not None
    assert torch.equal(found["weights"], state["weights"])


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Run(CONFIG, tmp_path / "run")(watcher=KilledAt(8))
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be read.*--force"):
        Run(CONFIG, tmp_path / "run", resume=True)()


def test_a_flipped_bit_in_a_checkpoint_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """torch reads most of them without a word."""
    generator = torch.Generator().manual_seed(0)
    folder = RunFolder(tmp_path)
    state = {"weights": torch.randn(40, 20, generator=generator), "step": 7, "nested": {"names": ["a", "b"]}}
    folder.save_checkpoint(state)
    content = folder.checkpoint.read_bytes()
    refused = silent = 0
    for bit in torch.randint(8 * len(content), (400,), generator=generator).tolist():
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        folder.checkpoint.write_bytes(damaged)
        with contextlib.suppress(Exception):
            silent += not equal(torch.load(folder.checkpoint, weights_only=True), state)
        try:
            found = folder.load_checkpoint()
        except CheckpointError:
            refused += 1
        else:
            assert equal(found, state)  # in what torch pads with, say
    assert silent > 200
    assert refused > silent


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else bool(one == two)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1, 2], "holds a list"),
        ({"engine": {}}, "lacks 'generators'"),
        ({"engine": {}, "generators": {"cpu": "x"}, "seconds": 1.0}, "is no checkpoint of a run"),
        ({"engine": {}, "generators": {"cpu": torch.zeros(3, dtype=torch.uint8)}, "seconds": 1.0}, "no checkpoint"),
        ({"engine": 3, "generators": {"cpu": torch.get_rng_state()}, "seconds": "long"}, "is no checkpoint of a run"),
        ({"engine": 3, "generators": {"cpu": torch.get_rng_state()}, "seconds": 1.0}, "a state is a mapping"),
    ],
)
def test_a_checkpoint_of_odd_types_is_refused(killed: Path, tmp_path: Path, state: Any, message: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    torch.save(state, folder / "checkpoint.pt")
    with pytest.raises(CheckpointError, match=message):
        Run(CONFIG, folder, resume=True)()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run killed in its fourth window."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    with pytest.raises(KeyboardInterrupt):
        Run(CONFIG, folder)(watcher=KilledAt(20))
    return folder


@pytest.mark.parametrize("lines", [slice(0, 0), slice(0, 1), slice(1, None)], ids=["none", "the first", "all but it"])
def test_a_run_whose_history_lost_lines_is_not_gone_on_with(killed: Path, tmp_path: Path, lines: slice) -> None:
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    history = folder / "history.jsonl"
    history.write_text("".join(history.read_text().splitlines(keepends=True)[lines]))
    with pytest.raises(HdetError, match="lines of it are missing; put the file back"):
        Run(CONFIG, folder, resume=True)()


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"knobs": [3]}', '{"knobs": null}', '{"test_loss": "low"}', "[" * 100_000, "\ud800"]
)
def test_a_damaged_result_is_named(finished: Path, tmp_path: Path, content: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    kept = json.loads((folder / "result.json").read_text())
    if content == '{"test_loss": "low"}':
        content = json.dumps({**kept, "test_loss": "low"})
    (folder / "result.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(HdetError, match=r"result\.json .* --resume writes it anew") as caught:
        Run(CONFIG, folder, resume=True)
    assert "\n" not in str(caught.value)
    assert ("result.json is no result of a run" in str(caught.value)) == content.startswith('{"')
    (folder / "result.json").unlink()
    Run(CONFIG, folder, resume=True)()
    assert json.loads((folder / "result.json").read_text())["test_loss"] == kept["test_loss"]


# -- whose folder it is -----------------------------------------------------------------------------


def test_a_folder_in_use_is_refused_and_left_alone(finished: Path) -> None:
    before = {path: path.read_bytes() for path in finished.iterdir()}
    with pytest.raises(ConfigError, match=r"not empty.*--resume.*--force.*--out"):
        Run(CONFIG, finished)
    with pytest.raises(ConfigError, match="say one of them"):
        Run(CONFIG, finished, force=True, resume=True)
    with pytest.raises(ConfigError, match=r"steps, schedule.* differ"):
        Run(RunConfig.from_dict({**DIGITS, "steps": 34}), finished, resume=True)
    with pytest.raises(ConfigError, match="is over"):
        Run(CONFIG, finished, resume=True)()
    assert {path: path.read_bytes() for path in finished.iterdir()} == before


def test_a_damaged_configuration_is_named(finished: Path, tmp_path: Path) -> None:
    kept = shutil.copytree(finished, tmp_path / "run") / "config.yaml"
    kept.write_text(kept.read_text()[:30])
    with pytest.raises(ConfigError, match=f"^{kept}: .*steps: Field required"):
        Run(CONFIG, kept.parent, resume=True)


def test_nothing_to_resume_and_a_file_in_the_way_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to resume"):
        Run(CONFIG, tmp_path / "none", resume=True)
    (tmp_path / "file").write_text("")
    for blocked in ("file", "file/run", "file/runs/1"):
        with pytest.raises(ConfigError, match=f"{tmp_path}/file is a file; choose another --out"):
            Run(CONFIG, tmp_path / blocked)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("out", ["", "below/it"])
def test_a_folder_that_may_not_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """By what the system says of the folder: tests may be run by root, who may write anywhere."""
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and allowed(path, mode))
    with pytest.raises(ConfigError, match=f"{tmp_path} may not be written; choose another --out"):
        Run(CONFIG, tmp_path / out)


def test_a_folder_has_one_process_at_a_time(killed: Path, tmp_path: Path) -> None:
    """The second resume would write the same windows again."""
    folder = tmp_path / "run"
    shutil.copytree(killed, folder)
    other = Run(CONFIG, folder, resume=True)
    replacing = Run(CONFIG, folder, force=True)

    class Second(Watcher):
        def window(self, record: WindowRecord, bases: dict[str, float]) -> None:
            for second in (other, replacing):
                with pytest.raises(ConfigError, match="another process is at the run in"):
                    second()

    Run(CONFIG, folder, resume=True)(watcher=Second())
    assert [window["window"] for window in windows_of(folder)] == list(range(6))
    first = Run(CONFIG, tmp_path / "new")
    Run(CONFIG, tmp_path / "new")()
    with pytest.raises(ConfigError, match="not empty"):  # made when the folder was free, called when it is not
        first()


def test_a_kill_before_a_run_has_begun_leaves_a_folder_that_is_free(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.yaml.part", "config.yaml.0a1b2c3d.part", ".run.lock", ".lock"):
        (folder / name).write_text("half")
    Run(CONFIG, folder)()
    assert windows_of(folder) == windows_of(finished)


def test_half_a_checkpoint_does_not_outlive_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        Run(CONFIG, folder)(watcher=KilledAt(20))
    half, others = folder / "checkpoint.pt.0a1b2c3d.part", folder / "checkpoint.pt.mine.part"
    half.write_text("half")
    others.write_text("mine")
    Run(CONFIG, folder, resume=True)()
    assert not half.exists()
    assert others.read_text() == "mine"


def test_force_replaces_a_runs_files_and_no_others(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        Run(CONFIG.replace(seed=5), folder)(watcher=KilledAt(20))
    (folder / "notes.txt").write_text("mine")
    Run(CONFIG, folder, force=True)()
    assert windows_of(folder) == windows_of(finished)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"knobs": ["attention_temperature"]}, MatchError, "attention_temperature"),
        ({"knobs": [{"kind": "learning_rate", "groups": "head"}]}, MatchError, "no parameter group 'head'"),
        ({"knobs": ["learning_rate", "learning_rate"]}, ConfigError, "two knobs are called"),
        ({"gradients": "shared"}, ConfigError, "acts in the forward pass"),
        ({"signal": "training_loss"}, ConfigError, "changes the training loss"),
        ({"replicas": 1}, ConfigError, "at least 2 replicas"),
        ({"optimizer": {"kind": "torch", "name": "AdamZ"}}, ConfigError, "no optimizer 'AdamZ'"),
    ],
)
def test_a_run_that_cannot_be_writes_nothing(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Run(RunConfig.from_dict({**DIGITS, **changed}), tmp_path / "deep" / "run")
    assert not any(tmp_path.iterdir())


# -- beside plain training --------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [{"kind": "sgd", "lr": 0.05}, {"kind": "adamw", "lr": 0.01}])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_one_replica_without_spread_is_plain_training_bit_for_bit(
    tmp_path: Path, optimizer: dict[str, Any], clip: float | None
) -> None:
    config = RunConfig.from_dict(
        {
            **DIGITS,
            "optimizer": optimizer,
            "clip": clip,
            "replicas": 1,
            "knobs": [
                {"kind": "learning_rate", "spread": {"kind": "two_level", "width": 0.0}},
                {"kind": "dropout", "spread": {"kind": "two_level", "width": 0.0}},
            ],
        }
    )
    Run(config, tmp_path / "run")()
    plain = train_plain(config, config.task.build(seed=0, batch_size=8), Watcher())
    kept = model_of(tmp_path / "run")["model"]
    assert all(torch.equal(kept[name], value) for name, value in plain.state_dict().items())


def test_groups_that_no_knob_explores_follow_the_schedule(tmp_path: Path) -> None:
    """A learning rate explored in one group only must leave the other on the run's schedule."""
    seen: list[tuple[float, float]] = []
    config = RunConfig.from_dict(
        {**DIGITS, "knobs": [{"kind": "learning_rate", "groups": "decay", "controller": "hold"}]}
    )

    class Look(Watcher):
        def window(self, record: WindowRecord, bases: dict[str, float]) -> None:
            groups = run.training.engine.optimizers[0].param_groups
            seen.append((record.bases["learning_rate[decay]"], groups[1]["lr"]))

    run = Run(config, tmp_path / "run")
    run(watcher=Look())
    assert config.schedule is not None
    assert seen == [(config.schedule(stop - 1), config.schedule(stop - 1)) for stop in (6, 12, 18, 24, 30, 33)]


def test_plain_training_follows_a_knobs_own_schedule(tmp_path: Path) -> None:
    """`schedule: 0.7` on a dropout knob is where the knob starts, whatever the task says."""
    fixed = RunConfig.from_dict({**DIGITS, "knobs": [{"kind": "dropout", "schedule": 0.7}]})
    declared = RunConfig.from_dict({**DIGITS, "task": {**DIGITS["task"], "dropout": 0.7}, "knobs": []})
    one, two = (train_plain(config, config.task.build(seed=0, batch_size=8), Watcher()) for config in (fixed, declared))
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_plain_training_follows_the_schedule_that_hdet_would_warm_up() -> None:
    short = {**DIGITS, "schedule": {"kind": "cosine", "warmup": 0.0}}
    configs = (RunConfig.from_dict({**short, "knobs": knobs}) for knobs in ("recommended", []))
    one, two = (train_plain(config, config.task.build(seed=0, batch_size=8), Watcher()) for config in configs)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_compare_trains_again_without_hdet_now_or_later(finished: Path, tmp_path: Path) -> None:
    phases: list[str] = []
    folder = tmp_path / "run"

    class Phases(Watcher):
        def begin(self, phase: str, first: int, steps: int) -> None:
            phases.append(phase)
            if phase == "plain":
                kept = json.loads((folder / "result.json").read_text())
                assert kept["comparing"], "it is watched until that ends"
                assert kept["host"] == platform.node()

    result = Run(CONFIG, folder)(compare=True, watcher=Phases())
    assert phases == ["hdet", "plain"]
    assert result.plain is not None
    kept = json.loads((folder / "result.json").read_text())
    assert kept["plain"]["test_loss"] == result.plain["test_loss"] != result.test_loss
    assert not kept["comparing"]
    assert same(model_of(folder), model_of(finished)), "the comparison must not touch the run"

    kept["plain"] = None
    (folder / "result.json").write_text(json.dumps(kept))
    later = Run(CONFIG, folder, resume=True)(compare=True, watcher=Phases())
    assert phases == ["hdet", "plain", "plain"]
    assert later.plain is not None
    assert later.plain["test_loss"] == result.plain["test_loss"]
    assert later.test_loss == result.test_loss


def test_a_picture_that_cannot_be_written_costs_nothing_else(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        if self.name.startswith("bases.png"):
            write(self, b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    folder = tmp_path / "run"
    with pytest.warns(UserWarning, match=r"bases.png could not be written \(.*No space left.*\), and all else is"):
        result = Run(CONFIG, folder)()
    assert sorted(path.name for path in folder.iterdir()) == [name for name in FILES if name != "bases.png"]
    assert json.loads((folder / "result.json").read_text())["test_loss"] == result.test_loss
    assert same(model_of(folder), model_of(finished))


def test_a_picture_that_cannot_be_drawn_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(windows: object, **options: object) -> None:
        raise ValueError("no such axis")

    monkeypatch.setattr("hdet.app.run.runner.overview", broken)
    with pytest.warns(UserWarning, match=r"bases.png could not be written \(no such axis\), and all else is"):
        Run(CONFIG, tmp_path / "run")()
    assert RunFolder(tmp_path / "run").load_result() is not None


def test_a_run_that_ends_while_its_picture_is_drawn_is_resumed_and_drawn(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Figure, part: Path, **options: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Figure, "savefig", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Run(CONFIG, folder)()
    result = Run(CONFIG, folder, resume=True)()
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert result.test_loss == json.loads((finished / "result.json").read_text())["test_loss"]


def test_a_comparison_that_is_interrupted_is_no_longer_watched(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    class Interrupted(Watcher):
        def begin(self, phase: str, first: int, steps: int) -> None:
            if phase == "plain":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run(CONFIG, folder)(compare=True, watcher=Interrupted())
    assert json.loads((folder / "result.json").read_text())["comparing"] is False
    assert Run(CONFIG, folder, resume=True)(compare=True).plain is not None


def test_a_configuration_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr("hdet.app.run.folder.replace", full)
    with pytest.raises(HdetError, match=rf"^{re.escape(str(tmp_path / 'run' / 'config.yaml'))} could not be written"):
        Run(CONFIG, tmp_path / "run")()


@pytest.mark.parametrize("room", [0, 1])
def test_a_result_that_cannot_be_written_is_told_and_written_later(
    room: int, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full as the run ends, or as the one that it is compared with does."""
    results = 0

    def full(path: Path, content: bytes) -> None:
        nonlocal results
        results += path.name == "result.json"
        if results > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, content)

    with monkeypatch.context() as patched:
        patched.setattr("hdet.app.run.folder.replace", full)
        with pytest.raises(HdetError, match=r"result.json could not be written \(.*No space.*make room, and go on"):
            Run(CONFIG, tmp_path / "run")(compare=True)
    result = Run(CONFIG, tmp_path / "run", resume=True)(compare=True)
    assert result.plain is not None
    assert result.test_loss == json.loads((finished / "result.json").read_text())["test_loss"]


def test_a_run_without_knobs_draws_nothing(tmp_path: Path) -> None:
    result = Run(RunConfig.from_dict({**DIGITS, "knobs": []}), tmp_path / "run")()
    assert result.knobs == []
    assert not (tmp_path / "run" / "bases.png").exists()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
def test_a_folder_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/proc/run cannot be a run folder: \[Errno"):
        Run(CONFIG, "/proc/run")()


@pytest.mark.parametrize("knobs", [None, ["learning_rate"]])
def test_without_matplotlib_a_run_that_draws_is_refused_before_training(
    knobs: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hdet.app.run.runner.find_spec", {}.get)
    with pytest.raises(MissingExtraError, match=r"^matplotlib is not installed; .*hdet\[cli\]"):
        Run(RunConfig.from_dict({**DIGITS, "gradients": "shared", "knobs": knobs}), tmp_path / "run")
    Run(RunConfig.from_dict({**DIGITS, "knobs": []}), tmp_path / "run")


def test_a_run_evaluates_its_own_training_loss_where_evidence_asks_for_it(tmp_path: Path) -> None:
    declared = {**DIGITS, "gradients": "shared", "knobs": [{"kind": "dropout", "evidence": "mixed_difference"}]}
    Run(RunConfig.from_dict(declared), tmp_path / "run")()
    told = [window["estimates"]["dropout"]["stderr"] for window in windows_of(tmp_path / "run")]
    assert all(0.0 < stderr < float("inf") for stderr in told[:4])


def test_the_text_task_runs_with_all_four_knobs(tmp_path: Path) -> None:
    config = RunConfig.from_dict(
        {
            "task": {"kind": "text", "width": 16, "depth": 1, "heads": 2, "context": 16, "dropout": 0.1},
            "steps": 12,
            "batch_size": 2,
            "gradients": "local",
            "window": 4,
            "knobs": ["learning_rate", "weight_decay", "dropout", "attention_temperature"],
        }
    )
    result = Run(config, tmp_path / "run")()
    assert [knob.knob for knob in result.knobs] == [knob["kind"] for knob in config.to_dict()["knobs"]]
    assert len(hdet.History(tmp_path / "run" / "history.jsonl")) == 3
    kept = model_of(tmp_path / "run")
    workload = config.task.build(seed=0, batch_size=2)
    model = workload.model()
    model.load_state_dict(kept["model"])
    temperature = hdet.AttentionTemperature().bind(model, torch.optim.SGD(model.parameters(), lr=0.1))
    temperature.write(kept["bases"]["attention_temperature"])
    assert workload.test_loss(model) == result.test_loss
