"""The recipe: what it chooses on which model, what it says of it, and that it does good."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import explicit_loop
import pytest
import schedulefree
import torch
from torch import Tensor, nn

import hdet
from hdet import Engine, Probe
from hdet.controllers import Calibrate, Gated, Regularize
from hdet.errors import ConfigError
from hdet.recipes.recommended import CAUTION, WARMUP, choose, describe
from hdet.schedules import Constant, Cosine, LinearDecay, LinearWarmup, OneCycle, Replay, Schedule

STEPS = 100


def network(*, dropout: Any = None, smoothing: float | None = None) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = [] if dropout is None else [dropout]
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), *middle, nn.Linear(32, 4))
    if smoothing is not None:
        model.add_module("criterion", hdet.nn.CrossEntropyLoss(label_smoothing=smoothing))
    return model


def adamw(model: nn.Module, lr: float = 1e-2, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)


def chosen(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    return {choice.subject: choice.knob for choice in choose(model, optimizer, STEPS, **options)}


def probe() -> Probe:
    return Probe(lambda model, x: model[:-1](x).square().mean(), [torch.ones(8, 8), torch.zeros(8, 8)])


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dropout", [None, nn.Dropout(0.1), hdet.nn.Dropout(0.1)])
@pytest.mark.parametrize("smoothing", [None, 0.1])
def test_it_explores_what_the_model_has(decay: float, dropout: Any, smoothing: float | None) -> None:
    model = network(dropout=dropout, smoothing=smoothing)
    found = chosen(model, adamw(model, weight_decay=decay))
    assert {subject for subject, knob in found.items() if knob is not None} == {
        "learning rate",
        *(["weight decay"] if decay else []),
        *(["dropout"] if dropout is not None else []),
        *(["label smoothing"] if smoothing is not None else []),
    }


def test_dropouts_set_at_different_rates_are_a_knob_each() -> None:
    rates = [0.1, 0.05, 0.1, 0.0]
    model = nn.Sequential(nn.Linear(8, 4), *(nn.Dropout(rate) for rate in rates))
    found = chosen(model, adamw(model))
    assert found["dropout[0.1]"].pattern == ("1", "3")
    assert found["dropout[0.05]"].pattern == ("2",)
    assert found["dropout[0]"] is None
    bound = {name: knob.bind(model, adamw(model)).read() for name, knob in found.items() if knob and "dropout" in name}
    assert bound == {"dropout[0.1]": 0.1, "dropout[0.05]": 0.05}


def test_dropouts_whose_rates_print_alike_have_names_of_their_own() -> None:
    model = nn.Sequential(nn.Dropout(0.3), nn.Linear(2, 2), nn.Dropout(3 * 0.1), nn.Dropout(0.0))
    found = chosen(model, adamw(model))
    assert [name for name in found if "dropout" in name] == [
        "dropout[0.3]",
        "dropout[0.30000000000000004]",
        "dropout[0]",
    ]


@pytest.mark.parametrize("rate", [0.95, 1.0])
def test_a_dropout_of_nearly_all_is_left_alone(rate: float) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(rate))
    said = {choice.subject: choice for choice in choose(model, adamw(model), STEPS)}["dropout"]
    assert said.knob is None
    assert said.reason == f"left alone: {rate:g} lies outside of (0.0, 0.9), within which it is explored"


def test_a_name_stands_for_all_of_its_kind() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.1), nn.Dropout(0.05))

    def explored(**options: Any) -> list[str]:
        return [knob.label for knob in chosen(model, adamw(model), **options).values() if knob is not None]

    assert explored(exclude=["dropout"]) == ["learning_rate"]
    assert explored(exclude=["dropout[0.05]"]) == ["learning_rate", "dropout[0.1]"]
    assert explored(knobs=[hdet.Dropout(pattern="2")]) == ["learning_rate", "dropout[2]"]
    own = hdet.Dropout(pattern="2", name="dropout[0.05]")
    assert explored(knobs=[own]) == ["learning_rate", "dropout[0.1]", "dropout[0.05]"]


def test_of_many_rates_those_of_most_modules_are_explored() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.6), *(nn.Dropout(number / 10) for number in [1, 2, 3, 4, 5, 6]))
    explored = [choice for choice in choose(model, adamw(model), STEPS) if choice.subject.startswith("dropout[")]
    assert [choice.subject for choice in explored if choice.knob is not None] == [
        "dropout[0.6]",
        "dropout[0.1]",
        "dropout[0.2]",
        "dropout[0.3]",
    ]
    assert all("declare it by its pattern" in choice.reason for choice in explored if choice.knob is None)


def test_plain_dropout_of_a_compiled_model_is_named_once() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.1))
    said = describe(choose(torch.compile(model, backend="eager"), adamw(model), STEPS))
    assert "- dropout: left alone: the model is compiled and ['1.p'] are plain nn.Dropout" in said


def test_a_rate_that_is_a_plain_number_of_a_module_is_named_and_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.MultiheadAttention(4, 1, dropout=0.1))
    choices = {choice.subject: choice for choice in choose(model, adamw(model), STEPS)}
    assert [subject for subject, choice in choices.items() if choice.knob is not None] == ["learning rate"]
    assert "a plain number that one module may read (1), " in choices["dropout"].reason
    assert "hdet.nn.swap" in choices["dropout"].reason
    assert "hdet.Scalar" not in choices["dropout"].reason
    del model[1]
    hidden = nn.Linear(4, 4)
    hidden.attention_dropout = 0.1  # type: ignore[assignment]
    model.append(hidden)
    choices = {choice.subject: choice for choice in choose(model, adamw(model), STEPS)}
    assert "hdet.Scalar('attention_dropout', get=..., set=..., " in choices["attention dropout"].reason


def test_a_plain_number_called_dropout_is_advised_a_knob_that_leaves_the_recipes_own_dropout_in_place() -> None:
    """An LSTM's, which `hdet.nn.swap` refuses: the advice, taken as it stands, explores it beside `nn.Dropout`."""
    model = nn.ModuleDict({"rnn": nn.LSTM(4, 4, 2, dropout=0.2), "drop": nn.Dropout(0.1)})
    [plain] = [one for one in choose(model, adamw(model), STEPS) if one.subject == "dropout" and one.knob is None]
    assert "hdet.nn.swap" not in plain.reason
    found = re.search(r"knobs=\[(hdet\.Scalar\(.*\))\]", plain.reason)
    assert found is not None
    set_ = "lambda model, value: setattr(model['rnn'], 'dropout', value)"
    code = found[1].replace("get=...", "get=lambda model: model['rnn'].dropout").replace("set=...", f"set={set_}")
    advised = eval(code, {"hdet": hdet})
    choices = choose(model, adamw(model), STEPS, knobs=[advised])
    explored = {choice.knob.label for choice in choices if choice.knob is not None}
    assert explored == {"learning_rate", "dropout", "rnn_dropout"}


class StochasticDepth(nn.Identity):
    """Torchvision's, as far as its rate goes."""

    p = 0.0


def test_stochastic_depth_is_named_and_left_alone() -> None:
    """Modules of timm and Transformers keep its rate as `drop_prob` or `layerdrop`; 0 is none."""
    model = nn.Sequential(nn.Linear(8, 4), *(nn.Identity() for _ in range(4)), StochasticDepth())
    model[1].drop_prob, model[2].drop_prob, model[3].drop_prob = 0.0, 0.1, 0.2  # type: ignore[assignment]
    model[4].layerdrop = model[5].p = 0.3  # type: ignore[assignment]
    choices = {choice.subject: choice for choice in choose(model, adamw(model), STEPS)}
    assert "is a plain number that 2 modules may read (2, ...)" in choices["drop prob"].reason
    assert "is a plain number that one module may read (4), " in choices["layerdrop"].reason
    assert "is a plain number that one module may read (5), " in choices["stochastic depth"].reason
    assert [subject for subject, choice in choices.items() if choice.knob is not None] == ["learning rate"]


@pytest.mark.parametrize("kept_by", ["the forward", "a dropout", "a swapped dropout", "a dropout elsewhere"])
def test_a_drop_rate_that_the_forward_reads_is_named(kept_by: str) -> None:
    """Many models of timm give it to `F.dropout`; others keep it beside the dropout that they made with it."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5 if kept_by == "the forward" else 0.2))
    holder = model[0] if kept_by == "a dropout elsewhere" else model
    holder.drop_rate = 0.2  # type: ignore[assignment]
    if kept_by == "a swapped dropout":
        hdet.nn.swap(model)
    told = [choice.reason for choice in choose(model, adamw(model), STEPS) if choice.subject == "drop rate"]
    assert [reason.partition(",")[0] for reason in told] == (
        ["is a plain number that one module may read (the model itself)"] if kept_by == "the forward" else []
    )


def test_what_is_excluded_is_said_once() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.2), nn.MultiheadAttention(4, 1, dropout=0.1))
    said = describe(choose(model, adamw(model), STEPS, exclude=["dropout"]))
    assert said.count("- dropout: excluded") == 1


def test_dropout_can_be_left_out_of_a_model_that_has_it_as_a_plain_number_alone() -> None:
    """As of one without any: errors and pages tell to leave both out, whatever the model is."""
    model = nn.Linear(8, 4)
    model.attention_dropout = 0.1  # type: ignore[assignment]
    choices = choose(model, adamw(model), STEPS, exclude=["dropout", "label_smoothing"])
    assert [choice.subject for choice in choices if choice.knob is not None] == ["learning rate"]


def test_nothing_it_chooses_diverges() -> None:
    model = network(dropout=nn.Dropout(0.1), smoothing=0.1)
    knobs = list(chosen(model, adamw(model, weight_decay=0.1)).values())
    kinds = [knob.evidence.kind for knob in knobs]
    assert kinds == ["line", "analytic", "contrast", "contrast"]
    assert not any(knob.evidence.diverges for knob in knobs)
    assert isinstance(knobs[0].controller, Calibrate)
    assert isinstance(knobs[1].controller, Regularize)
    assert all(isinstance(knob.controller, Gated) for knob in knobs[2:])


def test_one_group_that_decays_is_enough() -> None:
    model = network()
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1], "weight_decay": 0.0}, {"params": parameters[1:], "weight_decay": 0.1}]
    knob = chosen(model, torch.optim.AdamW(groups, lr=1e-2))["weight decay"]
    assert knob is not None
    assert knob.bind(model, torch.optim.AdamW(groups, lr=1e-2)).read() == pytest.approx(0.1)


def test_label_smoothing_that_is_off_is_left_alone_and_it_says_so() -> None:
    model = network(smoothing=0.0)
    (choice,) = [each for each in choose(model, adamw(model), STEPS) if each.subject == "label smoothing"]
    assert choice.knob is None
    assert "is off" in choice.reason
    engine = hdet.recommended(model, adamw(model), total_steps=STEPS, probe=probe(), quiet=True)
    assert [knob.name for knob in engine.knobs] == ["learning_rate"]


def test_label_smoothing_of_torchs_own_loss_is_not_called_none() -> None:
    model = network()
    model.add_module("criterion", nn.CrossEntropyLoss(label_smoothing=0.1))
    said = describe(choose(model, adamw(model), STEPS))
    assert "criterion smooths by 0.1, a plain number; hdet.nn.swap(model) makes it explorable" in said
    hdet.nn.swap(model)
    assert chosen(model, adamw(model))["label smoothing"] is not None


def test_a_regulariser_that_was_set_may_go_to_zero() -> None:
    model = network(dropout=hdet.nn.Dropout(0.3), smoothing=0.1)
    knobs = chosen(model, adamw(model))
    assert knobs["dropout"].bounds == hdet.Dropout().bounds
    assert knobs["label smoothing"].bounds == hdet.LabelSmoothing().bounds


@pytest.mark.parametrize(("rate", "entered"), [(0.8, 0.1), (0.51, 0.1), (0.5, 0.5), (0.3, 0.3), (0.0, 0.0)])
def test_a_dropout_of_most_is_entered_far_below(rate: float, entered: float) -> None:
    model = network(dropout=hdet.nn.Dropout(rate))
    optimizer = adamw(model)
    engine = hdet.recommended(model, optimizer, total_steps=STEPS, probe=probe(), quiet=True)
    assert engine.bases["dropout"] == pytest.approx(entered)
    knob = chosen(network(dropout=hdet.nn.Dropout(rate)), optimizer)["dropout"]
    assert knob.bounds[1] > 0.5, "evidence may raise it again"


def test_choosing_changes_nothing() -> None:
    model = network(dropout=hdet.nn.Dropout(0.2))
    optimizer = adamw(model, lr=0.03, weight_decay=0.1)
    before = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    choose(model, optimizer, STEPS)
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == before
    assert model[2].p == 0.2  # type: ignore[index]


# -- the learning rate's schedule -----------------------------------------------------------------


def test_the_rate_set_is_the_peak_and_entered_from_below() -> None:
    model = network()
    knob = chosen(model, adamw(model, lr=0.02))["learning rate"]
    course = knob.schedule
    assert course.total_steps == STEPS
    assert max(course(step) for step in range(STEPS)) == pytest.approx(0.02)
    assert course(0) < 0.001
    assert max(range(STEPS), key=course) == pytest.approx(0.3 * STEPS, abs=2)
    assert knob.initial_shift == pytest.approx(-math.log(CAUTION))


def test_only_its_own_line_falls_by_how_far_the_model_overfits() -> None:
    model = network()
    own = chosen(model, adamw(model))["learning rate"]
    others = [Cosine(0.02, STEPS, warmup=0.3), LinearDecay(0.02, STEPS, warmup=0.3, floor=1e-4)]
    assert [rule.kind for rule in own.controller.rules][-1] == "fall"
    for other in others:
        assert chosen(model, adamw(model), schedule=other)["learning rate"].controller == Calibrate()


@pytest.mark.parametrize(
    ("examples", "decay", "powers"),
    [(None, 0.0, {"learning_rate": 0.75}), (512, 0.0, {"learning_rate": 1.5}), (512, 0.01, {})],
    ids=["fresh", "repeated", "repeated, and decay goes up"],
)
def test_a_run_falls_slower_on_fresh_data_and_faster_on_repeated(
    examples: int | None, decay: float, powers: dict[str, float]
) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 20, generator=generator)
        return x, x[:, :1].sin() + 0.5 * torch.randn(count, 1, generator=generator)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = adamw(model, lr=3e-3, weight_decay=decay)
    loss = nn.functional.mse_loss
    held_out = Probe(lambda model, batch: loss(model(batch[0]), batch[1]), [drawn(64) for _ in range(8)])
    search = hdet.attach(model, optimizer, probe=held_out, total_steps=4 * STEPS, quiet=True)
    kept = drawn(examples) if examples else None
    for _ in range(4 * STEPS):
        x, y = kept or drawn(64)
        search.loss(loss(model(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    records = search.history.windows
    if decay:
        assert search.engine.learned["weight_decay"].value > 2.0 * decay
    line = LinearDecay(peak=1.0, total_steps=4 * STEPS, warmup=0.3)
    assert records[-1].powers == powers
    assert not any(record.powers for record in records if record.stop < 120)
    for before, record in pairwise(records):
        course = record.course["learning_rate"]
        given = [line(step) for step in range(record.start, record.stop)]
        bent = [course[0] * (one / given[0]) ** before.powers.get("learning_rate", 1.0) for one in given]
        assert course == pytest.approx(bent)


def test_groups_at_rate_0_stay_there_and_the_others_are_explored() -> None:
    """As one whose training begins later, by the user's hand."""
    model = network()
    groups = [{"params": list(model[0].parameters()), "lr": 0.0}, {"params": list(model[-1].parameters()), "lr": 0.01}]
    engine = hdet.recommended(model, torch.optim.AdamW(groups), probe=probe(), total_steps=100, quiet=True)
    assert engine.learned["learning_rate"].start == 0.01
    assert engine.optimizers[0].param_groups[0]["lr"] == 0.0 < engine.optimizers[0].param_groups[1]["lr"]


@pytest.mark.parametrize("schedule", [Constant(0.02), Cosine(0.02, STEPS, warmup=0.0), Replay([0.02] * STEPS)])
def test_without_a_warm_up_it_begins_where_it_was_told(schedule: Schedule) -> None:
    """The first has no end that is known; the others are asked to stay as they are."""
    model = network()
    kept = {} if isinstance(schedule, Constant) else {"warmup_steps": 0}
    knob = chosen(model, adamw(model), schedule=schedule, **kept)["learning rate"]
    assert knob.initial_shift == 0.0
    assert knob.schedule == schedule
    options = {"total_steps": STEPS, "probe": probe(), "schedule": schedule, "quiet": True, **kept}
    engine = hdet.recommended(model, adamw(model), **options)
    assert engine.bases["learning_rate"] == pytest.approx(0.02)


@pytest.mark.parametrize(("total_steps", "wanted", "expected"), [(100, None, 30), (5000, None, 300), (100, 45, 45)])
def test_a_schedule_without_a_warm_up_is_given_one(total_steps: int, wanted: int | None, expected: int) -> None:
    model = network()
    schedule = Cosine(0.02, total_steps, warmup=0.0)
    choices = choose(model, adamw(model), total_steps, schedule, warmup_steps=wanted)
    assert f"heads for a peak of 0.02 by a warm-up of {expected} steps, longer than its schedule's" in describe(choices)
    knob = choices[0].knob
    assert knob is not None
    assert knob.schedule == LinearWarmup(schedule, expected)
    assert knob.initial_shift == pytest.approx(-math.log(CAUTION))
    engine = hdet.recommended(
        model, adamw(model), total_steps=total_steps, probe=probe(), schedule=schedule, warmup_steps=wanted, quiet=True
    )
    assert engine.learned["learning_rate"].start == 0.02
    assert engine.bases["learning_rate"] == pytest.approx(0.02 / expected / CAUTION)


@pytest.mark.parametrize("schedule", [None, OneCycle(0.02, STEPS), Cosine(0.02, STEPS, warmup=0.5)])
def test_a_warm_up_that_is_long_enough_stays_as_it_is(schedule: Schedule | None) -> None:
    model = network()
    expected = schedule or LinearDecay(0.02, STEPS, warmup=0.3)
    choices = choose(model, adamw(model, lr=0.02), STEPS, schedule)
    assert choices[0].knob is not None
    assert choices[0].knob.schedule == expected
    assert "by a warm-up" not in describe(choices)


def test_a_warm_up_is_of_the_run_where_the_schedule_is_longer() -> None:
    model = network()
    schedule = Cosine(0.02, 10_000, warmup=0.0)
    with pytest.warns(UserWarning, match="schedule is one of 10000 steps, and the run has 100, so the run ends before"):
        found = chosen(model, adamw(model), schedule=schedule)
    assert found["learning rate"].schedule == LinearWarmup(schedule, 30)


def test_a_schedule_that_ends_before_the_run_is_told_of() -> None:
    model = network()
    for length, told in ((30, True), (STEPS, False)):
        said = describe(choose(model, adamw(model), STEPS, Cosine(0.02, length)))
        assert ("its schedule ends at step 30 of 100" in said) == told


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (-1, f"warmup_steps=-1 lies outside 0 and the {STEPS} steps"),
        (STEPS, f"warmup_steps={STEPS} lies outside 0 and the {STEPS} steps"),
        (0.3, "warmup_steps must be of type int, got 0.3"),
        (True, "warmup_steps must be of type int, got True"),
    ],
)
def test_a_warm_up_that_cannot_be_is_refused(wanted: Any, message: str) -> None:
    model = network()
    with pytest.raises(ConfigError, match=message):
        choose(model, adamw(model), STEPS, warmup_steps=wanted)


def test_a_warm_up_to_a_peak_that_nobody_knows_is_refused() -> None:
    model = network()
    with pytest.raises(ConfigError, match="of one without an end nobody knows it"):
        choose(model, adamw(model), STEPS, Constant(0.02), warmup_steps=20)


def test_a_warm_up_that_starts_above_what_is_looked_ahead_to_counts_as_none() -> None:
    high = Cosine(0.02, STEPS, warmup=0.3, floor=0.01)
    model = network()
    assert chosen(model, adamw(model), schedule=high)["learning rate"].initial_shift == 0.0
    low = Cosine(0.02, STEPS, warmup=0.3)
    assert chosen(model, adamw(model), schedule=low)["learning rate"].initial_shift < 0.0


# -- what it says ---------------------------------------------------------------------------------


def test_a_constant_that_was_given_is_said_and_not_the_optimizers_rate() -> None:
    model = network()
    choices = choose(model, adamw(model, lr=0.02), STEPS, schedule=Constant(0.3))
    assert "+ learning rate: starts at 0.3, held but for what is learned\n" in describe(choices)


def test_it_prints_what_it_chose_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    model = network(dropout=nn.Dropout(0.1))
    optimizer = adamw(model, lr=0.02)
    hdet.recommended(model, optimizer, total_steps=STEPS, probe=probe())
    said = capsys.readouterr().out
    assert "+ learning rate: heads for a peak of 0.02" in said
    assert f"at step {round(WARMUP * STEPS)}, then for 0" in said
    assert f"entered {CAUTION:g} times lower" in said
    assert "- weight decay: no parameter group decays" in said
    assert "+ dropout: starts at 0.1; micro-batches" in said
    assert "- label smoothing: the model has no hdet.nn.CrossEntropyLoss" in said
    assert "guard: where training breaks down, back to the best point" in said
    model = network(dropout=nn.Dropout(0.1))
    assert said.strip() == describe(choose(model, adamw(model, lr=0.02), STEPS))


def test_quiet_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    hdet.recommended(model, adamw(model), total_steps=STEPS, probe=probe(), quiet=True)
    assert capsys.readouterr().out == ""


def test_without_a_warm_up_it_does_not_speak_of_caution(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    hdet.recommended(model, adamw(model), total_steps=STEPS, probe=probe(), schedule=Constant(0.02))
    assert "times lower" not in capsys.readouterr().out


@pytest.mark.parametrize(("warmup", "short"), [(0, True), (61, True), (63, False), (300, False)])
def test_it_says_that_a_warm_up_is_too_short_to_look_ahead_twice(warmup: float, short: bool) -> None:
    """A rise over 62 steps is at a quarter of its peak in the middle of the steps 11 to 20."""
    schedule = Cosine(0.02, 1000, warmup=warmup / 1000)
    model = network()
    said = describe(choose(model, adamw(model), 1000, schedule, warmup_steps=0))
    assert ("too short to look ahead twice" in said) is short


def test_what_it_says_of_caution_stands_with_the_peak() -> None:
    """Not behind what it says of a warm-up that is too short to look ahead twice."""
    model = network()
    said = describe(choose(model, adamw(model), 150))
    assert "then for 0; entered 4 times lower, while it looks ahead; its warm-up is too short" in said


# -- the engine it makes --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, hdet.signals.TrainingLoss(), lambda model: 0.0, [torch.ones(2)]])
def test_what_is_no_probe_is_refused(bad: Any) -> None:
    model = network()
    with pytest.raises(ConfigError, match=r"probe must be an hdet\.Probe"):
        hdet.recommended(model, adamw(model), total_steps=STEPS, probe=bad, quiet=True)


def test_one_run_is_paid_for() -> None:
    model = network()
    engine = hdet.recommended(model, adamw(model), total_steps=STEPS, probe=probe(), micro_batches=4, quiet=True)
    assert isinstance(engine, Engine)
    assert (engine.size, len(engine.hosts), engine.total_steps) == (4, 1, STEPS)
    assert engine.hosts[0][0] is model


def test_a_guard_watches_over_it() -> None:
    model = network()
    engine = hdet.recommended(model, adamw(model), total_steps=STEPS, probe=probe(), quiet=True)
    assert engine.cycle.watch is not None
    assert engine.cycle.watch.spec == hdet.Rewind()


def test_replicas_may_be_given() -> None:
    model = network()
    optimizer = adamw(model)
    given = hdet.replicate(model, optimizer, n=2)
    engine = hdet.recommended(model, optimizer, total_steps=STEPS, probe=probe(), replicas=given, quiet=True)
    assert (engine.size, len(engine.hosts)) == (2, 2)
    assert [knob.evidence.kind for knob in engine.knobs] == ["line"]
    with pytest.raises(ConfigError, match="replicas= are of another model or optimizer than those that were given"):
        hdet.recommended(model, adamw(model), total_steps=STEPS, probe=probe(), replicas=given, quiet=True)


def test_a_number_of_micro_batches_beside_replicas_is_that_of_theirs() -> None:
    model = network()
    optimizer = adamw(model)
    given = hdet.micro_batches(model, optimizer, 2)
    options = {"total_steps": STEPS, "probe": probe(), "replicas": given, "quiet": True}
    for micro_batches in (1, 4):
        with pytest.raises(ConfigError, match=f"micro_batches={micro_batches} was given beside replicas= of 2 passes"):
            hdet.recommended(model, optimizer, micro_batches=micro_batches, **options)
    assert hdet.recommended(model, optimizer, micro_batches=2, **options).size == 2


# -- what it is good for --------------------------------------------------------------------------

LONG = 500
with torch.random.fork_rng():
    torch.manual_seed(1)
    TEACHER = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)
    for own in TEACHER.parameters():
        own.mul_(2.0)


def draw(seed: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return x, TEACHER(x) + 0.3 * torch.randn(count, 4, generator=generator)


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def by_sub_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean(dim=1).reshape(8, -1).mean(dim=1)


def held_out_loss(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return squared_error(model, draw(-7, 2000)).item()


def trained(lr: float, *, explored: bool) -> tuple[float, float]:
    """The test loss, and the factor by which the rate was moved in the end."""
    model = network()
    optimizer = adamw(model, lr=lr)
    course = Cosine(lr, LONG, warmup=0.3)
    if explored:
        held_out = Probe(by_sub_batch, lambda window: [draw(1_000_000 + window, 64)])
        engine = hdet.recommended(model, optimizer, total_steps=LONG, probe=held_out, quiet=True)
        explicit_loop.train(engine, loss=lambda model, step, index: squared_error(model, draw(step, 32)))
        return held_out_loss(model), math.exp(engine.knobs[0].shift)
    for step in range(LONG):
        optimizer.param_groups[0]["lr"] = course(step)
        squared_error(model, draw(step, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return held_out_loss(model), 1.0


GOOD = 1e-2


def test_a_rate_thirty_times_too_low_is_raised_and_pays() -> None:
    left, _ = trained(GOOD / 30, explored=False)
    best, _ = trained(GOOD, explored=False)
    ours, factor = trained(GOOD / 30, explored=True)
    assert best < 0.8 * left  # the start is a bad one
    assert factor > 5.0
    assert ours < left - 0.5 * (left - best)


def test_a_good_rate_is_not_spoilt() -> None:
    left, _ = trained(GOOD, explored=False)
    ours, _ = trained(GOOD, explored=True)
    assert ours < 1.1 * left


def test_knobs_are_replaced_by_name_added_and_left_out() -> None:
    model = network(dropout=nn.Dropout(0.1))
    decay = hdet.WeightDecay(bounds=(1e-3, 1.0))
    engine = hdet.recommended(
        model,
        adamw(model, weight_decay=0.1),
        total_steps=STEPS,
        probe=probe(),
        quiet=True,
        knobs=[decay, hdet.Beta2()],
        exclude=["dropout"],
    )
    assert [knob.name for knob in engine.knobs] == ["learning_rate", "weight_decay", "beta2"]
    assert engine.knobs[1].spec.bounds == (1e-3, 1.0)


def test_what_is_left_out_is_there_and_not_declared_too() -> None:
    model = network()
    options: dict[str, Any] = {"total_steps": STEPS, "probe": probe(), "quiet": True}
    with pytest.raises(ConfigError, match="exclude names 'momentum'"):
        hdet.recommended(model, adamw(model), exclude=["momentum"], **options)
    with pytest.raises(ConfigError, match="both in knobs= and in exclude="):
        hdet.recommended(model, adamw(model), knobs=[hdet.Dropout()], exclude=["dropout"], **options)


def test_a_rate_that_is_left_out_is_told_to_stay_what_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    model = network()
    optimizer = torch.optim.AdamW([{"params": layer.parameters(), "lr": 1e-2} for layer in (model[0], model[-1])])
    names = {"below": "0.*", "head": f"{len(model) - 1}.*"}
    left_out = ["learning_rate[head]", "dropout"]
    hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, rates=names, exclude=left_out)
    told = capsys.readouterr().out
    assert "learning rate of group head: excluded; it stays what you or your scheduler write" in told
    assert told.count("excluded") == 2


def test_of_many_of_a_kind_one_name_is_told_as_an_example() -> None:
    model = network()
    told = r"it has 'dropout', 'label_smoothing', 'learning_rate' \(\d by name, as 'learning_rate\[0.weight\]'\)"
    with pytest.raises(ConfigError, match=told):
        hdet.attach(model, adamw(model), probe=probe(), total_steps=STEPS, rates="matrices", exclude=["lr"], quiet=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"knobs": hdet.Beta2()}, "knobs is a list of knobs, got Beta2"),
        ({"knobs": "dropout"}, "knobs is a list of knobs, got 'dropout'"),
        ({"total_steps": 60.0}, "total_steps must be of type int, got 60.0"),
        ({"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        ({"history": 3}, "history is a path or an hdet.History, got 3"),
    ],
)
def test_what_is_of_another_type_is_refused(given: dict[str, Any], message: str) -> None:
    model = network()
    options: dict[str, Any] = {"total_steps": STEPS, "probe": probe(), "quiet": True, **given}
    with pytest.raises(ConfigError, match=message):
        hdet.recommended(model, adamw(model), **options)


def test_one_name_may_be_left_out_without_a_list() -> None:
    model = network(dropout=nn.Dropout(0.1))
    engine = hdet.recommended(model, adamw(model), total_steps=STEPS, probe=probe(), quiet=True, exclude="dropout")
    assert [knob.name for knob in engine.knobs] == ["learning_rate"]


def test_the_recipes_places_and_strides_are_the_engines() -> None:
    model = network()
    engine = hdet.recommended(
        model,
        adamw(model, weight_decay=0.1),
        total_steps=STEPS,
        probe=probe(),
        quiet=True,
        window=7,
        guard=None,
        anchor="host",
        averages="host",
        stride=3,
    )
    assert (engine.plan.anchor, engine.plan.averages, engine.plan.guard) == ("host", "host", None)
    assert engine.plan.windows == hdet.windows.FixedWindow(7)
    assert {evidence.stride for evidence in engine.plan.evidence} == {3}  # type: ignore[attr-defined]


def test_dropout_that_is_a_number_in_the_config_is_found_and_not_called_none() -> None:
    """As attention_dropout in Hugging Face's Llama: a float that the forward pass reads."""
    model = torch.nn.Linear(2, 1)
    model.config = SimpleNamespace(attention_dropout=0.1, hidden_dropout_prob=0.0, hidden_size=2)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (said,) = [choice.reason for choice in choose(model, optimizer, 10) if choice.subject == "dropout"]
    assert "found attention_dropout=0.1 in the model's config, but not explorable" in said


def test_a_tail_is_told_of_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    for optimizer, told in ((torch.optim.AdamW, True), (schedulefree.AdamWScheduleFree, False)):
        model = nn.Linear(8, 1)
        probe = hdet.Probe(lambda model, x: model(x).square().mean(1), [torch.ones(8, 8)])
        hdet.recommended(model, optimizer(model.parameters(), lr=1e-3), total_steps=STEPS, probe=probe)
        assert ("end: averaged weights" in capsys.readouterr().out) == told


@pytest.mark.parametrize(
    ("window", "total", "enters"),
    [(None, 100, True), (5, 100, True), (28, 100, True), (29, 100, False), (1000, 100, False), (None, 20, False)],
)
def test_a_run_is_entered_from_below_only_where_a_window_ends_in_its_warm_up(
    window: int | None, total: int, enters: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing else brings it back: with one window it would train to its end at a quarter of what was set."""
    model = network()
    engine = hdet.recommended(model, adamw(model), total_steps=total, probe=probe(), window=window)
    factor = engine.learned["learning_rate"].factor
    assert factor == pytest.approx(1 / CAUTION if enters else 1.0)
    said = capsys.readouterr().out
    assert ("times lower" in said) == enters
    assert ("so nothing is learned before the run ends" in said) == (window == 1000)
