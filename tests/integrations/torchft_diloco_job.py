"""One of two replicas under torchft's own DiLoCo: started by test_torchft.py as a process of its own."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

import hdet

sys.path.insert(0, str(Path(hdet.__file__).parent.parent / "examples"))

from torchft_replicas import batch, loss_of, made

STEPS, WINDOW = 40, 10


def main(group: int, folder: Path) -> None:
    """Train, and save the anchors: the weights that each window opens with."""
    torch.manual_seed(0)
    model = made()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"group_{group}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        timeout=timedelta(seconds=60),
        quorum_timeout=timedelta(seconds=60),
    )
    anchors = []
    try:
        with DiLoCo(manager, [model], inner, outer, sync_every=WINDOW):
            for step in range(STEPS):
                loss_of(model, batch(step, group)).backward()
                inner.step()
                inner.zero_grad()
                if (step + 1) % WINDOW == 0:
                    anchors.append([parameter.detach().clone() for parameter in model.parameters()])
        assert manager.current_step() == STEPS // WINDOW
    finally:
        manager.shutdown(wait=False)
    torch.save(anchors, folder / f"anchors{group}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
