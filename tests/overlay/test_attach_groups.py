"""hdet.attach with a learning rate for each group: by the optimizer's groups, by patterns on names, by matrices."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
from grouped_runs import PROBE, STEPS, attach, build, examples, groups_in_a_step, names_by_group, train
from torch import nn
from torch.nn import functional as F

import hdet
from hdet.errors import CheckpointError, ConfigError, MatchError
from hdet.hparams.binding import GroupBinding
from hdet.recipes.recommended import ALONG_A_LINE


def test_each_matrix_is_a_group_by_its_own_name() -> None:
    """What is a vector, in more dimensions too, is the rest; a tied matrix has one name, and a frozen one its own."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"table[in]": nn.Embedding(6, 4), "mix": nn.Conv1d(4, 4, 1), "out": nn.Linear(4, 6)})
    model["out"].weight = model["table[in]"].weight
    model["frozen"] = nn.Linear(4, 4).requires_grad_(False)
    model["single"] = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not model["frozen"].bias], lr=1e-3)
    search = attach(model, optimizer, rates="matrices")
    names = ["frozen.weight", "mix.weight", "others", "table[in].weight"]
    assert sorted(search.shifts) == [f"learning_rate[{name}]" for name in names]
    groups = groups_in_a_step(optimizer.step)
    assert sorted(map(sorted, names_by_group(model, groups))) == [
        ["frozen.weight"],
        ["mix.bias", "out.bias", "single.weight"],
        ["mix.weight"],
        ["table[in].weight"],
    ]
    search.detach()
    assert len(optimizer.param_groups) == 1


def of_matrices(count: int) -> nn.Sequential:
    """So many matrices, beside as many vectors."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def rates_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> list[str]:
    exclude = ["weight_decay", *options.pop("exclude", ())]
    search = hdet.attach(
        model, optimizer, probe=PROBE, total_steps=STEPS, window=5, exclude=exclude, quiet=True, **options
    )
    search.detach()
    return sorted(search.shifts)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_each_matrix_has_a_rate_where_nobody_says(kind: type[torch.optim.Optimizer]) -> None:
    each = ["learning_rate[0.weight]", "learning_rate[1.weight]", "learning_rate[others]"]
    model = of_matrices(2)
    assert rates_of(model, kind(model.parameters(), lr=1e-3)) == each
    assert rates_of(model, kind(model.parameters(), lr=1e-3), rates="together") == ["learning_rate"]
    model[1].requires_grad_(False)
    assert rates_of(model, kind(model.parameters(), lr=1e-3)) == each, "it may be thawed later"
    base = nn.Sequential(model, nn.Linear(4, 4).requires_grad_(False))
    assert rates_of(base, kind(base.parameters(), lr=1e-3)) == ["learning_rate"], "most are frozen"


def test_a_function_of_the_step_may_read_the_optimizers_groups() -> None:
    """As where rates fall from layer to layer, by a factor that each group holds."""
    model = of_matrices(3)
    groups = [{"params": own.parameters(), "lr_scale": 0.5**place} for place, own in enumerate(model)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    rates = lambda step: [1e-3 * own["lr_scale"] for own in optimizer.param_groups]  # noqa: E731
    search = attach(model, optimizer, rates="matrices", scheduler=rates)
    assert search.shifts["learning_rate[2.weight]"].start == pytest.approx(2.5e-4)
    search.detach()


def test_one_rate_is_kept_where_more_are_not_known_to_be_good() -> None:
    model, many = of_matrices(2), of_matrices(301)
    one = ["learning_rate"]
    single = of_matrices(1)
    assert rates_of(single, torch.optim.AdamW(single.parameters())) == one
    assert rates_of(many, torch.optim.AdamW(many.parameters())) == one
    assert len(rates_of(many[:300], torch.optim.AdamW(many[:300].parameters()))) == 301
    assert rates_of(model, torch.optim.RMSprop(model.parameters(), lr=1e-3)) == one
    assert rates_of(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))) == one
    assert rates_of(model, torch.optim.AdamW(model.parameters()), knobs=[hdet.LearningRate()]) == one
    groups = [{"params": own.parameters(), "lr": rate} for own, rate in zip(model, (1e-3, 2e-3), strict=True)]
    assert rates_of(model, torch.optim.SGD(groups)) == one, "somebody has thought of the ratio"
    optimizer = torch.optim.SGD([{"params": own.parameters(), "lr": 1e-3} for own in model])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.01, lambda step: 1.0])
    assert rates_of(model, optimizer, scheduler=scheduler) == one
    optimizer = torch.optim.SGD([{"params": own.parameters(), "lr": 1e-3} for own in model])
    assert rates_of(model, optimizer, scheduler=lambda step: [1e-3, 5e-4]) == one
    optimizer = torch.optim.SGD([{"params": own.parameters(), "lr": 1e-3} for own in model])
    lambdas = [lambda step: 1.0, lambda step: 1.0 if step <= STEPS else 0.5]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambdas)
    assert len(rates_of(model, optimizer, scheduler=scheduler)) == 3
    for _ in range(10):
        optimizer.step()
        scheduler.step()
    assert len(rates_of(model, optimizer, scheduler=scheduler)) == 3, "as it is resumed; beyond its end they differ"
    named = nn.ParameterDict({name: nn.Parameter(torch.randn(4, 4)) for name in ("others", "first")})
    assert rates_of(named, torch.optim.SGD(named.parameters(), lr=1e-3)) == one
    optimizer = torch.optim.AdamW(model.parameters())
    assert rates_of(model, optimizer, replicas=hdet.micro_batches(model, optimizer, 1)) == one
    assert rates_of(model, torch.optim.AdamW(model.parameters()), exclude=["learning_rate"]) == []
    assert rates_of(model, torch.optim.AdamW(model.parameters()), schedule=None) == one, "no peak, nothing to compare"


def test_it_is_said_where_each_matrix_has_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    for count, said in ((2, 1), (1, 0)):
        model = of_matrices(count)
        hdet.attach(model, torch.optim.AdamW(model.parameters()), probe=PROBE, total_steps=STEPS).detach()
        assert capsys.readouterr().out.count('rates="together" keeps one') == said


def test_a_state_of_one_rate_and_one_of_many_are_told_apart() -> None:
    """As of a search from before each matrix had a rate by default."""
    states = []
    for rates in ("together", "matrices"):
        model, optimizer = build(width=64)
        states.append(attach(model, optimizer, rates=rates).state_dict())
    asked = r'.*; rates="together" is one learning rate, "matrices" one for each matrix'
    missing = r"written with other knobs \(missing here: 'learning_rate"
    model, optimizer = build(width=64)
    with pytest.raises(CheckpointError, match=missing + "'; new h" + asked):
        attach(model, optimizer, rates="matrices").load_state_dict(states[0])
    model, optimizer = build(width=64)
    with pytest.raises(CheckpointError, match=missing + r"\[0.weight\]', .*; new here: 'lea" + asked):
        attach(model, optimizer, rates="together").load_state_dict(states[1])


def test_of_many_rates_the_middle_goes_by_the_name_of_one() -> None:
    model, optimizer = build(width=64)
    search = attach(model, optimizer, rates="matrices")
    train(model, optimizer, search, stop=20)
    shifts = search.shifts
    assert len(shifts) == 3
    assert shifts["learning_rate"] == sorted(shifts.values(), key=lambda one: one.value)[1]
    with pytest.raises(KeyError, match="weight_decay"):
        shifts["weight_decay"]


def test_without_a_matrix_there_is_no_group() -> None:
    model = nn.LayerNorm(4)
    with pytest.raises(ConfigError, match="finds no matrix that this optimizer holds"):
        attach(model, torch.optim.AdamW(model.parameters()), rates="matrices")


def test_a_matrix_that_is_called_as_the_rest_is_refused() -> None:
    model = nn.ParameterDict({"others": nn.Parameter(torch.randn(4, 4)), "bias": nn.Parameter(torch.zeros(4))})
    with pytest.raises(ConfigError, match="and so hdet calls the parameters that no pattern matches"):
        attach(model, torch.optim.AdamW(model.parameters()), rates="matrices")


def test_rates_by_matrix_learn_what_the_same_patterns_do() -> None:
    learned = []
    for rates in ("matrices", {"0.weight": "0.weight", "2.weight": "2.weight"}):
        model, optimizer = build(width=64)
        with torch.no_grad():
            model[2].weight.mul_(0.2)
        search = attach(model, optimizer, rates=rates)
        train(model, optimizer, search)
        learned.append((search.shifts, [parameter.tolist() for parameter in model.parameters()]))
    assert learned[0] == learned[1]
    factors = {name: own.factor for name, own in learned[0][0].items()}
    assert factors["learning_rate[2.weight]"] < 0.7 * factors["learning_rate[0.weight]"], "its weights are smaller"


def test_what_is_said_of_many_groups_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    attach(model, torch.optim.AdamW(model.parameters(), lr=1e-3), rates="matrices", quiet=False)
    printed = capsys.readouterr().out
    assert "+ learning rates of 13 groups, 0.weight to others: heads" in printed
    assert "learning rate of group" not in printed


def test_a_second_search_ends_the_first_one_and_its_groups() -> None:
    """Whether or not somebody keeps the first, as a notebook's cell may not."""
    model, optimizer = build()
    attach(model, optimizer)
    gc.collect()
    search = attach(model, optimizer, rates={"head": "2.*"})
    assert len(groups_in_a_step(lambda: train(model, optimizer, search, stop=1))) == 2
    assert len(optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize(
    ("options", "kind"), [({}, torch.optim.AdamW), ({"lr": 0.1, "momentum": 0.9}, torch.optim.SGD)], ids=str
)
def test_held_it_is_training_in_one_group(options: dict[str, Any], kind: Any) -> None:
    """Cut and factor 1: the same weights, bit for bit."""
    one, plain = build(kind, **options)
    train(one, plain, None)
    other, cut = build(kind, **options)
    held = [
        hdet.LearningRate(name=f"learning_rate[{name}]", groups=index, controller=hdet.controllers.Hold())
        for index, name in enumerate(("others", "biases", "head"))
    ]
    train(other, cut, attach(other, cut, schedule=None, knobs=held))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_each_groups_rate_is_in_force_while_the_optimizer_steps() -> None:
    model, optimizer = build(width=64)  # large enough to tell that nothing has trained it
    search = attach(model, optimizer, schedule=hdet.schedules.Constant(3e-3), guard=None)
    names = {"0.weight": "others", "0.bias": "biases", "2.weight": "head", "2.bias": "head"}
    seen: dict[int, float] = {}
    optimizer.register_step_pre_hook(
        lambda own, *_: seen.update({id(p): group["lr"] for group in own.param_groups for p in group["params"]})
    )
    for step in range(STEPS):
        shifts = {knob.name: knob.shift for knob in search.engine.knobs}
        train(model, optimizer, search, start=step, stop=step + 1)
        found = {name: seen[id(parameter)] for name, parameter in model.named_parameters()}
        expected = {name: 3e-3 * math.exp(shifts[f"learning_rate[{group}]"]) for name, group in names.items()}
        assert found == pytest.approx(expected)
    assert len({round(knob.shift, 6) for knob in search.engine.knobs}) == 3


@pytest.mark.parametrize(("second", "alike"), [(3e-3, True), (3e-3 * (1 + 1e-7), True), (0.0, True), (1e-2, False)])
@pytest.mark.parametrize("scheduled", [False, True])
def test_rates_that_were_given_alike_are_not_parted_by_first_steps_alone(
    second: float, alike: bool, scheduled: bool
) -> None:
    """One that stands at 0 is nobody's: no factor moves it."""
    model, _ = build()
    model.append(nn.Linear(3, 3))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW([*groups, {"params": model[3].parameters(), "lr": second}], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, STEPS) if scheduled else None
    search = attach(model, optimizer, rates="matrices", scheduler=scheduler)
    for knob in search.engine.knobs:
        assert isinstance(knob.evidence, hdet.evidence.GroupLines)
        assert (knob.evidence.first, knob.evidence.again) == ((0.5, (0.2,)) if alike else (1.0, (0.1, 0.2)))


def test_named_groups_go_by_their_names_and_others_by_their_number() -> None:
    model, _ = build()
    for named, expected in ((True, ["body", "head"]), (False, ["0", "1"])):
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        if named:
            groups = [{**group, "name": name} for group, name in zip(groups, expected, strict=True)]
        search = attach(model, torch.optim.SGD(groups, lr=0.1), rates="groups")
        assert list(search.shifts) == [f"learning_rate[{name}]" for name in expected]
        assert all(knob.controller.common == ALONG_A_LINE for knob in search.engine.knobs)
        search.detach()


def test_a_stopped_run_goes_on_as_if_it_had_not_been() -> None:
    whole, optimizer = build()
    search = attach(whole, optimizer)
    train(whole, optimizer, search)

    first, other = build()
    begun = attach(first, other)
    train(first, other, begun, stop=33)
    saved = copy.deepcopy({"model": first.state_dict(), "optimizer": other.state_dict(), "search": begun.state_dict()})
    second, again = build()
    resumed = attach(second, again)
    second.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["search"])
    train(second, again, resumed, start=33)
    assert resumed.shifts == search.shifts
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    assert [record.estimates for record in resumed.history] == [record.estimates for record in search.history][-6:]
    resumed.detach()
    assert len(again.param_groups) == 1


class Thawed:
    """A run with a rate for each matrix and a dropout, whose first layer is trained from step 12 on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Linear(16, 3))
        self.model[0].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.search = hdet.attach(
            self.model,
            self.optimizer,
            probe=PROBE,
            total_steps=2 * STEPS,
            window=10,
            micro_batches=4,
            rates="matrices",
            quiet=True,
        )

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            self.model[0].requires_grad_(step >= 12)
            torch.manual_seed(step)
            for part in range(4):
                inputs, labels = examples(4 * step + part)
                (self.search.loss(F.cross_entropy(self.model(inputs), labels)) / 4).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def parts(self) -> list[Any]:
        return [self.search, self.model, self.optimizer]


def test_a_run_whose_matrices_were_thawed_is_gone_on_with_to_the_bit() -> None:
    """Gradients are sketched anew in a pass, and belong to the groups that are cut for the step."""
    straight, resumed = Thawed(), Thawed()
    straight.train(0, 47)
    saved = copy.deepcopy([part.state_dict() for part in straight.parts()])
    straight.train(47, 2 * STEPS)
    resumed.model[0].requires_grad_(True)
    for part, state in zip(resumed.parts(), saved, strict=True):
        part.load_state_dict(state)
    resumed.train(47, 2 * STEPS)
    assert resumed.search.shifts == straight.search.shifts
    assert straight.search.shifts["dropout"].factor != 1.0
    assert all(map(torch.equal, straight.model.parameters(), resumed.model.parameters()))


def test_what_cannot_be_is_refused() -> None:
    model, optimizer = build()
    with pytest.raises(
        MatchError, match=r"no parameter that the optimizer holds matches 'body\.\*'; there are '0\.weight'"
    ):
        attach(model, optimizer, rates={"body": "body.*"})
    with pytest.raises(ConfigError, match="names each group by a printable string, got 3"):
        attach(model, optimizer, rates={3: "2.*"})
    with pytest.raises(
        ConfigError, match='rates is "auto", "together", "groups", "matrices", "optimizers" or a mapping'
    ):
        attach(model, optimizer, rates="group")
    with pytest.raises(ConfigError, match="rates must be of type str or Mapping"):
        attach(model, optimizer, rates=["matrices"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rates": {}}, r"rates=\{\} names no group"),
        ({"rates": {"head": 3}}, r"'head': \.\.\.\} takes a pattern on parameter names or a list of them, got 3"),
        ({"rates": {"head": ["2.*", 3]}}, "takes a pattern on parameter names or a list of them"),
        ({"rates": {"all": "*", "head": "2.*"}}, r"'head': \.\.\.\} is left with no parameter, since names before it"),
        ({"rates": {"others": "2.*"}}, "and so hdet calls the parameters that no pattern matches"),
        ({"knobs": [hdet.LearningRate()]}, "the knob 'learning_rate' would take the place of all of them"),
        ({"knobs": [hdet.LearningRate(groups=0)]}, r"the knob 'learning_rate\[0\]' would take the place"),
        (
            {"knobs": [hdet.LearningRate()], "rates": "groups"},
            r"rates= asks for the learning rates \['learning_rate\[0\]",
        ),
    ],
)
def test_no_rate_that_was_asked_for_is_dropped_in_silence(given: dict[str, Any], message: str) -> None:
    model, optimizer = build()
    with pytest.raises(ConfigError, match=message):
        attach(model, optimizer, **given)
    assert len(optimizer.param_groups) == 1


def test_the_name_of_the_rest_can_be_given_where_there_is_no_rest() -> None:
    search = attach(*build(), rates={"head": "2.*", "others": "*"})
    assert list(search.shifts) == ["learning_rate[head]", "learning_rate[others]"]


def test_names_are_those_of_the_model_under_its_wrappers() -> None:
    model, optimizer = build()
    search = attach(torch.compile(model, backend="eager"), optimizer)
    assert len(search.shifts) == 3


def test_tied_parameters_go_by_any_of_their_names() -> None:
    model, _ = build()
    model.append(nn.Linear(8, 3, bias=False))
    model[3].weight = model[2].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    search = attach(model, optimizer, rates={"tied": "3.weight"})
    (tied,) = search.engine.knobs[1].bindings
    assert isinstance(tied, GroupBinding)
    groups = groups_in_a_step(optimizer.step)
    assert [parameter is model[2].weight for parameter in groups[1]["params"]] == [True]
