"""Every merge on ranks is what it is in one process: DDP with local gradients, and shards of HSDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import cases
import pytest
import torch
from launch import launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from training import batch, batch_normed, difference, knobs, loss_of, network, probe, train

import hdet
from hdet.contrib import Grawa, Weighted
from hdet.merges import Exploit, Mean, Merge, Outer, OuterLearningRate, OuterMomentum

Found = dict[str, Any]

MERGES: dict[str, Merge] = {
    "softmax": Weighted(0.5),
    "best": Weighted(0.0, optimizer="keep"),
    "trimmed": Weighted(None, trim=0.3),
    "grawa": Grawa(),
    "grawa by layers": Grawa(layers=True, momentum=0.0),
    "outer": Outer(),
    "outer explored": Outer(),
    "outer adam": Outer(0.01, optimizer="Adam", options={}, merge=Weighted(1.0)),
}
WAYS = ("softmax", "grawa", "grawa by layers", "outer", "outer explored")
"""Those whose sums over ranks and shards are not another's: the three weighted ones differ in their numbers only."""
KEEPING = ("grawa", "outer explored", "outer adam")
"""Those that keep something between windows: a running mean, an outer optimizer's state, that of other rates."""
STORED = ("grawa", "outer adam")
RULES = ("truncation", "tournament")
FAILING = (*RULES, "keep", "outer")
"""Those whose replicas are not alike as a window opens, by their weights or by the state of their optimizers."""
SAVED = "tournament"
"""What a population's members hold does not depend on the rule by which they are copied."""


def options_of(name: str) -> Found:
    objective = hdet.Objective(loss_of, lambda window: [batch(window, 50 + j) for j in range(2)])
    options: Found = {"gradients": "local", "merge": MERGES[name], "objective": objective}
    if name == "outer explored":
        options |= {"knobs": [*knobs(), OuterLearningRate(), OuterMomentum()], "signal": probe()}
    return options


def options_of_failing(name: str) -> Found:
    merges = {"keep": Mean("keep"), "outer": Outer()}
    return {"gradients": "local", "merge": merges[name]} if name in merges else population(name)


def on_ranks(folder: str) -> Found:
    found: Found = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for name in MERGES:
        options = options_of(name)
        home: Found = {"exact": True}
        found[f"ddp {name}"] = cases.many_ranks(DistributedDataParallel, batch_normed, home=home, **options)
        found[f"copies {name}"] = cases.many_ranks(home={"copies": 2, "exact": True}, **options)
    for name in WAYS:
        found[f"reduced {name}"] = cases.many_ranks(DistributedDataParallel, **options_of(name))
        found[f"hsdp {name}"] = over_shards(mesh, options_of(name))
    for name in KEEPING:
        found[f"resumed {name}"] = resumed(options_of(name), None)
        found[f"hsdp resumed {name}"] = resumed(options_of(name), mesh)
    for name in STORED:
        found[f"stored {name}"] = stored(options_of(name), None, f"{folder}/ddp {name}")
        found[f"hsdp stored {name}"] = stored(options_of(name), mesh, f"{folder}/hsdp {name}")
    for rule in RULES:
        found[f"ddp {rule}"] = cases.many_ranks(DistributedDataParallel, batch_normed, **population(rule))
        found[f"copies {rule}"] = cases.many_ranks(make=batch_normed, home={"copies": 2}, **population(rule))
        found[f"hsdp {rule}"] = over_shards(mesh, population(rule))
    for name in FAILING:
        found[f"failing {name}"] = failing(fresh(options_of_failing(name), None, exact=True))
    found["statistics"] = statistics(mesh)
    members = population(SAVED)
    for home, own in (("", None), ("hsdp ", mesh)):
        found[f"{home}resumed"] = resumed(members, own)
        found[f"{home}stored"] = stored(members, own, f"{folder}/{home}members")
    return found


def over_shards(mesh: Any, options: Found) -> Found:
    """Two replicas of two ranks each."""
    home, part = {"mesh": mesh}, mesh.get_local_rank("dp_shard")
    return cases.many_ranks(cases.sharded_over(mesh), home=home, part=part, each=2, **options)


def population(rule: Any) -> Found:
    evidence = hdet.evidence.Population()
    knob = hdet.LearningRate(spread=hdet.spreads.Symmetric(1.0), evidence=evidence)
    return {"gradients": "local", "merge": Exploit(rule, share=0.5), "knobs": [knob], "window": 3}


def statistics(mesh: Any) -> Found:
    """Buffers of sharded members: as each rank has them, at the window's end of the same steps, at the run's."""
    found: Found = {}
    for name, window, steps in (("own", cases.STEPS, 3), ("merged", 3, 3), ("last", 3, cases.STEPS)):
        engine = fresh({**population("truncation"), "window": window}, mesh, batch_normed)
        train(engine, steps, **parts_of(mesh))
        found[name] = cases.outcome(engine)["buffers"]
    return found


def fresh(options: Found, mesh: Any, make: Callable[[], nn.Module] = network, **home: Any) -> hdet.Engine:
    model = make()
    if mesh is not None:
        model = cases.sharded_over(mesh)(model)
    home |= {"mesh": mesh} if mesh is not None else {}
    return cases.engine_of(hdet.distribute(model, cases.optimizer_of(model), **home), **options)


def parts_of(mesh: Any) -> Found:
    return {"parts": (mesh.get_local_rank("dp_shard"),), "each": 2} if mesh is not None else {}


def compared(whole: hdet.Engine, second: hdet.Engine, parts: Found) -> Found:
    train(whole, cases.STEPS, **parts)
    train(second, cases.STEPS, **parts)
    return {"difference": difference(cases.outcome(whole)["weights"], cases.outcome(second)["weights"])}


def resumed(options: Found, mesh: Any) -> Found:
    """A run that is taken up in the middle of its second window, each rank by its own state."""
    whole, second = fresh(options, mesh), fresh(options, mesh)
    train(whole, 6, **parts_of(mesh))
    second.load_state_dict(whole.state_dict())
    return compared(whole, second, parts_of(mesh))


def failing(engine: hdet.Engine) -> Found:
    """A run whose members all become non-finite in the second window."""
    train(engine, 5)
    for model, _ in engine.hosts:
        for parameter in model.parameters():
            parameter.detach().fill_(torch.nan)
    train(engine, cases.STEPS)
    return cases.outcome(engine)


def stored(options: Found, mesh: Any, folder: str) -> Found:
    """The same by a folder of checkpoints, at the opening of the third window."""
    whole, second = fresh(options, mesh), fresh(options, mesh)
    train(whole, 8, **parts_of(mesh))
    checkpoints = hdet.checkpoints.CheckpointFolder(folder)
    checkpoints.save(whole)
    return {"at": checkpoints.resume(second), **compared(whole, second, parts_of(mesh))}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return launch(on_ranks, 4, str(tmp_path_factory.mktemp("merges")), limit=300.0)


@cache
def reference(name: str, n: int, each: int = 1, normed: bool = False) -> Found:
    torch.set_num_threads(1)
    make = batch_normed if normed else network
    return cases.one_process(n, make, each, **options_of(name))


def alike(ranks: list[Found], case: str) -> Found:
    for rank in ranks[1:]:
        assert rank[case]["history"] == ranks[0][case]["history"]
        assert difference(rank[case]["weights"], ranks[0][case]["weights"]) == 0.0
    found: Found = ranks[0][case]
    return found


@pytest.mark.parametrize("name", MERGES)
def test_in_the_order_of_the_replicas_it_is_one_process_bit_for_bit(ranks: list[Found], name: str) -> None:
    for case, expected in (
        (f"ddp {name}", reference(name, 4, normed=True)),
        (f"copies {name}", reference(name, 8)),
    ):
        found = alike(ranks, case)
        assert found["history"] == expected["history"]
        assert difference(found["weights"], expected["weights"]) == 0.0
        assert all(map(torch.equal, found["buffers"], expected["buffers"]))


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("home", "n", "each"), [("reduced", 4, 1), ("hsdp", 2, 2)])
def test_by_all_reduce_and_by_shards_it_is_so_to_float_tolerance(
    ranks: list[Found], name: str, home: str, n: int, each: int
) -> None:
    found = alike(ranks, f"{home} {name}")
    assert difference(found["weights"], reference(name, n, each)["weights"]) < 1e-4


@pytest.mark.parametrize("name", KEEPING)
def test_it_is_taken_up_where_it_was(ranks: list[Found], name: str) -> None:
    for rank in ranks:
        assert rank[f"resumed {name}"]["difference"] == 0.0
        assert rank[f"hsdp resumed {name}"]["difference"] == 0.0


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("home", ["", "hsdp "])
def test_a_folder_of_checkpoints_holds_what_a_merge_remembers(ranks: list[Found], name: str, home: str) -> None:
    for rank in ranks:
        assert rank[f"{home}stored {name}"]["at"] == 8
        assert rank[f"{home}stored {name}"]["difference"] == 0.0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("home", "n"), [("ddp", 4), ("copies", 8)])
def test_a_population_on_ranks_is_one_in_one_process_bit_for_bit(
    ranks: list[Found], rule: str, home: str, n: int
) -> None:
    """Copies travel as they are, so that even their number and the loop's home make no difference."""
    found = alike(ranks, f"{home} {rule}")
    torch.set_num_threads(1)
    expected = cases.one_process(n, batch_normed, **population(rule))
    assert found["history"] == expected["history"]
    assert difference(found["weights"], expected["weights"]) == 0.0
    assert all(map(torch.equal, found["buffers"], expected["buffers"]))


@pytest.mark.parametrize("rule", RULES)
def test_a_population_of_sharded_members_is_one_in_one_process_bit_for_bit(ranks: list[Found], rule: str) -> None:
    found = ranks[0][f"hsdp {rule}"]
    torch.set_num_threads(1)
    expected = cases.one_process(2, network, 2, **population(rule))
    assert all(rank[f"hsdp {rule}"]["history"] == found["history"] for rank in ranks)
    assert difference(found["weights"], expected["weights"]) == 0.0


def test_members_of_a_sharded_population_have_their_ranks_mean_of_batch_statistics(ranks: list[Found]) -> None:
    """After the first window one of the two goes on as a copy of the other."""
    own = [rank["statistics"]["own"] for rank in ranks]
    assert difference(own[0], own[1]) > 0.0
    means = [[(a + b) / 2 for a, b in zip(own[first], own[first + 1], strict=True)] for first in (0, 2)]
    for rank in ranks:
        assert min(difference(rank["statistics"]["merged"], mean) for mean in means) < 1e-6
        assert difference(rank["statistics"]["last"], ranks[0]["statistics"]["last"]) == 0.0


@pytest.mark.parametrize("home", ["", "hsdp "])
def test_every_member_is_taken_up_where_it_was(ranks: list[Found], home: str) -> None:
    """By each rank's own state in mid-window, and by a folder of checkpoints, while members are apart."""
    for rank in ranks:
        assert rank[f"{home}resumed"]["difference"] == 0.0
        assert rank[f"{home}stored"] == {"at": 6, "difference": 0.0}


@pytest.mark.parametrize("name", FAILING)
def test_after_all_members_failed_it_still_is_the_one_in_one_process(ranks: list[Found], name: str) -> None:
    """Each process holds the opening of its own members; all go on from member 0's."""
    found = alike(ranks, f"failing {name}")
    torch.set_num_threads(1)
    model = network()
    home = hdet.replicate(model, cases.optimizer_of(model), n=4)
    expected = failing(cases.engine_of(home, **options_of_failing(name)))
    assert [fault["kind"] for fault in expected["history"][1]["faults"]].count("restored") == 1
    assert found["history"] == expected["history"]
    assert difference(found["weights"], expected["weights"]) == 0.0
