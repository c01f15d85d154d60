"""What `hdet.attach` refuses, and leaves as it was."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attach_parts import STEPS, adamw, batch, loop, loss_of, network, probe
from torch import Tensor, nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn import functional as F
from torch.optim import Optimizer

import hdet
from hdet.errors import CheckpointError, ConfigError, StepError
from hdet.overlay.hooks import requiring_grad
from hdet.overlay.surroundings import OptimizedParameters


class Sharpness(torch.optim.Optimizer):
    """An optimizer that steps another, as those who minimise sharpness do."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        self.base_optimizer = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(parameters, {"lr": 0.1})


class Looking(torch.optim.Optimizer):
    """As timm's Lookahead is made: of the parameter groups of another, and without torch's own beginning."""

    def __init__(self, parameters: Any) -> None:
        self._base_optimizer = torch.optim.SGD(parameters, lr=0.1)
        self.param_groups = self._base_optimizer.param_groups
        self.state = self._base_optimizer.state


@pytest.mark.parametrize(("kind", "name"), [(Sharpness, "base_optimizer"), (Looking, "_base_optimizer")])
def test_an_optimizer_that_steps_another_is_refused(kind: Any, name: str) -> None:
    model = network()
    with pytest.raises(ConfigError, match=f"{kind.__name__} steps another optimizer, its {name},"):
        hdet.attach(model, kind(model.parameters()), probe=probe(), total_steps=STEPS, quiet=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_model_takes_no_hooks_and_one_that_holds_it_does() -> None:
    model: Any = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    with pytest.raises(ConfigError, match="and takes no hooks, by which hdet follows a loop; put it into a module"):
        hdet.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), probe=probe(), total_steps=10, quiet=True)
    holder = nn.Sequential(model)
    optimizer = torch.optim.SGD(holder.parameters(), lr=0.1)
    search = hdet.attach(holder, optimizer, probe=probe(), total_steps=10, window=5, quiet=True)
    loop(holder, optimizer, search=search, stop=10)
    assert search.finished
    assert not any(record.faults for record in search.history)


def test_weights_that_are_averaged_now_and_then_need_a_loop_of_their_own() -> None:
    model = network()
    within = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(within, averager=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="PostLocalSGDOptimizer makes the ranks' weights their mean every few steps"):
        hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True)


def cosine(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda m, o: {"probe": loss_of}, "probe must be an hdet.Probe, got function"),
        (lambda m, o: {**cosine(m, o), "total_steps": None}, "a scheduler is simulated to the run's end"),
        (lambda m, o: {**cosine(m, o), "schedule": None}, "give scheduler= or schedule=, not both"),
        (lambda m, o: {"schedule": "cosine"}, "schedule is an hdet.schedules.Schedule.*got 'cosine'"),
        (lambda m, o: {"knobs": ["dropout"]}, "a knob must be of type Knob, got 'dropout'"),
        (lambda m, o: {"knobs": [hdet.Beta2]}, "a knob must be of type Knob, got <class"),
        (
            lambda m, o: {"knobs": hdet.Beta2()},
            r"knobs is a list of knobs, got Beta2\(.*give \[hdet.Dropout\(\)\], say",
        ),
        (
            lambda m, o: {"knobs": [hdet.LearningRate(bounds=(1e-3, 1e-2))]},
            "outside the bounds .* warm-up and fall as well .hdet's own if none was given.* authority=",
        ),
        (lambda m, o: {"knobs": [hdet.Beta1(), hdet.Beta1(bounds=(0.5, 0.9))]}, "two knobs are called 'beta1'"),
        (lambda m, o: {"total_steps": "60"}, "total_steps must be of type int, got '60'"),
        (lambda m, o: {"micro_batches": 0}, "micro_batches must be at least 1, got 0"),
        (lambda m, o: {"micro_batches": -3}, "micro_batches must be at least 1, got -3"),
        (lambda m, o: {"micro_batches": 10**30}, "one process holds 65536 replicas, or micro-batches of a step, at"),
        (
            lambda m, o: {"scheduler_every": 4},
            "scheduler_every=4 says how often a scheduler is stepped, and none is given",
        ),
        (
            lambda m, o: {**cosine(m, o), "scheduler_every": 1.5},
            "scheduler_every must be of type int, got 1.5",
        ),
        (lambda m, o: {**cosine(m, o), "scheduler_every": True}, "scheduler_every must be of type int, got True"),
        (lambda m, o: {**cosine(m, o), "scheduler_every": 0}, "scheduler_every must be at least 1, got 0"),
        (lambda m, o: {"scheduler_every": True}, "scheduler_every must be of type int, got True"),
        (
            lambda m, o: {"scheduler": lambda step: 0.01, "scheduler_every": True},
            "scheduler_every must be of type int, got True",
        ),
        (lambda m, o: {"window": "5"}, "window must be of type int or Windows or None, got '5'"),
        (lambda m, o: {"stride": "5"}, "stride must be of type int, got '5'"),
        (lambda m, o: {"seed": "0"}, "seed must be of type int, got '0'"),
        (lambda m, o: {"noise_scale": "yes"}, "noise_scale is True or False, got 'yes'"),
        (lambda m, o: {"exclude": 3}, r"exclude is a list of knobs' names, got 3; give \['weight_decay'\], say"),
        (lambda m, o: {"exclude": torch.tensor(1)}, r"exclude is a list of knobs' names, got tensor\(1\)"),
        (lambda m, o: {"knobs": torch.tensor(1)}, r"knobs is a list of knobs, got tensor\(1\)"),
        (lambda m, o: {"exclude": [hdet.Dropout()]}, r"exclude is a list of knobs' names, got \[Dropout"),
        (lambda m, o: {"replicas": 2}, "replicas must be of type Replicas or None, got 2"),
        (lambda m, o: {"history": 3}, "history is a path or an hdet.History, got 3"),
        (lambda m, o: {"replicas": hdet.replicate(m, o, n=2)}, "replicas with models of their own need a loop"),
        (lambda m, o: {"replicas": hdet.micro_batches(m, adamw(m), 1)}, "replicas= are of another model or optimizer"),
        (
            lambda m, o: {"micro_batches": 4, "replicas": hdet.micro_batches(m, o, 2)},
            "micro_batches=4 was given beside replicas= of 2 passes a step",
        ),
    ],
)
def test_what_attach_cannot_take_is_refused_and_changes_nothing(given: Any, message: str) -> None:
    model = network()
    optimizer = adamw(model)
    options = {"probe": probe(), "total_steps": STEPS, "quiet": True, **given(model, optimizer)}
    with pytest.raises(ConfigError, match=message):
        hdet.attach(model, optimizer, **options)
    assert not any((model._forward_pre_hooks, model._forward_hooks, optimizer._optimizer_step_post_hooks))


def test_replicas_are_of_a_model_that_the_loop_calls() -> None:
    model = network()
    optimizer = adamw(model)
    options: dict[str, Any] = {"probe": probe(), "total_steps": STEPS, "micro_batches": 2, "quiet": True}
    replicas = hdet.micro_batches(model, optimizer, 2)
    with pytest.raises(ConfigError, match="replicas= are of another model or optimizer"):
        hdet.attach(network(), optimizer, replicas=replicas, **options)
    assert hdet.attach(nn.Sequential(model), optimizer, replicas=replicas, **options).engine.home is replicas


def test_numbers_of_numpy_and_any_collection_of_names_are_taken() -> None:
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(
        model,
        optimizer,
        probe=probe(),
        total_steps=np.int64(STEPS),  # type: ignore[arg-type]
        micro_batches=np.int32(2),  # type: ignore[arg-type]
        window=np.int64(5),  # type: ignore[arg-type]
        warmup_steps=np.int64(0),  # type: ignore[arg-type]
        seed=np.int64(3),  # type: ignore[arg-type]
        stride=np.int64(2),  # type: ignore[arg-type]
        noise_scale=np.bool_(False),  # type: ignore[arg-type]
        exclude=(name for name in ["weight_decay"]),  # type: ignore[arg-type]
        scheduler_every=np.int64(2),  # type: ignore[arg-type]
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5),
        quiet=True,
    )
    plan = search.engine.plan
    assert [plan.total_steps, plan.windows.at(0), plan.seed, plan.replicas.size] == [STEPS, 5, 3, 2]
    assert {type(number) for number in (plan.total_steps, plan.windows.at(0), plan.seed)} == {int}
    assert sorted(search.shifts) == ["dropout", "learning_rate"]


def test_a_refused_state_leaves_the_search_as_it_was() -> None:
    searches = []
    for rate in (0.01, 0.05):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        searches.append(hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True))
    peak = searches[1].engine.knobs[0].peak
    with pytest.raises(CheckpointError):
        searches[1].load_state_dict(searches[0].state_dict())
    assert searches[1].engine.knobs[0].peak == peak


DAMAGED: list[tuple[tuple[Any, ...], Any]] = [
    (("part",), "x"),
    (("micro_batches",), "x"),
    (("entered",), "x"),
    (("lost",), "x"),
    (("rates", "courses"), None),
    (("losses",), {}),
    (("engine",), None),
    (("engine", "window"), "x"),
    (("engine", "converged"), {}),
    (("engine", "converged", "model"), None),
    (("engine", "converged", "optimizer", "state", 0), None),
    (("engine", "opening"), "x"),
    (("engine", "watch"), {}),
    (("engine", "collectors", 1, "pulls"), "x"),
    (("engine", "collectors", 1, "pulls"), []),
    (("engine", "open", "tally"), {}),
]


@pytest.mark.parametrize(("place", "value"), DAMAGED)
def test_a_damaged_state_is_refused_and_the_search_goes_on_as_it_was(place: tuple[Any, ...], value: Any) -> None:
    ends = []
    for damage in (False, True):
        torch.manual_seed(0)
        model = network()
        optimizer = adamw(model)
        search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True)
        for step in range(STEPS):
            if damage and step == 13:
                state = copy.deepcopy(search.state_dict())
                part = state
                for key in place[:-1]:
                    part = part[key]
                part[place[-1]] = value
                with pytest.raises(CheckpointError):
                    search.load_state_dict(state)
            search.loss(loss_of(model, batch(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize(("key", "value"), [("renewed", "no"), ("in_vain", None)])
def test_a_count_of_what_contrast_missed_that_is_none_is_refused(key: str, value: Any) -> None:
    model = network()
    search = hdet.attach(model, adamw(model), probe=probe(), total_steps=STEPS, quiet=True)
    state = copy.deepcopy(search.state_dict())
    assert key in state["engine"]["collectors"][2]
    state["engine"]["collectors"][2][key] = value
    with pytest.raises(CheckpointError, match="number of windows of which Contrast learned nothing"):
        search.load_state_dict(state)


def test_a_models_state_is_no_searchs() -> None:
    model = network()
    search = hdet.attach(model, adamw(model), probe=probe(), total_steps=STEPS, quiet=True)
    with pytest.raises(CheckpointError, match="this is no state of a search: it has no 'format', but '0"):
        search.load_state_dict(model.state_dict())


def test_a_model_of_which_nothing_is_trained_is_refused() -> None:
    model = network().requires_grad_(False)
    optimizer = adamw(model)
    with pytest.raises(ConfigError, match="no parameter that the optimizer holds requires a gradient"):
        hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True)
    with pytest.raises(ConfigError, match="no parameter that the optimizer holds requires a gradient"):
        hdet.recommended(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True)
    with pytest.raises(ConfigError, match="no parameter that the optimizer holds requires a gradient"):
        hdet.find(model, optimizer, loss=loss_of, batches=[batch(0)], probe=probe(), total_steps=STEPS)
    model[3].requires_grad_()
    hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_window_that_cannot_be_gone_on_with_is_told(scheduled: bool) -> None:
    searches = []
    for window in (5, 4):
        model = network()
        optimizer = adamw(model)
        options: dict[str, Any] = {"total_steps": STEPS, "window": window, "micro_batches": 1, "quiet": True}
        if scheduled:
            options["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        searches.append(hdet.attach(model, optimizer, probe=probe(), **options))
    for step in range(7):
        searches[0].loss(loss_of(searches[0].model, batch(step))).backward()
        searches[0].optimizer.step()
        searches[0].optimizer.zero_grad()
    said = "the search could not go on in the window that the state was taken in, at step 7"
    with pytest.warns(UserWarning, match=said) as told:
        searches[1].load_state_dict(searches[0].state_dict())
    assert [one.filename for one in told] == [__file__]
    assert ("the scheduler put back to that step too" in str(told[0].message)) is scheduled
    assert searches[1].engine.step_count == 5


def test_an_attached_model_can_be_pickled() -> None:
    model = network()
    hdet.attach(model, adamw(model), probe=probe(), total_steps=STEPS, quiet=True)
    again = pickle.loads(pickle.dumps(model))
    again(batch(0)[0])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_a_search_is_not_pickled_and_in_a_copy_it_is_detached() -> None:
    """As of a trainer, or of its callback, that keeps it."""
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True)
    with pytest.raises(CheckpointError, match=r"is not pickled: save search.state_dict\(\)"):
        pickle.dumps({"callback": [search]})
    loop(model, optimizer, search=search, stop=3)
    again, other, copied = copy.deepcopy([model, optimizer, search])
    assert not copied.attached
    assert copied.model is again
    assert copied.optimizer is other
    assert copied.shifts == search.shifts
    copied.detach()
    loop(again, other, search=copied, start=3)
    assert copied.engine.step_count == search.engine.step_count == 3
    loop(model, optimizer, search=search, start=3)
    assert search.finished


def test_a_wrapper_is_told_apart_from_the_optimizer_that_it_holds() -> None:
    model = network()

    class OptimWrapper:
        def __init__(self) -> None:
            self.opt = adamw(model)

    message = (
        r"must be a torch.optim.Optimizer, got <class '.*OptimWrapper'>, which holds one: give hdet.attach its .opt$"
    )
    with pytest.raises(ConfigError, match=message):
        hdet.attach(model, OptimWrapper(), probe=probe(), total_steps=STEPS, quiet=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"got <class 'object'>$"):
        hdet.attach(model, object(), probe=probe(), total_steps=STEPS, quiet=True)  # type: ignore[arg-type]


def test_passes_that_teach_nothing_are_told_once() -> None:
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=5, micro_batches=1, quiet=True)

    def train() -> None:
        for step in range(12):
            inputs, labels = batch(step)
            output = model(inputs)
            search.loss(F.cross_entropy(output, labels)).backward(retain_graph=True)
            (1e-3 * output.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="taught nothing about dropout") as told:
        train()
    assert len([one for one in told if "taught nothing" in str(one.message)]) == 1


@pytest.mark.filterwarnings("ignore:most steps of a window taught nothing")
@pytest.mark.parametrize("exclude", [[], ["dropout"]])
def test_steps_of_more_passes_than_expected_are_told_once(exclude: list[str]) -> None:
    """Where no knob of the forward pass is explored nothing is lost by it."""
    model = network()
    optimizer = adamw(model)
    options: dict[str, Any] = {"total_steps": STEPS, "exclude": exclude, "micro_batches": 1, "quiet": True}
    search = hdet.attach(model, optimizer, probe=probe(), **options)

    def train() -> None:
        for step in range(12):
            for part in range(2):
                (search.loss(loss_of(model, batch(step, part))) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    if exclude:
        with warnings.catch_warnings(action="error"):
            train()
        return
    with pytest.warns(
        UserWarning, match=r"the last 5 optimizer steps had .* training passes each or so, and hdet expects 1"
    ) as told:
        train()
    said = [(one.filename, str(one.message)[-15:]) for one in told]
    assert said[0] == (__file__, "micro_batches=2")
    assert not any("hdet expects" in str(one.message) for one in told[1:])


@pytest.mark.filterwarnings("ignore:the first training loss is")  # an adversary's loss is not the probe's
@pytest.mark.parametrize("frozen", [False, True])
def test_of_two_adversaries_the_one_that_is_looked_through_is_told(frozen: bool) -> None:
    """Its gradients of the other's turn are dropped, if it is not frozen there. The other's loop is an ordinary one."""
    torch.manual_seed(0)
    maker, judge = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 4)), network()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (maker, judge)]
    batches = [batch(-1, part)[0] for part in range(8)]
    probes = [
        hdet.Probe(lambda model, inputs: judge(model(inputs)).square().mean(1), batches),
        hdet.Probe(lambda model, inputs: model(inputs).square().mean(1), batches),
    ]
    options: dict[str, Any] = {"total_steps": 20, "window": 10, "micro_batches": 1, "quiet": True}
    searches = [
        hdet.attach(model, optimizer, probe=held_out, **options)
        for model, optimizer, held_out in zip((maker, judge), optimizers, probes, strict=True)
    ]

    def train() -> None:
        for step in range(20):
            real, made = batch(step)[0], maker(batch(step, 1)[0])
            optimizers[1].zero_grad()
            searches[1].loss(judge(real).square().mean() + judge(made.detach()).exp().mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            judge.requires_grad_(not frozen)
            searches[0].loss(judge(made).square().mean()).backward()
            optimizers[0].step()
            judge.requires_grad_(True)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train()
    said = [one for one in told if "taught nothing about dropout" in str(one.message)]
    assert [one.filename for one in said] == ([] if frozen else [__file__])
    assert all("freeze the model in the adversary's turn (requires_grad_(False))" in str(one.message) for one in said)
    maker_window, judge_window = (search.history.windows[0] for search in searches)
    assert all(search.finished for search in searches)
    for record in (maker_window, judge_window):
        assert 0.0 < record.estimates["learning_rate[0.weight]"]["stderr"] < float("inf")


def test_gradients_that_are_looked_at_between_steps_are_no_sign_of_another_optimizer() -> None:
    """As those that estimate Fisher information, a hundred passes without a step."""
    model = network()
    optimizer = adamw(model)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True)
    for step in range(6):
        search.loss(loss_of(model, batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    with warnings.catch_warnings(action="error"):
        for step in range(120):
            loss_of(model, batch(step)).backward()
            optimizer.zero_grad()
    with pytest.warns(UserWarning, match="without a step of the AdamW that hdet.attach was given"):
        loop(model, adamw(model), stop=12)


def test_layers_that_have_no_shape_yet_are_named() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="parameters without a shape yet"):
        hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS)


@pytest.mark.parametrize("zeroed", ["after the step", "before backward"])
def test_an_optimizer_that_the_loop_does_not_step_is_noticed(zeroed: str) -> None:
    """As where a trainer makes its optimizer anew after the search was attached; within a dozen steps."""
    model = network()
    attached = torch.optim.AdamW(model.parameters(), lr=0.01)
    search = hdet.attach(model, attached, probe=probe(), total_steps=STEPS, quiet=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loop() -> None:
        for step in range(12):
            loss = search.loss(loss_of(model, batch(step)))
            if zeroed == "before backward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if zeroed == "after the step":
                optimizer.zero_grad()

    with pytest.warns(UserWarning, match="without a step of the AdamW that hdet.attach was given") as told:
        loop()
    assert len(told) == 1
    assert search.engine.step_count == 0


@pytest.mark.parametrize("follows", ["own schedule", "no schedule", "scheduler"])
def test_a_group_that_is_added_later_is_named(follows: str) -> None:
    """And not taken for a rate that moved."""
    model = network()
    optimizer = torch.optim.AdamW(list(model.parameters())[:2], lr=0.01)
    given: dict[str, Any] = {"schedule": None} if follows == "no schedule" else {}
    if follows == "scheduler":
        given["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True, **given)
    search.loss(loss_of(model, batch(0))).backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(model.parameters())[2:]})
    with pytest.raises(StepError, match="holds 2 parameter groups at step 1, and held 1 when hdet was attached"):
        loss_of(model, batch(1))


@pytest.mark.parametrize("rates", ["matrices", "together", "groups"])
def test_a_group_that_is_taken_out_in_the_middle_of_a_pass_is_named(rates: Any) -> None:
    model = network()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.01)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, rates=rates, quiet=True)
    loss = search.loss(loss_of(model, batch(0)))
    del optimizer.param_groups[1]
    with pytest.raises(StepError, match="was taken out of the optimizer in the middle of a pass"):
        loss.backward()


def test_nothing_is_attached_where_no_tensor_could_be_written_later() -> None:
    model = network()
    optimizer = adamw(model)
    with torch.inference_mode():
        with pytest.raises(ConfigError, match=r"under torch.inference_mode\(\), and what is made there is not"):
            hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, quiet=True)
        with pytest.raises(ConfigError, match="was called under torch"):
            hdet.Engine(hdet.micro_batches(model, optimizer, 1), [], total_steps=STEPS)
    assert not any((model._forward_pre_hooks, model._forward_hooks, optimizer._optimizer_step_post_hooks))


@pytest.mark.parametrize("rates", ["matrices", "together"])
@pytest.mark.parametrize("steps", [0, 3, 10])
def test_an_engine_is_saved_with_its_search(tmp_path: Path, rates: str, steps: int) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, window=10, rates=rates, quiet=True)
    loop(model, optimizer, search=search, stop=steps)
    folder = hdet.checkpoints.CheckpointFolder(tmp_path)
    alone = "this is the engine of hdet.attach, from which alone the run could not go on"
    for refused in (folder.save, hdet.checkpoints.Stateful, hdet.Engine.state_dict):
        with pytest.raises(CheckpointError, match=alone):
            refused(search.engine)
    assert search.engine.cycle.run is None
    windows = list(search.history)
    for load in (folder.resume, lambda engine: engine.load_state_dict({})):
        with pytest.raises(CheckpointError, match=r"the engine of hdet\.attach takes no state by itself"):
            load(search.engine)
    assert list(search.history) == windows
    search.load_state_dict(search.state_dict())
    loop(model, optimizer, search=search, start=steps)
    assert search.finished


@pytest.mark.parametrize("attached_first", [True, False])
def test_a_scheduler_that_explores_beside_it_is_noticed_in_the_first_step(attached_first: bool) -> None:
    """Also where the scheduler was not given the model, and holds the optimizer's parameters alone."""
    model = network()
    optimizer = adamw(model)

    def explored() -> Any:
        replicas = hdet.replicate(OptimizedParameters(optimizer), optimizer, n=2)
        return hdet.explore(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS), replicas=replicas)

    scheduler = None if attached_first else explored()
    search = hdet.attach(model, optimizer, probe=probe(), schedule=None, quiet=True)
    scheduler = scheduler or explored()
    search.loss(loss_of(model, batch(0))).backward()
    for one, other in zip(model.parameters(), scheduler.engine.hosts[1][0].parameters(), strict=True):
        other.grad = one.grad

    def step() -> None:
        for stepped in scheduler.engine.optimizers:
            stepped.step()
        scheduler.step([torch.tensor(1.0)] * 2)

    with pytest.raises(StepError, match="another engine has been made on this model or its optimizer since"):
        step()


def test_a_loop_that_runs_a_compiled_model_is_told_of_plain_dropouts() -> None:
    """hdet was given the model that was compiled, which bears no mark of it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    search = hdet.attach(model, optimizer, probe=probe(), total_steps=STEPS, micro_batches=1, quiet=True)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(StepError, match=r"the loop runs what torch\.compile made of the model.*hdet\.nn\.swap"):
        search.loss(loss_of(compiled, batch(0))).backward()  # type: ignore[arg-type]


@dataclass
class Inner:
    logits: Tensor


@dataclass(slots=True)
class Slotted:
    inner: Inner


class Bare:
    def __init__(self, part: Any) -> None:
        self.part = part


@dataclass
class Linked:
    """Parts that know each other, as nodes of a graph do."""

    logits: Tensor
    other: Any = None


def linked(logits: Tensor) -> Bare:
    first, last = Linked(logits.detach()), Linked(logits)
    first.other, last.other = last, first
    return Bare([first, {"itself": first}])


def with_more(logits: Tensor) -> Any:
    """Attributes beside its fields."""
    found = Linked(logits.detach())
    found.extra = logits  # type: ignore[attr-defined]
    return found


class Hidden:
    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass in one with slots": (lambda z: Slotted(Inner(z)), lambda out: out.inner.logits),
    "list in an object": (lambda z: Bare([z]), lambda out: out.part[0]),
    "objects that know each other": (linked, lambda out: out.part[0].other.logits),
    "attribute of a dataclass": (with_more, lambda out: out.extra),
    "mapping": (lambda z: UserDict(logits=z), lambda out: out["logits"]),
    "hidden": (Hidden, lambda out: out.logits),
}


class Wrapping(nn.Module):
    """Returns its logits in something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = network()
        self.wrap, self.unwrap = KINDS[kind]

    def forward(self, inputs: Tensor) -> Any:
        return self.wrap(self.layers(inputs))


@pytest.mark.parametrize("kind", list(KINDS))
def test_passes_are_counted_whatever_the_model_returns_or_it_is_told(kind: str) -> None:
    model = Wrapping(kind)

    def loss_in(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model.unwrap(model(given[0])), given[1])  # type: ignore[operator]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    search = hdet.attach(model, optimizer, probe=hdet.Probe(loss_in, probe().batches), total_steps=STEPS, quiet=True)
    unseen = pytest.warns(UserWarning, match="no tensor that requires gradients in what the Wrapping returns")
    with unseen if kind == "hidden" else nullcontext():
        for step in range(3):
            for part in range(2):
                search.loss(loss_in(model, batch(step, part)) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(search.engine.replicas) == (1 if kind == "hidden" else 2)


def test_what_an_output_holds_deep_inside_is_looked_at_where_nothing_else_is_there() -> None:
    """A cache of keys and values costs a hook each, in each pass."""
    logits, cached = torch.ones(2, requires_grad=True) * 2, torch.ones(3, requires_grad=True) * 2
    assert requiring_grad({"logits": logits, "cache": Bare([cached])}) == [logits]
    assert requiring_grad({"cache": Bare([cached])}) == [cached]
    assert requiring_grad(Bare([nn.Linear(2, 2)])) == []
