"""hdet inside the trainers people use: what it makes of a wrong learning rate, and what it costs beside their own step.

The small GPT of the tests trains on the bytes of Python's standard library, by each trainer's own loop, under the same
schedule of the user's (a warm-up of 10 %, or --warmup, then a straight line to 0). Printed, for each trainer and rate:
the loss on text that neither training nor the probe sees, in nats per byte, without hdet and with it.

    python benchmarks/trainers.py --steps 800

With `--overhead` the well-set run is repeated in turns, and what is printed is the time of a step: CPU time of the
process, its trainer's own work included, over the same run without hdet. A held search measures and moves nothing.

    python benchmarks/trainers.py --overhead --steps 400 --repeats 5

DeepSpeed, Ray and torchft train on two processes, and are asked for by name:

    python benchmarks/trainers.py --trainers deepspeed ray torchft torchft_replicas
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn
from trainers_parts import one_process, two_processes
from trainers_parts.case import Case, task

ALONE: dict[str, Callable[[Case], nn.Module]] = {
    "loop": one_process.loop,
    "lightning": one_process.lightning,
    "transformers": one_process.transformers,
    "accelerate": one_process.accelerate,
}
ON_TWO: dict[str, Callable[[Sequence[Case]], list[two_processes.Ended]]] = {
    "deepspeed": two_processes.deepspeed,
    "ray": two_processes.ray,
    "torchft": two_processes.torchft,
    "torchft_replicas": two_processes.torchft_replicas,
}


def runs(trainer: str, cases: Sequence[Case]) -> list[tuple[float, float]]:
    """By case the test loss in nats per byte, and the CPU time of a step in milliseconds."""
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        if trainer in ON_TWO:
            ended = ON_TWO[trainer](cases)
            trained = [(one.model(case), one.seconds) for one, case in zip(ended, cases, strict=True)]
        else:
            trained = [_timed(ALONE[trainer], case) for case in cases]
    return [
        (task(case.seed).test_loss(model.get_submodule("model")), 1000 * seconds / case.steps)
        for (model, seconds), case in zip(trained, cases, strict=True)
    ]


def _timed(train: Callable[[Case], nn.Module], case: Case) -> tuple[nn.Module, float]:
    torch.manual_seed(case.seed)
    task(case.seed)
    began = time.process_time()
    return train(case), time.process_time() - began


def losses(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of losses."""
    yield f"{'trainer':>16} {'seed':>4} {'rate':>8} {'plain':>7} {'hdet':>7} {'hdet - well-set':>16}"
    for trainer in options.trainers:
        for seed in range(options.seeds):
            rates = [options.rate * factor for factor in options.factors]
            made = partial(Case, steps=options.steps, seed=seed, warmup=options.warmup)
            plain = {rate: made(rate, explored=False) for rate in (options.rate, *rates)}
            found = {rate: made(rate) for rate in rates}
            cases = [*plain.values(), *found.values()]
            lost = {case: loss for case, (loss, _) in zip(cases, runs(trainer, cases), strict=True)}
            well_set = lost[plain[options.rate]]
            for rate in rates:
                without, explored = lost[plain[rate]], lost[found[rate]]
                yield f"{trainer:>16} {seed:4} {rate:8.2g} {without:7.3f} {explored:7.3f} {explored - well_set:+16.3f}"


def overhead(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of times."""
    yield f"{'trainer':>16} {'plain, ms':>10} {'held, ms':>10} {'hdet, ms':>10} {'held/plain':>11} {'hdet/plain':>11}"
    for trainer in options.trainers:
        kinds = [
            Case(options.rate, options.steps, 0, explored=False),
            Case(options.rate, options.steps, 0, held=True),
            Case(options.rate, options.steps, 0),
        ]
        # The first is left out: it imports, and allocates memory once.
        spent = [milliseconds for _, milliseconds in runs(trainer, [kinds[0], *options.repeats * kinds])][1:]
        times = [spent[at : at + len(kinds)] for at in range(0, len(spent), len(kinds))]
        plain, held, found = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = [statistics.median(row[kind] / row[0] for row in times) for kind in (1, 2)]
        yield f"{trainer:>16} {plain:10.2f} {held:10.2f} {found:10.2f} {ratios[0]:11.3f} {ratios[1]:11.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rate", type=float, default=1e-2, help="the well-set one")
    parser.add_argument("--factors", type=float, nargs="+", default=[1 / 30, 1.0, 30.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--warmup", type=float, default=0.1, help="a share of the steps")
    parser.add_argument("--trainers", nargs="+", choices=[*ALONE, *ON_TWO], default=list(ALONE))
    parser.add_argument("--overhead", action="store_true", help="time a step instead")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for line in overhead(options) if options.overhead else losses(options):
        print(line, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
