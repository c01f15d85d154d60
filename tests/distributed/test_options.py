"""Merges in lower precision and merges that overlap with training: what each changes, by real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from training import batch, difference, loss_of, network, told, train, weights

import hdet
from hdet.controllers import Hold
from hdet.errors import ConfigError
from hdet.merges import Mean, Merge, Outer, OuterLearningRate
from hdet.spreads import TwoLevel

Found = dict[str, Any]
RANKS, STEPS, WINDOW, DELAY = 4, 10, 5, 2
OUTER = Outer()


def descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def held() -> list[hdet.Knob]:
    return [hdet.LearningRate(controller=Hold(), spread=TwoLevel(0.3))]


def options(folder: Path) -> Found:
    found: Found = {"full": cases.many_ranks(DistributedDataParallel, gradients="local")}
    for name, precision in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        found[name] = cases.many_ranks(DistributedDataParallel, home={"precision": precision}, gradients="local")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    part = mesh.get_local_rank("dp_shard")
    for name, home in (("shards", {}), ("shards bfloat16", {"precision": torch.bfloat16})):
        found[name] = cases.many_ranks(
            cases.sharded_over(mesh), home={"mesh": mesh, **home}, part=part, each=2, merge=Mean("keep")
        )

    found["shards overlap"] = weights(overlapped(cases.sharded_over(mesh), STEPS, part, each=2, mesh=mesh))[0]
    found["outer overlap"] = outer_overlap()
    found["thawed in flight"] = thawed_in_flight()
    found["tiny"] = tiny()
    found["double"] = double()
    found["lists sent"] = lists_sent()
    found["resumed"] = resumed(folder / "narrow")
    found["stale"] = stale()

    model = DistributedDataParallel(network())
    engine = hdet.Engine(
        hdet.distribute(model, descent(model), overlap=DELAY),
        held(),
        window=WINDOW,
        total_steps=STEPS,
        gradients="local",
        merge=Mean("keep"),
    )
    apart = []
    for step in range(STEPS):
        train(engine, step + 1)
        own = torch.cat([p.detach().flatten() for p in model.parameters()])
        rows = [torch.empty_like(own) for _ in range(RANKS)]
        dist.all_gather(rows, own)
        apart.append(float(torch.stack(rows).std(0).max()))
    found["overlap"] = {"history": told(engine), "weights": weights(engine)[0], "apart": apart}

    # A checkpoint taken while a merge is under way holds the merged point.
    engine = overlapped(DistributedDataParallel, WINDOW + 1)
    state = engine.state_dict()
    found["saved"] = {
        "in flight": engine.home.in_flight,
        "open": state["open"],
        "model": list(state["converged"]["model"].values()),
    }
    hdet.checkpoints.CheckpointFolder(folder).save(engine)
    train(engine, STEPS)
    found["saved"]["end"] = weights(engine)[0]

    told_off = {}
    for name, attempt in {
        "average": lambda: cases.many_ranks(home={"overlap": 1}),
        "outer over average": lambda: cases.many_ranks(home={"overlap": 1}, merge=Outer(merge=Mean())),
        "outer explored": explored_overlap,
        "both": lambda: cases.many_ranks(home={"overlap": 1, "precision": torch.float16}),
        "precision": lambda: cases.many_ranks(home={"precision": torch.float64}),
    }.items():
        try:
            attempt()
        except ConfigError as error:
            told_off[name] = str(error)
    found["refused"] = told_off
    return found


def overlapped(
    wrap: Callable[[nn.Module], nn.Module],
    steps: int,
    part: int = 0,
    each: int = 1,
    merge: Merge = Mean("keep"),  # noqa: B008 (it is frozen)
    **home: Any,
) -> hdet.Engine:
    """An engine whose merges overlap, after some steps."""
    model = wrap(network())
    engine = hdet.Engine(
        hdet.distribute(model, descent(model), overlap=DELAY, **home),
        held(),
        window=WINDOW,
        total_steps=STEPS,
        gradients="local",
        merge=merge,
    )
    train(engine, steps, parts=(part,), each=each)
    return engine


def outer_overlap() -> Found:
    """Outer steps made as the mean arrives, to the end, and once with a state taken while it travels."""
    whole = overlapped(DistributedDataParallel, STEPS, merge=OUTER)
    saved = overlapped(DistributedDataParallel, WINDOW + 1, merge=OUTER)
    state = saved.state_dict()
    train(saved, STEPS)
    other = overlapped(DistributedDataParallel, WINDOW + 1, merge=OUTER)
    other.load_state_dict(state)
    return {
        "weights": weights(whole)[0],
        "saved": weights(saved)[0],
        "point": list(state["converged"]["model"].values()),
        "taken up": weights(other)[0],
    }


def thawed_in_flight() -> list[torch.Tensor]:
    """The weights of a run whose optimizer holds but some, of which another is thawed while a merge travels."""
    model = network()
    *others, last = model.parameters()
    last.requires_grad_(False)
    home = hdet.distribute(model, torch.optim.SGD(others, lr=0.05), overlap=DELAY)
    engine = hdet.Engine(home, held(), window=WINDOW, total_steps=STEPS, gradients="local", merge=Mean("keep"))
    train(engine, WINDOW)
    assert home.in_flight
    last.requires_grad_()
    train(engine, STEPS)
    return weights(engine)[0]


def explored_overlap() -> None:
    model = network()
    home = hdet.distribute(model, descent(model), overlap=1)
    hdet.Engine(home, [OuterLearningRate()], merge=OUTER, gradients="local", total_steps=STEPS)


def tiny() -> dict[str, float]:
    """How far rank 0's model came, in steps of a size that float16 has no number for."""
    found = {}
    for name, precision in (("full", None), ("float16", torch.float16)):
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1e-3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        home = hdet.distribute(model, optimizer, precision=precision)
        engine = hdet.Engine(home, held(), window=2, total_steps=8, gradients="local")
        for _ in range(8):
            with engine.replicas[0] as replica:
                loss = replica.model(torch.ones(1, 1)).sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.step([loss])
        found[name] = float(model.weight.detach()) - 1e-3
    return found


class Lists(TorchFunctionMode):
    """Counts the tensors that are made from numbers of the host: an accelerator would have to wait for each."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.tensor
        return func(*args, **(kwargs or {}))


def lists_sent() -> list[int]:
    """How many in each of three steps that share gradients; in the third another parameter is frozen."""
    model = network()
    optimizer = descent(model)
    engine = hdet.Engine(hdet.distribute(model, optimizer), held(), window=50, total_steps=50)
    found = []
    for step in range(3):
        next(model.parameters()).requires_grad_(step < 2)
        with engine.replicas[0] as replica:
            loss = replica.model(torch.ones(4, next(model.parameters()).shape[1])).square().mean()
            loss.backward()
        with Lists() as lists:
            engine.share_gradients()
        found.append(lists.count)
        optimizer.step()
        optimizer.zero_grad()
        engine.step([loss.detach()])
    return found


def double() -> float:
    """How far double-precision parameters are from single-precision numbers after narrow merges."""
    model = network().double()
    optimizer = descent(model)
    home = hdet.distribute(model, optimizer, precision=torch.bfloat16)
    engine = hdet.Engine(home, held(), window=2, total_steps=4, gradients="local")
    for step in range(4):
        with engine.replicas[0] as replica:
            inputs, targets = batch(step, replica.index)
            loss = loss_of(replica.model, (inputs.double(), targets.double()))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step([loss])
    return difference(weights(engine)[0], [w.float().double() for w in weights(engine)[0]])


def resumed(folder: Path) -> float:
    """Where a run with narrow merges ends after a resume at a window's opening, from where it ends without."""

    def fresh() -> hdet.Engine:
        model = DistributedDataParallel(network())
        home = hdet.distribute(model, descent(model), precision=torch.bfloat16)
        return hdet.Engine(home, held(), window=WINDOW, total_steps=STEPS, gradients="local")

    checkpoints = hdet.checkpoints.CheckpointFolder(folder)
    whole, other = fresh(), fresh()
    train(whole, WINDOW)
    checkpoints.save(whole)
    train(whole, STEPS)
    checkpoints.resume(other)
    train(other, STEPS)
    return difference(weights(whole)[0], weights(other)[0])


def stale() -> Found:
    """A state is loaded while a merge is under way: the steps after it, beside those of an engine that had none."""
    engine, other = overlapped(DistributedDataParallel, 0), overlapped(DistributedDataParallel, 0)
    state = engine.state_dict()
    train(engine, WINDOW + 1)
    before = engine.home.in_flight
    for loaded in (engine, other):
        loaded.load_state_dict(state)
    after = engine.home.in_flight
    for loaded in (engine, other):
        train(loaded, DELAY + 1)
    return {"before": before, "after": after, "off": difference(weights(engine)[0], weights(other)[0])}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("overlap")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Found]:
    return launch(options, RANKS, folder, limit=150.0)


def test_a_step_like_the_one_before_sends_no_list_to_the_device(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["lists sent"] == [1, 0, 1]


@pytest.mark.parametrize(("precision", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_lower_precision_is_off_by_its_share_of_the_differences(ranks: list[Found], precision: str, bits: int) -> None:
    for found in ranks:
        assert difference(found[precision]["weights"], ranks[0][precision]["weights"]) == 0.0
    full, found = ranks[0]["full"], ranks[0][precision]
    # The first merge is in full; the second window's start, and so its losses, agree.
    assert found["history"][0] == full["history"][0]
    assert found["history"][1]["losses"] == full["history"][1]["losses"]
    off = difference(found["weights"], full["weights"])
    moved = difference(full["weights"], [p.detach() for p in network().parameters()])
    assert 0.0 < off < 8 * moved * 2.0**-bits


def test_steps_below_half_precisions_numbers_are_not_lost(ranks: list[Found]) -> None:
    for found in ranks:
        assert found["tiny"]["full"] < -7e-9
        assert found["tiny"]["float16"] == pytest.approx(found["tiny"]["full"], rel=0.02)


def test_narrow_merges_keep_double_precision(ranks: list[Found]) -> None:
    assert all(found["double"] > 0.0 for found in ranks)


def test_narrow_merges_resume_bit_for_bit(ranks: list[Found]) -> None:
    assert [found["resumed"] for found in ranks] == [0.0] * RANKS


def test_a_merge_under_way_does_not_reach_weights_that_are_loaded(ranks: list[Found]) -> None:
    assert [found["stale"] for found in ranks] == [{"before": True, "after": False, "off": 0.0}] * RANKS


def test_lower_precision_merges_shards(ranks: list[Found]) -> None:
    off = difference(ranks[0]["shards bfloat16"]["weights"], ranks[0]["shards"]["weights"])
    assert 0.0 < off < 0.01


def delayed(n: int = RANKS, each: int = 1, outer: torch.optim.Optimizer | None = None) -> list[list[torch.Tensor]]:
    """The overlapped merge in one process and by hand, at the rates that hdet gave: weights of each replica.

    A replica's batch is `each` batches. With `outer`, an optimizer of weights of its own, these make its step.
    """
    torch.set_num_threads(1)
    probe = network()
    plain = hdet.Engine(
        hdet.replicate(probe, descent(probe), n=n), held(), window=WINDOW, total_steps=STEPS, gradients="local"
    )
    models = [network() for _ in range(n)]
    correction: list[list[torch.Tensor]] = []
    for step in range(STEPS):
        rates = [plain.knobs[0].values(step, [r])[0] for r in range(n)]
        for r, model in enumerate(models):
            loss = torch.stack([loss_of(model, batch(step, r * each + part)) for part in range(each)]).mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p.sub_(rates[r] * g)
        if step + 1 == WINDOW + DELAY:
            with torch.no_grad():
                for model, change in zip(models, correction, strict=True):
                    for p, c in zip(model.parameters(), change, strict=True):
                        p.add_(c)
        if (step + 1) % WINDOW == 0:
            stacked = [torch.stack(ps).mean(0) for ps in zip(*(m.parameters() for m in models), strict=True)]
            if outer is not None:
                merged = outer.param_groups[0]["params"]
                for own, mean in zip(merged, stacked, strict=True):
                    own.grad = own.detach() - mean
                outer.step()
                stacked = [own.detach().clone() for own in merged]
            correction = [
                [(mean - p).detach() for mean, p in zip(stacked, model.parameters(), strict=True)] for model in models
            ]
            train(plain, step + 1, parts=range(each), each=each)  # moves on to the next window's levels
    with torch.no_grad():
        for model, change in zip(models, correction, strict=True):
            for p, c in zip(model.parameters(), change, strict=True):
                p.add_(c)
    return [[p.detach() for p in model.parameters()] for model in models]


def test_an_overlapped_merge_is_the_late_correction(ranks: list[Found]) -> None:
    expected = delayed()
    for found, own in zip(ranks, expected, strict=True):
        assert difference(found["overlap"]["weights"], own) < 1e-5
        assert difference(found["overlap"]["weights"], ranks[0]["overlap"]["weights"]) == 0.0


def test_an_outer_step_is_made_as_the_mean_arrives(ranks: list[Found]) -> None:
    """By torch's own SGD on a model of its own; and a state taken in flight is of the point that it leads to."""
    expected = delayed(outer=torch.optim.SGD(network().parameters(), lr=0.7, momentum=0.9, nesterov=True))
    mean = delayed()
    for found, own, other in zip((rank["outer overlap"] for rank in ranks), expected, mean, strict=True):
        assert difference(found["weights"], own) < 1e-5
        assert difference(own, other) > 1e-3
        assert difference(found["saved"], found["weights"]) == 0.0  # saving changed nothing
        assert difference(found["taken up"], found["point"]) == 0.0
        assert difference(found["point"], ranks[0]["outer overlap"]["point"]) == 0.0


def test_a_merge_arrives_where_another_parameter_is_thawed_meanwhile(ranks: list[Found]) -> None:
    for found in ranks:
        assert difference(found["thawed in flight"], ranks[0]["thawed in flight"]) == 0.0


def test_replicas_stay_apart_until_the_correction_comes(ranks: list[Found]) -> None:
    apart = ranks[0]["overlap"]["apart"]
    assert apart[WINDOW - 1] > 0.0  # where a merge that is waited for leaves nothing
    assert apart[-1] == 0.0


def test_a_checkpoint_in_flight_holds_the_merged_point(ranks: list[Found], folder: Path) -> None:
    first = ranks[0]["saved"]
    for found in ranks:
        assert found["saved"]["in flight"]
        assert found["saved"]["open"] is None
        assert difference(found["saved"]["model"], first["model"]) == 0.0
        assert difference(found["saved"]["end"], found["overlap"]["weights"]) == 0.0  # saving changed nothing
    model = network()
    engine = hdet.Engine(
        hdet.replicate(model, descent(model), n=RANKS), held(), window=WINDOW, total_steps=STEPS, gradients="local"
    )
    assert hdet.checkpoints.CheckpointFolder(folder).resume(engine) == WINDOW
    assert difference(weights(engine)[0], first["model"]) == 0.0


def test_shards_overlap_too(ranks: list[Found]) -> None:
    expected = delayed(2, each=2)
    for found in ranks:
        assert difference(found["shards overlap"], ranks[0]["shards overlap"]) == 0.0
        assert difference(found["shards overlap"], expected[0]) < 1e-5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("average", "hdet.merges.Mean('keep')"),
        ("outer over average", "hdet.merges.Outer()"),
        ("outer explored", "between the merge and the outer step"),
        ("both", "goes with one"),
        ("precision", "bfloat16"),
    ],
)
def test_options_that_do_not_go_together_are_refused(ranks: list[Found], name: str, words: str) -> None:
    assert words in ranks[0]["refused"][name]
