"""`hdet.attach` on the ranks of a job, where the home is found from what wraps the model: real processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attached_cases as attached
import pytest
import torch
from launch import launch

import hdet


@pytest.mark.parametrize(
    ("name", "ranks", "parts", "quiet", "normed"),
    [
        ("ddp", 2, 1, False, True),
        ("ddp", 2, 2, True, False),
        ("ddp", 2, 2, False, False),
        ("static graph", 2, 1, False, False),
        ("comm hook", 2, 1, False, False),
        ("fsdp", 2, 1, False, False),
        ("fsdp", 2, 2, False, False),
        ("hsdp", 4, 1, False, False),
        ("tensor parallel", 2, 1, False, False),
    ],
)
def test_held_it_is_the_loop_without_it_bit_for_bit(
    name: str, ranks: int, parts: int, quiet: bool, normed: bool
) -> None:
    is_held(launch(attached.held, ranks, name, parts, quiet, normed))


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_held_two_optimizers_chained_are_too(name: str) -> None:
    is_held(launch(attached.held, 2, name, 1, False, False, True))


def is_held(found: list[dict[str, Any]]) -> None:
    assert all(own["same"] for own in found)
    assert all(own["history"] == found[0]["history"] for own in found)
    assert all(record["estimates"]["learning_rate"]["stderr"] > 0 for record in found[0]["history"][:3])


@pytest.mark.parametrize(("name", "parts", "quiet"), [("ddp", 2, True), ("fsdp", 1, False)])
def test_all_ranks_learn_the_same(name: str, parts: int, quiet: bool, assert_same: Any) -> None:
    found = launch(attached.learned, 2, name, parts, quiet)
    assert found[0]["history"] == found[1]["history"]
    assert_same(found[0]["weights"], found[1]["weights"])
    rate = "learning_rate[others]" if name == "ddp" else "learning_rate"
    assert any(record["moves"][rate] for record in found[0]["history"])
    assert found[0]["replicas"] == (4 if name == "ddp" else 1)
    first = found[0]["history"][0]["estimates"][rate]
    assert first["step_size"] == pytest.approx(step_size() / 4, rel=0.1), "entered from four times below"
    assert first["excess"] == pytest.approx(0.9, abs=0.2)


@pytest.mark.parametrize(("name", "ranks"), [("fsdp", 4), ("tensor parallel", 2)])
@pytest.mark.parametrize("strength", [0.0, 1.5])
def test_sharded_weights_are_judged_as_wholes(name: str, ranks: int, strength: float) -> None:
    """A strong direction hardly shows in a rank's few rows."""
    ((told, of_wholes),) = set(launch(attached.excess, ranks, name, strength))
    assert told == pytest.approx(of_wholes, rel=0.03)
    assert (told > 1.2) == (strength > 0.0)


def step_size() -> float:
    """The mean over the two matrices of what `hdet.evidence.parts.step_size` works out, of the whole model."""
    matrices = [weights.detach() for weights in attached.network().parameters() if weights.ndim == 2]
    return sum(0.01 * w.numel() / float(w.norm()) / sum(n**0.5 for n in w.shape) for w in matrices) / 2


@pytest.mark.parametrize(
    ("name", "ranks", "normed"),
    [("ddp", 2, True), ("fsdp", 2, False), ("hsdp", 4, False), ("tensor parallel", 2, False)],
)
def test_all_ranks_end_with_the_mean_of_the_tail(name: str, ranks: int, normed: bool, assert_same: Any) -> None:
    """Of sharded weights each rank averages its part; the statistics of BatchNorm are the ranks' mean."""
    first, *others = launch(attached.tailed, ranks, name, normed)
    assert first["start"] == 12
    assert 0.0 < first["share"] <= 1.0
    if not normed:
        assert first["difference"] == pytest.approx(0.75 * first["measured"], rel=1e-3)  # two ranks hold a replica
    for other in (first, *others):
        assert other["a step away"]
        assert_same(other["weights"], first["weights"])
        assert_same(other["statistics"], first["statistics"])
        assert other["history"] == first["history"]
    assert len(first["statistics"]) == 2 * normed


@pytest.mark.parametrize(("name", "normed"), [("ddp", True), ("fsdp", False)])
def test_all_ranks_end_with_weights_from_before_more_training_did_harm(
    name: str, normed: bool, assert_same: Any
) -> None:
    first, other = launch(attached.stopped, 2, name, normed)
    assert first["ended"]["parts"] == [{"start": 8, "stop": 16, "share": 1.0}]
    assert first["the mean"]
    assert other["the mean"]
    assert_same(other["weights"], first["weights"])
    assert other["history"] == first["history"]


def test_a_run_that_is_ended_where_it_was_taken_up_ends_alike_on_all_ranks(tmp_path: Path, assert_same: Any) -> None:
    first, other = launch(attached.ended_where_it_was_taken_up, 2, str(tmp_path / "history.jsonl"))
    *before, last = first["tails"]
    assert before == [{}] * 3
    assert last["parts"]
    assert other["tails"] == []
    assert_same(other["weights"], first["weights"])
    assert hdet.History(tmp_path / "history.jsonl").windows[-1].tail == last


def test_batch_statistics_of_the_ranks_do_not_pass_for_a_slope(assert_same: Any) -> None:
    (own, other), (lent, _) = launch(attached.normed, 2, False), launch(attached.normed, 2, True)
    rate = "learning_rate[others]"
    told = [[record["estimates"][rate]["slope"] for record in one["history"]] for one in (own, lent)]
    assert told[0] == pytest.approx(told[1], rel=0.2)
    assert min(sum(record["moves"][rate] for record in one["history"]) for one in (own, lent)) > 1.0
    assert any(not torch.equal(a, b) for a, b in zip(own["statistics"], other["statistics"], strict=True))


@pytest.mark.parametrize("parts", [1, 2])
def test_buffers_that_are_each_ranks_own_stay_its_own(parts: int) -> None:
    assert launch(attached.own_buffers, 2, parts) == [True, True]


def test_buffers_of_other_lengths_on_other_ranks_are_not_lent() -> None:
    assert launch(attached.caches_of_other_lengths, 2) == [attached.STEPS] * 2


def test_rates_of_groups_are_judged_alike_on_all_ranks_and_on_shards(assert_same: Any) -> None:
    """Norms of shards add up to those of whole matrices."""
    whole, shards = launch(attached.grouped, 2, "ddp"), launch(attached.grouped, 2, "fsdp")
    for found in (whole, shards):
        assert found[0]["history"] == found[1]["history"]
        assert_same(found[0]["weights"], found[1]["weights"])
    of_wholes, of_shards = (
        {name: own["step_ratio"] for name, own in found[0]["history"][0]["estimates"].items()}
        for found in (whole, shards)
    )
    assert of_wholes["learning_rate[biases]"] is of_shards["learning_rate[biases]"] is None
    for name in ("learning_rate[head]", "learning_rate[others]"):
        assert of_shards[name] == pytest.approx(of_wholes[name], rel=0.01)
        assert abs(math.log(of_wholes[name])) > 0.05


def test_gradients_of_a_large_model_are_weighed_by_the_rates_of_the_step(assert_same: Any) -> None:
    """Also those that are handed over while backward goes on, when the optimizer holds its own groups and rates."""
    in_backward, at_its_end = launch(attached.large, 2, 2**20), launch(attached.large, 2, 2**30)
    names = ("0.weight", "3.weight", "4.weight", "others")
    for found in (in_backward, at_its_end):
        assert found[0]["knobs"] == ["dropout", *(f"learning_rate[{name}]" for name in names), "weight_decay"]
        assert found[0]["history"] == found[1]["history"]
        assert_same(found[0]["weights"], found[1]["weights"])
    slopes, others = (
        [record["estimates"]["dropout"]["slope"] for record in found[0]["history"]]
        for found in (in_backward, at_its_end)
    )
    first = next(place for place, slope in enumerate(slopes) if slope)
    assert slopes[first] == pytest.approx(others[first], rel=1e-3)


def test_a_large_model_in_parts_keeps_one_rate() -> None:
    assert launch(attached.large_and_sharded, 2) == [["learning_rate"]] * 2


def test_dropout_is_left_alone_where_fully_shard_averages_whole_gradients() -> None:
    """No hook on a parameter sees what a rank's own backward gives it."""
    assert launch(attached.whole_on_a_mesh, 2) == [(["learning_rate", "weight_decay"], [])] * 2


def test_it_is_the_explicit_loop_on_ranks_bit_for_bit(assert_same: Any) -> None:
    [own, _] = launch(attached.learned, 2, "ddp", 1, False, "together")
    [written, _] = launch(attached.explicit, 2)
    assert own["history"] == written["history"]
    assert_same(own["weights"], written["weights"])


def test_ranks_whose_model_nothing_puts_together_are_refused() -> None:
    assert all("wrap it first" in message for message in launch(attached.plain, 2))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("passes", "training passes in the first step, and another rank made another number"),
        ("losses", "a training loss was reported on some ranks and not on others"),
    ],
)
def test_ranks_that_differ_in_the_first_step_are_told_and_do_not_wait(what: str, said: str) -> None:
    assert all(said in message for message in launch(attached.unlike, 2, what))


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_ranks_whose_schedulers_differ_later_are_refused(name: str) -> None:
    """Of a sharded model each rank would step its part at a rate of its own, and nothing would show it."""
    said = launch(attached.schedulers_that_differ, 2, name)
    assert all(message.startswith("the ranks disagree on schedules: ") for message in said)


def test_where_ranks_declare_other_knobs_the_message_shows_where_they_differ() -> None:
    for message in launch(attached.groups_in_another_order, 2):
        assert message.startswith("the ranks disagree on optimizer")
        both = message.removesuffix(" on rank 1; declare the same run on every rank")
        first, second = both.split(" on rank 0 and ")
        assert not first.endswith(second)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([{"knobs": [hdet.WeightDecay()]}, {"knobs": attached.HELD[1:]}], "the ranks disagree on knobs: "),
        ([{"micro_batches": 1}, {}], "micro_batches= was given on some ranks and not on others"),
    ],
)
def test_ranks_that_are_given_other_arguments_are_refused_before_a_step(options: list[Any], said: str) -> None:
    """Of a knob, too, that follows what the optimizer holds, which no declaration can write down."""
    assert all(message.startswith(said) for message in launch(attached.declared_unlike, 2, options))


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_ranks_of_one_replica_that_write_unlike_settings_are_refused(key: str) -> None:
    said = launch(attached.settings_that_ranks_write_unlike, 3, key, 1.01)
    assert all("hold other learning rates, decays or momenta in their optimizers at step 8" in one for one in said)


def test_ranks_of_one_replica_whose_settings_differ_by_rounding_are_not() -> None:
    assert set(launch(attached.settings_that_ranks_write_unlike, 3, "lr", 1.0 + 1e-9)) == {"nothing was refused"}


@pytest.mark.parametrize(
    ("count", "told"), [(8, "nothing was refused"), (7, "the probe's batches differ between processes")]
)
def test_on_shards_each_rank_may_have_a_part_of_the_probe_in_as_many_batches(count: int, told: str) -> None:
    for said in launch(attached.probe_by_own_part, 2, count):
        assert said.startswith(told)


def test_a_probe_that_one_rank_cannot_read_is_told_on_all() -> None:
    """The gradient's losses are known where they are worked out, and told of there."""
    (first,), (second, gradient) = launch(attached.probe_that_one_rank_cannot_read, 2)
    assert "not finite on 1 of 8 sub-batches (first [3]) where contrast took its gradient" in gradient
    for said in (first, second):
        assert "not finite on sub-batches [3] of 8 at some of the weights" in said
        assert "replicas [1] of 2 " in said


def test_ranks_that_may_make_different_numbers_of_steps_are_refused() -> None:
    said = "lets ranks make different numbers of steps"
    assert all(said in message for message in launch(attached.joined, 2))


def test_ranks_that_come_after_the_search_are_refused() -> None:
    for said in launch(attached.group_made_late, 2):
        assert "the process group of 2 ranks was made after hdet.attach, which found one process" in said


def test_ranks_that_come_after_a_search_whose_replicas_were_given_are_none_of_its() -> None:
    assert launch(attached.group_made_late_beside_replicas_that_were_given, 2) == [2, 2]


def test_models_trained_apart_on_one_mesh_are_told_to_say_what_belongs_together() -> None:
    found = launch(attached.models_trained_apart, 4)
    assert all("over this model's part of the mesh" in said for said, _ in found)
    assert [steps for _, steps in found] == [attached.WINDOW] * 2 + [2 * attached.WINDOW] * 2


def test_detached_no_hook_is_left_on_a_parameter() -> None:
    assert launch(attached.hooks_left, 2) == [0, 0]


def test_one_ranks_state_in_mid_window_is_refused_on_all() -> None:
    assert all("save search.all_ranks.state_dict()" in message for message in launch(attached.state_of_one_rank, 2))


def test_what_one_rank_cannot_take_of_its_own_state_is_refused_on_all() -> None:
    (first, weight), (second, other) = launch(attached.damaged_on_one_rank, 2)
    assert first == "another process cannot load its state; this one's search is as it was"
    assert "the checkpoint cannot be loaded (AttributeError" in second
    assert weight == other


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (1, 2), (2, 1)])
def test_all_ranks_state_in_mid_window_is_gone_on_with_by_other_ranks_from_its_opening(
    saved_by: int, loaded_by: int
) -> None:
    state, *_ = launch(attached.state_of_all_ranks, saved_by)
    assert launch(attached.resumed_on_other_ranks, loaded_by, state) == [attached.WINDOW] * loaded_by


@pytest.mark.parametrize("saved_at", [2 * attached.WINDOW, 2 * attached.WINDOW + 2], ids=["window's end", "mid-window"])
@pytest.mark.parametrize("chained", [False, True], ids=["one optimizer", "two chained"])
def test_fully_sharded_the_state_of_all_ranks_is_gone_on_with(saved_at: int, chained: bool, assert_same: Any) -> None:
    for whole, resumed in launch(attached.sharded_and_resumed, 2, saved_at, chained):
        rates = [name for name in whole["history"][0]["bases"] if name.startswith("learning_rate[")]
        assert rates == (["learning_rate[SGD]", "learning_rate[AdamW]"] if chained else [])
        assert_same(resumed["weights"], whole["weights"])
        assert resumed["history"] == whole["history"]


@pytest.mark.parametrize("saved_at", [2 * attached.WINDOW, 2 * attached.WINDOW + 2], ids=["window's end", "mid-window"])
def test_a_state_on_a_mesh_is_gone_on_with_where_groups_have_other_names(
    saved_at: int, tmp_path: Path, assert_same: Any
) -> None:
    """A group's name is its number in the process: moments of a file would be gathered over the groups of that name."""
    path = str(tmp_path / "search.pt")
    saved = launch(attached.among_other_groups, 4, path, saved_at, 0)
    found = launch(attached.among_other_groups, 4, path, saved_at, 3)
    assert saved[0]["held"]
    assert all(rank["said"] == [] for rank in saved), "what torch says of each tensor of other ranks"
    assert_same(found, saved)


def test_another_ranks_part_of_a_sharded_model_is_refused() -> None:
    first, second = launch(attached.part_of_another_rank, 2)
    assert first == "another process cannot load its state; this one's search is as it was"
    assert second.startswith("the search's state is of rank 0 of 2 that share weights, and this is rank 1 of 2")


def test_where_one_rank_cannot_write_the_history_all_go_on(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    (first, told), (second, elsewhere) = launch(attached.history_that_one_rank_cannot_write, 2, str(tmp_path))
    assert first == second == attached.STEPS
    windows = [text for text in told if "could not be written" in text]
    assert [text.partition("; ")[2] for text in windows] == [
        f"window {window} is kept in memory, and is written with the next" for window in range(len(windows))
    ]
    assert windows
    assert not [text for text in elsewhere if "could not be written" in text]


def test_a_state_is_gathered_over_the_ranks_that_train_together() -> None:
    assert launch(attached.states_of_a_group, 2) == [1, 0]


@pytest.mark.parametrize("given", [False, True])
def test_fully_sharded_a_look_at_the_model_before_changes_nothing(given: bool) -> None:
    assert launch(attached.looked_at, 2, given) == [attached.STEPS] * 2


def test_fully_sharded_replicas_are_made_after_a_look_too() -> None:
    assert launch(attached.made_after_a_look, 2) == [2, 2]


def test_a_rank_that_holds_nothing_of_what_decays_takes_part_all_the_same() -> None:
    first, second = launch(attached.held_by_one, 2)
    assert sorted([sum(first["held"]), sum(second["held"])]) == [0, 9]
    assert first["slopes"] == second["slopes"]
    assert any(first["slopes"])


def test_where_a_scaler_skips_steps_all_ranks_end_the_run_alike(assert_same: Any) -> None:
    first, second = launch(attached.skipped_by_a_scaler, 2)
    assert (first["steps"], first["over"]) == (attached.STEPS - 2, True)
    assert_same(first, second)
