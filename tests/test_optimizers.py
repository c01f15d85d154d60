"""The recipe over the optimizers that people train with: docs/optimizers.md says what works, and this runs it."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import explicit_loop
import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hdet
from hdet.evidence.contrast import ContrastCollector
from hdet.spreads import TwoLevel

STEPS = 120
with torch.random.fork_rng():
    torch.manual_seed(1)
    TEACHER = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)

muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def with_adamw(model: nn.Module, scale: float) -> Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return hdet.ChainedOptimizer(
        torch.optim.Muon(matrices, lr=0.02 * scale, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=0.01 * scale, weight_decay=0.1),
    )


class SignDescent(Optimizer):
    """Whose steps leave no state."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


Make = Callable[[nn.Module, float], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw_fused": lambda m, s: torch.optim.AdamW(m.parameters(), lr=1e-2 * s, weight_decay=0.1, fused=True),
    "schedule_free": lambda m, s: schedulefree.AdamWScheduleFree(m.parameters(), lr=1e-2 * s, weight_decay=0.1),
    "sgd_nesterov": lambda m, s: torch.optim.SGD(
        m.parameters(), lr=3e-2 * s, momentum=0.9, nesterov=True, weight_decay=1e-3
    ),
    "adafactor": lambda m, s: torch.optim.Adafactor(m.parameters(), lr=2e-2 * s, weight_decay=0.1),
    "of_signs": lambda m, s: SignDescent(m.parameters(), lr=3e-3 * s, weight_decay=0.1),
    "muon_with_adamw": with_adamw,
}
CASES = [pytest.param(name, make, id=name, marks=[muon] if "muon" in name else []) for name, make in OPTIMIZERS.items()]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), hdet.nn.Dropout(0.1), nn.Linear(32, 4))


def draw(seed: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=generator)
    return x, TEACHER(x) + 0.1 * torch.randn(count, 4, generator=generator)


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Run:
    """The recipe with one optimizer, and the modes its probe was read in."""

    def __init__(self, make: Make, scale: float, **options: Any) -> None:
        self.model = network()
        self.optimizer: Any = make(self.model, scale)
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        self.modes: list[tuple[bool, bool]] = []
        probe = hdet.Probe(self.loss, [draw(-1 - number, 32) for number in range(8)])
        self.engine = hdet.recommended(
            self.model, self.optimizer, total_steps=STEPS, probe=probe, quiet=True, micro_batches=2, **options
        )

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        switched = all(not group.get("train_mode", False) for group in self.optimizer.param_groups)
        self.modes.append((model.training, switched))
        return squared_error(model, batch)

    def train(self, until: int = STEPS) -> hdet.Engine:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            explicit_loop.train(
                self.engine, until, loss=lambda model, step, index: squared_error(model, draw(10 * step + index, 32))
            )
        return self.engine


@pytest.mark.filterwarnings("ignore:hdet does not know")
@pytest.mark.filterwarnings("ignore:the probe is too small")
@pytest.mark.parametrize(("name", "make"), CASES)
def test_the_recipe_runs_and_raises_a_rate_that_is_too_low(name: str, make: Make) -> None:
    run = Run(make, 1 / 30)
    engine = run.train()
    assert engine.finished
    assert all(torch.isfinite(parameter).all() for parameter in run.model.parameters())
    assert not any(fault["kind"] in ("non_finite", "rewound") for record in engine.history for fault in record.faults)
    shifts = {knob.name: knob.shift for knob in engine.knobs}
    assert {"learning_rate", "weight_decay", "dropout"} == set(shifts)
    assert shifts["learning_rate"] > math.log(2.0)
    moved = {knob for record in engine.history for knob, move in record.moves.items() if move}
    assert {"learning_rate", "dropout"} <= moved
    estimates = [record.estimates for record in engine.history]
    for knob in shifts:
        assert any(math.isfinite(one[knob]["stderr"]) and one[knob]["slope"] != 0.0 for one in estimates), knob
    assert engine.history.windows[-1].loss < engine.history.windows[0].loss


class Own(torch.optim.AdamW):
    """Somebody's own, which keeps a state."""


def test_one_that_has_not_stepped_yet_is_not_taken_for_stateless() -> None:
    """As where the first window was undone: nothing is read off it, and nothing said."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        run = Run(lambda model, _: Own(model.parameters(), lr=1e-2), 1.0)

    def undone(model: nn.Module, step: int, index: int) -> Tensor:
        return squared_error(model, draw(10 * step + index, 32)) * (math.nan if step < 10 else 1.0)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hdet does not know how Own scales")
        explicit_loop.train(run.engine, 10, loss=undone)
        (record,) = run.engine.history
        assert record.faults[-1]["kind"] == "restored"
        assert not run.optimizer.state
        (contrast,) = [one for one in run.engine.cycle.collectors if isinstance(one, ContrastCollector)]
        assert not contrast.stateless


@pytest.mark.filterwarnings("ignore:hdet does not know")
@pytest.mark.filterwarnings("ignore:the probe is too small")
@pytest.mark.parametrize(("name", "make"), CASES)
def test_probes_are_read_in_eval_mode_and_every_mode_is_as_before(name: str, make: Make) -> None:
    run = Run(make, 1.0)
    run.train(until=40)
    assert run.modes
    assert set(run.modes) == {(False, True)}
    assert all(module.training for module in run.model.modules())
    assert all(group.get("train_mode", True) for group in run.optimizer.param_groups)


@pytest.mark.filterwarnings("ignore:hdet does not know")
@pytest.mark.filterwarnings("ignore:the probe is too small")
@pytest.mark.parametrize(("name", "make"), CASES)
def test_half_a_windows_state_brings_the_run_back(name: str, make: Make, assert_same: Any) -> None:
    whole, first, second = (Run(make, 1.0) for _ in range(3))
    first.train(until=27)
    second.engine.load_state_dict(copy.deepcopy(first.engine.state_dict()))
    with torch.random.fork_rng():
        whole.train(until=27)
    for run in (whole, second):
        run.train(until=40)
    assert_same(second.model.state_dict(), whole.model.state_dict())
    assert second.engine.bases == whole.engine.bases


@pytest.mark.filterwarnings("ignore:hdet does not know")
@pytest.mark.filterwarnings("ignore:the probe is too small")
@pytest.mark.parametrize(("name", "make"), CASES)
def test_a_run_that_begins_anew_goes_on_as_if_just_begun(name: str, make: Make) -> None:
    """With an optimizer that has been switched to training since the engine was made, too."""
    run = Run(make, 1.0)
    watch = run.engine.cycle.watch
    assert watch is not None
    assert watch.first is not None
    if hasattr(run.optimizer, "eval"):
        run.optimizer.eval()
        watch.first.take(0)
        run.optimizer.train()
    real = watch._overshot
    watch._overshot = lambda ahead: run.engine.step_count == 20 or real(ahead)  # type: ignore[method-assign]
    first = copy.deepcopy(run.model.state_dict())
    run.train(until=20)
    assert [fault["kind"] for fault in run.engine.history.windows[-1].faults] == ["restarted"]
    for key, value in run.model.state_dict().items():
        assert torch.equal(value, first[key]), key
    assert not any(state for state in run.optimizer.state.values())
    run.train()
    assert run.engine.finished
    assert run.engine.history.windows[-1].loss < run.engine.history.windows[0].loss


@muon
def test_two_optimizers_in_one_are_replicated_and_merged(assert_alike: Any) -> None:
    model = network()
    optimizer = with_adamw(model, 1.0)
    engine = hdet.Engine(
        hdet.replicate(model, optimizer, n=2), [hdet.LearningRate(spread=TwoLevel(0.3))], window=5, total_steps=10
    )
    for step in range(10):
        losses = []
        for replica in engine.replicas:
            with replica:
                losses.append(squared_error(replica.model, draw(step, 32)))
                losses[-1].backward()
        engine.share_gradients()
        for own in engine.optimizers:
            own.step()
            own.zero_grad()
        engine.step(losses)
    assert_alike(engine)
    assert not torch.equal(model[0].weight, network()[0].weight)  # type: ignore[index]


def test_an_optimizer_of_half_the_model_leaves_the_rest_alone() -> None:
    """Of two optimizers given apart, the engine drives one; the other's parameters are the user's to step."""
    model = network()
    first, second = model[0], model[3]  # type: ignore[index]
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    other = torch.optim.SGD(second.parameters(), lr=1e-2)
    probe = hdet.Probe(squared_error, [draw(-1, 32), draw(-2, 32)])
    engine = hdet.recommended(model, optimizer, total_steps=20, probe=probe, quiet=True)
    for step in range(20):
        with engine.replicas[0] as replica:
            loss = squared_error(replica.model, draw(step, 32))
            loss.backward()
        optimizer.step()
        other.step()
        model.zero_grad()
        engine.step(loss.detach())
    assert engine.finished
    assert other.param_groups[0]["lr"] == 1e-2
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
