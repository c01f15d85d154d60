"""Does the recipe hold for large models and long runs? Byte GPTs of 10 and 125 million parameters on a GPU.

    python benchmarks/large_lengths.py                                    # 500 steps, both sizes, one seed
    python benchmarks/large_lengths.py --sizes 125M --steps 500 2000 --sweep 0.3 1 3
    python benchmarks/large_lengths.py --sizes 125M --steps 10000 --batch 8 --compile --sweep 0.3 1 --jobs 4
    python benchmarks/large_lengths.py --matrices                         # a rate for each matrix as well
    python benchmarks/large_lengths.py --report --csv large.csv           # of the runs there are, with their options

8,192 bytes a step (32 sequences of 256; --batch has others), in bfloat16, of the source text of Python's standard
library and of torch. Every number of steps has its own sweep: fixed cosines at --sweep times a rate near the best for
500 steps of them, for the same compute. The oracle is the best of them, by its mean over seeds. hdet begins at --starts
times that same rate. Regret is the test loss above the oracle's of the same seed. One JSON file a run lies under --out,
in a folder for each version of the library, of torch, each device and batch; a run that has its file there is not made
again. --compile has torch compile each block of the model: steps are faster. Rounding is another then, by which losses
at the end differ as between seeds.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lengths import ROOT, Run, against_the_oracle, finish, finished, show
from numpy.typing import NDArray
from search_parts import cell as cells
from search_parts import runner
from search_parts.cell import Cell
from search_parts.contenders import cosine, recommended, recommended_matrices
from search_parts.task import LEARNING_RATES, SIZES, Grid, Setting, Start, Task
from search_parts.text import IGNORANCE, TextProblem, TextTask
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hdet.app.tasks.text import Text, standard_library


class LargeProblem(TextProblem):
    """More text, and bfloat16 for all but weights."""

    def __init__(self, text: Text, *, seed: int, batch: int, device: str) -> None:
        super().__init__(text, seed=seed, batch=batch, device=device)
        self.workload.splits = {**self.workload.splits, "train": with_source_of_torch()}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.workload.device.type, torch.bfloat16)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with self.autocast():
            return super().loss(model, batch)

    def example_losses(self, model: nn.Module, batch: Tensor) -> Tensor:
        with self.autocast():
            return super().example_losses(model, batch)

    def test_loss(self, model: nn.Module) -> float:
        with self.autocast():
            return super().test_loss(model)


class CompiledProblem(LargeProblem):
    """Blocks are compiled, each alone: they share their graphs, and whoever counts passes stays outside of them."""

    def model(self) -> nn.Module:
        model = super().model()
        for block in model.get_submodule("blocks").children():
            block.compile()
        return model


@dataclass(frozen=True, kw_only=True)
class LargeText(TextTask):
    """A byte GPT that wants a GPU.

    Attributes:
        device: where it trains. The grid has one setting, near the best for 500 steps.
        compiled: whether torch compiles the model's blocks.
    """

    device: str = "cuda"
    compiled: bool = False

    def problem(self, seed: int, dropout: float) -> TextProblem:
        kind = CompiledProblem if self.compiled else LargeProblem
        return kind(self.text(dropout), seed=seed, batch=self.batch, device=self.device)

    def optimizer(self, groups: Sequence[dict[str, Any]], setting: Setting) -> Optimizer:
        return AdamW(list(groups), lr=setting.lr, betas=self.betas, weight_decay=setting.decay, fused=True)

    def rehearsed(self) -> Task:
        return replace(self, width=8, depth=1, heads=1, device="cpu", compiled=False)


def of_size(name: str, width: int, depth: int, heads: int, rate: float) -> LargeText:
    return LargeText(
        name=name,
        title=f"Byte GPT, {name}",
        steps=500,
        batch=32,
        family="adamw",
        ignorance=IGNORANCE,
        grid=Grid((rate,), (0.1,)),
        starts=SIZES,
        clip=1.0,
        width=width,
        depth=depth,
        heads=heads,
        context=256,
    )


TASKS = {"10M": of_size("10M", 320, 8, 4, 1e-3), "125M": of_size("125M", 768, 18, 12, 5e-4)}
FACTORS = {start.lr: start for start in LEARNING_RATES}
CONTENDERS = {made.CONTENDER.name: made.CONTENDER for made in (recommended, recommended_matrices, cosine)}


@lru_cache(maxsize=1)
def with_source_of_torch() -> NDArray[np.uint8]:
    """The training text of the standard library, and all .py files of the torch that runs."""
    root = Path(torch.__file__).parent
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    source = np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)
    return np.concatenate([standard_library()["train"], source])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", nargs="+", type=int, default=[500])
    parser.add_argument("--sweep", nargs="+", type=float, choices=FACTORS, default=[0.1, 0.3, 1, 3, 10])
    parser.add_argument("--starts", nargs="+", type=float, choices=FACTORS, default=[0.1, 1, 10])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--compile", action="store_true", help="compile the model's blocks")
    runner.add_recipes(parser)
    runner.add_options(parser, ROOT / "runs" / "large_lengths")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", "the probe is too small")
    errors: list[str] = []
    where = f"{given.device}-batch-{given.batch}" + "-compiled" * given.compile
    out = given.out / f"{cells.code_hash()}-torch-{torch.__version__}-{where}"
    plans: list[tuple[LargeText, Cell, Start]] = []
    for steps in given.steps:
        tasks = {
            name: replace(TASKS[name], steps=steps, batch=given.batch, device=given.device, compiled=given.compile)
            for name in given.sizes
        }
        own = [(tasks[cell.task], cell, start) for cell, start in planned(tasks, given)]
        if not given.report:
            wanted = [cell for _, cell, _ in own]
            errors += runner.run(wanted, tasks, CONTENDERS, out, jobs=given.jobs, label=f"{steps} steps")
        plans += own
    runs: list[Run] = []
    for made, cell, start in plans:
        result = cells.load(out, cell)
        if result is not None:
            runs.append(finished(made, made.steps, cell, start, result))
    print(f"{len(with_source_of_torch()):,} bytes to train on")
    show(runs, against_the_oracle(runs))
    return finish(errors, given.csv, runs, batch=given.batch, compiled=given.compile)


def planned(tasks: dict[str, LargeText], given: argparse.Namespace) -> Iterator[tuple[Cell, Start]]:
    """Each cell with its start: those of hdet first, which take longest."""
    for seed in range(given.seeds):
        for contender, factors in (*((recipe, given.starts) for recipe in given.recipes), ("cosine", given.sweep)):
            for name in reversed(tasks):
                for start in (FACTORS[factor] for factor in factors):
                    setting = start.setting(tasks[name].grid.settings()[0])
                    yield Cell.of(tasks[name], CONTENDERS[contender], setting, seed), start


if __name__ == "__main__":
    sys.exit(main())
