"""A Ray `TorchTrainer` whose workers train one model, with one call to hdet.

    pip install 'hdet[ray]'
    python examples/ray_trainer.py --steps 200 --workers 2

Each worker attaches to the model that Ray has wrapped in DistributedDataParallel. Windows reach Ray's own results by
`ray.train.report`, which all workers call, as Ray asks; the last one brings the model, and so is what `fit()` returns.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from torch.nn import functional as F

import hdet

CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))


def examples(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(10, (count,), generator=generator)
    return CENTRES[labels] + 2 * torch.randn(count, 20, generator=generator), labels


def train_on_a_worker(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)

    same, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + rank)
    held_out = [examples(64, same) for _ in range(8)]
    probe = hdet.Probe(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), held_out)
    search = hdet.attach(model, optimizer, probe=probe, total_steps=config["steps"], quiet=rank != 0)

    @search.on_window
    def report(record: hdet.history.WindowRecord) -> None:
        learned = {name: values["closed"] for name, values in record.learned.items()}
        metrics = {"step": record.stop, "training_loss": record.loss, **learned}
        if rank != 0 or record.stop < config["steps"]:
            ray.train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            torch.save(model.state_dict(), Path(folder) / "model.pt")
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))

    for _ in range(config["steps"]):
        inputs, labels = examples(32, own)
        loss = search.loss(F.cross_entropy(model(inputs), labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train(steps: int, workers: int, folder: str | None = None) -> dict[str, Any]:
    """The last window's report."""
    trainer = TorchTrainer(
        train_on_a_worker,
        train_loop_config={"steps": steps},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder),
    )
    metrics: dict[str, Any] = trainer.fit().metrics
    return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(train(options.steps, options.workers))
