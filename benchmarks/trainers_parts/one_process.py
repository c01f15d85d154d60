"""The loops and trainers that need one process only."""

from __future__ import annotations

import tempfile
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

import hdet
from trainers_parts.case import Batches, Case, task


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
