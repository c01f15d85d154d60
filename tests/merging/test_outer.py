"""The outer optimizer."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import PlainSerializer

import hdet
from hdet.contrib import Weighted
from hdet.errors import CheckpointError, ConfigError
from hdet.merges import Mean, Merge, Outer

TOTAL, WINDOW = 14, 4


def engine_of(problem: Any, merge: Merge, n: int = 4, total: int = TOTAL, **options: Any) -> hdet.Engine:
    model = problem.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    knob = hdet.LearningRate(spread=hdet.spreads.TwoLevel(0.3 if n > 1 else 0.0))
    return hdet.Engine(
        hdet.replicate(model, optimizer, n=n),
        [knob],
        window=WINDOW,
        merge=merge,
        total_steps=total,
        **{"gradients": "local", **options},
    )


def held(engine: hdet.Engine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.replicas[0].model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("gradients", ["shared", "local"])
@pytest.mark.parametrize("inner", [Mean("keep"), Mean("average"), Weighted(0.5), Outer(0.5)])
def test_sgd_of_rate_1_without_momentum_is_the_inner_merge_bit_for_bit(
    inner: Merge, gradients: str, problem: Any, train: Any
) -> None:
    plain = engine_of(problem, inner, gradients=gradients)
    outer = engine_of(problem, Outer(1.0, options={}, merge=inner), gradients=gradients)
    train(plain)
    train(outer)
    assert same(held(plain), held(outer))


class Halving(torch.optim.SGD):
    """Keeps in its group what it has come to."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["lr"] /= 2


@pytest.mark.parametrize(
    ("merge", "reference"),
    [
        (Outer(optimizer=f"{__name__}:Halving", options={}), lambda ps: Halving(ps, lr=0.7)),
        (Outer(), lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True)),
        (
            Outer(0.05, optimizer="Adam", options={"betas": [0.8, 0.9]}),
            lambda ps: torch.optim.Adam(ps, 0.05, betas=(0.8, 0.9)),
        ),
    ],
)
def test_it_is_the_optimizer_on_the_converged_weights(
    merge: Outer, reference: Any, problem: Any, train: Any, assert_alike: Any
) -> None:
    """As DiLoCo is written: the weights are the outer optimizer's parameters, start minus mean their gradient."""
    engine = engine_of(problem, merge)
    own = [torch.nn.Parameter(value.double()) for value in held(engine)]
    outer = reference(own)
    for stop in (4, 8, 12, 14):
        before: list[Any] = []

        def after(step: int, before: list[Any] = before) -> None:
            before[:] = [[p.detach().double() for p in replica.model.parameters()] for replica in engine.replicas]

        train(engine, stop, after_update=after)
        assert_alike(engine)
        for parameter, *values in zip(own, *before, strict=True):
            parameter.grad = parameter.detach() - torch.stack(values).mean(dim=0)
        outer.step()
        for mine, parameter in zip(held(engine), own, strict=True):
            torch.testing.assert_close(mine.double(), parameter.detach(), rtol=1e-4, atol=1e-5)
            parameter.data.copy_(mine)


def test_the_inner_optimizers_state_is_each_replicas_own(problem: Any, train: Any) -> None:
    engine = engine_of(problem, Outer())
    train(engine, WINDOW)
    first, second = (o.state[o.param_groups[0]["params"][0]]["exp_avg"] for o in engine.optimizers[:2])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("home", ["one replica", "micro-batches"])
def test_of_one_model_it_is_lookahead(home: str, problem: Any, train: Any) -> None:
    """Every WINDOW steps the weights go back half the way to where they were."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    one = home == "one replica"
    replicas = hdet.replicate(model, optimizer, n=1) if one else hdet.micro_batches(model, optimizer, n=2)
    engine = hdet.Engine(replicas, [], window=WINDOW, merge=Outer(0.5, options={}), total_steps=8)
    twin = problem.model()
    plain = torch.optim.SGD(twin.parameters(), lr=0.05)
    start = [parameter.detach().clone() for parameter in twin.parameters()]
    for step in range(8):
        for replica in engine.replicas:
            (problem.loss(twin, problem.batch(step, replica.index)) / len(engine.replicas)).backward()
        plain.step()
        plain.zero_grad()
        if (step + 1) % WINDOW == 0:
            with torch.no_grad():
                for parameter, before in zip(twin.parameters(), start, strict=True):
                    before.lerp_(parameter, 0.5)
                    parameter.copy_(before)
    records = train(engine)
    assert [record.merged for record in records] == [True, True]
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("options", "copies"), [({}, 0), ({"momentum": 0.9, "nesterov": True}, 1)])
def test_between_its_steps_it_holds_the_outer_state_alone(
    options: dict[str, Any], copies: int, problem: Any, train: Any
) -> None:
    """Lookahead's slow weights are the window's opening, of which there is no second copy."""
    engine = engine_of(problem, Outer(0.5, options=options), n=1)  # type: ignore[arg-type]
    train(engine, 8)
    own = {name: value for name, value in vars(engine.cycle.merger).items() if name not in ("scene", "inner", "spec")}
    size = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(own))
    assert size == copies * sum(value.numel() * value.element_size() for value in held(engine))


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value, *([value.grad] if value.grad is not None else [])]
    if isinstance(value, (list, tuple)):
        return [tensor for entry in value for tensor in tensors_in(entry)]
    if isinstance(value, torch.optim.Optimizer):
        return tensors_in(vars(value))
    return tensors_in(list(value.values())) if isinstance(value, dict) else []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda engine: pickle.loads(pickle.dumps(engine))])
@pytest.mark.parametrize("step", [0, 9])
def test_an_engine_is_copied_with_it(step: int, copied: Any, problem: Any, train: Any) -> None:
    """Its outer state goes along, and follows the copied weights."""
    engine = engine_of(problem, Outer())
    train(engine, step)
    other = copied(engine)
    train(engine)
    train(other)
    assert same(held(engine), held(other))


def test_an_outer_optimizer_that_begins_with_a_state_begins_with_it_anew(problem: Any, train: Any) -> None:
    """Adagrad makes its sums of squares as it is made; a run that goes back has them as at first."""
    merge = Outer(0.1, optimizer="Adagrad", options={"initial_accumulator_value": 0.5})
    engine = engine_of(problem, merge)
    train(engine, 4)
    train(engine, 8, loss=lambda model, batch: problem.loss(model, batch) * float("nan"))
    engine.cycle.merger.forget()
    first = engine_of(problem, merge)
    assert all(
        torch.equal(own["sum"], other["sum"])
        for own, other in zip(
            engine.cycle.merger.state_dict()["optimizer"]["state"].values(),
            first.cycle.merger.state_dict()["optimizer"]["state"].values(),
            strict=True,
        )
    )
    train(engine)
    assert all(value.isfinite().all() for value in held(engine))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


FACTORED = Outer(0.1, optimizer="Adafactor", options={})


@pytest.mark.parametrize("merge", [Outer(), FACTORED], ids=["momentum", "factored"])
@pytest.mark.parametrize("step", [0, 2, 4, 9, 12, 13])
def test_a_run_that_is_taken_up_is_the_same_run(step: int, merge: Outer, problem: Any, train: Any) -> None:
    whole, first, second = (engine_of(problem, merge) for _ in range(3))
    train(whole)
    train(first, step)
    second.load_state_dict(through_a_file(first.state_dict()))
    train(second)
    assert same(held(whole), held(second))


class Paired(torch.optim.SGD):
    """Keeps two tensors of a parameter in one tuple."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                zero = torch.zeros_like(parameter)
                mean, last = self.state[parameter].get("moments", (zero, zero))
                self.state[parameter]["moments"] = mean, last = 0.9 * mean + parameter.grad, parameter.grad.clone()
                parameter.sub_(mean + last, alpha=group["lr"])


def test_a_checkpoint_holds_what_the_outer_optimizer_keeps_in_tuples(tmp_path: Path, problem: Any, train: Any) -> None:
    merge = Outer(0.1, optimizer=f"{__name__}:Paired", options={})
    whole, other = engine_of(problem, merge), engine_of(problem, merge)
    train(whole, 2 * WINDOW)
    hdet.checkpoints.CheckpointFolder(tmp_path).save(whole)
    hdet.checkpoints.CheckpointFolder(tmp_path).resume(other)
    train(whole)
    train(other)
    assert same(held(whole), held(other))


@pytest.mark.parametrize("frozen_at_load", [[], [1], [0, 1]], ids=["none", "another", "more"])
def test_what_it_knows_goes_to_the_parameters_that_moved_at_the_save(frozen_at_load: list[int]) -> None:
    """Layers of one shape, of which others are frozen as the state is loaded than were as it was saved."""
    whole, other = partly_frozen([0]), partly_frozen(frozen_at_load)
    momenta = of_layers(whole, 2 * WINDOW)
    state = through_a_file(whole.state_dict())
    other.load_state_dict(state)
    assert momenta == of_layers(other, 0) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    for replica in other.replicas:
        freeze(replica.model, [0])
    assert of_layers(whole, TOTAL) == of_layers(other, TOTAL)
    assert same(held(whole), held(other))
    del state["merge"]["state"]["moving"]  # as older versions left it out
    (older := partly_frozen([0])).load_state_dict(state)
    of_layers(older, TOTAL)
    assert same(held(whole), held(older))


@pytest.mark.parametrize("moving", [None, 3, [], [True, True], ["no"] * 6, [True] * 6])
def test_a_state_that_does_not_tell_what_it_is_of_is_refused(moving: Any) -> None:
    engine = partly_frozen([0])
    of_layers(engine, 2 * WINDOW)
    state = through_a_file(engine.state_dict())
    state["merge"]["state"]["moving"] = moving
    with pytest.raises(CheckpointError, match="outer optimizer is of 4 parameters, and which of 6 those are cannot"):
        partly_frozen([0]).load_state_dict(state)


def partly_frozen(frozen: list[int]) -> hdet.Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(3)])
    freeze(model, frozen)
    replicas = hdet.replicate(model, torch.optim.SGD(model[2].parameters(), lr=0.1), n=2)
    return hdet.Engine(replicas, [], window=WINDOW, gradients="local", total_steps=TOTAL, merge=Outer())


def freeze(model: torch.nn.Module, layers: list[int]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(int(name[0]) not in layers)


def of_layers(engine: hdet.Engine, until: int) -> set[str]:
    """Train, and name the parameters that the outer optimizer has a state of then."""
    while engine.step_count < until:
        losses = []
        for replica in engine.replicas:
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * engine.step_count + replica.index))
            with replica:
                losses.append(replica.model(inputs).square().mean())
                losses[-1].backward()
        for optimizer in engine.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        engine.step(losses)
    known: Any = engine.cycle.merger.state  # type: ignore[attr-defined]
    return {name for name, parameter in engine.hosts[0][0].named_parameters() if parameter in known}


def test_another_merge_does_not_take_up_what_it_cannot_know(problem: Any, train: Any) -> None:
    engine = engine_of(problem, Outer())
    train(engine, 5)
    state = engine.state_dict()
    for other in (Mean(), Outer(0.5)):
        with pytest.raises(CheckpointError, match=r"written with merge=.*which remembers"):
            engine_of(problem, other).load_state_dict(state)
    later = engine_of(problem, Outer())
    train(plain := engine_of(problem, Mean("keep")), 5)
    later.load_state_dict(plain.state_dict())  # a mean remembers nothing: the outer optimizer begins here
    train(later)
    entries = next(iter(state["merge"]["state"]["optimizer"]["state"].values()))
    entries["momentum_buffer"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError, match=r"the checkpoint's outer .*momentum_buffer"):
        engine_of(problem, Outer()).load_state_dict(state)


def test_replicas_that_open_apart_first_become_one(problem: Any, train: Any) -> None:
    """Where `hdet.perturb` set them apart there is no common origin to measure the first displacement from."""
    found = []
    for merge in (Outer(), Mean("keep")):
        engine = engine_of(problem, merge)
        hdet.perturb(engine.home, noise=0.1)
        train(engine, WINDOW)
        found.append(held(engine))
    assert same(*found)


def test_a_run_that_went_back_begins_with_a_new_state(problem: Any, train: Any) -> None:
    engine = engine_of(problem, Outer())
    train(engine, 8)
    assert engine.cycle.merger.state_dict()["optimizer"]["state"]
    (record,) = train(engine, 12, loss=lambda model, batch: problem.loss(model, batch) * float("nan"))
    assert record.faults[-1]["kind"] == "restored"
    assert not engine.cycle.merger.state_dict()["optimizer"]["state"]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"options": {"weight_decay": 0.1}}, "the outer optimizer steps displacements"),
        ({"lr": 0.0}, "lr"),
        ({"merge": hdet.merges.Exploit()}, "the outer step goes from one merged model, and exploit leaves"),
    ],
)
def test_fields_that_cannot_be(fields: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Outer(**fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"optimizer": "Nadir"}, "cannot make the optimizer 'Nadir'"),
        ({"optimizer": "Adam", "options": {"momentum": 0.9}}, "cannot make the optimizer 'Adam'"),
        ({"optimizer": "LBFGS", "options": {}}, "Outer cannot step by 'LBFGS'.*takes dense gradients and no closure"),
        ({"optimizer": "SparseAdam", "options": {}}, "Outer cannot step by 'SparseAdam'"),
        ({"optimizer": "unittest.mock:Mock"}, "'unittest.mock:Mock', which makes no torch optimizer"),
    ],
)
def test_optimizers_that_cannot_be(fields: Any, told: str, problem: Any) -> None:
    with pytest.raises(ConfigError, match=told):
        engine_of(problem, Outer(**fields))


def test_its_options_are_written_by_a_function_that_pydantic_2_7_can_look_into() -> None:
    (serializer,) = [of for of in Outer.model_fields["options"].metadata if isinstance(of, PlainSerializer)]
    assert len(inspect.signature(serializer.func).parameters) == 1  # type: ignore[arg-type]
    assert Outer(options={"momentum": 0.9}).to_dict()["options"] == {"momentum": 0.9}
