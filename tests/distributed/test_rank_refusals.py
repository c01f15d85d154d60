"""What ranks must have in common, what is refused where they have not, and ranks that fail; real processes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, TensorDataset
from training import batch, difference, loss_of, network, optimizer_of, train, weights

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError, StepError
from hdet.schedules import OneCycle
from hdet.spreads import TwoLevel

Found = dict[str, Any]
NOISE = 0.3
HELD_OUT = TensorDataset(*batch(-1, 0, size=32))


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except ConfigError as error:
        return str(error)
    return ""


def declared_with(betas: tuple[float, float], lr: float) -> hdet.Engine:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas)
    schedule = OneCycle(0.02, total_steps=cases.STEPS)
    return cases.engine_of(hdet.distribute(model, optimizer), knobs=[hdet.LearningRate(schedule=schedule)])


def in_another_order() -> hdet.replicas.Replicas:
    """The last rank's optimizer has two parameters of one shape the other way round, as from a set of their names."""
    model = Twins()
    first, second, third = model.parameters()
    held = [third, second, first] if dist.get_rank() == dist.get_world_size() - 1 else [first, second, third]
    return hdet.distribute(DistributedDataParallel(model), torch.optim.AdamW(held))


class Normed(nn.Module):
    """A norm that tensor parallelism leaves whole on each rank of a replica, before layers that it cuts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 16), nn.Linear(16, 1)


def sequence_parallel() -> hdet.Engine:
    mesh = init_device_mesh("cpu", (1, 1, 4), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = Normed()
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
    still = [hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold())]
    return cases.engine_of(hdet.distribute(model, optimizer_of(model), mesh=mesh), knobs=still)


def failing(engine: hdet.Engine) -> Found:
    """The loss that rank 1 tells is not a number in step 1."""
    records = []
    for step in range(cases.WINDOW):
        with engine.replicas[0] as replica:
            loss = loss_of(replica.model, batch(step, dist.get_rank()))
            loss.backward()
        engine.share_gradients()
        engine.optimizers[0].step()
        engine.optimizers[0].zero_grad()
        records.append(engine.step(loss * float("nan") if (step, dist.get_rank()) == (1, 1) else loss))
    record = records[-1]
    assert record is not None
    failed = [i for i, value in enumerate(record.losses) if value is None]
    return {"failed": failed, "faults": record.faults, "weights": weights(engine)[0]}


class Twins(nn.Module):
    """Layers of one shape, which could be taken for each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs).sum(dim=1, keepdim=True)
        return found


def frozen(layer: int, **home: Any) -> str:
    """What is said where a rank freezes one of the layers before the second step; "" where weights stay right."""
    model = Twins()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    still = [hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold())]
    engine = cases.engine_of(hdet.distribute(model, optimizer, **home), knobs=still)
    train(engine, 1)
    for own, _ in engine.hosts:
        own.get_parameter(f"layers.{layer}.weight").requires_grad_(False)
    try:
        train(engine, 2)
    except StepError as error:
        return str(error)
    gathered = [torch.empty(3, 6, 6) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.stack([own.detach() for own in model.parameters()]))
    return "" if all(torch.equal(own, gathered[0]) for own in gathered) else "apart"


def without_the_block(**options: Any) -> str:
    """What is said of a loop that leaves `with replica:` out, under DistributedDataParallel."""
    model = DistributedDataParallel(network())
    engine = cases.engine_of(hdet.distribute(model, optimizer_of(model)), **options)
    loss_of(model, batch(0, dist.get_rank())).backward()
    engine.share_gradients()
    engine.optimizers[0].step()
    try:
        engine.step(0.0)
    except StepError as error:
        return str(error)
    return ""


def judged_by(batches: Any) -> str:
    """What is said where the first window ends under this probe; "" where it is judged."""
    model = network()
    rate = hdet.LearningRate(evidence=hdet.evidence.Line())
    signal = hdet.Probe(loss_of, batches)
    engine = cases.engine_of(hdet.distribute(model, optimizer_of(model)), knobs=[rate], signal=signal)
    try:
        train(engine, cases.WINDOW)
    except StepError as error:
        return str(error)
    return ""


def loaded(sampler: Sampler[int]) -> DataLoader[Any]:
    return DataLoader(HELD_OUT, batch_size=4, sampler=sampler)


def four_ranks() -> Found:
    rank = dist.get_rank()
    found: Found = {}
    found["one probe"] = judged_by([batch(-1, part) for part in range(4)])
    found["other data"] = judged_by([batch(-1, part + rank) for part in range(4)])
    found["other order"] = judged_by([batch(-1, (part + rank) % 4) for part in range(4)])
    found["own part"] = judged_by(loaded(DistributedSampler(HELD_OUT)))
    found["own part, in a mapping of its own"] = judged_by([UserDict(x=batch(-1, part + rank)[0]) for part in range(4)])
    found["own part, NumPy's"] = judged_by([batch(-1, part + rank)[0].numpy() for part in range(4)])
    found["one loader"] = judged_by(loaded(RandomSampler(HELD_OUT)))
    found["own function"] = judged_by(lambda window: [batch(-1 - window, part + rank) for part in range(4)])
    found["fewer from a function"] = judged_by(lambda window: [batch(-1, part) for part in range(4 if rank else 3)])
    found["one function"] = judged_by(lambda window: [batch(-1 - window, part) for part in range(4)])
    found["fewer batches"] = judged_by([batch(-1, part) for part in range(4 if rank else 3)])
    found["betas"] = error_of(lambda: declared_with((0.9 if rank < 3 else 0.5, 0.999), 0.02))
    still = [hdet.LearningRate(spread=TwoLevel(0.0), controller=Hold())]
    model = network()
    found["noise scale"] = error_of(
        lambda: cases.engine_of(hdet.distribute(model, optimizer_of(model)), knobs=still, noise_scale=rank == 1)
    )
    found["rates"] = error_of(lambda: declared_with((0.9, 0.999), 0.02 * (1 + rank)))  # the knob's, which it writes
    found["parameters"] = error_of(in_another_order)
    found["shared without"] = without_the_block()
    found["local without"] = without_the_block(gradients="local")
    found["frozen alike"] = frozen(1)
    found["frozen apart"] = [frozen(1 if rank == 2 else 0, **home) for home in ({}, {"exact": True}, {"copies": 2})]
    pair = dist.new_group([0, 1])
    model = network()
    found["outside"] = error_of(lambda: hdet.distribute(model, optimizer_of(model), group=pair))
    flat = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    found["flat"] = error_of(lambda: hdet.distribute(flat, optimizer_of(flat)))
    found["sequence parallel"] = sequence_parallel().size

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = cases.sharded_over(mesh)(network())
    home = hdet.distribute(model, optimizer_of(model), mesh=mesh)
    found["failed shard"] = failing(cases.engine_of(home))
    model = DistributedDataParallel(network())
    found["failed rank"] = failing(cases.engine_of(hdet.distribute(model, optimizer_of(model))))

    model = cases.sharded_over(mesh)(network())
    home = hdet.distribute(model, optimizer_of(model), mesh=mesh)
    hdet.perturb(home, noise=NOISE)
    found["noise"] = weights(cases.engine_of(home))[0]
    return found


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return launch(four_ranks, 4)


def test_local_gradients_need_the_block_under_ddp_which_averages_them_elsewhere(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["shared without"] == ""
        assert "0 of 1 replicas ran inside `with replica:` in step 0" in found["local without"]
        assert "data parallelism averages in backward" in found["local without"]


def test_probes_that_differ_between_ranks_are_refused(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["one probe"] == ""
        assert "the probe's batches differ between processes" in found["other data"]
        assert "in the same order" in found["other order"]
        assert "(3.0, " in found["fewer batches"]
        assert "not its part as by a DistributedSampler" in found["own part"]
        assert "drawn by itself" in found["own function"]
        assert "drawn by itself" in found["own part, in a mapping of its own"]
        assert "drawn by itself" in found["own part, NumPy's"]
        assert "(3.0, " in found["fewer from a function"]
        assert found["one loader"] == found["one function"] == ""


def test_a_layer_that_is_frozen_on_all_ranks_is_supported(ranks: list[Found]) -> None:
    assert {found["frozen alike"] for found in ranks} == {""}


def test_layers_that_are_frozen_on_some_ranks_are_named_and_never_mixed(ranks: list[Found]) -> None:
    """Layers of one shape, as many on each rank: nothing else would show it."""
    for said in (text for found in ranks for text in found["frozen apart"]):
        assert "'layers.0.weight', 'layers.1.weight' took gradients in some replicas and not in others" in said


def test_optimizers_that_differ_are_refused_but_for_what_knobs_write(ranks: list[Found]) -> None:
    for found in ranks:
        assert "optimizer's groups" in found["betas"]
        assert "0.5" in found["betas"]
        assert found["rates"] == ""
        assert found["noise scale"].startswith(
            "the ranks disagree on noise_scale: noise_scale is False on rank 0 and True on rank 1"
        )


def test_optimizers_that_hold_parameters_in_another_order_are_refused(ranks: list[Found]) -> None:
    """Their moments would be averaged with those of other parameters."""
    for found in ranks:
        assert found["parameters"].startswith("the ranks disagree on optimizer: optimizer is ")
        first, last = found["parameters"].split(" on rank 0 and ")
        assert "[['layers.0.weight', 'layers.1.weight', 'layers.2.weight']]" in first
        assert "[['layers.2.weight', 'layers.1.weight', 'layers.0.weight']] on rank 3" in last


def test_a_rank_outside_its_group_is_told(ranks: list[Found]) -> None:
    assert [found["outside"] for found in ranks[:2]] == ["", ""]
    assert "rank 3 is not in the group" in ranks[3]["outside"]


def test_flat_parameters_are_refused(ranks: list[Found]) -> None:
    for found in ranks:
        assert "FullyShardedDataParallel (FSDP1), whose flat parameters cannot be merged" in found["flat"]


def test_sequence_parallel_norms_are_no_second_replicas(ranks: list[Found]) -> None:
    assert [found["sequence parallel"] for found in ranks] == [1] * 4


def test_noise_on_shards_is_that_of_whole_models(ranks: list[Found]) -> None:
    model = network()
    home = hdet.replicate(model, optimizer_of(model), n=2)
    hdet.perturb(home, noise=NOISE)
    for rank, found in enumerate(ranks):
        whole = [parameter.detach() for parameter in home.hosts[rank // 2][0].parameters()]
        assert difference(found["noise"], whole) < 1e-6


@pytest.mark.parametrize(("name", "replica"), [("failed rank", 1), ("failed shard", 0)])
def test_a_loss_that_is_no_number_fails_the_rank_or_its_whole_shard_group(
    ranks: list[Found], name: str, replica: int
) -> None:
    for found in ranks:
        assert found[name]["failed"] == [replica]
        assert [(fault["kind"], fault["replica"]) for fault in found[name]["faults"]] == [("non_finite", replica)]
        assert difference(found[name]["weights"], ranks[0][name]["weights"]) == 0.0
        assert all(bool(tensor.isfinite().all()) for tensor in found[name]["weights"])
