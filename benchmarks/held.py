"""What each knob's moves bring or cost a run that is set well: the recipe, with one knob after another held.

    python benchmarks/held.py                          # the three tasks where a well-set run loses most, 5 seeds
    python benchmarks/held.py --tasks denoise --seeds 3

Every run starts from the best fixed setting of the task's grid. A rate that is held follows the recipe's schedule,
probes paid all the same; other knobs that are held are left out, neither explored nor moved. Where something is held,
runs are planned for all probes that there can be: a schedule that the budget cuts off costs more than any move.
Differences to the fixed cosine of the same seed, with standard errors. Straight lines without hdet, of several peaks,
tell what the schedule alone is worth.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from search_parts.contender import Contender
from search_parts.contenders.recommended import Recommended
from search_parts.found import all_contenders, all_tasks
from search_parts.sweep import losses
from search_parts.task import Problem, Setting, Task
from torch import nn

import hdet
from hdet.controllers import Hold
from hdet.evidence import Line
from hdet.recipes.recommended import choose
from hdet.replicas import Replicas

# As benchmarks/search.py found them.
BEST = {
    "tabular": Setting(0.064, 3.0, 0.0),
    "ratings": Setting(0.064, 0.3, 0.0),
    "teacher": Setting(0.01, 0.01, 0.0),
    "denoise": Setting(0.016, 0.3, 0.0),
    "digits_conv": Setting(0.05, 0.03, 0.0),
    "digits_noise": Setting(0.4, 3e-3, 0.3),
    "clusters": Setting(0.008, 0.1, 0.0),
    "point_sets": Setting(0.004, 0.03, 0.0),
    "operator": Setting(0.004, 0.03, 0.0),
    "autoencoder": Setting(6.4, 1e-6, 0.0),
    "diffusion": Setting(0.004, 0.03, 0.0),
    "sorting": Setting(0.008, 0.3, 0.0),
    "spoken": Setting(0.064, 0.3, 0.0),
    "cells": Setting(0.1, 1e-3, 0.0),
    "experts": Setting(0.008, 0.3, 0.0),
    "flow": Setting(0.016, 0.03, 0.0),
    "strokes": Setting(0.016, 0.03, 0.0),
    "textures": Setting(0.064, 0.03, 0.0),
    "waves": Setting(0.8, 1e-3, 0.0),
    "recall": Setting(0.016, 0.3, 0.0),
    "text_small": Setting(0.016, 0.1, 0.0),
    "text_tiny": Setting(0.01, 0.1, 0.0),
    "text_recurrent": Setting(0.032, 0.1, 0.0),
    "text_momentum": Setting(0.32, 1e-4, 0.0),
    "text_repeated": Setting(0.002, 1.0, 0.1),
    "text_large": Setting(0.008, 0.1, 0.0),
    "gpt_400k": Setting(0.008, 0.1, 0.0),
    "gpt_3m": Setting(0.002, 0.1, 0.0),
    "gpt_10m": Setting(0.001, 0.1, 0.0),  # of two rates that were tried
    "finetune_full": Setting(0.004, 0.1, 0.1),
    "finetune_lora": Setting(0.032, 0.1, 0.1),
}
PEAKS = (0.25, 0.5, 0.7, 1.0, 1.4)
"""Of straight lines, times the rate that is best for a cosine."""

RATE, DECAY, DROPOUT = hdet.LearningRate, hdet.WeightDecay, hdet.Dropout


def exploring(
    contender: Recommended, home: Replicas, knobs: Sequence[hdet.Knob], probe: hdet.Probe, steps: int, seed: int
) -> hdet.Engine:
    """The recipe's windows, and the contender's guard and tail, with these knobs."""
    return hdet.Engine(
        home,
        knobs,
        window=hdet.windows.GrowingWindow(),
        signal=probe,
        seed=seed,
        total_steps=steps,
        guard=contender.guard,
        tail=contender.tail,
    )


class Held(Recommended):
    """The recipe with some knobs where they were set."""

    kinds: tuple[type[hdet.Knob], ...] = ()
    line: Line = Line()

    def rehearse(self, task: Task, setting: Setting, steps: int) -> int:
        every = copy.copy(self)
        every.line = Line(read_average_above=None)
        return super(Held, every).rehearse(task, setting, steps)

    def engine(
        self, task: Task, setting: Setting, problem: Problem, model: nn.Module, probe: hdet.Probe, steps: int, seed: int
    ) -> hdet.Engine:
        optimizer = task.optimizer(problem.groups(model), setting)
        knobs = [choice.knob for choice in choose(model, optimizer, steps) if choice.knob is not None]
        knobs = [self.held(knob) if isinstance(knob, RATE) else knob for knob in knobs if self.explores(knob)]
        home = hdet.micro_batches(model, optimizer, task.micro_batches)
        return exploring(self, home, knobs, probe, steps, seed)

    def explores(self, knob: hdet.Knob) -> bool:
        return isinstance(knob, RATE) or not isinstance(knob, self.kinds)

    def held(self, rate: hdet.Knob) -> hdet.Knob:
        rate = rate.replace(evidence=self.line)
        return rate.replace(controller=Hold(), initial_shift=0.0) if RATE in self.kinds else rate


class RateHeld(Held):
    kinds = (RATE,)


class DecayHeld(Held):
    kinds = (DECAY,)


class DropoutHeld(Held):
    kinds = (DROPOUT,)


class OnlyRate(Held):
    kinds = (DECAY, DROPOUT)


class AllHeld(Held):
    kinds = (RATE, DECAY, DROPOUT)


class AllHeldUnguarded(AllHeld):
    guard = None


class Unguarded(Held):
    guard = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=sorted(BEST), default=["tabular", "ratings", "teacher"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--first-seed", type=int, default=0, help="seeds from here on: 5 are those of the search benchmark"
    )
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    known = all_contenders()
    rows: dict[str, Contender] = {
        "recipe": known["hdet"],
        "learning rate held": RateHeld(),
        "weight decay held": DecayHeld(),
        "dropout held": DropoutHeld(),
        "decay and dropout held": OnlyRate(),
        "all held": AllHeld(),
        "all held, no guard": AllHeldUnguarded(),
        "recipe, no guard": Unguarded(),
    }
    plans = [(title, contender, 1.0) for title, contender in rows.items()]
    plans += [(f"fixed straight line, rate x{factor:g}", known["linear"], factor) for factor in PEAKS]
    for name in given.tasks:
        task = all_tasks()[name]
        seeds = range(given.first_seed, given.first_seed + given.seeds)
        fixed = losses(task, known["cosine"], BEST[name], seeds)
        print(f"{name}, {given.seeds} seeds from {given.first_seed} on; fixed cosine {fixed.mean():.4f}")
        for title, contender, factor in plans:
            setting = replace(BEST[name], lr=factor * BEST[name].lr)
            lost = losses(task, contender, setting, seeds) - fixed
            error = lost.std(ddof=1) / np.sqrt(len(lost)) if len(lost) > 1 else float("nan")
            print(f"  {title:31s} {lost.mean():+.4f} +- {error:.4f}", flush=True)


if __name__ == "__main__":
    main()
