"""The search benchmark's harness: what compute it counts, what it runs again, what its ranks mean."""

import csv
import json
import math
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hdet
from hdet.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import search
from search_parts import cell as cells
from search_parts import finetuning, found, range_test, statistics, sweep
from search_parts.cell import Cell, Result
from search_parts.contender import Contender, Outcome, begin, train
from search_parts.contenders import width_transfer
from search_parts.interval import over_seeds
from search_parts.meter import Meter
from search_parts.option import Option
from search_parts.range_test import STEPS, valley
from search_parts.tables import Earlier
from search_parts.task import Grid, Problem, Setting, Start, Task, split

Batch = tuple[Tensor, Tensor]


class LineProblem(Problem):
    """Four numbers on their sum."""

    def __init__(self, seed: int, dropout: float, width: int) -> None:
        self.seed, self.rate, self.width = seed, dropout, width

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return nn.Sequential(nn.Linear(4, self.width), hdet.nn.Dropout(self.rate), nn.Linear(self.width, 1))

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.parameters())}]

    def batch(self, step: int) -> Batch:
        return self._draw(step, 8)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.example_losses(model, batch).mean()

    def probe(self, window: int) -> Batch:
        return self._draw(10_000 + window, 8)

    def example_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch[0])[:, 0] - batch[1]).square()

    def test_loss(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float(self.loss(model, self._draw(20_000, 64)))

    def _draw(self, step: int, count: int) -> Batch:
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1000 * self.seed + step))
        return x, x.sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class LineTask(Task):
    width: int = 8

    def narrowed(self, factor: int) -> Task:
        return replace(self, width=self.width // factor)

    def problem(self, seed: int, dropout: float) -> LineProblem:
        return LineProblem(seed, dropout, self.width)


TASK = LineTask(
    name="line",
    title="A line",
    steps=120,
    batch=8,
    family="sgd",
    ignorance=20.0,
    grid=Grid((1e-3, 1e-2, 1e-1), (1e-4,), (0.0, 0.1)),
    starts=(Start("lr x0.1", lr=0.1), Start("lr x1"), Start("lr x1000", lr=1000)),
    micro_batches=4,
    clip=1.0,
)
SETTING = Setting(0.02, 1e-4, 0.1)
EVERYONE = found.chosen(found.all_contenders(), None, "contender")


class Counting(Contender):
    """The fixed schedule's plain training at a constant rate, which counts its runs."""

    name = "cosine"
    title = "counting"
    runs = 0

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        type(self).runs += 1
        problem, model = begin(task, setting, seed, meter)
        optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr)
        return Outcome(train(task, problem, model, optimizer, 5), problem)


class Other(Counting):
    name = "other"
    runs = 0


class Broken(Contender):
    name = "broken"
    title = "broken"

    def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
        raise RuntimeError("no such thing")


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., int]:
    Counting.runs = Other.runs = 0

    def call(*contenders: Contender, **options: Any) -> int:
        return search.benchmark(
            {"line": options.pop("task", TASK)},
            {one.name: one for one in contenders or (Counting(), Other())},
            Counting(),
            out=options.pop("out", tmp_path / "out"),
            docs=tmp_path / "docs",
            seeds=range(*options.pop("seeds", (2,))),
            sweep_seeds=1,
            **options,
        )

    return call


# -- compute


def test_a_pass_counts_its_examples_and_gradients_count_twice() -> None:
    meter, model = Meter(), nn.Linear(4, 1)
    meter.watch(model)
    loss = model(torch.ones(8, 4)).sum()
    assert (meter.forward, meter.backward, meter.passes) == (8, 0, 8)
    loss.backward()
    assert (meter.forward, meter.backward, meter.passes) == (8, 8, 24)
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert meter.passes == 27
    torch.autograd.grad(model(torch.ones(2, 4)).sum(), list(model.parameters()))
    assert meter.passes == 33
    with meter.paused():
        model(torch.ones(100, 4)).sum().backward()
    assert meter.passes == 33


def test_replicas_of_a_watched_model_are_charged_to_the_same_meter() -> None:
    meter, model = Meter(), nn.Linear(4, 1)
    meter.watch(model)
    replicas = hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=3)
    for replica in replicas.local:
        replica.model(torch.ones(2, 4)).sum().backward()
    assert meter.passes == 3 * 2 * 3


@pytest.mark.parametrize("name", list(EVERYONE))
def test_every_contender_spends_the_budget_and_no_more(name: str) -> None:
    contender = EVERYONE[name]
    result = cells.run(TASK, contender, Cell.of(TASK, contender, SETTING, 0))
    assert 0.9 < result.cost <= 1.0
    assert result.forward + 2 * result.backward == round(result.cost * TASK.budget)
    assert math.isfinite(result.test)


def test_the_recommended_recipe_pays_for_its_probes_with_steps() -> None:
    contender = EVERYONE["hdet"]
    result = cells.run(TASK, contender, Cell.of(TASK, contender, SETTING, 0))
    trained = result.details["steps"] * 3 * TASK.batch
    assert trained < TASK.budget
    assert result.forward + 2 * result.backward > trained


def test_the_range_tests_rules_are_those_of_their_makers() -> None:
    finder = pytest.importorskip("lightning.pytorch.tuner.lr_finder")
    rates = np.logspace(-8, 0, 100)
    losses = 2.0 - 1.5 / (1.0 + (1e-3 / rates) ** 2) + 40.0 * rates**2 + 0.01 * np.sin(np.arange(100.0))
    made = finder._LRFinder(mode="exponential", lr_min=1e-8, lr_max=1.0, num_training=100)
    made.results = {"lr": rates.tolist(), "loss": losses.tolist()}
    assert range_test.steepest(rates, losses) == pytest.approx(made.suggestion(), rel=0.25)
    assert range_test.tenth_of_lowest(rates, losses) == pytest.approx(rates[losses.argmin()] / 10)
    assert rates[10] < range_test.valley(rates, losses) < rates[losses.argmin()]


@pytest.mark.parametrize(("family", "wanted"), [("adamw", [1, 1, 1 / 4, 1, 1 / 4]), ("sgd", [4, 4, 1, 4, 1 / 4])])
def test_rates_go_with_width_as_in_mup(family: str, wanted: list[float]) -> None:
    """By their sizes: embedding, first bias, hidden matrix, its bias, head (Yang et al. 2022, table 3)."""

    def model(width: int) -> nn.Module:
        first = nn.Embedding(5, width)
        return nn.Sequential(
            first, nn.LayerNorm(width, bias=False), nn.Linear(width, width), nn.Linear(width, 3, False)
        )

    wide = model(8)
    found = width_transfer.transferred([{"params": list(wide.parameters())}], wide, model(2), family)
    factors = {id(parameter): group["factor"] for group in found for parameter in group["params"]}
    assert [factors[id(parameter)] for parameter in wide.parameters()] == wanted


def test_all_contenders_see_the_same_examples() -> None:
    x, y = TASK.problem(0, 0.0).batch(3)
    parts = split((x, y), 4)
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), y)
    with pytest.raises(ValueError, match="cannot be cut into 3"):
        split(x, 3)


# -- cells


def test_a_finished_cell_is_never_run_again(bench: Callable[..., int], tmp_path: Path) -> None:
    assert bench() == 0
    # 6 swept; 3 starting points by 2 seeds, the oracle's being one of them
    assert (Counting.runs, Other.runs) == (6 + 6, 6)
    assert bench() == 0
    assert (Counting.runs, Other.runs) == (12, 6)
    next((tmp_path / "out" / "line" / "other").glob("*.json")).unlink()
    assert bench() == 0
    assert (Counting.runs, Other.runs) == (12, 7)
    assert bench(seeds=(3,)) == 0
    assert (Counting.runs, Other.runs) == (15, 10)


def test_a_cell_of_another_length_is_another_cell(bench: Callable[..., int]) -> None:
    bench()
    before = Counting.runs
    bench(task=replace(TASK, steps=60))
    assert Counting.runs == 2 * before


def test_an_interrupted_cell_leaves_no_file(
    bench: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        bench()
    assert not list((tmp_path / "out").rglob("*.json"))


def test_a_broken_cell_is_told_and_tried_again_and_the_rest_is_reported(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(Counting(), Broken()) == 1
    assert "no such thing" in capsys.readouterr().err
    assert not (tmp_path / "out" / "line" / "broken").exists()
    assert "Incomplete: 6 of 12" in (tmp_path / "docs" / "report.md").read_text()


def test_a_failed_run_is_kept_as_failed(tmp_path: Path) -> None:
    cell = Cell("line", "cosine", SETTING, 120, 0)
    cells.save(tmp_path, cell, Result(math.nan, 1, 1, 1.0, 0.1, "code", {}))
    json.loads((tmp_path / cell.path).read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    loaded = cells.load(tmp_path, cell)
    assert loaded is not None
    assert sweep.failed(TASK, loaded.test)
    assert sweep.judged(TASK, loaded.test) == TASK.ignorance
    assert sweep.failed(TASK, TASK.ignorance + 1e-6)
    assert not sweep.failed(TASK, 19.9)


def test_what_a_contender_ignores_is_run_once() -> None:
    prodigy = EVERYONE["prodigy"]
    one, other = (Cell.of(TASK, prodigy, replace(SETTING, lr=lr), 0) for lr in (0.1, 10.0))
    assert one == other
    searched = EVERYONE["random_search"]
    assert Cell.of(TASK, searched, Setting(1.0, 1e-4, 0.8), 0) == Cell.of(TASK, searched, Setting(9.0, 1e-4, 0.0), 0)
    assert Cell.of(TASK, searched, Setting(1.0, 1e-3), 0) != Cell.of(TASK, searched, Setting(1.0, 1e-4), 0)


def test_the_best_setting_has_the_least_mean_and_says_when_it_lies_at_the_edge() -> None:
    swept = sweep.cells(TASK, Counting(), 2)
    losses = {1e-3: (1.0, math.nan), 1e-2: (1.5, 1.6), 1e-1: (1.7, 1.2)}
    results = {
        cell: Result(losses[cell.setting.lr][cell.seed - 1000] + cell.setting.dropout, 0, 0, 1.0, 0.0, "", {})
        for cell in swept
    }
    best = sweep.best(TASK, swept, results)
    assert best.setting == Setting(1e-1, 1e-4, 0.0)
    assert best.loss == pytest.approx(1.45)
    assert best.at_edge
    assert best.runs == 12


def test_starts_are_factors_on_the_best_or_are_said_outright() -> None:
    best = Setting(0.1, 1e-3, 0.2)
    assert Start("", 10, 0.1, 0.1).setting(best) == Setting(1.0, 1e-4, pytest.approx(0.02))
    assert Start("", dropout=10).setting(best).dropout == 0.8
    assert Start("").setting(replace(best, dropout=0.85)).dropout == 0.85
    assert Start("", at=Setting(1e-4, 0.1)).setting(best) == Setting(1e-4, 0.1)


# -- ranks


def test_ranks_are_within_a_seed_and_failures_share_the_last() -> None:
    losses = {("t", "a"): np.array([[1.0, 5.0], [2.0, 4.0], [math.inf, math.inf], [math.inf, 1.0]])}
    standings = statistics.standings(losses, reference=0)
    assert [one.rank.mean for one in standings] == [2.0, 2.0, 3.75, 2.25]
    assert standings[0].behind.mean == standings[0].behind.low == standings[0].behind.high == 0.0


def test_an_interval_covers_chance_and_not_a_clear_lead() -> None:
    rng = np.random.default_rng(0)
    cases = [(f"task {i % 3}", f"start {i}") for i in range(15)]
    table = {case: rng.standard_normal((3, 5)) + np.array([[0.0], [0.0], [3.0]]) for case in cases}
    first, second, third = statistics.standings(table, reference=0)
    assert second.behind.low < 0 < second.behind.high
    assert third.behind.low > 0.5
    assert first.rank.low < first.rank.mean < first.rank.high
    assert third.by_task.low > second.by_task.high


def test_starts_that_share_their_seeds_make_no_interval_narrower() -> None:
    """One contender wins with three seeds of five whatever the start, so five runs are all there is to go by."""
    wins = np.array([0.0, 0.0, 0.0, 1.0, 1.0])
    losses = np.stack([wins, 1.0 - wins])
    one, many = (
        statistics.standings({("a", f"{i}"): losses for i in range(starts)}, reference=0)[0] for starts in (1, 20)
    )
    for alone, among in ((one.rank, many.rank), (one.by_task, many.by_task)):
        assert (among.low, among.high) == pytest.approx((alone.low, alone.high))


def test_whole_tasks_are_resampled_together() -> None:
    """One contender wins all of one task and loses all of the other: over tasks nothing is certain."""
    one, other = np.array([[0.0], [1.0]]), np.array([[1.0], [0.0]])
    losses = {(task, f"{i}"): (one if task == "a" else other) for task in "ab" for i in range(10)}
    standing = statistics.standings(losses, reference=0)[0]
    assert (standing.by_task.low, standing.by_task.high) == (1.0, 2.0)
    assert standing.rank.low > 1.1
    assert standing.rank.high < 1.9


# -- the whole


def test_it_leaves_tables_and_pictures(bench: Callable[..., int], tmp_path: Path) -> None:
    names = ("hdet", "cosine", "schedule_free")
    assert bench(*(EVERYONE[name] for name in names), task=replace(TASK, clip=None)) == 0
    docs = tmp_path / "docs"
    text = (docs / "report.md").read_text()
    assert "lr x1000" in text
    assert "hdet, recommended" in text
    assert " failed)" in text  # a plain run at 1000 times the rate
    assert (docs / "line.png").stat().st_size > 5000
    assert (docs / "ranks.png").stat().st_size > 3000
    assert (docs / "starts.png").stat().st_size > 5000
    with (docs / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 3 * 2
    ends = {
        name: {
            (row["start"], row["seed"]): sweep.judged(TASK, float(row["test_loss"]))
            for row in rows
            if row["contender"] == name
        }
        for name in names
    }
    told = {
        line.split(" | ")[0][2:]: line.split(" | ") for line in text[: text.index("by starting point:")].splitlines()
    }
    worst, hurt = (told["contender"].index(column) for column in ("worst", "hurt"))
    regrets = [loss - ends["cosine"]["lr x1", seed] for (_, seed), loss in ends["hdet"].items()]
    assert float(told["hdet, recommended"][worst]) == pytest.approx(max(regrets), abs=6e-4)
    starts = text[text.index("by starting point:") : text.index("## A line")].splitlines()
    assert starts[2].split(" | ")[1:] == ["lr x0.1", "lr x1", "lr x1000 |"]
    assert next(row for row in starts if "fixed cosine" in row).split(" | ")[2] == "0.000"
    above = [loss > ends["cosine"][case] + 0.01 for case, loss in ends["schedule_free"].items()]
    assert any(above), "nothing is counted"
    assert told["Schedule-Free"][hurt] == f"{100 * np.mean(above):.0f} %"
    assert told["fixed cosine"][hurt] == "0 %"


def test_the_best_value_of_an_option_is_told_in_hindsight(bench: Callable[..., int], tmp_path: Path) -> None:
    class Slow(Other):
        name = "slow"

        def run(self, task: Task, setting: Setting, seed: int, meter: Meter) -> Outcome:
            return super().run(task, replace(setting, lr=0.1 * setting.lr), seed, meter)

    fast, slow = Other(), Slow()
    assert bench(Counting(), fast, options={"other": Option("pace", (slow, fast))}) == 0
    with (tmp_path / "docs" / "cells.csv").open() as file:
        losses = defaultdict(list)
        for row in csv.DictReader(file):
            losses[row["contender"]].append(sweep.judged(TASK, float(row["test_loss"])))
    assert losses["other_best"] == min(losses["other"], losses["slow"], key=np.mean)
    assert losses["other"] != losses["slow"]
    text = (tmp_path / "docs" / "report.md").read_text()
    assert "counting, best of 2 (pace)" in text
    assert "Incomplete" not in text


def test_beside_an_earlier_report_only_what_is_new_is_run(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench() == 0
    before = (tmp_path / "docs" / "cells.csv").read_text().splitlines()
    Counting.runs = Other.runs = 0
    (tmp_path / "docs").rename(tmp_path / "earlier")
    earlier = Earlier.read(tmp_path / "earlier")
    assert bench(Other(), out=tmp_path / "new", earlier=earlier) == 0
    assert Counting.runs == 2  # the oracle, with both seeds; no sweep
    after = (tmp_path / "docs" / "cells.csv").read_text().splitlines()
    assert [row for row in after if ",cosine," in row] == [row for row in before if ",cosine," in row]
    assert (tmp_path / "docs" / "best.csv").read_text() == (tmp_path / "earlier" / "best.csv").read_text()
    text = (tmp_path / "docs" / "report.md").read_text()
    assert "Runs from an earlier report: fixed cosine." in text
    assert [name for name, one in EVERYONE.items() if one.uses_library][:2] == ["hdet", "find"], (
        "are never taken from it"
    )
    assert bench(Other(), out=tmp_path / "newer", earlier=earlier, seeds=(1, 2)) == 0
    rows = [row.split(",") for row in (tmp_path / "docs" / "cells.csv").read_text().splitlines()[1:]]
    assert {(row[2], row[3]) for row in rows} == {("cosine", "1"), ("other", "1")}
    capsys.readouterr()
    assert bench(Other(), out=tmp_path / "newest", earlier=earlier, seeds=(1, 4)) == 0
    assert "has no runs with seeds 2, 3: its rivals are left out" in capsys.readouterr().err
    rows = [row.split(",") for row in (tmp_path / "docs" / "cells.csv").read_text().splitlines()[1:]]
    assert {(row[2], row[3]) for row in rows} == {("other", str(seed)) for seed in (1, 2, 3)}
    with pytest.raises(ConfigError, match="--quick shortens every run"):
        search.main(["--quick", "--beside", str(tmp_path / "earlier")])
    with pytest.raises(ConfigError, match=r"has no cells\.csv; give the folder of a report"):
        Earlier.read(tmp_path / "nothing")


def test_the_first_seed_is_told_and_never_one_of_the_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[range] = []
    monkeypatch.setattr(search, "benchmark", lambda *args, seeds, **options: asked.append(seeds) or 0)
    assert search.main(["--first-seed", "20", "--seeds", "3"]) == 0
    assert search.main(["--quick"]) == 0
    assert asked == [range(20, 23), range(search.QUICK_SEEDS)]
    for first in ("-1", str(sweep.FIRST_SEED - 2)):
        with pytest.raises(ConfigError, match="are the sweep's"):
            search.main(["--first-seed", first, "--seeds", "3"])

    with pytest.raises(ConfigError, match="how many runs a case has, got 0"):
        search.main(["--seeds", "0"])


def test_the_report_names_whom_others_are_behind_and_tells_no_share_of_probes_that_nobody_counted(
    bench: Callable[..., int], tmp_path: Path
) -> None:
    bench(Other(), Counting())
    head, _, *rows = (
        line.split(" | ") for line in (tmp_path / "docs" / "report.md").read_text().splitlines() if line.startswith("|")
    )
    behind, probes = head.index("behind other"), head.index("probes")
    told = {row[behind] for row in rows[:2]}
    assert "+0.00 [+0.00, +0.00]" in told
    assert {row[probes] for row in rows[:2]} == {"-"}


def test_the_regret_of_the_oracle_from_its_own_start_is_zero(bench: Callable[..., int], tmp_path: Path) -> None:
    bench()
    text = (tmp_path / "docs" / "report.md").read_text()
    regrets = text[text.index("Regret:") :].splitlines()
    counting = next(line for line in regrets if line.startswith("| counting"))
    assert counting.split("|")[3].strip() == "0.000 ± 0.000"


def test_processes_give_the_same_numbers(tmp_path: Path) -> None:
    task = replace(found.all_tasks()["ratings"], steps=10)
    task = replace(task, grid=Grid((0.1,), (0.1,)), starts=(Start("lr x1"),))
    cosine = EVERYONE["cosine"]
    tables = []
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        options: dict[str, Any] = {"seeds": range(2), "sweep_seeds": 1, "jobs": jobs}
        code = search.benchmark({"ratings": task}, {"cosine": cosine}, cosine, out=out, docs=out / "docs", **options)
        assert code == 0
        rows = (out / "docs" / "cells.csv").read_text().splitlines()
        tables.append([row.rsplit(",", 1)[0] for row in rows])  # all but the seconds
    assert tables[0] == tables[1]


@pytest.fixture
def barely_pretrained(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The weights that fine-tuning begins from: 20 steps in place of 1500, which take half a minute."""
    monkeypatch.setattr(finetuning, "PRETRAINED_STEPS", 20)
    finetuning.pretrained.cache_clear()
    yield
    finetuning.pretrained.cache_clear()


@pytest.mark.usefixtures("barely_pretrained")
def test_every_task_builds_and_keeps_its_promises() -> None:
    tasks = found.all_tasks()
    assert len(tasks) >= 6
    for task in tasks.values():
        problem = task.problem(0, 0.1)
        model = problem.model()
        with torch.no_grad():
            losses = [problem.example_losses(model.eval(), problem.probe(window)) for window in range(4)]
        assert len(losses[0]) % task.sub_batches == 0, task.name
        split(problem.batch(0), task.micro_batches)
        ignorance = math.log(256) if isinstance(task, finetuning.FineTuningTask) else task.ignorance
        assert float(torch.cat(losses).mean()) < 1.2 * ignorance, task.name
        assert "lr x1" in {start.name for start in task.starts}
        assert pickle.loads(pickle.dumps(task)) == task, task.name
        same = problem.model().state_dict()
        assert all(torch.equal(value, same[name]) for name, value in model.state_dict().items()), task.name


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no task is called nonsense; there are"):
        found.chosen(found.all_tasks(), ["nonsense"], "task")


def test_a_start_that_is_another_by_another_name_is_one_case(bench: Callable[..., int], tmp_path: Path) -> None:
    """Ten times a dropout of 0 is the right start: it does not count twice in ranks."""
    said = Start("said", at=Setting(3e-2, 1e-4))  # that of "lr x3"
    starts = (Start("lr x1"), Start("dropout x10", dropout=10), Start("lr x3", lr=3), said)
    assert bench(task=replace(TASK, starts=starts, grid=Grid((1e-2,), (1e-4,), (0.0,)))) == 0
    text = (tmp_path / "docs" / "report.md").read_text()
    assert "mean rank over 2 cases" in text
    assert "Incomplete" not in text


def test_fastais_valley() -> None:
    """In the middle of the second third of the longest fall; at the first rate that counts where nothing falls."""
    rates = np.geomspace(1e-7, 10.0, STEPS)
    falling = np.concatenate([np.full(40, 3.0), np.linspace(2.9, 0.0, 30), np.linspace(1.0, 9.0, 30)])
    assert valley(rates, falling) == rates[38 + 10 + 5]
    assert valley(rates, np.linspace(1.0, 2.0, STEPS)) == rates[STEPS // 10]


def test_the_interval_over_seeds_is_students() -> None:
    interval = over_seeds([1.0, 2.0, 3.0, 4.0])
    assert interval.mean == 2.5
    assert interval.half == pytest.approx(3.182446 * 1.2909944 / 2, rel=1e-6)
    assert math.isnan(over_seeds([1.0]).half)
