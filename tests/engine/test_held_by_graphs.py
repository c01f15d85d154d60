"""What a compiled step or a captured graph holds is written in place over windows, and never replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import hdet
from hdet.controllers import Gated, Hold
from hdet.schedules import OneCycle

WINDOW, STEPS = 4, 14


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.dropout = hdet.nn.Dropout(0.1)
        self.outer = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.dropout(self.norm(self.inner(x))))
        return out


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


PROBE = hdet.Probe(loss_of, [torch.ones(4, 4), torch.arange(16.0).reshape(4, 4)])
OBJECTIVE = hdet.Objective(loss_of, [torch.ones(4, 4), torch.arange(16.0).reshape(4, 4)])


def copies(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> hdet.replicas.Replicas:
    return hdet.replicate(model, optimizer, 2)


def seats(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> hdet.replicas.Replicas:
    return hdet.micro_batches(model, optimizer, 2)


Home = Callable[[torch.nn.Module, torch.optim.Optimizer], hdet.replicas.Replicas]
CASES: dict[str, tuple[Home, list[hdet.Knob], dict[str, Any]]] = {
    "diverged copies": (copies, [hdet.LearningRate(), hdet.WeightDecay()], {}),
    "diverged copies, local": (copies, [hdet.LearningRate(controller=Hold())], {"gradients": "local"}),
    "lines on copies": (copies, [hdet.LearningRate(evidence=hdet.evidence.Line(read_average_above=None))], {}),
    "lines": (
        seats,
        [
            hdet.LearningRate(evidence=hdet.evidence.Line(read_average_above=None)),
            hdet.WeightDecay(evidence=hdet.evidence.Analytic()),
        ],
        {},
    ),
    "group lines": (seats, [hdet.LearningRate(evidence=hdet.evidence.GroupLines())], {}),
    "recursion": (seats, [hdet.Beta2(evidence=hdet.evidence.Recursion())], {}),
    "contrast": (seats, [hdet.Dropout(evidence=hdet.evidence.Contrast(horizon=20))], {}),
    "mixed difference": (seats, [hdet.Dropout(evidence=hdet.evidence.MixedDifference())], {}),
    "a guard": (seats, [hdet.LearningRate(evidence=hdet.evidence.Line())], {"guard": hdet.Rewind()}),
}


def held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[int, int]]:
    """Identity and memory of all tensors that training reads or writes, by what they are."""
    found: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for number, state in enumerate(optimizer.state.values()):
        found |= {f"state {number} {key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"group {number} {key}": value for key, value in group.items() if isinstance(value, torch.Tensor)}
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_windows_replace_nothing_that_a_graph_holds(case: str) -> None:
    """Weights, buffers, moments and a rate that is a tensor; a window whose replicas all fail goes back in place."""
    home, knobs, options = CASES[case]
    torch.manual_seed(0)
    model = Net()
    rate = 0.01 if case == "recursion" else torch.tensor(0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    engine = hdet.Engine(
        home(model, optimizer), knobs, window=WINDOW, total_steps=STEPS, signal=PROBE, objective=OBJECTIVE, **options
    )
    before: list[dict[str, tuple[int, int]]] = []
    for step in range(STEPS):
        losses = []
        for replica in engine.replicas:
            with replica:
                loss = loss_of(replica.model, torch.randn(4, 4) + replica.index)
                loss.backward()
            losses.append(loss.detach() if step // WINDOW != 2 else torch.tensor(torch.nan))
        engine.share_gradients()
        for own in engine.optimizers:
            own.step()
            own.zero_grad(set_to_none=False)
        if step == 0:
            before = [held(*host) for host in engine.hosts]
        engine.step(losses)
    assert any(fault["kind"] == "restored" for record in engine.history for fault in record.faults)
    assert [held(*host) for host in engine.hosts] == before
    kinds = {name.split()[0] for name in before[0]}
    assert {"state"} < kinds
    assert ("group" in kinds) == isinstance(rate, torch.Tensor)


@pytest.mark.filterwarnings("ignore:the first training loss")
def test_attached_and_detached_nothing_is_replaced() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    search = hdet.attach(model, optimizer, probe=PROBE, total_steps=40, window=WINDOW, quiet=True)
    before: dict[str, tuple[int, int]] = {}
    for step in range(STEPS):
        model.train()
        search.loss(loss_of(model, torch.randn(4, 4))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if step == 0:
            before = held(model, optimizer)
    search.detach()
    assert held(model, optimizer) == before


@pytest.mark.parametrize("how", ["engine", "attach"])
@pytest.mark.filterwarnings("ignore:the first training loss")
def test_a_compiled_model_and_step_are_compiled_in_the_first_window_alone(how: str) -> None:
    """Rate and dropout change at every step; after a window, its end included, no graph is made or replaced."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), fused=True)
    graphs = CompileCounter()
    model.compile(backend=graphs)
    update = torch.compile(optimizer.step, backend=graphs)
    knobs: list[hdet.Knob] = [
        hdet.LearningRate(
            schedule=OneCycle(0.01, total_steps=STEPS), evidence=hdet.evidence.Line(), controller=Gated(gate=0.0)
        ),
        hdet.Dropout(
            schedule=hdet.schedules.LinearDecay(0.3, total_steps=STEPS),
            evidence=hdet.evidence.Contrast(),
            controller=Hold(),
        ),
    ]
    if how == "attach":
        search = hdet.attach(model, optimizer, knobs=knobs, probe=PROBE, total_steps=STEPS, window=WINDOW, quiet=True)
        engine = search.engine
    else:
        engine = hdet.Engine(
            hdet.micro_batches(model, optimizer, 2), knobs, window=WINDOW, total_steps=STEPS, signal=PROBE
        )
    made, before, rates = 0, {}, set()
    for step in range(STEPS - 1):
        losses = []
        for replica in engine.replicas:
            loss = torch.tensor(0.0)
            if how == "attach":
                loss = search.loss(loss_of(model, torch.randn(4, 4)))
                loss.backward()
            else:
                with replica:
                    loss = loss_of(model, torch.randn(4, 4))
                    loss.backward()
            losses.append(loss.detach())
        if how == "engine":
            engine.share_gradients()
        update()
        optimizer.zero_grad(set_to_none=False)
        if how == "engine":
            engine.step(losses)
        if step == WINDOW:
            made, before = graphs.frame_count, held(model, optimizer)
        rates.add(engine.bases["learning_rate"])
    assert len(engine.history) == 3
    assert len(rates) > 2 * WINDOW
    assert graphs.frame_count == made > 0
    assert held(model, optimizer) == before
