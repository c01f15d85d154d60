"""The report: Markdown tables, CSV files of all runs, and pictures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hdet.app.study.tables import pipe_table
from search_parts import tables
from search_parts.interval import Interval
from search_parts.meter import DEFINITION
from search_parts.outcome import HARM, Findings
from search_parts.pictures import draw_ranks, draw_starts, draw_task
from search_parts.task import Task


def write(findings: Findings, folder: Path, command: str) -> Path:
    """Write everything into a folder; returns the Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = _head(findings, command) + _ranks(findings) + _starts(findings)
    for task in findings.tasks.values():
        lines += _task(findings, task)
        draw_task(findings, task, folder / f"{task.name}.png")
    draw_ranks(findings, folder / "ranks.png")
    draw_starts(findings, folder / "starts.png")
    tables.write(findings, folder)
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def _which(findings: Findings) -> str:
    """From which seed to which there are runs."""
    there = {seed for runs in findings.runs.values() for seed in runs}
    return f" ({min(there)} to {max(there)})" if len(there) > 1 else ""


def _head(findings: Findings, command: str) -> list[str]:
    cases = findings.cases()
    there = sum(len(findings.runs[(*case, name)]) for case in cases for name in findings.contenders)
    wanted = len(cases) * len(findings.contenders) * findings.seeds
    lines = [
        "# One run's compute, badly set hyperparameters",
        "",
        f"Made by `{command}`. Test loss, {findings.seeds} seeds{_which(findings)}, 95 % confidence intervals "
        "(Student's t).",
        "",
        DEFINITION,
        "",
        "The oracle is the fixed cosine schedule at the best setting of a sweep. That setting is chosen "
        "on seeds of its own; the starting points are factors on it. Regret is the test loss above the "
        "oracle's of the same seed. A starting point that is another by another name (ten times a dropout of 0) "
        "is no case of its own.",
        "A run that is not finite, or ends above what a model that knows nothing gets, has failed: it is "
        "counted, ranked last, and enters means as having learnt nothing.",
        "",
    ]
    if there < wanted:
        lines += [f"**Incomplete: {there} of {wanted} runs are there.** Ranks use the complete cases only.", ""]
    if findings.earlier:
        names = ", ".join(findings.contenders[name].title for name in findings.earlier)
        lines += [f"Runs from an earlier report: {names}. CPU times are compared over machines and days.", ""]
    if len(findings.versions()) > 1:
        lines += [f"**The runs were made with {len(findings.versions())} versions of the library's code.**", ""]
    return lines


def _ranks(findings: Findings) -> list[str]:
    lines = ["## Standing", ""]
    header = ["contender", "mean rank", "over whole tasks", f"behind {findings.reference}", "mean regret", "worst"]
    header += ["hurt", "failed", "compute, mean (most)", "probes", "seconds"]
    development = {task.name for task in findings.tasks.values() if task.development}
    groups: list[tuple[str, set[str] | None]] = [("All tasks", None)]
    if development and development != set(findings.tasks):
        groups.append(("Only tasks that settings were not chosen on", set(findings.tasks) - development))
    for title, tasks in groups:
        standings = findings.standings(tasks)
        if not standings:
            lines += [f"{title}: no case is complete.", ""]
            continue
        cases = [case for case in findings.complete() if tasks is None or case[0] in tasks]
        lines += [
            f"{title}: mean rank over {len(cases)} cases (a task and a starting point), seed by seed; "
            f"intervals by bootstrap over cases and each task's seeds, and over whole tasks. Worst is the largest "
            f"regret of a run; hurt, the share of runs that end above the fixed schedule from the same start by more "
            f"than {HARM:g}. Probes are the share of compute that did not train, of contenders that tell it; "
            f"seconds are CPU time over the fixed schedule's.",
            "",
        ]
        shown, body = findings.within(cases), []
        for name, standing in sorted(standings.items(), key=lambda item: item[1].rank.mean):
            regrets = [findings.regrets(*case, name) for case in cases]
            failures = sum(findings.failures(*case, name) for case in cases)
            costs, untrained = shown.costs(name), shown.untrained(name)
            row = [
                findings.contenders[name].title,
                _spanned(standing.rank),
                _spanned(standing.by_task),
                _spanned(standing.behind, signed=True),
                f"{np.mean([np.mean(case) for case in regrets]):.3f}",
                f"{max(map(max, regrets)):.3f}",
                f"{100 * shown.hurt(name):.0f} %",
                f"{failures} of {len(cases) * findings.seeds}",
                f"{np.mean(costs):.3f} ({max(costs):.3f})",
                "-" if math.isnan(untrained) else f"{100 * untrained:.1f} %",
                f"{shown.seconds(name):.2f}x",
            ]
            body.append(row)
        lines += [*pipe_table(header, body), ""]
    return [*lines, "![mean ranks](ranks.png)", ""]


def _starts(findings: Findings) -> list[str]:
    """Mean regret by starting point, of those that are complete for every task."""
    shared = findings.shared_starts()
    if not shared:
        return []
    body = [
        [contender.title, *(f"{value:.3f}" for value in findings.regret_by_start(name, shared))]
        for name, contender in findings.contenders.items()
    ]
    table = pipe_table(["contender", *shared], body)
    return ["Mean regret over all tasks, by starting point:", "", *table, "", "![by starting point](starts.png)", ""]


def _task(findings: Findings, task: Task) -> list[str]:
    best = findings.best[task.name]
    chosen = "Settings of the library were chosen on this task." if task.development else "Nothing was chosen on it."
    lines = [
        f"## {task.title}",
        "",
        f"{task.steps} steps of {task.batch}. {chosen} Oracle: learning rate {best.setting.lr:g}, decay "
        f"{best.setting.decay:g}, dropout {best.setting.dropout:g}; test loss "
        f"{_plus_minus(findings.oracle_loss(task.name))}; found by {best.runs} runs, {best.runs} budgets.",
    ]
    if best.at_edge:
        lines.append("**The best learning rate lies at the edge of the grid.**")
    header = ["contender", *(start.name for start in task.starts)]
    for what in ("Test loss", "Regret"):
        body = []
        for name, contender in findings.contenders.items():
            row = [contender.title]
            for start in task.starts:
                case = (task.name, start.name, name)
                value = findings.loss(*case) if what == "Test loss" else findings.regret(*case)
                failures = findings.failures(*case)
                row.append(_plus_minus(value) + (f" ({failures} failed)" if failures else ""))
            body.append(row)
        lines += ["", f"{what}:", "", *pipe_table(header, body)]
    return [*lines, "", f"![{task.title}]({task.name}.png)", ""]


def _plus_minus(value: Interval) -> str:
    if math.isnan(value.mean):
        return "-"
    return f"{value.mean:.3f}" if math.isnan(value.half) else f"{value.mean:.3f} ± {value.half:.3f}"


def _spanned(value: Interval, signed: bool = False) -> str:
    sign = "+" if signed else ""
    return f"{value.mean:{sign}.2f} [{value.low:{sign}.2f}, {value.high:{sign}.2f}]"
