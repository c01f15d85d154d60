"""hdet inside the trainers people use: what it makes of a wrong learning rate, and what it costs beside their own step.

The small GPT of the tests trains on the bytes of Python's standard library, by each trainer's own loop, under the same
schedule of the user's (10 % warm-up, then a straight line to 0). Printed, for each trainer and rate: the loss on text
that neither training nor the probe sees, in nats per byte, without hdet and with it.

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
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
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
ON_TWO: dict[str, Callable[[Case], two_processes.Ended]] = {
    "deepspeed": two_processes.deepspeed,
    "ray": two_processes.ray,
    "torchft": two_processes.torchft,
    "torchft_replicas": two_processes.torchft_replicas,
}


def run(trainer: str, case: Case) -> tuple[float, float]:
    """The test loss in nats per byte, and the CPU time of a step in milliseconds."""
    torch.manual_seed(case.seed)
    task(case.seed)
    began = time.process_time()
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        if trainer in ON_TWO:
            ended = ON_TWO[trainer](case)
            trained, spent = ended.model(case), ended.seconds
        else:
            trained = ALONE[trainer](case)
            spent = time.process_time() - began
    return task(case.seed).test_loss(trained.get_submodule("model")), 1000 * spent / case.steps


def losses(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of losses."""
    yield f"{'trainer':>16} {'seed':>4} {'rate':>8} {'plain':>7} {'hdet':>7} {'hdet - well-set':>16}"
    for trainer in options.trainers:
        for seed in range(options.seeds):
            well_set, _ = run(trainer, Case(options.rate, options.steps, seed, explored=False))
            for factor in options.factors:
                case = Case(options.rate * factor, options.steps, seed)
                plain = well_set
                if factor != 1.0:
                    plain, _ = run(trainer, Case(case.rate, case.steps, seed, explored=False))
                found, _ = run(trainer, case)
                yield f"{trainer:>16} {seed:4} {case.rate:8.2g} {plain:7.3f} {found:7.3f} {found - well_set:+16.3f}"


def overhead(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of times."""
    yield f"{'trainer':>16} {'plain, ms':>10} {'held, ms':>10} {'hdet, ms':>10} {'held/plain':>11} {'hdet/plain':>11}"
    for trainer in options.trainers:
        kinds = [
            Case(options.rate, options.steps, 0, explored=False),
            Case(options.rate, options.steps, 0, held=True),
            Case(options.rate, options.steps, 0),
        ]
        run(trainer, kinds[0])  # imports, and memory that is allocated once
        times = [[run(trainer, case)[1] for case in kinds] for _ in range(options.repeats)]
        plain, held, found = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = [statistics.median(row[kind] / row[0] for row in times) for kind in (1, 2)]
        yield f"{trainer:>16} {plain:10.2f} {held:10.2f} {found:10.2f} {ratios[0]:11.3f} {ratios[1]:11.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rate", type=float, default=1e-2, help="the well-set one")
    parser.add_argument("--factors", type=float, nargs="+", default=[1 / 30, 1.0, 30.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trainers", nargs="+", choices=[*ALONE, *ON_TWO], default=list(ALONE))
    parser.add_argument("--overhead", action="store_true", help="time a step instead")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for line in overhead(options) if options.overhead else losses(options):
        print(line, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
