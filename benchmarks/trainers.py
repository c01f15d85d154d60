"""hdet inside the trainers people use: what it makes of a wrong learning rate, and what it costs beside their own step.

The small GPT of the tests trains on the bytes of Python's standard library, by each trainer's own loop, under the same
schedule of the user's (10 % warm-up, then a straight line to 0). Printed, for each trainer and rate: the loss on text
that neither training nor the probe sees, in nats per byte, without hdet and with it.

    python benchmarks/trainers.py --steps 800

With `--overhead` the well-set run is repeated in turns, and what is printed is the time of a step: CPU time of the
process, its trainer's own work included, over the same run without hdet. A held search measures and moves nothing.

    python benchmarks/trainers.py --overhead --steps 400 --repeats 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import hdet
from hdet.app.tasks.text import Text, TextWorkload
from hdet.controllers import Hold
from hdet.spreads import TwoLevel

BATCH = 16
WARMUP = 0.1
HELD = (
    hdet.LearningRate(controller=Hold()),
    hdet.WeightDecay(controller=Hold()),
    hdet.Dropout(controller=Hold(), spread=TwoLevel(0.0)),
)


@cache
def task(seed: int) -> TextWorkload:
    return Text(width=32, depth=1, heads=2, context=32, dropout=0.1, test_sequences=256).build(
        seed=seed, batch_size=BATCH
    )


@dataclass(frozen=True)
class Case:
    """One run: how it is set, and what hdet does in it."""

    rate: float
    steps: int
    seed: int
    explored: bool = True
    held: bool = False

    def model(self) -> nn.Module:
        return Predicting(task(self.seed))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(task(self.seed).groups(model), lr=self.rate, weight_decay=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        warmup = int(WARMUP * self.steps)
        return LambdaLR(optimizer, lambda t: min(t / warmup, max(0.0, (self.steps - t) / (self.steps - warmup))))

    def probe(self) -> hdet.Probe:
        return hdet.Probe(lambda model, batch: model(batch)["loss"], task(self.seed).probe)

    def options(self) -> dict[str, Any]:
        return {"quiet": True, **({"knobs": HELD, "guard": None} if self.held else {})}


class Predicting(nn.Module):
    """The GPT, which returns its loss as models for the Trainer of Transformers do."""

    def __init__(self, workload: TextWorkload) -> None:
        super().__init__()
        self.task = workload
        self.model = workload.model()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"loss": self.task.loss(self.model, tokens)}


class Batches(Dataset[dict[str, Tensor]]):
    """One item is one batch of a step."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return self.case.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        if step >= self.case.steps:
            raise IndexError(step)
        return {"tokens": task(self.case.seed).batch(step, 0)}


def loop(case: Case) -> nn.Module:
    """A loop written by hand, with `hdet.attach`."""
    model = case.model()
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer)
    if case.explored:
        hdet.attach(model, optimizer, probe=case.probe(), total_steps=case.steps, scheduler=scheduler, **case.options())
    batches = Batches(case)
    for step in range(case.steps):
        model(batches[step]["tokens"])["loss"].backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def lightning(case: Case) -> nn.Module:
    """Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = case.model()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.network(batch["tokens"])["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = case.optimizer(self.network)
            return [optimizer], [{"scheduler": case.scheduler(optimizer), "interval": "step"}]

    probe = hdet.Probe(lambda module, batch: module.network(batch)["loss"], task(case.seed).probe)
    module = Module()
    trainer = Trainer(
        max_epochs=1,
        callbacks=[hdet.lightning.Search(probe=probe, **case.options())] if case.explored else [],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        accelerator="cpu",
    )
    trainer.fit(module, DataLoader(Batches(case), batch_size=None))
    return module.network


def transformers(case: Case) -> nn.Module:
    """The Trainer of Transformers."""
    from transformers import Trainer, TrainingArguments

    model = case.model()
    optimizer = case.optimizer(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                max_steps=case.steps,
                max_grad_norm=0.0,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                remove_unused_columns=False,
                seed=case.seed,
            ),
            train_dataset=Batches(case),
            data_collator=lambda items: items[0],
            optimizers=(optimizer, case.scheduler(optimizer)),
        )
        if case.explored:
            trainer.add_callback(hdet.transformers.Search(probe=case.probe(), **case.options()))
        trainer.train()
    return model


def accelerate(case: Case) -> nn.Module:
    """A loop with an Accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = case.model()
    optimizer = case.optimizer(model)
    prepared = accelerator.prepare(
        model, optimizer, case.scheduler(optimizer), DataLoader(Batches(case), batch_size=None)
    )
    model, optimizer, scheduler, loader = prepared
    if case.explored:
        hdet.attach(model, optimizer, probe=case.probe(), total_steps=case.steps, scheduler=scheduler, **case.options())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["tokens"])["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    unwrapped: nn.Module = accelerator.unwrap_model(model)
    return unwrapped


TRAINERS: dict[str, Callable[[Case], nn.Module]] = {
    "loop": loop,
    "lightning": lightning,
    "transformers": transformers,
    "accelerate": accelerate,
}


def run(trainer: str, case: Case) -> tuple[float, float]:
    """The test loss in nats per byte, and the CPU time of a step in milliseconds."""
    torch.manual_seed(case.seed)
    task(case.seed)
    began = time.process_time()
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        trained = TRAINERS[trainer](case)
    spent = time.process_time() - began
    return task(case.seed).test_loss(trained.get_submodule("model")), 1000 * spent / case.steps


def losses(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of losses."""
    yield f"{'trainer':>12} {'seed':>4} {'rate':>8} {'plain':>7} {'hdet':>7} {'hdet - well-set':>16}"
    for trainer in options.trainers:
        for seed in range(options.seeds):
            well_set, _ = run(trainer, Case(options.rate, options.steps, seed, explored=False))
            for factor in options.factors:
                case = Case(options.rate * factor, options.steps, seed)
                plain = well_set
                if factor != 1.0:
                    plain, _ = run(trainer, Case(case.rate, case.steps, seed, explored=False))
                found, _ = run(trainer, case)
                yield f"{trainer:>12} {seed:4} {case.rate:8.2g} {plain:7.3f} {found:7.3f} {found - well_set:+16.3f}"


def overhead(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the table of times."""
    yield f"{'trainer':>12} {'plain, ms':>10} {'held, ms':>10} {'hdet, ms':>10} {'held/plain':>11} {'hdet/plain':>11}"
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
        yield f"{trainer:>12} {plain:10.2f} {held:10.2f} {found:10.2f} {ratios[0]:11.3f} {ratios[1]:11.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rate", type=float, default=1e-2, help="the well-set one")
    parser.add_argument("--factors", type=float, nargs="+", default=[1 / 30, 1.0, 30.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--trainers", nargs="+", choices=list(TRAINERS), default=list(TRAINERS))
    parser.add_argument("--overhead", action="store_true", help="time a step instead")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for line in overhead(options) if options.overhead else losses(options):
        print(line, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
