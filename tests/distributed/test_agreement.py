"""Ranks and one process take the same decisions: real processes against `hdet.replicate`."""

from __future__ import annotations

from functools import cache
from typing import Any

import cases
import pytest
import torch
from launch import launch
from training import batch_normed, chained_of, difference, network, probe

import hdet

Found = dict[str, Any]


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return launch(cases.everything, 4, limit=200.0)


@cache
def reference(
    n: int, gradients: str = "shared", each: int = 1, signal: str | None = None, normed: bool = False
) -> Found:
    torch.set_num_threads(1)
    return cases.one_process(
        n, batch_normed if normed else network, each, gradients=gradients, signal=probe(signal) if signal else None
    )


def decided_alike(found: list[Found]) -> None:
    """Every rank holds the same history and, after the last merge, the same weights."""
    for other in found[1:]:
        assert other["history"] == found[0]["history"]
        assert other["bases"] == found[0]["bases"]
        assert difference(other["weights"], found[0]["weights"]) == 0.0


def same_designs(found: Found, expected: Found) -> None:
    for ours, theirs in zip(found["history"], expected["history"], strict=True):
        assert (ours["start"], ours["stop"], ours["merged"]) == (theirs["start"], theirs["stop"], theirs["merged"])
        for name, values in theirs["values"].items():
            ratios = [value / theirs["bases"][name] for value in values]
            own = [value / ours["bases"][name] for value in ours["values"][name]]
            assert own == pytest.approx(ratios, rel=1e-9)


def close(found: Found, expected: Found, tolerance: float = 2e-5) -> None:
    """As far as the order in which a backend adds floats allows."""
    same_designs(found, expected)
    assert difference(found["weights"], expected["weights"]) < tolerance
    for ours, theirs in zip(found["history"], expected["history"], strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert found["bases"] == pytest.approx(expected["bases"], rel=1e-3)


def identical(found: Found, expected: Found) -> None:
    assert found["history"] == expected["history"]
    assert found["bases"] == expected["bases"]
    assert difference(found["weights"], expected["weights"]) == 0.0


def each_rank(ranks: list[Found], case: str) -> list[Found]:
    return [rank[case] for rank in ranks]


def test_chained_optimizers_are_averaged_as_in_one_process(ranks: list[Found]) -> None:
    found = each_rank(ranks, "chained")
    decided_alike(found)
    identical(found[0], cases.one_process(4, optimizer=chained_of, gradients="local"))


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("home", ["ddp", "plain"])
def test_in_the_order_of_the_replicas_ranks_agree_with_one_process_bit_for_bit(
    ranks: list[Found], home: str, gradients: str
) -> None:
    found = each_rank(ranks, f"{home} {gradients} exact")
    decided_alike(found)
    identical(found[0], reference(4, gradients))


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("home", ["ddp", "plain"])
def test_by_the_backends_all_reduce_they_agree_to_float_tolerance(
    ranks: list[Found], home: str, gradients: str
) -> None:
    found = each_rank(ranks, f"{home} {gradients}")
    decided_alike(found)
    close(found[0], reference(4, gradients))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_a_process_group_of_two_of_the_ranks_is_a_run_of_two(ranks: list[Found], gradients: str) -> None:
    found = each_rank(ranks, f"pair {gradients}")
    for half in (found[:2], found[2:]):
        decided_alike(half)
        identical(half[0], reference(2, gradients))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_batch_norm_statistics_are_each_replicas_own_until_the_merge(ranks: list[Found], gradients: str) -> None:
    found = each_rank(ranks, f"batch norm {gradients}")
    decided_alike(found)
    expected = reference(4, gradients, normed=True)
    identical(found[0], expected)
    assert difference(found[0]["buffers"], expected["buffers"]) == 0.0
    assert difference(found[3]["buffers"], expected["buffers"]) == 0.0


def test_at_averaged_weights_all_ranks_have_the_same_batch_norm_statistics(ranks: list[Found]) -> None:
    """Points of one line fall to different ranks, and the replicas have come apart."""
    found = each_rank(ranks, "averages")
    decided_alike(found)
    knobs = cases.judged_at_averages()
    identical(found[0], cases.one_process(4, batch_normed, knobs=knobs, signal=probe(), gradients="local"))


@pytest.mark.parametrize("at", ["last", "average"])
def test_a_probe_judges_ranks_as_it_judges_copies(ranks: list[Found], at: str) -> None:
    found = each_rank(ranks, f"probe {at}")
    decided_alike(found)
    identical(found[0], reference(4, signal=at))


def test_tilted_probes_are_split_over_ranks(ranks: list[Found]) -> None:
    found = each_rank(ranks, "tilt")
    decided_alike(found)
    identical(found[0], cases.one_process(4, signal=probe(), evidence=hdet.evidence.Divergent(tilt=1.0)))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_several_copies_on_each_rank_are_replicas(ranks: list[Found], gradients: str) -> None:
    found = each_rank(ranks, f"copies {gradients}")
    decided_alike(found)
    close(found[0], reference(8, gradients))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_copies_in_the_order_of_the_replicas_agree_bit_for_bit(ranks: list[Found], gradients: str) -> None:
    found = each_rank(ranks, f"copies {gradients} exact")
    decided_alike(found)
    expected = reference(8, gradients, normed=True)
    identical(found[0], expected)
    assert difference(found[3]["buffers"], expected["buffers"]) == 0.0


def test_a_shard_group_is_a_replica(ranks: list[Found]) -> None:
    found = each_rank(ranks, "hsdp shared")
    decided_alike(found)
    close(found[0], reference(2, each=2))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_shards_without_a_replicate_dimension_of_their_own(ranks: list[Found], gradients: str) -> None:
    found = each_rank(ranks, f"shards {gradients}")
    decided_alike(found)
    expected = reference(2, gradients, each=2)
    close(found[0], expected)
    assert difference(found[0]["weights"], expected["weights"]) == 0.0


def test_a_sharded_model_is_probed_at_averaged_weights(ranks: list[Found]) -> None:
    found = each_rank(ranks, "hsdp probe")
    decided_alike(found)
    close(found[0], reference(2, each=2, signal="average"))


def test_a_sharded_model_is_probed_at_tilted_weights(ranks: list[Found]) -> None:
    found = each_rank(ranks, "hsdp tilt")
    decided_alike(found)
    close(found[0], cases.one_process(2, each=2, signal=probe(), evidence=hdet.evidence.Divergent(tilt=1.0)))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_tensor_parallel_ranks_are_one_replica(ranks: list[Found], gradients: str) -> None:
    found = each_rank(ranks, f"tensor parallel {gradients}")
    decided_alike(found)
    close(found[0], reference(2, gradients))


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_hsdp_leaves_each_replica_its_own_gradients_where_asked(ranks: list[Found], gradients: str) -> None:
    """`fully_shard` over the whole mesh, whose own all-reduce over replicas has to stay out."""
    found = each_rank(ranks, f"hsdp exact {gradients}")
    decided_alike(found)
    expected = reference(2, gradients, each=2)
    close(found[0], expected)
    assert difference(found[0]["weights"], expected["weights"]) == 0.0


def test_batch_statistics_are_the_mean_of_a_shard_groups_ranks(ranks: list[Found]) -> None:
    found = each_rank(ranks, "hsdp batch norm")
    for other in found[1:]:
        assert difference(other["buffers"], found[0]["buffers"]) == 0.0


@pytest.mark.parametrize("hook", list(cases.HOOKS))
def test_communication_hooks_of_ddp_keep_working(ranks: list[Found], hook: str) -> None:
    found = each_rank(ranks, f"{hook} hook")
    decided_alike(found)
    same_designs(found[0], reference(4))
    for rank in ranks:
        still = rank["spread zero"]
        assert still[hook, "average"] == {"difference": 0.0, "same": True}  # as DDP with the hook, bit for bit
        assert difference(still[hook], still["plain"]) > 1e-5  # where the hook does compress


@pytest.fixture(scope="module")
def three() -> list[Found]:
    """Ranks whose number has no exact reciprocal: a mean of what is alike is not always that."""
    return launch(cases.spread_zero, 3)


@pytest.mark.parametrize("policy", ["average", "keep"])
@pytest.mark.parametrize("name", ["plain", "batch norm"])
def test_spread_zero_is_plain_ddp_bit_for_bit(ranks: list[Found], three: list[Found], name: str, policy: str) -> None:
    for found in (*(rank["spread zero"] for rank in ranks), *three):
        assert found[name, policy] == {"difference": 0.0, "same": True}
