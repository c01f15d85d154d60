"""FSDP2, tensor parallelism, torch.compile and distributed checkpoints: a GPT in a loop as torchtitan's is.

    torchrun --nproc-per-node 4 examples/fsdp2_tp_gpt.py --steps 200 --folder out
    torchrun --nproc-per-node 4 examples/fsdp2_tp_gpt.py --steps 200 --folder out --compile inductor

A mesh (dp_shard, tp) holds one model, sharded over all ranks. hdet adds one call after the optimizer, one around the
loss and one entry to the checkpoint; started again, the run goes on from its last checkpoint, in mid-window too.
"""

import argparse
import io
import sysconfig
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import hdet

CONTEXT, BATCH, WIDTH, HEAD = 64, 8, 64, 16


class Attention(nn.Module):
    """Causal attention; under tensor parallelism each rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.w2 = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class GPT(nn.Module):
    """From bytes [batch, time] to logits [batch, time, 256]."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.tok_embeddings, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tok_embeddings(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model: GPT, mesh: DeviceMesh, backend: str | None) -> None:
    """Tensor and sequence parallel, compiled block by block, then fully sharded."""
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    output = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    whole = {"tok_embeddings": embedding, "positions": embedding, "norm": SequenceParallel(), "output": output}
    parallelize_module(model, mesh["tp"], whole)
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": gathered,
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": gathered,
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh["tp"], plan)
        if backend is not None:
            layer.compile(backend=backend, fullgraph=True)
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])


class Data:
    """Sequences of the standard library's source; ranks of one tensor parallel group draw the same."""

    def __init__(self, place: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
        cut = 9 * len(text) // 10
        self.text, self.unseen, self.place = text[:cut], text[cut:], place

    def batch(self, step: int) -> Tensor:
        return self._sequences(self.text, BATCH, 1000 * step + self.place)

    def held_out(self) -> list[Tensor]:
        return [self._sequences(self.unseen, BATCH, -1 - part) for part in range(8)]

    @staticmethod
    def _sequences(text: Tensor, count: int, seed: int) -> Tensor:
        starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=torch.Generator().manual_seed(seed))
        return torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class Training(Stateful):
    """Model, optimizer, scheduler and search as one entry of a distributed checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, search: hdet.Search) -> None:
        self.model, self.optimizer, self.scheduler, self.search = model, optimizer, scheduler, search
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        search = io.BytesIO()
        torch.save(self.search.state_dict(), search)  # each rank has a part of its own
        rest = {"step": self.step, "scheduler": self.scheduler.state_dict()}
        return {"model": model, "optimizer": optimizer, **rest, f"search.{dist.get_rank()}": search.getvalue()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        self.scheduler.load_state_dict(state["scheduler"])
        self.search.load_state_dict(torch.load(io.BytesIO(state[f"search.{dist.get_rank()}"]), weights_only=True))
        self.step = state["step"]


def checkpoints(folder: Path) -> Iterator[Path]:
    """Those that are whole, newest first."""
    found = [path.parent for path in folder.glob("step-*/.metadata")]
    yield from sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def train(
    steps: int, folder: Path, *, every: int = 50, until: int | None = None, backend: str | None = None
) -> hdet.Search:
    """Train to step `until`, from the newest checkpoint in the folder."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp_shard", "tp"))
    torch.manual_seed(0)
    model = GPT()
    parallelize(model, mesh, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, betas=(0.9, 0.95))
    warmup = max(1, steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
    )
    data = Data(mesh["dp_shard"].get_local_rank())
    probe = hdet.Probe(loss_of, data.held_out())
    search = hdet.attach(
        model, optimizer, probe=probe, total_steps=steps, scheduler=scheduler, quiet=dist.get_rank() != 0
    )
    training = Training(model, optimizer, scheduler, search)
    for checkpoint in checkpoints(folder):
        dcp.load({"training": training}, checkpoint_id=checkpoint)
        break

    while training.step < (until if until is not None else steps):
        optimizer.zero_grad()
        loss = search.loss(loss_of(model, data.batch(training.step)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        training.step += 1
        if training.step % every == 0:
            dcp.save({"training": training}, checkpoint_id=folder / f"step-{training.step}")
            if dist.get_rank() == 0:
                print(f"step {training.step}: training loss {loss.item():.3f}, {search.shifts['learning_rate']}")
    return search


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--compile", help="torch.compile's backend; without it nothing is compiled")
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try:
        train(options.steps, options.folder, backend=options.compile)
    finally:
        dist.destroy_process_group()
