"""A run's compute and badly set hyperparameters: hdet against everything a user would pick instead.

    python benchmarks/search.py --quick --tasks teacher ratings tabular digits_conv denoise
                                             # short runs of small tasks, under 10 minutes on 2 cores
    python benchmarks/search.py --jobs 2     # everything; stop it at will, the same command goes on
    python benchmarks/search.py --report     # tables and pictures of the runs there are
    python benchmarks/search.py --contenders hdet --beside docs/results/search_now --docs report
                                             # hdet alone, beside the sweeps and the rivals of that report
    python benchmarks/search.py --hindsight  # and of contenders with one option to try, the best of three values

First each task's grid of fixed settings is swept for the best, the oracle. Then every contender trains every
task from starting points that are wrong by factors on that best setting, with one training run's compute
(search_parts/meter.py says how that is counted). One JSON file a run lies under --out; a run that has its
file is never made again.

A task is a file in search_parts/tasks, a contender one in search_parts/contenders.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from search_parts import cell as cells
from search_parts import report, runner, sweep
from search_parts.cell import Cell
from search_parts.contender import Contender
from search_parts.found import all_contenders, all_options, all_tasks, chosen
from search_parts.option import Option, in_hindsight, with_values
from search_parts.outcome import FIXED, Findings
from search_parts.sweep import Best
from search_parts.tables import Earlier
from search_parts.task import Task

from hdet.errors import ConfigError

ROOT = Path(__file__).parents[1]
SEEDS, QUICK_SEEDS = 5, 2
SWEEP_SEEDS, QUICK_SWEEP_SEEDS = 2, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then report."""
    given = _parser().parse_args(arguments)
    if given.quick and given.beside:
        raise ConfigError("--quick shortens every run, and --beside FOLDER shows runs of full length; give one of them")
    earlier = Earlier.read(given.beside) if given.beside else None
    tasks = chosen(all_tasks(), given.tasks or (list(earlier.best) if earlier else None), "task")
    if given.quick:
        tasks = {name: task.quickened() for name, task in tasks.items()}
    count = given.seeds if given.seeds is not None else QUICK_SEEDS if given.quick else SEEDS
    if count < 1:
        raise ConfigError(f"--seeds is how many runs a case has, got {count}")
    seeds = range(given.first_seed, given.first_seed + count)
    if given.first_seed < 0 or seeds.stop > sweep.FIRST_SEED:
        raise ConfigError(
            f"seeds from {seeds.start} to {seeds.stop - 1}; those from {sweep.FIRST_SEED} on are the sweep's"
        )
    out = given.out or ROOT / "runs" / ("search-quick" if given.quick else "search")
    docs = given.docs or (out / "report" if given.quick else ROOT / "docs" / "results" / "search")
    return benchmark(
        tasks,
        chosen(all_contenders(), given.contenders, "contender"),
        all_contenders()[FIXED],
        out=out,
        docs=docs,
        seeds=seeds,
        sweep_seeds=QUICK_SWEEP_SEEDS if given.quick else SWEEP_SEEDS,
        jobs=given.jobs,
        options=all_options() if given.hindsight else {},
        earlier=earlier,
        only_report=given.report,
        dry=given.dry_run,
    )


def benchmark(
    tasks: Mapping[str, Task],
    contenders: Mapping[str, Contender],
    fixed: Contender,
    *,
    out: Path,
    docs: Path,
    seeds: range,
    sweep_seeds: int,
    jobs: int = 1,
    options: Mapping[str, Option] | None = None,
    earlier: Earlier | None = None,
    only_report: bool = False,
    dry: bool = False,
) -> int:
    """The whole of it for given tasks and contenders; returns the exit code.

    Args:
        fixed: the contender that is swept.
        out: where the cells' files are. docs: where the report goes.
        seeds: of the contenders' runs. sweep_seeds: how many the sweep has, which are others.
        options: by contender, one of its own that is tried by several values, the best of which is told in hindsight.
        earlier: a report whose best settings stand for a sweep, and whose other contenders are shown beside these.
        only_report: run nothing. dry: only say how many cells there are.
    """
    options = {name: option for name, option in (options or {}).items() if name in contenders}
    contenders = with_values(contenders.values(), options)
    everyone = {**contenders, fixed.name: fixed}
    known = {name: best for name, best in earlier.best.items() if name in tasks} if earlier else {}
    swept = {name: sweep.cells(task, fixed, sweep_seeds) for name, task in tasks.items() if name not in known}
    if dry:
        _count(tasks, contenders, swept, len(seeds))
        return 0
    errors: list[str] = []
    if not only_report:
        everything = [cell for own in swept.values() for cell in own]
        errors += runner.run(everything, tasks, everyone, out, jobs=jobs, label="sweep")
    best = known | _best(tasks, swept, out)
    ready = {name: task for name, task in tasks.items() if name in best}
    places = {
        (name, start.name, contender.name, seed): Cell.of(task, contender, start.setting(best[name].setting), seed)
        for seed in seeds  # outermost, so that a stopped run has all cases with the first seeds
        for name, task in ready.items()
        for start in task.starts
        for contender in contenders.values()
    }
    oracle = {
        (name, seed): Cell.of(task, fixed, best[name].setting, seed) for name, task in ready.items() for seed in seeds
    }
    if not only_report:
        everything = [*oracle.values(), *places.values()]
        errors += runner.run(everything, tasks, everyone, out, jobs=jobs, label="contenders")
    if ready:
        findings = in_hindsight(_findings(ready, contenders, best, places, oracle, len(seeds), out), options)
        path = report.write(_beside(findings, earlier, seeds) if earlier else findings, docs, _command())
        print(f"report: {path}")
    for error in errors:
        print(f"broke: {error}", file=sys.stderr)
    return 1 if errors or not ready else 0


def _best(tasks: Mapping[str, Task], swept: Mapping[str, list[Cell]], out: Path) -> dict[str, Best]:
    """Of the tasks whose sweep is complete."""
    found = {}
    for name, own in swept.items():
        results = {cell: result for cell in own if (result := cells.load(out, cell)) is not None}
        if len(results) == len(own):
            found[name] = sweep.best(tasks[name], own, results)
            print(f"{name}: best fixed setting {found[name].setting}, {found[name].loss:.4f}")
        else:
            print(f"{name}: the sweep lacks {len(own) - len(results)} of {len(own)} runs", file=sys.stderr)
    return found


def _findings(
    tasks: Mapping[str, Task],
    contenders: Mapping[str, Contender],
    best: Mapping[str, Best],
    places: Mapping[tuple[str, str, str, int], Cell],
    oracle: Mapping[tuple[str, int], Cell],
    seeds: int,
    out: Path,
) -> Findings:
    runs: dict[tuple[str, str, str], dict[int, cells.Result]] = {place[:3]: {} for place in places}
    for (task, start, contender, seed), cell in places.items():
        result = cells.load(out, cell)
        if result is not None:
            runs[task, start, contender][seed] = result
    best_runs: dict[str, dict[int, cells.Result]] = {task: {} for task in tasks}
    for (task, seed), cell in oracle.items():
        result = cells.load(out, cell)
        if result is not None:
            best_runs[task][seed] = result
    return Findings(tasks, contenders, best, runs, best_runs, seeds)


def _beside(findings: Findings, earlier: Earlier, seeds: range) -> Findings:
    """The same, and what an earlier report has of these tasks and seeds by contenders that did not run here."""
    named = all_contenders()
    others = [
        name
        for name in earlier.contenders
        if name in named and name not in findings.contenders and not named[name].uses_library
    ]
    there = {seed for runs in earlier.runs.values() for seed in runs}
    if others and not there.issuperset(seeds):
        missing = ", ".join(str(seed) for seed in seeds if seed not in there)
        print(f"{earlier.folder} has no runs with seeds {missing}: its rivals are left out", file=sys.stderr)
        others = []
    return replace(
        findings,
        contenders={**findings.contenders, **{name: named[name] for name in others}},
        runs={
            **findings.runs,
            **{
                (task.name, start.name, name): {
                    seed: run
                    for seed, run in earlier.runs.get((task.name, start.name, name), {}).items()
                    if seed in seeds
                }
                for name in others
                for task in findings.tasks.values()
                for start in task.starts
            },
        },
        earlier=others,
    )


def _count(
    tasks: Mapping[str, Task], contenders: Mapping[str, Contender], swept: Mapping[str, list[Cell]], seeds: int
) -> None:
    """How many distinct cells there are, with the middle of each grid in the best setting's place."""
    for name, task in tasks.items():
        settings = task.grid.settings()
        middle = settings[len(settings) // 2]
        own = {
            Cell.of(task, contender, start.setting(middle), seed)
            for contender in contenders.values()
            for start in task.starts
            for seed in range(seeds)
        }
        print(f"{name}: {len(swept.get(name, ()))} swept cells, {len(own)} of contenders, {task.steps} steps each")


def _command() -> str:
    return shlex.join(["python", "benchmarks/search.py", *sys.argv[1:]])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs, three starting points, two seeds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help=f"of {', '.join(all_tasks())}")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help=f"of {', '.join(all_contenders())}")
    parser.add_argument("--seeds", type=int, help=f"seeds of a case (default {SEEDS})")
    parser.add_argument("--first-seed", type=int, default=0, help="seeds from here on")
    parser.add_argument("--out", type=Path, help="folder of the runs' files (default runs/search)")
    parser.add_argument("--docs", type=Path, help="folder of the report (default docs/results/search)")
    parser.add_argument("--beside", type=Path, help="folder of an earlier report, whose sweeps and rivals are taken")
    parser.add_argument("--report", action="store_true", help="run nothing, report on what is there")
    parser.add_argument("--hindsight", action="store_true", help="also the best of three values of an option")
    parser.add_argument("--dry-run", action="store_true", help="run nothing, count the cells")
    return parser


if __name__ == "__main__":
    sys.exit(main())
