"""All that a report is made of: every contender's runs from every starting point, in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from search_parts import sweep
from search_parts.cell import Result
from search_parts.contender import Contender
from search_parts.interval import Interval, over_seeds
from search_parts.statistics import Array, Case, Standing, standings
from search_parts.sweep import Best
from search_parts.task import Setting, Task

Runs = dict[int, Result]
FIXED = "cosine"
REFERENCE = "hdet"
HARM = 0.01


@dataclass(frozen=True)
class Findings:
    """What was run.

    Attributes:
        tasks, contenders: that took part.
        best: by task, the oracle's setting.
        runs: by (task, start, contender), the results by seed.
        oracle: by task, the runs of the oracle by seed: the fixed schedule at the best setting.
        seeds: how many there should be.
        earlier: contenders whose runs are those of an earlier report.
    """

    tasks: Mapping[str, Task]
    contenders: Mapping[str, Contender]
    best: Mapping[str, Best]
    runs: Mapping[tuple[str, str, str], Runs]
    oracle: Mapping[str, Runs]
    seeds: int
    earlier: Sequence[str] = ()

    def losses(self, task: str, start: str, contender: str) -> list[float]:
        """Test losses of the seeds there are, failures as having learnt nothing."""
        return [sweep.judged(self.tasks[task], run.test) for run in self.runs[task, start, contender].values()]

    def loss(self, task: str, start: str, contender: str) -> Interval:
        """Their mean."""
        return over_seeds(self.losses(task, start, contender))

    def oracle_loss(self, task: str) -> Interval:
        """The oracle's, on the seeds contenders are compared with."""
        return over_seeds([sweep.judged(self.tasks[task], run.test) for run in self.oracle[task].values()])

    def regrets(self, task: str, start: str, contender: str) -> list[float]:
        """Test loss above the oracle's of the same seed, of each seed."""
        one, oracle = self.tasks[task], self.oracle[task]
        return [
            sweep.judged(one, run.test) - sweep.judged(one, oracle[seed].test)
            for seed, run in self.runs[task, start, contender].items()
            if seed in oracle
        ]

    def regret(self, task: str, start: str, contender: str) -> Interval:
        """Their mean."""
        return over_seeds(self.regrets(task, start, contender))

    def hurt(self, contender: str) -> float:
        """Share of runs that end above the fixed schedule from the same start and seed by more than `HARM`."""
        losses = [
            sweep.judged(self.tasks[task], run.test) - sweep.judged(self.tasks[task], fixed[seed].test)
            for (task, start, name), runs in self.runs.items()
            if name == contender
            for fixed in [self.runs.get((task, start, FIXED), {})]
            for seed, run in runs.items()
            if seed in fixed
        ]
        return float(np.mean([loss > HARM for loss in losses])) if losses else math.nan

    def failures(self, task: str, start: str, contender: str) -> int:
        """Runs that were not finite or ended above knowing nothing."""
        return sum(sweep.failed(self.tasks[task], run.test) for run in self.runs[task, start, contender].values())

    def cases(self) -> list[Case]:
        """Every (task, start), without starts that are an earlier one by another name: ten times a dropout of 0."""
        found: list[Case] = []
        for task in self.tasks.values():
            named: dict[Setting, Case] = {}
            for start in task.starts:
                named.setdefault(start.setting(self.best[task.name].setting), (task.name, start.name))
            found += named.values()
        return found

    def complete(self) -> list[Case]:
        """Those that all contenders have run with all seeds."""
        return [
            case
            for case in self.cases()
            if all(len(self.runs[(*case, name)]) == self.seeds for name in self.contenders)
        ]

    def shared_starts(self) -> list[str]:
        """Starting points that every task has, and that are complete for all of them."""
        complete, (first, *_) = set(self.complete()), self.tasks.values()
        return [start.name for start in first.starts if all((task, start.name) in complete for task in self.tasks)]

    def regret_by_start(self, contender: str, starts: Sequence[str]) -> list[float]:
        """The mean over all tasks, for each of some of `shared_starts`."""
        return [float(np.mean([self.regret(task, start, contender).mean for task in self.tasks])) for start in starts]

    @property
    def reference(self) -> str:
        """The contender that others are compared with: hdet, or without it the first."""
        return REFERENCE if REFERENCE in self.contenders else next(iter(self.contenders))

    def standings(self, tasks: set[str] | None = None) -> dict[str, Standing]:
        """Ranks over the complete cases (of some tasks); empty where there are none."""
        names = list(self.contenders)
        table: dict[Case, Array] = {}
        for case in self.complete():
            task = self.tasks[case[0]]
            if tasks is None or task.name in tasks:
                table[case] = np.array(
                    [
                        [math.inf if sweep.failed(task, run.test) else run.test for _, run in sorted(runs.items())]
                        for runs in (self.runs[(*case, name)] for name in names)
                    ]
                )
        if not table:
            return {}
        return dict(zip(names, standings(table, names.index(self.reference)), strict=True))

    def within(self, cases: Sequence[Case]) -> Findings:
        """The same, with nothing but the runs of some cases."""
        runs = {key: runs for key, runs in self.runs.items() if key[:2] in set(cases)}
        return replace(self, runs=runs)

    def costs(self, contender: str) -> list[float]:
        """Example-passes over the budget, of every run."""
        return [run.cost for key, runs in self.runs.items() if key[2] == contender for run in runs.values()]

    def seconds(self, contender: str) -> float:
        """Mean ratio of CPU time to that of the fixed schedule in the same place; NaN without one."""
        ratios = [
            run.seconds / self.runs[task, start, FIXED][seed].seconds
            for (task, start, name), runs in self.runs.items()
            if name == contender
            for seed, run in runs.items()
            if seed in self.runs.get((task, start, FIXED), {})
        ]
        return float(np.mean(ratios)) if ratios else math.nan

    def untrained(self, contender: str) -> float:
        """Mean share of a run's passes that did not train its model; NaN where the contender says nothing."""
        shares = [
            1.0 - run.details["steps"] * 3 * self.tasks[task].batch / (run.forward + 2 * run.backward)
            for (task, _, name), runs in self.runs.items()
            if name == contender
            for run in runs.values()
            if "steps" in run.details
        ]
        return float(np.mean(shares)) if shares else math.nan

    def versions(self) -> set[str]:
        """Of the library's code, that the runs of its own contenders were made with."""
        return {run.code for key, runs in self.runs.items() if key[2] not in self.earlier for run in runs.values()}
