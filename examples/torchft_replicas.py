"""Replica groups that torchft manages, each a replica at values of its own; a killed one comes back into the run.

    pip install 'hdet[torchft]'
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --bind '[::]:29510' &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    python examples/torchft_replicas.py --group 0 --groups 2 &
    python examples/torchft_replicas.py --group 1 --groups 2

Kill one with `kill -9`, and start it again by the same line.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torchft import Manager, ProcessGroupGloo

import hdet

TEACHER = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def batch(step: int, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's part of the data. A step that is made again, after a group was lost, has the same."""
    generator = torch.Generator().manual_seed(1000 * step + shard)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs, (inputs @ TEACHER + torch.randn(32, 4, generator=generator)).argmax(dim=1)


def loss_of(model: torch.nn.Module, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def made() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def declared(steps: int) -> dict[str, Any]:
    """What the engine of every group is told."""
    return {
        "knobs": [hdet.LearningRate(spread=hdet.spreads.TwoLevel(0.3))],
        "window": 10,
        "signal": hdet.Probe(loss_of, [batch(10**6, shard) for shard in range(8)]),
        "gradients": "local",
        # Two replicas do not tell their own noise from what their rates did; of four or more leave this out.
        "evidence": hdet.evidence.Divergent(estimator=hdet.estimators.LeastSquares()),
        "total_steps": steps,
    }


def managed(group: int, store: dist.TCPStore) -> Manager:
    """torchft's manager of this group, a single process on the CPU."""
    return Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"group_{group}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        timeout=timedelta(seconds=30),
        quorum_timeout=timedelta(minutes=10),
    )


def train(group: int, groups: int, steps: int, history: Path | None = None) -> hdet.torchft.ManagedEngine:
    """This group's part of the run. Where others are ahead, it goes on where they are."""
    torch.manual_seed(group)  # the weights of the first group are everybody's
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = managed(group, store)
    try:
        engine = hdet.Engine(
            hdet.torchft.distribute(manager, model, optimizer, group=group, groups=groups),
            **declared(steps),
            history=hdet.History(history),
        )
        run = hdet.torchft.ManagedEngine(engine)
        (replica,) = engine.replicas
        while not engine.finished:
            with replica:
                loss = loss_of(replica.model, batch(engine.step_count, replica.data_index))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record = run.step(loss)
            if record is not None:
                print(f"step {record.stop}: lr {record.bases['learning_rate']:.2e}, losses {record.losses}", flush=True)
        return run
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--history", type=Path)
    given = parser.parse_args()
    train(given.group, given.groups, given.steps, given.history)
