"""What the ranks of `test_attached_ranks.py` run: a loop of the user's own, with hdet and without."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from launch import free_port
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.controllers import Hold
from hdet.errors import CheckpointError, ConfigError, StepError
from hdet.nested import flat
from hdet.replicas.distributed import own_gradient

STEPS, WINDOW, WIDTH = 24, 4, 8
Found = dict[str, Any]


def network(normed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norm: list[nn.Module] = [nn.BatchNorm1d(16)] if normed else []
    return nn.Sequential(nn.Linear(WIDTH, 16), *norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))


def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + part)
    inputs = torch.randn(8, WIDTH, generator=generator)
    return inputs, inputs[:, :4].argmax(dim=1)


def loss_of(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(given[0]), given[1])


def probe() -> hdet.Probe:
    return hdet.Probe(loss_of, [batch(-1, part) for part in range(8)])


HELD: list[hdet.Knob] = [hdet.LearningRate(controller=Hold()), hdet.WeightDecay(controller=Hold())]


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def static(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def hooked(model: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def fsdp(model: nn.Module) -> nn.Module:
    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model)
    return model


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model[0], mesh=mesh)  # type: ignore[index]
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), str(len(model) - 1): RowwiseParallel()})  # type: ignore[arg-type]
    return model


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp,
    "static graph": static,
    "comm hook": hooked,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tensor parallel": tensor_parallel,
}


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    search: hdet.Search | None,
    parts: int,
    quiet: bool,
    alike: bool,
    steps: Sequence[int] = range(STEPS),
) -> None:
    rank = 0 if alike else dist.get_rank()
    for step in steps:
        torch.manual_seed(100 * step + rank)
        for part in range(parts):
            early = quiet and part + 1 < parts
            with model.no_sync() if early else nullcontext():  # type: ignore[operator]
                loss = loss_of(model, batch(step, 10 * rank + part))
                if search is not None:
                    loss = search.loss(loss)
                (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


def full(tensor: Any) -> Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    held: Tensor = tensor.detach().clone()
    return held


def ends(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [full(tensor) for tensor in (*model.parameters(), *model.buffers(), *moments)]


def told(search: hdet.Search) -> list[Any]:
    records = [asdict(record) for record in search.history]
    for record in records:
        del record["seconds"], record["closing"]
    return records


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> hdet.Search:
    given = {"probe": probe(), "total_steps": STEPS, "window": WINDOW, "quiet": True, **options}
    return hdet.attach(model, optimizer, **given)


def optimizer_of(model: nn.Module, chained: bool) -> torch.optim.Optimizer:
    """AdamW, or for the first parameter SGD and for the others AdamW."""
    if not chained:
        return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    first, *rest = model.parameters()
    return hdet.ChainedOptimizer(
        torch.optim.SGD([first], lr=0.1, momentum=0.9, weight_decay=1e-3, foreach=False),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1, foreach=False),
    )


def held(name: str, parts: int, quiet: bool, normed: bool, chained: bool = False) -> Found:
    """With hdet, whose controllers hold, and without: what each ends in."""
    found = []
    measured = []
    for attached in (False, True):
        model = WRAPS[name](network(normed))
        optimizer = optimizer_of(model, chained)
        search = None
        if attached:
            search = attach(model, optimizer, schedule=None, knobs=HELD, exclude=["dropout"], tail=None)
        loop(model, optimizer, search, parts, quiet, alike=name == "tensor parallel")
        found.append(ends(model, optimizer))
        if search is not None:
            measured = told(search)
    same = all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    return {"same": same, "history": measured}


def learned(name: str, parts: int, quiet: bool, rates: str = "auto") -> Found:
    """The recipe, dropout included where gradients are seen whole."""
    model = WRAPS[name](network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    search = attach(model, optimizer, micro_batches=parts, rates=rates)
    loop(model, optimizer, search, parts, quiet, alike=name == "tensor parallel")
    return {"history": told(search), "weights": ends(model, optimizer), "replicas": search.engine.size}


def excess(name: str, strength: float) -> tuple[float, float]:
    """What the first window tells of matrices to each of which a strong direction was added, and what they have.

    Some of four ranks hold nothing of the head.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 6))
    found = []
    for weights in [own.detach() for own in model.parameters() if own.ndim == 2]:
        row, column = (F.normalize(torch.randn(size), dim=0) for size in weights.shape)
        weights += strength * torch.linalg.matrix_norm(weights, 2) * torch.outer(row, column)
        scale = weights.square().mean().sqrt() * sum(size**0.5 for size in weights.shape)
        found.append(float(torch.linalg.matrix_norm(weights, 2) / scale))
    model = WRAPS[name](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    search = attach(model, optimizer, micro_batches=1)
    loop(model, optimizer, search, 1, False, alike=name == "tensor parallel", steps=range(WINDOW))
    return search.history.windows[0].estimates["learning_rate"]["excess"], max(found)


def normed(lent: bool) -> Found:
    """BatchNorm follows each rank's own data; a loop may make the ranks' statistics their mean before a step."""
    model = ddp(network(normed=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    search = attach(model, optimizer, micro_batches=1, exclude=["dropout"])
    rank = dist.get_rank()
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        search.loss(loss_of(model, batch(step, 10 * rank))).backward()
        for buffer in model.buffers() if lent else ():
            dist.broadcast(buffer, 0)
        optimizer.step()
        optimizer.zero_grad()
    return {"history": told(search), "statistics": [buffer.clone() for buffer in model.buffers()]}


class Remembering(nn.Module):
    """Training reads what each rank keeps of its own data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("seen", torch.full((4,), float(dist.get_rank())))
        self.register_buffer("scale", torch.full((1,), 0.1).expand(4))  # it cannot be written over

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.head(inputs) + self.scale * self.seen
        if self.training:
            self.seen = 0.9 * self.seen + inputs.mean(dim=0)[:4]
        return logits


class Caching(nn.Module):
    """A buffer that is as long as each rank's data have asked for, beside BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(normed=True)
        self.register_buffer("cache", torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.cache = torch.ones(8 + 4 * dist.get_rank())
        logits: Tensor = self.layers(inputs)
        return logits


def caches_of_other_lengths() -> int:
    model = DistributedDataParallel(Caching(), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    search = attach(model, optimizer, micro_batches=1)
    loop(model, optimizer, search, 1, quiet=False, alike=False)
    return search.engine.step_count


def own_buffers(parts: int) -> bool:
    """Whether, with every knob held, the ranks' own buffers and the weights are those of the loop without hdet."""
    ended = []
    for explored in (False, True):
        model = DistributedDataParallel(Remembering(), broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        if explored:
            attach(model, optimizer, schedule=None, knobs=HELD[:1], exclude=["weight_decay"], tail=None)
        for step in range(STEPS):
            for part in range(parts):
                loss_of(model, batch(step, 10 * dist.get_rank() + part)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ended.append([*model.parameters(), *model.buffers()])
    return all(torch.equal(one, other) for one, other in zip(*ended, strict=True))


def looked_at(given: bool) -> int:
    """A model that ran in evaluation before, as a trainer's do, and so is gathered when it is attached to.

    Args:
        given: whether its replicas were made before that, and none of its layers is sharded by itself.
    """
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = fully_shard(network(), mesh=mesh) if given else fsdp(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"replicas": hdet.distribute(model, optimizer, mesh=mesh, micro_batches=1)} if given else {}
    with torch.no_grad():
        model.eval()(batch(0, 0)[0])
    model.train()
    search = attach(model, optimizer, **options)
    loop(model, optimizer, search, 1, False, alike=False)
    search.state_dict()
    return search.engine.step_count


def made_after_a_look() -> int:
    """The same model, whose replicas are made after that."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = fully_shard(network(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with torch.no_grad():
        model.eval()(batch(0, 0)[0])
    return hdet.distribute(model, optimizer, mesh=mesh).size


def skipped_by_a_scaler() -> Found:
    """A loop over all batches whose GradScaler skips two steps."""
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with attach(model, optimizer) as search:
        for step in range(STEPS):
            loss = search.loss(loss_of(model, batch(step, dist.get_rank())))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if step in (1, 9):
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        over = search._riding._made_all_steps()
    return {"steps": search.engine.step_count, "over": over, "weights": [p.detach() for p in model.parameters()]}


def held_by_one() -> Found:
    """A sharded model of which one rank holds all and the other nothing: its only weights have one row."""
    model = nn.Sequential(nn.Linear(WIDTH, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    x = torch.randn(4 * STEPS, 8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    held_out = hdet.Probe(lambda model, given: (model(given) - 1.0).square().mean(), [*x[-4:]])
    search = hdet.attach(model, optimizer, probe=held_out, total_steps=STEPS, window=WINDOW, quiet=True)
    for step in range(STEPS):
        search.loss((model(x[step]) - 1.0).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"held": [p.to_local().numel() for p in model.parameters()], "slopes": slopes(search)}  # type: ignore[attr-defined]


def slopes(search: hdet.Search) -> list[float]:
    return [record.estimates["weight_decay"]["slope"] for record in search.history]


def tailed(name: str, normed: bool) -> Found:
    """A run that ends with averaged weights: whether they are those of the steps, and the ends of what follows data.

    At its end each rank but the first has losses of its own, as it has their last bits in other runs.
    """
    model = WRAPS[name](network(normed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if normed else 4.0, foreach=False)

    def off(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, given) * (1.0 - 0.5 * dist.get_rank() * (search.engine.step_count == STEPS))

    search = attach(
        model,
        optimizer,
        micro_batches=1,
        schedule=None,
        knobs=HELD[:1],
        exclude=["weight_decay", "dropout"],
        tail=hdet.TailAverage(starts=(0.4,), significance=0.0),
        probe=hdet.Probe(off, probe().batches),
    )
    path: list[list[Tensor]] = []
    for step in range(STEPS):
        loop(model, optimizer, search, 1, quiet=False, alike=name == "tensor parallel", steps=[step])
        path.append([full(parameter) for parameter in model.parameters()])
    (part,) = search.history.windows[-1].tail["parts"]
    start, share = part["start"], part["share"]
    # The last step's weights are nobody's to see; what the others leave of the mean tells what they were.
    *seen, ended = path
    own = 1.0 - share + share / (STEPS - start)
    rest = [share / (STEPS - start) * sum(same) for same in zip(*seen[start:], strict=True)]
    last = [(mean - before) / own for mean, before in zip(ended, rest, strict=True)]
    moved = [float((one - before).norm()) for one, before in zip(last, seen[-1], strict=True)]
    usual = [float((one - before).norm()) for one, before in zip(seen[-1], seen[-2], strict=True)]
    losses = [0.0 if normed else float(probe().measure(holding(own), 0).mean()) for own in (ended, last)]
    return {
        "difference": search.history.windows[-1].tail["difference"],
        "measured": losses[0] - losses[1],
        "start": start,
        "share": share,
        "a step away": all(0.0 < one < 20 * other + 1e-3 for one, other in zip(moved, usual, strict=True)),
        "weights": ended,
        "statistics": [full(buffer) for key, buffer in model.named_buffers() if "running" in key],
        "history": told(search),
    }


def ended_where_it_was_taken_up(path: str) -> Found:
    """A run that is taken up between two windows, and ended there; only the first rank has the history."""
    searches = []
    for _ in range(2):
        model = ddp(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=4.0, foreach=False)
        tail = hdet.TailAverage(starts=(0.0,), significance=0.0)
        searches.append(
            attach(model, optimizer, micro_batches=1, knobs=HELD, schedule=None, tail=tail, history=hdet.History(path))
        )
        if len(searches) == 1:
            loop(model, optimizer, searches[0], 1, quiet=False, alike=False, steps=range(4 * WINDOW))
            dist.barrier()
    first, second = searches
    second.load_state_dict(first.state_dict())
    second.engine.finish()
    return {"weights": ends(model, optimizer), "tails": [record.tail for record in second.history]}


def holding(weights: Sequence[Tensor]) -> nn.Module:
    """The network in one piece, without BatchNorm, at some weights."""
    model = network()
    for own, value in zip(model.parameters(), weights, strict=True):
        own.detach().copy_(value)
    return model


def stopped(name: str, normed: bool) -> Found:
    """A run whose last third climbs: whether it ends with the mean of weights from before."""
    model = WRAPS[name](network(normed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    tail = hdet.TailAverage(starts=(0.3, 0.6), significance=0.0)
    search = attach(
        model, optimizer, micro_batches=1, schedule=None, knobs=HELD[:1], exclude=["weight_decay", "dropout"], tail=tail
    )
    path: list[list[Tensor]] = []
    for step in range(STEPS):
        optimizer.param_groups[0]["maximize"] = step >= 2 * STEPS // 3
        loop(model, optimizer, search, 1, quiet=False, alike=name == "tensor parallel", steps=[step])
        path.append([full(parameter) for parameter in model.parameters()])
    ended = search.history.windows[-1].tail
    first = ended["parts"][0]
    means = [torch.stack(same).mean(0) for same in zip(*path[first["start"] : first["stop"]], strict=True)]
    return {
        "ended": ended,
        "the mean": all(torch.allclose(*pair, atol=1e-5) for pair in zip(path[-1], means, strict=True)),
        "weights": path[-1],
        "history": told(search),
    }


def grouped(name: str) -> Found:
    """A learning rate for each of three groups, by patterns on names."""
    model = WRAPS[name](network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    rates = {"head": "3.*", "biases": "*.bias"}
    search = attach(model, optimizer, micro_batches=1, rates=rates, exclude=["weight_decay", "dropout"])
    loop(model, optimizer, search, 1, False, alike=name == "tensor parallel")
    return {"history": told(search), "weights": ends(model, optimizer)}


def probe_by_own_part(count: int) -> str:
    """What is said on shards where each rank's probe has a part of the data, the last rank's in so many batches."""
    model = fsdp(network())
    last = dist.get_rank() == dist.get_world_size() - 1
    batches = [batch(-1, 8 * dist.get_rank() + part) for part in range(count if last else 8)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    try:
        loop(model, optimizer, attach(model, optimizer, probe=hdet.Probe(loss_of, batches)), 1, False, alike=False)
    except StepError as error:
        return str(error)
    return "nothing was refused"


def large_network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 1100), nn.Tanh(), nn.Dropout(0.2), nn.Linear(1100, 1000), nn.Linear(1000, 4)
    return nn.Sequential(*layers)


def whole_on_a_mesh() -> tuple[list[str], list[str]]:
    """The knobs of a model that `fully_shard` averages over ranks and cuts nowhere, and the warnings of a run."""
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search = attach(model, optimizer, micro_batches=1)
        loop(model, optimizer, search, 1, quiet=False, alike=False)
    told = [str(warning.message) for warning in caught if "backward" in str(warning.message)]
    return sorted(search.shifts), told


def large_and_sharded() -> list[str]:
    """The knobs of a large model of which each rank holds a part."""
    model = fsdp(large_network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    return sorted(attach(model, optimizer, micro_batches=1, exclude=["weight_decay", "dropout"]).shifts)


def large(together: int) -> Found:
    """The default rates of a large model, whose own gradients are handed over where they have so many numbers."""
    model = ddp(large_network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    search = attach(model, optimizer, micro_batches=1)
    with patch.object(own_gradient, "TOGETHER", together):
        loop(model, optimizer, search, 1, quiet=False, alike=False)
    return {"knobs": sorted(search.shifts), "history": told(search), "weights": ends(model, optimizer)}


def explicit() -> Found:
    """The loop written for the engine, on the same model."""
    model = ddp(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    replicas = hdet.distribute(model, optimizer, micro_batches=1)
    engine = hdet.recommended(
        model, optimizer, probe=probe(), total_steps=STEPS, window=WINDOW, quiet=True, replicas=replicas
    )
    rank = dist.get_rank()
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        with engine.replicas[0] as replica:
            loss = loss_of(replica.model, batch(step, 10 * rank))
            loss.backward()
        engine.share_gradients()
        optimizer.step()
        optimizer.zero_grad()
        engine.step(loss.detach())
    records = [asdict(record) for record in engine.history]
    for record in records:
        del record["seconds"], record["closing"]
    return {"history": records, "weights": ends(model, optimizer)}


def plain() -> str:
    """A model that nothing wraps, on several ranks."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    try:
        attach(model, optimizer)
    except ConfigError as error:
        return str(error)
    return ""


def _attached(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, hdet.Search]:
    model = ddp(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    search = attach(model, optimizer, **options)
    return model, optimizer, search


def _refusal(error: type[Exception], run: Callable[[], None]) -> str:
    try:
        run()
    except error as refused:
        return str(refused)
    return "nothing was refused"


def unlike(what: str) -> str:
    """One step in which the ranks differ in their passes, or in whether they report a loss."""
    model, optimizer, search = _attached()
    rank = dist.get_rank()

    def step() -> None:
        for part in range(1 + rank if what == "passes" else 1):
            with model.no_sync() if part < rank and what == "passes" else nullcontext():  # type: ignore[operator]
                loss = loss_of(model, batch(0, 10 * rank + part))
                (search.loss(loss) if what == "passes" or rank == 0 else loss).backward()
        optimizer.step()

    return _refusal(StepError, step)


def schedulers_that_differ(name: str) -> str:
    """Where ranks take their schedulers to be of other lengths, as by each rank's own number of batches."""
    model = WRAPS[name](network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS + 2 * dist.get_rank())
    return _refusal(ConfigError, lambda: attach(model, optimizer, scheduler=scheduler))


def groups_in_another_order() -> str:
    """The optimizer's groups are built the other way round on the second rank; matrices have rates of their own."""
    model = ddp(network())
    first, second, *rest = model.parameters()
    groups = [{"params": [first, second]}, {"params": rest}]
    optimizer = torch.optim.AdamW(groups[:: -1 if dist.get_rank() else 1], lr=0.01)
    return _refusal(ConfigError, lambda: attach(model, optimizer, micro_batches=1))


def declared_unlike(options: Sequence[Found]) -> str:
    """Each rank gives its own of these arguments."""
    model = ddp(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return _refusal(ConfigError, lambda: attach(model, optimizer, **options[dist.get_rank()]))


def settings_that_ranks_write_unlike(key: str, far: float) -> str:
    """In the second window, on the last rank; two of the three go on with one value."""
    model = WRAPS["fsdp"](network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    search = attach(model, optimizer, schedule=None)

    def train() -> None:
        for step in range(STEPS):
            if step == WINDOW + 1 and dist.get_rank() == dist.get_world_size() - 1:
                optimizer.param_groups[0][key] *= far
            search.loss(loss_of(model, batch(step, dist.get_rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()

    return _refusal(StepError, train)


def probe_that_one_rank_cannot_read() -> list[str]:
    """The warnings of a run in which a probe's batch is damaged on the second rank, after the first window."""
    batches = [batch(-1, part) for part in range(8)]

    def drawn(window: int) -> list[tuple[Tensor, Tensor]]:
        if window and dist.get_rank() == 1:
            batches[3][0][0, 0] = torch.nan
        return batches

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, search = _attached(probe=hdet.Probe(loss_of, drawn))
        loop(model, optimizer, search, 1, False, False)
    return [str(warning.message) for warning in caught]


def state_of_one_rank() -> str:
    """Rank 0's state, taken in mid-window, loaded on every rank."""
    model, optimizer, search = _attached()
    for step in range(WINDOW + 2):
        search.loss(loss_of(model, batch(step, dist.get_rank()))).backward()
        optimizer.step()
        optimizer.zero_grad()
    box = [search.state_dict() if dist.get_rank() == 0 else None]
    if dist.get_rank() != 0:
        search.engine.home.settle()  # as rank 0 does while it takes its state
    dist.broadcast_object_list(box)
    return _refusal(CheckpointError, lambda: search.load_state_dict(box[0]))


def damaged_on_one_rank() -> tuple[str, float]:
    """Each rank's own state between two windows, of which rank 1's has no peaks; what is said, and the end's weight."""
    model, optimizer, search = _attached()

    def train(steps: range) -> None:
        for step in steps:
            search.loss(loss_of(model, batch(step, dist.get_rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(range(WINDOW))
    state = search.state_dict()
    if dist.get_rank() == 1:
        state["peaks"] = None
    said = _refusal(CheckpointError, lambda: search.load_state_dict(state))
    train(range(WINDOW, 2 * WINDOW))
    return said, float(next(model.parameters()).detach().sum())


def joined() -> str:
    """Ranks with different numbers of batches."""
    model, _, search = _attached()
    with Join([model]):  # type: ignore[list-item]
        return _refusal(StepError, lambda: search.loss(loss_of(model, batch(0, 0))))


@contextmanager
def before_the_group() -> Iterator[None]:
    """What stands in the block comes before the process group, which is there again after it."""
    rank, ranks, port = dist.get_rank(), dist.get_world_size(), [free_port()]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    yield
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port[0]}", rank=rank, world_size=ranks)


def group_made_late() -> str:
    """What the first pass says where the search is older than the process group."""
    with before_the_group():
        model = network()
        search = attach(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    wrapped = DistributedDataParallel(model)
    return _refusal(StepError, lambda: search.loss(loss_of(wrapped, batch(0, 0))))


def group_made_late_beside_replicas_that_were_given() -> int:
    """Steps that a worker on its own has made, which joined others after its first."""
    with before_the_group():
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        search = attach(model, optimizer, replicas=hdet.micro_batches(model, optimizer, 1))
        search.loss(loss_of(model, batch(0, 0))).backward()
        optimizer.step()
    search.loss(loss_of(model, batch(1, 0))).backward()
    optimizer.step()
    return search.engine.step_count


def hooks_left() -> int:
    """Of the parameters, after searches that counted the micro-batches of a step and were detached."""
    model = ddp(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        with attach(model, optimizer) as search:
            loop(model, optimizer, search, 2, quiet=False, alike=False, steps=range(3))
    return sum(len(parameter._backward_hooks or {}) for parameter in model.parameters())


def state_of_all_ranks() -> dict[str, Any]:
    """Taken in mid-window, as rank 0 keeps it."""
    model, optimizer, search = _attached()
    for step in range(WINDOW + 2):
        search.loss(loss_of(model, batch(step, dist.get_rank()))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return search.all_ranks.state_dict()


def resumed_on_other_ranks(state: dict[str, Any]) -> int:
    """The step at which a run on other ranks goes on, with a warning."""
    *_, search = _attached()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search.all_ranks.load_state_dict(state)
    assert any("could not go on in the window" in str(warning.message) for warning in caught)
    return search.engine.step_count


def history_that_one_rank_cannot_write(folder: str) -> tuple[int, list[str]]:
    """A file lies where rank 0 wants its folder; no other rank writes."""
    model = ddp(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    search = attach(model, optimizer, micro_batches=1, history=f"{folder}/taken/history.jsonl")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(model, optimizer, search, 1, quiet=False, alike=False)
    return search.engine.step_count, [str(warning.message) for warning in caught]


def states_of_a_group() -> int:
    """Each rank trains a model of its own, in a group of its own; only the first gathers its state."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = DistributedDataParallel(network(), process_group=groups[dist.get_rank()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    search = attach(model, optimizer, micro_batches=1)
    if dist.get_rank() > 0:
        return 0
    return len(search.all_ranks.state_dict()["ranks"])


def sharded_and_resumed(saved_at: int, chained: bool) -> tuple[Found, Found]:
    """A run in one go, and the same gone on with from the state that rank 0 kept of all ranks."""
    found = []
    box: list[Any] = [None]
    for resumed in (False, True):
        model = fsdp(network())
        optimizer = optimizer_of(model, chained)
        search = attach(model, optimizer, micro_batches=1)
        if resumed:
            search.all_ranks.load_state_dict(box[0])
        else:
            loop(model, optimizer, search, 1, quiet=False, alike=False, steps=range(saved_at))
            box[0] = search.all_ranks.state_dict()
            dist.broadcast_object_list(box)
        loop(model, optimizer, search, 1, quiet=False, alike=False, steps=range(saved_at, STEPS))
        history = told(search)
        found.append({"history": history[-3:], "weights": ends(model, optimizer)})
    return found[0], found[1]


def among_other_groups(path: str, saved_at: int, others: int) -> Found:
    """A run whose state rank 0 keeps in a file, or, among so many other groups, the same gone on with from there."""
    for _ in range(others):
        dist.new_group([0, 1])
    model = hsdp(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    search = attach(model, optimizer, micro_batches=1)
    said: list[Any] = []
    if others:
        search.all_ranks.load_state_dict(torch.load(path, weights_only=True))
    else:
        loop(model, optimizer, search, 1, quiet=False, alike=False, steps=range(saved_at))
        with patch.object(logging.getLogger("torch.distributed.device_mesh"), "callHandlers", said.append):
            state = search.all_ranks.state_dict()
        if dist.get_rank() == 0:
            torch.save(state, path)
    held = [full(value) for value in flat(search.state_dict(), "/").values() if hasattr(value, "full_tensor")]
    return {"ends": ends(model, optimizer), "held": held, "said": list(map(str, said))}


def models_trained_apart() -> tuple[str, int]:
    """Two models on one mesh, each of two ranks: what is said of them, and the steps of one whose part is given."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("job", "replicate", "shard"))
    found: list[Any] = []
    for given in (False, True):
        model = network()
        fully_shard(model, mesh=mesh["shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        own = {"replicas": hdet.distribute(model, optimizer, mesh=mesh["replicate", "shard"], micro_batches=1)}
        search = attach(model, optimizer, micro_batches=None if given else 1, **own if given else {})
        steps = range(2 * WINDOW if dist.get_rank() > 1 else WINDOW)
        run = partial(loop, model, optimizer, search, 1, quiet=False, alike=False, steps=steps)
        found += [_refusal(StepError, run), search.engine.step_count]
    return found[0], found[3]


def part_of_another_rank() -> str:
    """Rank 0's part of a sharded model's search, between two windows, loaded on every rank."""
    model = fsdp(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    search = attach(model, optimizer, micro_batches=1)
    loop(model, optimizer, search, 1, quiet=False, alike=False, steps=range(WINDOW))
    box = [search.state_dict()]
    dist.broadcast_object_list(box)
    return _refusal(CheckpointError, lambda: search.load_state_dict(box[0]))
