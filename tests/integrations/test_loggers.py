"""Loggers of windows, each with the real package."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from torch import nn

import hdet
from hdet.errors import ConfigError, MissingExtraError

WINDOWS = 4


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def train(*loggers: Any) -> hdet.Search:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = hdet.Probe(squared, [torch.randn(16, 2) for _ in range(8)])
    search = hdet.attach(model, optimizer, probe=probe, total_steps=20, window=5, quiet=True, micro_batches=1)
    for logger in loggers:
        search.on_window(logger)
    for _ in range(20):
        search.loss(squared(model, torch.randn(16, 2))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return search


def values(search: hdet.Search) -> list[float]:
    return [record.learned["learning_rate"]["closed"] for record in search.history]


NAME = "hdet/value/learning_rate"


def test_json_lines(tmp_path: Path) -> None:
    search = train(hdet.loggers.JSONLines(tmp_path / "new" / "windows.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "new" / "windows.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert [row[NAME] for row in rows] == values(search)
    assert {"hdet/factor/learning_rate", "hdet/now/learning_rate", "hdet/window/loss"} <= set(rows[0])


@pytest.mark.parametrize("shared", [True, False], ids=["one logger", "a logger each"])
def test_several_searches_in_one_series_are_told_of_and_a_prefix_tells_them_apart(shared: bool, tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    log = hdet.loggers.JSONLines(path)
    loggers = [log, log if shared else hdet.loggers.JSONLines(path)]
    history = train().history

    def write(loggers: list[Any]) -> None:
        for record in history:
            for logger in loggers:
                logger(record)

    with pytest.warns(UserWarning, match="are of several searches, whose series overwrite each other") as told:
        write(loggers)
    assert len(told) == 1
    own = [hdet.loggers.JSONLines(tmp_path / "two.jsonl", prefix=prefix) for prefix in ("generator", "critic")]
    write(own)
    rows = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert [next(name for name in row if name != "step").partition("/")[0] for row in rows] == [
        "generator",
        "critic",
    ] * 4


def test_runs_on_end_in_one_place_are_no_two_at_once(tmp_path: Path) -> None:
    history = train().history
    for _ in range(4):
        log = hdet.loggers.JSONLines(tmp_path / "windows.jsonl")
        for record in history:
            log(record)


@pytest.mark.parametrize("prefix", ["", None])
def test_a_prefix_is_a_name(prefix: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix must be a name, such as 'hdet', and is"):
        hdet.loggers.JSONLines(tmp_path / "windows.jsonl", prefix=prefix)


@pytest.mark.parametrize(("layers", "each"), [(8, True), (9, False)])
def test_rates_of_many_matrices_are_logged_by_their_distribution(layers: int, each: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
    groups = [{"params": [own], "lr": 0.01 * (1 + place)} for place, own in enumerate(model.parameters())]
    optimizer = torch.optim.AdamW(groups)
    probe = hdet.Probe(squared, [torch.randn(16, 2) for _ in range(8)])
    search = hdet.attach(model, optimizer, probe=probe, total_steps=20, rates="matrices", window=5, quiet=True)
    search.on_window(hdet.loggers.JSONLines(tmp_path / "windows.jsonl"))
    for _ in range(20):
        search.loss(squared(model, torch.randn(16, 2))).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [f"learning_rate[{place}.weight]" for place in range(layers)]
    row = json.loads((tmp_path / "windows.jsonl").read_text().splitlines()[0])
    learned = search.history.windows[0].learned
    rates = sorted(learned[name]["closed"] for name in names)
    told = {name.removeprefix("hdet/value/"): value for name, value in row.items() if name.startswith("hdet/value/")}
    assert rates[0] < rates[4] < rates[-1]
    middle = {"learning_rate": rates[4]}
    if each:
        assert told == {**middle, **{name: own["closed"] for name, own in learned.items()}}
    else:
        ends = {"learning_rate[lowest]": rates[0], "learning_rate[highest]": rates[-1]}
        assert told == {**ends, **middle, "weight_decay": learned["weight_decay"]["closed"]}


@pytest.mark.parametrize("given", ["folder", "writer"])
def test_tensorboard(given: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    search = train(hdet.loggers.TensorBoard(tmp_path if given == "folder" else SummaryWriter(str(tmp_path))))
    assert hdet.loggers.TensorBoard(tmp_path).place == hdet.loggers.TensorBoard(SummaryWriter(str(tmp_path))).place
    page = EventAccumulator(str(tmp_path))
    page.Reload()
    assert [point.step for point in page.Scalars(NAME)] == [5, 10, 15, 20]
    assert [point.value for point in page.Scalars(NAME)] == pytest.approx(values(search))


def test_mlflow_in_sqlite(tmp_path: Path) -> None:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    with mlflow.start_run() as run:
        search = train(logger := hdet.loggers.MLflow())
        assert logger.place == hdet.loggers.MLflow(run.info.run_id).place
    points = mlflow.MlflowClient().get_metric_history(run.info.run_id, NAME)
    assert [point.step for point in points] == [5, 10, 15, 20]
    assert [point.value for point in points] == pytest.approx(values(search))


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=tmp_path, project="test")
    run.log({"own": 1.0})
    loggers = hdet.loggers.WandB(run), hdet.loggers.WandB(run, prefix="critic")
    assert loggers[0].place == loggers[1].place
    search = train(*loggers)
    for prefix in ("hdet", "critic"):
        assert run.summary[f"{prefix}/value/learning_rate"] == pytest.approx(values(search)[-1])
        assert run.summary[f"{prefix}/step"] == 20
    assert run.step == 1 + 2 * WINDOWS
    run.finish()


def test_trackio_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    run = trackio.init(project="test", name="one", embed=False)
    search = train(hdet.loggers.Trackio(run))
    run.finish()
    from trackio.sqlite_storage import SQLiteStorage

    rows = [row for row in SQLiteStorage.get_logs("test", "one") if NAME in row]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert [row[NAME] for row in rows] == pytest.approx(values(search))


class Failing(hdet.loggers.WindowLogger):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls += 1
        raise OSError("no space left on device")


class InOnePlace(hdet.loggers.WindowLogger):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        pass


@pytest.mark.parametrize("places", [("there", "there"), ("there", "elsewhere")])
def test_loggers_of_ones_own_say_where_they_write_by_an_attribute(places: tuple[str, str]) -> None:
    history = train().history
    one, other = map(InOnePlace, places)
    match = "InOnePlace writes as hdet/... are of several searches"
    with pytest.warns(UserWarning, match=match) if places[0] == places[1] else nullcontext():
        for record in history:
            one(record)
            other(record)


class Unreachable(hdet.loggers.WindowLogger):
    @property
    def place(self) -> str:
        raise ConnectionError("no such run")

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        pass


def test_one_that_cannot_say_where_it_writes_stops_nothing() -> None:
    with pytest.warns(UserWarning, match=r"Unreachable could not write window 0 \(ConnectionError: no such run"):
        assert train(Unreachable()).finished


def test_one_that_fails_warns_once_at_the_users_line_and_stops_nothing() -> None:
    failing = Failing()
    with pytest.warns(UserWarning, match=r"Failing could not write window 0 \(OSError: no space left") as caught:
        search = train(failing)
    assert search.finished
    assert failing.calls == 1
    assert [warning.filename for warning in caught if "Failing" in str(warning.message)] == [__file__]


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"mlflow is not installed; run: pip install 'hdet\[loggers\]'"):
        hdet.loggers.MLflow()


class Counting(Failing):
    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls += 1


def alone() -> int:
    """On ranks that train apart, so that each has windows of its own."""
    record = hdet.history.WindowRecord(0, 0, 5, {}, {}, [1.0], {}, {}, True)
    logger = Counting()
    logger(record)
    return logger.calls


def test_rank_0_alone_writes() -> None:
    assert launch(alone, 2) == [1, 0]
