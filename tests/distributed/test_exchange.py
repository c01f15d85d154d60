"""Collectives on lists of tensors, and what is refused, by real ranks."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import batch, batch_normed, knobs, network, optimizer_of, probe

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError, StepError
from hdet.merges import Exploit, Mean
from hdet.replicas import tensors
from hdet.replicas.distributed import fully_sharded, optimizer_mean
from hdet.replicas.distributed.exchange import Exchange, fold
from hdet.replicas.distributed.fingerprint import fingerprint
from hdet.replicas.distributed.layout import Group, of_group
from hdet.spaces import Log
from hdet.spreads import TwoLevel

Found = dict[str, Any]
POLICIES = ("average", "keep")


def members(rank: int) -> list[torch.Tensor]:
    """Every kind of tensor that a model may hold."""
    generator = torch.Generator().manual_seed(rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [
        normal(7, 3),
        normal(1000),  # larger than a bucket
        torch.zeros(0),
        normal(),
        normal(4, 5).t(),  # strided
        normal(2, 3, 4, 4).to(memory_format=torch.channels_last),
        (normal(33).tanh() * 60000).half(),  # their sum overflows
        normal(33).bfloat16(),
        normal(5).double(),
    ]


def of_odd_types(rank: int) -> list[torch.Tensor]:
    """Types of weights and buffers that gloo knows no collective of, and a complex one."""
    kinds = (torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn, torch.complex64)
    return [torch.tensor([1.0 + rank, 0.5]).to(kind) for kind in kinds]


def exchanged() -> Found:
    rank = dist.get_rank()
    found: Found = {}
    layout = of_group(None)
    for exact in (False, True):
        name = "exact" if exact else "backend's"
        for case, weights in (("all", [1, 1, 1, 1]), ("one failed", [1, 0, 1, 1]), ("weighted", [2, 1, 0, 3])):
            exchange = Exchange(layout, torch.device("cpu"), exact, capacity=256)
            own = members(rank)
            if weights[rank] == 0:
                own[0].fill_(float("nan"))
                own[6].fill_(float("inf"))
            exchange.reduce(own, own, weights, mean=True)
            found[f"{name} {case}"] = own
        own = [t.float() for t in members(rank)]
        targets = [torch.empty_like(t) for t in own]
        exchange.reduce(own, targets, [0.5, -1.0, 0.0, 2.0], mean=False)
        found[f"{name} sum"] = targets
        same = members(0)
        exchange.reduce(same, same, [1, 1, 1, 1], mean=True)
        found[f"{name} alike"] = same
    exchange = Exchange(layout, torch.device("cpu"), False, capacity=256)
    sent = [*members(rank), torch.tensor([rank, 2]), torch.tensor([rank == 2]), *of_odd_types(rank)]
    exchange.broadcast(sent, 2)
    found["broadcast"] = sent
    found["gathered"] = exchange.gather(torch.tensor([float(rank), float("nan") if rank == 1 else 0.5]))
    found["buckets"] = exchange.bytes_held
    found.update(
        told=refused(),
        buffers=own_buffers(),
        micro=micro(),
        statistics=statistics(),
        frozen=frozen(),
        failed=failed(),
        counters=counters(),
        scalars=of_no_dimensions(),
        groups=numbers_in_groups(),
        unused=unused(),
        kinds=other_kinds(),
        partly={case: partly_used(*case) for case in PARTLY},
    )
    return found


def refused() -> dict[str, str]:
    """The messages of declarations that cannot be, all raised on every rank alike."""
    rank = dist.get_rank()
    told: dict[str, str] = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]

    def engine(replicas: hdet.replicas.Replicas, **options: Any) -> hdet.Engine:
        return hdet.Engine(replicas, options.pop("knobs", knobs()), total_steps=4, **options)

    def sharded(over: Any) -> nn.Module:
        model = network()
        fully_shard(model, mesh=over)
        return model

    def zero() -> Any:
        model = network()
        return hdet.distribute(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))

    def plain(**options: Any) -> Any:
        model = network()
        return hdet.distribute(model, optimizer_of(model), **options)

    def wide() -> Any:
        model = nn.Linear(3, 2 if rank else 5)
        return engine(hdet.distribute(nn.Sequential(model), optimizer_of(model)))

    def hooked() -> Any:
        model = DistributedDataParallel(network())
        model.register_comm_hook(None, lambda state, bucket: None)
        return engine(hdet.distribute(model, optimizer_of(model), exact=True))

    def pair(model: nn.Module, **options: Any) -> Any:
        return hdet.distribute(model, optimizer_of(model), **options)

    def odd(frozen: torch.Tensor | None, buffer: torch.Tensor | None = None) -> Any:
        model = network()
        model.odd = nn.Parameter(frozen, requires_grad=False) if frozen is not None else None
        model.register_buffer("other", buffer)
        return pair(model)

    def localized(trained: bool) -> Any:
        base = parallelize_module(network(), mesh["dp_shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        adapted = nn.Sequential(base.requires_grad_(trained), nn.Linear(1, 1))
        model = DistributedDataParallel(adapted, device_mesh=mesh["dp_replicate"])
        return hdet.distribute(model, torch.optim.SGD((model if trained else adapted[1]).parameters(), lr=0.1))

    def local_hsdp() -> Any:
        with patch.object(fully_sharded, "COMMON", "torch.somewhere_else"):
            return engine(pair(sharded(mesh), mesh=mesh), gradients="local")

    attempts = {
        "zero": zero,
        "one replica": lambda: pair(sharded(mesh["dp_shard"])),
        "localized": lambda: localized(trained=True),
        "localized base": lambda: localized(trained=False),
        "local hsdp": local_hsdp,
        "seed": lambda: engine(plain(), seed=rank % 2),
        "knobs": lambda: engine(plain(), knobs=[hdet.LearningRate(spread=TwoLevel(0.1 + 0.1 * (rank == 3)))]),
        "shapes": wide,
        "expanded": lambda: odd(torch.full((1, 4), 1.0 + rank).expand(4, 4)),
        "expanded on one": lambda: odd(torch.ones(1, 4).expand(4, 4) if rank == 1 else torch.ones(4, 4)),
        "a buffer on one": lambda: odd(None, torch.ones(1, 4).expand(4, 4) if rank == 0 else torch.ones(4, 4)),
        "group": lambda: pair(DistributedDataParallel(network()), group=half),
        "both": lambda: plain(group=half, mesh=mesh),
        "no dimension": lambda: plain(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))),
        "copies": lambda: pair(DistributedDataParallel(network()), copies=2),
        "hook": hooked,
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except hdet.errors.HdetError as error:
            told[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return told


def own_buffers() -> Found:
    """Knobs kept as buffers and batch statistics are a rank's own under DDP."""
    rank = dist.get_rank()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = batch_normed()
            self.dropped = hdet.nn.Dropout(0.2)
            self.register_buffer("scale", torch.tensor(1.0))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append((float(self.scale), self.dropped.p))
            found: torch.Tensor = self.inner(self.dropped(inputs)) * self.scale
            return found

    seen: list[tuple[float, float]] = []
    model = DistributedDataParallel(Scaled())
    engine = hdet.Engine(
        hdet.distribute(model, optimizer_of(model)),
        [hdet.Scalar("scale", path="scale", spread=TwoLevel(0.1), bounds=(0.5, 2.0), space=Log()), hdet.Dropout()],
        window=3,
        gradients="local",
        signal=hdet.Probe(lambda m, x: m(x).square().mean(), [torch.ones(4, 6), torch.zeros(4, 6)]),
        total_steps=6,
    )
    for _ in range(2):
        with engine.replicas[0] as replica:
            loss = replica.model(torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))).square().mean()
            loss.backward()
        engine.optimizers[0].step()
        engine.step([loss])
    values = {knob.name: knob.values(1, [rank])[0] for knob in engine.knobs}
    statistics = dict(model.module.inner[1].named_buffers())["running_mean"].clone()
    return {"seen": seen, "values": values, "statistics": statistics}


def micro() -> Found:
    """Two micro-batches on each of four ranks are the eight replicas."""
    model = DistributedDataParallel(network())
    engine = hdet.Engine(
        hdet.distribute(model, optimizer_of(model), micro_batches=2),
        [hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold())],
        window=2,
        total_steps=4,
    )
    from training import told, train, weights

    train(engine, 4)
    return {"history": told(engine), "weights": weights(engine)[0], "size": engine.size}


def statistics() -> dict[str, torch.Tensor]:
    """Batch statistics at a window's end where several ranks train one model, by kind of home."""
    from training import train

    found = {}
    for name, wrap in (("plain", nn.Sequential), ("DDP", DistributedDataParallel)):
        model = wrap(batch_normed())
        knob = hdet.LearningRate(controller=Hold(), evidence=hdet.evidence.Line())
        home = hdet.distribute(model, optimizer_of(model), micro_batches=1)
        engine = hdet.Engine(home, [knob], window=1, total_steps=2, signal=probe())
        train(engine, 1)
        found[name] = dict(model.named_buffers())[f"{'0' if name == 'plain' else 'module'}.1.running_mean"].clone()
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = batch_normed()
    fully_shard(model, mesh=mesh)
    knob = hdet.LearningRate(controller=Hold(), evidence=hdet.evidence.Line())
    home = hdet.distribute(model, optimizer_of(model), mesh=mesh)
    engine = hdet.Engine(home, [knob], window=1, total_steps=2, signal=probe())
    train(engine, 1, parts=(dist.get_rank(),), each=4)
    found["one shard group"] = dict(model.named_buffers())["1.running_mean"].clone()
    return found


def frozen() -> Found:
    """Frozen and tied parameters, and one that no replica uses."""
    torch.manual_seed(1)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.second = nn.Linear(6, 6)
            self.second.weight = self.first.weight
            self.still = nn.Linear(6, 6).requires_grad_(False)
            self.idle = nn.Parameter(torch.ones(3))
            self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
            self.adjacency: torch.Tensor
            self.register_buffer("adjacency", torch.eye(6).to_sparse() * (1.0 + dist.get_rank()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.counts += 1 + dist.get_rank()
            found: torch.Tensor = self.second(self.still(self.first(inputs)))
            return found

    model = Tied()
    before = model.still.weight.clone()
    engine = hdet.Engine(
        hdet.distribute(model, optimizer_of(model)), knobs(), window=2, total_steps=4, gradients="local"
    )
    from training import train

    train(engine, 4)
    return {
        "still": torch.equal(model.still.weight, before),
        "tied": model.first.weight is model.second.weight,
        "idle": model.idle.detach().clone(),
        "counts": model.counts.tolist(),
        "adjacency": model.adjacency.to_dense(),
        "weights": model.first.weight.detach().clone(),
    }


def failed() -> Found:
    """A rank whose loss is not a number takes no part, everybody knows, and it goes on from the merged model."""
    rank = dist.get_rank()
    found: Found = {}
    for policy in ("average", "keep", "reset"):
        model = network()
        engine = hdet.Engine(
            hdet.distribute(model, optimizer_of(model)),
            knobs(),
            window=3,
            total_steps=6,
            gradients="local",
            merge=Mean(policy),
        )
        from training import batch, loss_of, told, weights

        for step in range(6):
            with engine.replicas[0] as replica:
                loss = loss_of(replica.model, batch(step, rank))
                if rank == 2 and step == 1:
                    loss = loss * float("nan")
                loss.backward()
            engine.optimizers[0].step()
            engine.optimizers[0].zero_grad()
            engine.step([loss])
        state = engine.optimizers[0].state_dict()["state"]
        found[policy] = {
            "history": told(engine),
            "weights": weights(engine)[0],
            "state": all(bool(value.isfinite().all()) for held in state.values() for value in held.values()),
        }
    return found


def counters() -> Found:
    """Step counts after a mean over ranks of which the first is left out: alike everywhere, or one rank's another."""
    rank = dist.get_rank()
    found: Found = {}
    for case in ("alike", "apart"):
        exchange = Exchange(of_group(None), torch.device("cpu"), False)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if case == "apart" and rank == 1:
            optimizer.state[model.bias]["step"].fill_(7.0)
        with patch.object(exchange, "broadcast", wraps=exchange.broadcast) as sent:
            optimizer_mean.average(exchange, [optimizer], [0.0, 1.0, 1.0, 1.0])
        found[case] = [float(state["step"]) for state in optimizer.state.values()], sent.call_count
    return found


def of_no_dimensions() -> Found:
    """The state of a learned temperature after a mean: where all have one, and where the last rank has none."""
    found: Found = {}
    for case, last in (("all", 4), ("some", 3)):
        parameter = nn.Parameter(torch.tensor(1.0))
        optimizer = torch.optim.Adam([parameter])
        if dist.get_rank() < last:
            parameter.grad = torch.tensor(1.0 + dist.get_rank())
            optimizer.step()
            optimizer.state[parameter]["step"].fill_(5.0 + dist.get_rank())
        optimizer_mean.average(Exchange(of_group(None), torch.device("cpu"), False), [optimizer], [1.0] * 4)
        state = optimizer.state[parameter]
        found[case] = float(state["exp_avg"]), float(state["step"])
    return found


class Counting(torch.optim.AdamW):
    """Keeps a number of its own in its groups, as Prodigy and Schedule-Free do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.01, foreach=False)
        self.param_groups[0].update(d=np.float64(1.0), k=0)

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        group["k"] += 5 - dist.get_rank()
        group["d"] += sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
        super().step(closure)


def numbers_in_groups() -> Found:
    """What each optimizer here holds after a window in which replica 1 failed, and one parameter was rank 0's only."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.common, self.rare, self.lost = nn.Linear(6, 1), nn.Linear(6, 1), nn.Linear(6, 1)

        def forward(self, inputs: torch.Tensor, index: int) -> torch.Tensor:
            found: torch.Tensor = self.common(inputs)
            if index == 0:
                found = found + self.rare(inputs)
            return found + self.lost(inputs) if index == 1 else found

    found: Found = {}
    for policy in POLICIES:
        for copies in (1, 2):
            model = Branches()
            engine = hdet.Engine(
                hdet.distribute(model, Counting(model), copies=copies),
                [hdet.LearningRate(controller=Hold())],
                window=2,
                total_steps=4,
                gradients="local",
                merge=Mean(policy),
            )
            for step in range(2):
                losses = []
                for replica in engine.replicas:
                    with replica:
                        inputs, targets = batch(step, replica.index)
                        loss = (replica.model(inputs, replica.index) - targets).square().mean()
                        if replica.index == 1:
                            loss = loss * float("nan")
                        loss.backward()
                    losses.append(loss)
                for optimizer in engine.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                engine.step(losses)
            found[policy, copies] = [
                {
                    "d": optimizer.param_groups[0]["d"],
                    "k": optimizer.param_groups[0]["k"],
                    "state": {
                        name: [optimizer.state[p][key].clone() for key in ("exp_avg", "step")]
                        for name, p in model.named_parameters()
                        if p in optimizer.state
                    },
                }
                for model, optimizer in engine.hosts
            ]
    return found


def unused() -> Found:
    """A parameter used on one rank only gets its share of the gradient; one used on none gets no gradient."""
    rank = dist.get_rank()

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.rare, self.never = (nn.Parameter(torch.ones(2)) for _ in range(3))

    model = Branches()
    engine = hdet.Engine(
        hdet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        [hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold())],
        window=2,
        total_steps=2,
    )
    with engine.replicas[0]:
        loss = model.common.sum() + (model.rare.sum() * 8 if rank == 1 else 0.0)
        loss.backward()
    engine.share_gradients()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


class Partly(nn.Module):
    """Of which some replicas use a part only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.common, self.rare = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor, both: bool) -> torch.Tensor:
        found: torch.Tensor = self.common(inputs)
        return found + self.rare(inputs) if both else found


class PlainCount(torch.optim.Optimizer):
    """Momentum with a count that is a number of Python's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(p), of=["a", 1.5], none=None)
                state["step"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                p.sub_(state["mean"] / (1 - 0.9 ** state["step"]), alpha=self.param_groups[0]["lr"])


USERS = ((0, 2, 3, 6), (0, 2, 6), (1, 2, 5), range(8))
"""By step, the replicas that use all of the model."""

PARTLY = [(kind, merge, n) for kind in ("tensors", "plain") for merge in ("average", "keep", "exploit") for n in (1, 2)]


def partly_used(kind: str, merge: str, copies: int) -> list[dict[str, Any]]:
    """By replica of this process, weights and state after two windows; in the first some had no state to merge.

    Args:
        copies: on each of 4 ranks; negative for all replicas in one process.
    """
    model = Partly()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if kind == "tensors" else PlainCount(model.parameters())
    home = (
        hdet.distribute(model, optimizer, copies=copies, exact=True)
        if copies > 0
        else hdet.replicate(model, optimizer, n=-4 * copies)
    )
    how = Exploit("tournament") if merge == "exploit" else Mean(merge)
    engine = hdet.Engine(home, [], window=2, total_steps=4, gradients="local", merge=how)
    for step in range(4):
        losses = []
        for replica in engine.replicas:
            with replica:
                inputs, targets = batch(step, replica.index)
                loss = (replica.model(inputs, replica.index in USERS[step]) - targets).square().mean()
                if merge == "keep" and replica.index in (1, 4):
                    loss = loss * float("nan")
                loss.backward()
            losses.append(loss)
        for each in engine.optimizers:
            each.step()
            each.zero_grad()
        engine.step(losses)
    return [
        {"weights": list(model.parameters()), "state": [optimizer.state[p] for p in model.parameters()]}
        for model, optimizer in engine.hosts
    ]


class Kinds(nn.Module):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.tensor([(first + 1) * (1.0 + 2.0j)]))
        self.fine = nn.Parameter(torch.tensor([1.0 + first * 1e-12], dtype=torch.float64))
        self.phase: torch.Tensor
        self.register_buffer("phase", self.turns.detach() * 1.0j)


def other_kinds() -> dict[str, list[torch.Tensor]]:
    """Complex and double parameters, combined and merged, and a complex buffer."""
    found = {}
    for name, copies, options in (("one", 1, {}), ("two", 2, {}), ("narrow", 1, {"precision": torch.bfloat16})):
        model = Kinds(0)
        replicas = hdet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), copies=copies, **options)
        engine = hdet.Engine(replicas, [], window=1, total_steps=2, gradients="local", merge=Mean("keep"))
        engine.step([torch.tensor(0.0)] * copies)  # narrow from the second merge on
        for replica, (host, _) in zip(replicas.local, replicas.hosts, strict=True):
            host.load_state_dict(Kinds(replica.index).state_dict())
        found[f"{name} combined"] = replicas.combine(np.full(replicas.size, 1.0 / replicas.size))
        engine.step([torch.tensor(0.0)] * copies)
        found[f"{name} merged"] = list(tensors.parameters(model))
        found[f"{name} buffer"] = [model.phase]
    model = Kinds(0)
    adam = torch.optim.Adam(model.parameters(), betas=(0.0, 0.0))
    engine = hdet.Engine(hdet.distribute(model, adam), [], window=1, total_steps=1, gradients="local")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(
            parameter, (dist.get_rank() + 1) * (1.0 + 2.0j) if parameter.is_complex() else 1.0
        )
    adam.step()
    engine.step([torch.tensor(0.0)])
    found["moments"] = [adam.state[model.turns]["exp_avg"], adam.state[model.turns]["exp_avg_sq"]]
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return launch(exchanged, 4)


@pytest.mark.parametrize(("case", "taking"), [("all", [0, 1, 2, 3]), ("one failed", [0, 2, 3])])
def test_in_order_the_mean_is_that_of_one_process_bit_for_bit(ranks: list[Found], case: str, taking: list[int]) -> None:
    expected = [torch.empty_like(t) for t in members(0)]
    tensors.mean_([members(rank) for rank in taking], [expected])
    for found in ranks:
        assert all(map(torch.equal, found[f"exact {case}"], expected))


@pytest.mark.parametrize("name", ["exact", "backend's"])
@pytest.mark.parametrize(
    ("case", "weights"), [("all", [1, 1, 1, 1]), ("one failed", [1, 0, 1, 1]), ("weighted", [2, 1, 0, 3])]
)
def test_the_mean_leaves_out_who_failed_and_does_not_overflow(
    ranks: list[Found], name: str, case: str, weights: list[int]
) -> None:
    for number, kind in enumerate(members(0)):
        parts = [members(rank)[number].double() * weights[rank] for rank in range(4)]
        expected = torch.stack(parts).sum(0) / sum(weights)
        tolerance = 1e-2 if kind.dtype in (torch.float16, torch.bfloat16) else 1e-5
        for found in ranks:
            got = found[f"{name} {case}"][number]
            assert got.dtype == kind.dtype
            assert torch.allclose(got.double(), expected, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("name", ["exact", "backend's"])
def test_weighted_sums_go_to_tensors_of_their_own(ranks: list[Found], name: str) -> None:
    for number, got in enumerate(ranks[0][f"{name} sum"]):
        rows = [members(rank)[number].double() for rank in range(4)]
        assert torch.allclose(got.double(), 0.5 * rows[0] - rows[1] + 2 * rows[3], rtol=1e-4, atol=1e-2)


def test_in_order_members_that_are_alike_stay_as_they_are(ranks: list[Found]) -> None:
    assert all(map(torch.equal, ranks[0]["exact alike"], members(0)))


def test_broadcasts_of_every_kind(ranks: list[Found]) -> None:
    for found in ranks:
        expected = [*members(2), torch.tensor([2, 2]), torch.tensor([True]), *of_odd_types(2)]
        for sent, own in zip(found["broadcast"], expected, strict=True):
            assert sent.dtype == own.dtype
            assert torch.equal(sent.to(torch.complex128), own.to(torch.complex128))


def test_gathering_keeps_a_nan_where_it_is(ranks: list[Found]) -> None:
    for found in ranks:
        np.testing.assert_array_equal(found["gathered"].numpy(), [[0, 0.5], [1, np.nan], [2, 0.5], [3, 0.5]])


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_fingerprints_of_tensors_that_are_no_plain_memory() -> None:
    """A quantised one ended the process, and a sparse or lazily conjugated one the save."""
    device = torch.device("cpu")
    quantised = [torch.quantize_per_tensor(torch.ones(3) * value, 0.1, 0, torch.qint8) for value in (1.0, 2.0)]
    marks = [fingerprint([own, torch.ones(2)], device) for own in quantised]
    assert not torch.equal(*marks)
    conjugated = torch.ones(2, dtype=torch.complex64).conj()
    odd = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), conjugated, torch.ones(2, device="meta")]
    assert torch.equal(fingerprint([*odd, torch.ones(2)], device), fingerprint([torch.ones(2)], device))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero", "ZeroRedundancyOptimizer partitions the optimizer"),
        ("one replica", "share one replica and cannot hold different values"),
        ("localized", "takes the parameters off their modules"),
        ("localized base", "takes the parameters off their modules"),
        ("local hsdp", "shard over the other dimension only"),
        ("seed", "the ranks disagree on seed: seed is 0 on rank 0 and 1 on rank 1"),
        ("knobs", "the ranks disagree on knobs"),
        ("both", "give group= or mesh="),
        ("no dimension", "none is called one of"),
        ("copies", "copies= needs a plain model"),
        ("hook", "a communication hook is registered"),
        ("expanded", "the parameter odd cannot be made the first rank's: it is sparse"),
        ("expanded on one", "the ranks disagree on parameters"),
        ("a buffer on one", "the ranks disagree on buffers"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(ranks: list[Found], name: str, words: str) -> None:
    for found in ranks:
        assert words in found["told"][name]
        assert found["told"][name].startswith("ConfigError")


def test_models_of_unequal_shapes_are_refused(ranks: list[Found]) -> None:
    assert all("disagree on parameters" in found["told"]["shapes"] for found in ranks)


def test_ddp_over_other_ranks_is_refused(ranks: list[Found]) -> None:
    for found in ranks:
        assert "give both the same process group" in found["told"]["group"]


def test_ddp_does_not_overwrite_a_ranks_knobs_and_statistics(ranks: list[Found]) -> None:
    for found in ranks:
        buffers = found["buffers"]
        for scale, rate in buffers["seen"]:
            assert scale == pytest.approx(buffers["values"]["scale"], rel=1e-6)
            assert rate == pytest.approx(buffers["values"]["dropout"], rel=1e-6)
    scales = {found["buffers"]["seen"][1][0] for found in ranks}
    assert len(scales) == 2
    assert not torch.equal(ranks[0]["buffers"]["statistics"], ranks[1]["buffers"]["statistics"])


def test_micro_batches_of_several_ranks_are_one_run(ranks: list[Found]) -> None:
    from training import difference, told, train, weights

    torch.set_num_threads(1)
    model = network()
    engine = hdet.Engine(
        hdet.micro_batches(model, optimizer_of(model), n=8),
        [hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold())],
        window=2,
        total_steps=4,
    )
    train(engine, 4)
    for found in ranks:
        assert found["micro"]["size"] == 8
        assert difference(found["micro"]["weights"], weights(engine)[0]) < 2e-5
        for ours, theirs in zip(found["micro"]["history"], told(engine), strict=True):
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)


@pytest.mark.parametrize("name", ["plain", "DDP", "one shard group"])
def test_ranks_that_train_one_model_share_their_batch_statistics(ranks: list[Found], name: str) -> None:
    own = []
    for rank in range(4):
        model = batch_normed()
        model(batch(0, rank)[0])
        own.append(dict(model.named_buffers())["1.running_mean"])
    for found in ranks:
        assert torch.allclose(found["statistics"][name], torch.stack(own).mean(0), atol=1e-6)


def test_frozen_tied_integer_sparse_and_unused_tensors(ranks: list[Found]) -> None:
    for rank, found in enumerate(ranks):
        frozen = found["frozen"]
        assert frozen["still"]
        assert frozen["tied"]
        assert frozen["counts"] == [4, 4]  # the first replica's
        assert torch.equal(frozen["idle"], torch.ones(3))
        assert torch.equal(frozen["adjacency"], torch.eye(6) * (1.0 + rank))  # each rank's own
        assert torch.equal(frozen["weights"], ranks[0]["frozen"]["weights"])


@pytest.mark.parametrize("policy", ["average", "keep", "reset"])
def test_a_failed_rank_is_left_out_and_restarts_from_the_merge(ranks: list[Found], policy: str) -> None:
    for found in ranks:
        result = found["failed"][policy]
        first, second = result["history"]
        assert [loss is None for loss in first["losses"]] == [False, False, True, False]
        assert first["faults"] == [{"kind": "non_finite", "replica": 2, "step": 1, "where": "loss"}]
        assert None not in second["losses"]
        assert result["history"] == ranks[0]["failed"][policy]["history"]
        assert all(map(torch.equal, result["weights"], ranks[0]["failed"][policy]["weights"]))
        assert result["state"]


def test_counters_are_sent_only_where_they_differ(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["counters"] == {"alike": ([1.0, 1.0], 0), "apart": ([1.0, 7.0], 1)}


def test_moments_of_a_parameter_without_dimensions_are_averaged(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["scalars"]["all"] == (pytest.approx(0.1 * 2.5), 5.0)
        assert found["scalars"]["some"] == (pytest.approx(0.1 * 2.0), 5.0)


@pytest.mark.parametrize("copies", [1, 2])
def test_numbers_in_groups_are_averaged_over_the_sound_and_given_to_all(ranks: list[Found], copies: int) -> None:
    kept = [host["d"] for found in ranks for host in found["groups"]["keep", copies]]
    sound = [d for index, d in enumerate(kept) if index != 1]
    assert len(set(sound)) == len(sound)
    assert kept[1] == kept[0]  # a failed replica's is the first sound one's
    counts = {policy: [host["k"] for found in ranks for host in found["groups"][policy, copies]] for policy in POLICIES}
    assert counts["average"] == [10] * len(kept), "integers are the first one's"
    assert counts["keep"][1] == counts["keep"][0]
    for found in ranks:
        for host in found["groups"]["average", copies]:
            assert host["d"] == pytest.approx(sum(sound) / len(sound), rel=1e-12)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("policy", ["average", "keep"])
def test_a_failed_replica_takes_over_what_state_there_is(ranks: list[Found], policy: str, copies: int) -> None:
    hosts = [host["state"] for found in ranks for host in found["groups"][policy, copies]]
    for state in hosts:
        assert "lost.weight" not in state  # used by the failed replica only
        assert all(tensor.isfinite().all() for held in state.values() for tensor in held)
    assert "rare.weight" in hosts[1]
    assert all(("rare.weight" in state) == (policy == "average") for state in hosts[2:])
    if policy == "keep":
        for name, held in hosts[0].items():
            assert all(map(torch.equal, hosts[1][name], held))


def test_gradients_of_parameters_that_some_ranks_do_not_use(ranks: list[Found]) -> None:
    for found in ranks:
        assert torch.equal(found["unused"]["common"], torch.ones(2))
        assert torch.equal(found["unused"]["rare"], torch.full((2,), 2.0))
        assert found["unused"]["never"] is None


@pytest.mark.parametrize(("kind", "merge", "copies"), PARTLY)
def test_state_that_some_replicas_have_is_merged_as_in_one_process_bit_for_bit(
    ranks: list[Found], kind: str, merge: str, copies: int
) -> None:
    expected = partly_used(kind, merge, -copies)
    hosts = [host for found in ranks for host in found["partly"][kind, merge, copies]]
    for host, wanted in zip(hosts, expected, strict=True):
        assert all(map(torch.equal, host["weights"], wanted["weights"]))
        for own, want in zip(host["state"], wanted["state"], strict=True):
            assert own.keys() >= {key for key in want if want[key] is not None}
            assert all(torch.equal(v, want[k]) if torch.is_tensor(v) else v == want[k] for k, v in own.items())


@pytest.mark.parametrize(("name", "size"), [("one", 4), ("two", 8), ("narrow", 4)])
def test_complex_and_double_parameters_stay_what_they_are(ranks: list[Found], name: str, size: int) -> None:
    for found in ranks:
        for done in ("combined", "merged"):
            turns, fine = found["kinds"][f"{name} {done}"]
            rough = 1e-2 if f"{name} {done}" == "narrow merged" else 1e-6
            assert turns.item() == pytest.approx((size + 1) / 2 * (1.0 + 2.0j), rel=rough)
            assert fine.item() == pytest.approx(1.0 + (size - 1) / 2 * 1e-12, abs=1e-14)
        rough = 1e-2 if name == "narrow" else 1e-6
        (phase,) = found["kinds"][f"{name} buffer"]
        assert phase.item() == pytest.approx((size + 1) / 2 * (1.0j - 2.0), rel=rough)


def test_complex_moments_are_averaged(ranks: list[Found]) -> None:
    for found in ranks:
        first, second = found["kinds"]["moments"]
        assert first.item() == pytest.approx(2.5 * (1.0 + 2.0j))
        assert second.item() == pytest.approx(7.5 * (1.0 + 4.0j))  # squares of the two parts, each on its own


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6).filter(any), st.integers(0, 2**31))
def test_folding_is_the_weighted_mean(weights: list[int], seed: int) -> None:
    rows = torch.randn(len(weights), 5, generator=torch.Generator().manual_seed(seed))
    exact = (rows.double() * torch.tensor(weights, dtype=torch.float64)[:, None]).sum(0) / sum(weights)
    assert torch.allclose(fold(rows, weights, mean=True).double(), exact, atol=1e-5)


@given(st.integers(0, 2**31), st.integers(0, 19))
def test_a_fingerprint_shows_any_single_change(seed: int, place: int) -> None:
    own = [torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)), torch.arange(3)]
    before = fingerprint(own, torch.device("cpu"))
    assert torch.equal(before, fingerprint([t.clone() for t in own], torch.device("cpu")))
    flat = own[0].view(-1)
    flat[place] = torch.nextafter(flat[place], torch.tensor(torch.inf))
    assert not torch.equal(before, fingerprint(own, torch.device("cpu")))


def test_without_a_process_group_the_way_in_is_told() -> None:
    model = network()
    with pytest.raises(ConfigError, match="init_process_group"):
        hdet.distribute(model, optimizer_of(model))


def test_without_torchruns_variables_the_way_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="torchrun"), hdet.process_group():
        pass


@pytest.mark.parametrize(
    ("name", "given", "bounds"),
    [
        ("WORLD_SIZE", "abc", "of at least 1"),
        ("WORLD_SIZE", "-1", "of at least 1"),
        ("RANK", "x", "from 0 to 1"),
        ("RANK", "2", "from 0 to 1"),
        ("LOCAL_RANK", "", "of at least 0"),
        ("MASTER_PORT", "99999999", "from 0 to 65535"),
    ],
)
def test_a_variable_of_torchrun_that_cannot_be_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, given: str, bounds: str
) -> None:
    valid = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871"}
    for variable, value in {**valid, name: given}.items():
        monkeypatch.setenv(variable, value)
    said = f"^the environment variable {name} is '{given}', and should be a whole number {bounds};"
    with pytest.raises(ConfigError, match=said), hdet.process_group(timeout=1.0):
        pass


def test_a_group_that_is_gone_is_told_of() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    group = Group(dist.group.WORLD)  # type: ignore[arg-type]
    dist.destroy_process_group()
    gc.collect()
    with pytest.raises(StepError, match="the process group has been destroyed; train inside its block"):
        group()
