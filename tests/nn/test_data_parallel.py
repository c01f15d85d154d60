"""DistributedDataParallel broadcasts parameters and buffers from rank 0, and must leave knobs alone."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hdet.nn import knob_tensors, swap


def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
        nn.Dropout(0.1),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
    )
    swap(model)
    for role in ("dropout", "temperature"):
        for knob in knob_tensors(model, role).values():
            knob.fill_(0.2 + 0.3 * rank)
    wrapped = DistributedDataParallel(model)
    # BatchNorm's buffers make each forward broadcast from rank 0.
    for _ in range(2):
        wrapped(torch.randn(3, 4)).square().sum().backward()
    names = list(knob_tensors(wrapped, "dropout"))
    knobs = [knob for role in ("dropout", "temperature") for knob in knob_tensors(wrapped, role).values()]
    values = {knob.value for knob in knobs}
    tensors = {round(knob.tensor.item(), 6) for knob in knobs}
    torch.save((names, values, tensors, model[0].weight.detach()), f"{folder}/{rank}.pt")
    while not all(Path(folder, f"{each}.pt").exists() for each in (0, 1)):
        time.sleep(0.01)
    # All is said; gloo's threads do not always survive the interpreter's teardown.
    os._exit(0)


def test_knobs_differ_over_ranks_after_construction_and_training(tmp_path: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(train, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first[0] == second[0] == ["2.p", "3.self_attn.dropout", "3.dropout.p", "3.dropout1.p", "3.dropout2.p"]
    assert first[1:3] == ({0.2}, {0.2})
    assert second[1:3] == ({0.5}, {0.5})
    assert torch.equal(first[3], second[3])
