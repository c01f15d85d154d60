"""How far the first weights are from random ones: `Estimate.excess`, which evidence of one trajectory tells."""

from __future__ import annotations

import math
from collections.abc import Callable

import explicit_loop
import pytest
import torch
from torch import Tensor, nn
from torch.nn import init
from torch.optim import AdamW

import hdet
from hdet import Engine, Objective, Probe
from hdet.controllers import Estimate, Hold
from hdet.evidence import Analytic, Contrast, Evidence, Line, MixedDifference
from hdet.evidence.parts.excess import _of_stack
from hdet.history import WindowRecord
from hdet.schedules import LinearDecay

INPUTS, CLASSES, STEPS = 64, 10, 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(x))
        return found

    @property
    def matrices(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.ndim > 1]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points about ten centres."""
    drawn = torch.Generator().manual_seed(step)
    centres = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(1234))
    of = torch.randint(CLASSES, (64,), generator=drawn)
    return centres[of] + torch.randn(64, INPUTS, generator=drawn), of


def losses(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    dtype = next(own.dtype for own in model.parameters() if own.requires_grad)
    return nn.functional.cross_entropy(model(rows[0].to(dtype)), rows[1], reduction="none")


def told(model: nn.Module, steps: int = 6) -> list[WindowRecord]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = Engine(
        hdet.micro_batches(model, AdamW(trained, lr=1e-3), n=1),
        [
            hdet.LearningRate(schedule=LinearDecay(peak=1e-3, total_steps=STEPS), evidence=Line(), controller=Hold()),
            hdet.WeightDecay(evidence=Analytic(), controller=Hold()),
        ],
        window=6,
        signal=Probe(losses, [batch(1000), batch(1001)]),
        total_steps=STEPS,
    )
    return explicit_loop.train(engine, steps, loss=lambda model, step, index: losses(model, batch(step)).mean())


def untrained(model: nn.Module) -> bool | None:
    found = {Estimate(0.0, excess=one["excess"]).untrained for one in told(model)[0].estimates.values()}
    assert len(found) == 1, "the rate's evidence and the decay's tell the same"
    return found.pop()


def trained() -> Net:
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for step in range(200):
        optimizer.zero_grad()
        losses(model, batch(step)).mean().backward()
        optimizer.step()
    return model


INITS: dict[str, Callable[[Tensor], object]] = {
    "normal": lambda w: init.normal_(w, std=0.02),
    "uniform": init.kaiming_uniform_,
    "orthogonal": init.orthogonal_,
    "sparse": lambda w: init.sparse_(w, 0.5),
    "large": lambda w: init.normal_(w, std=30.0),
}


@pytest.mark.parametrize("kind", INITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_were_drawn_at_random_are_untrained(kind: str, dtype: torch.dtype) -> None:
    model = Net()
    for matrix in model.matrices:
        INITS[kind](matrix.data)
    assert untrained(model.to(dtype)) is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_learnt_something_are_not(dtype: torch.dtype) -> None:
    assert untrained(trained().to(dtype)) is False


def test_it_is_told_where_the_first_window_teaches_nothing() -> None:
    """As where the rate is 0 in all of it: a warm-up that begins at 0, stepped once an epoch."""
    model, decay = trained(), hdet.WeightDecay(evidence=Analytic(), controller=Hold())
    home = hdet.micro_batches(model, AdamW(model.parameters(), lr=0.0), n=1)
    probe = Probe(losses, [batch(1000), batch(1001)])
    engine = Engine(home, [decay], window=6, signal=probe, total_steps=STEPS)
    (record,) = explicit_loop.train(engine, 6, loss=lambda model, step, index: losses(model, batch(step)).mean())
    estimate = record.estimates["weight_decay"]
    assert (estimate["slope"], estimate["stderr"]) == (0.0, math.inf)
    assert Estimate(0.0, excess=estimate["excess"]).pretrained
    assert estimate["own_excess"] == pytest.approx(estimate["excess"])


def test_it_is_told_once() -> None:
    first, second = told(Net(), steps=12)
    assert all(0.8 < one["excess"] < 1.1 for one in first.estimates.values())
    assert [one["excess"] for one in second.estimates.values()] == [None, None]


@pytest.mark.parametrize("evidence", [Contrast(), MixedDifference()], ids=lambda evidence: evidence.kind)
def test_knobs_of_the_forward_pass_hear_it_too(evidence: Evidence) -> None:
    """So that a pretrained model's dropout moves further; whether the window taught anything of it or not."""

    def of_dropout(model: nn.Module) -> list[WindowRecord]:
        knob = hdet.Dropout(evidence=evidence, controller=Hold())
        objective = Objective(lambda model, rows: losses(model, rows).mean(), [batch(2000), batch(2001)])
        optimizer = AdamW(model.parameters(), lr=1e-3)
        engine = Engine(
            hdet.micro_batches(model, optimizer, n=2),
            [knob],
            window=6,
            signal=Probe(losses, [batch(1000), batch(1001)]),
            objective=objective,
            total_steps=STEPS,
        )
        return explicit_loop.train(engine, 12, loss=lambda model, step, index: losses(model, batch(step)).mean())

    for model, pretrained in ((Net(), False), (trained(), True)):
        for dropout in (0.2, 0.0):
            model.layers.append(nn.Dropout(dropout))
            first, second = (record.estimates["dropout"] for record in of_dropout(model))
            model.layers.pop(-1)
            assert Estimate(0.0, excess=first["excess"]).pretrained is pretrained
            assert second["excess"] is None


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_new_head_on_a_trained_body_is_fine_tuning(frozen: bool, layers: int) -> None:
    model = trained()
    model.head = nn.Linear(128, CLASSES)
    if layers == 1:
        model.layers = model.layers[:2]
    model.layers.requires_grad_(not frozen)
    assert untrained(model) is False


def test_quantised_weights_are_trained_ones() -> None:
    class Quantised(Net):
        def __init__(self) -> None:
            super().__init__()
            packed = torch.zeros(2, 128 * 128 // 2, 1, dtype=torch.uint8)
            self.packed = nn.ParameterList(nn.Parameter(own, requires_grad=False) for own in packed)

    assert untrained(Quantised()) is False


@pytest.mark.parametrize("name", ["head", "layers.2"])
def test_zeros_and_a_matrix_of_the_users_own_do_not_count(name: str) -> None:
    """As the last layer of muP, and a table of positions: a quarter of the matrices may be anything."""
    zero, own = Net(), Net()
    zero.get_submodule(name).weight.data.zero_()
    own.positions = nn.Parameter(torch.outer(torch.arange(50.0), torch.ones(128)))
    assert untrained(zero) is True
    assert untrained(own) is True


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_each_matrix_of_a_stack_is_looked_at(strength: float) -> None:
    """As the experts of a mixture, whose strong directions have nothing in common."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            strong = torch.randn(32, INPUTS, 1) @ torch.randn(32, 1, CLASSES) / 4
            self.matrices = nn.Parameter(torch.randn(32, INPUTS, CLASSES) / 8 + strength * strong)

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.matrices).mean(0)

    assert untrained(Experts()) is (strength == 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_what_overflows_counts_as_trained_and_no_other(dtype: torch.dtype) -> None:
    large = torch.randn(1, 512, 512, generator=torch.Generator().manual_seed(0)).mul(200.0).to(dtype)
    assert _of_stack(large) == pytest.approx(0.96, abs=0.03)
    large[0, 0, 0] = math.inf
    assert _of_stack(large) == math.inf
