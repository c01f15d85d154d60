"""Tensors that a model may hold and no arithmetic is for: what trains beside them is what it was, and goes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attach_parts import HELD, STEPS, adamw, attached, batch, loss_of, network, probe
from torch import Tensor, nn

import hdet


def adjacency() -> Tensor:
    return (torch.arange(256).reshape(16, 16) % 3 == 0).float()


MADE = {
    "an infinite frozen parameter": lambda: nn.Parameter(torch.full((4,), -torch.inf), requires_grad=False),
    "a frozen float8 parameter": lambda: nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False),
    "a frozen sparse parameter": lambda: nn.Parameter(adjacency().to_sparse(), requires_grad=False),
    "a sparse buffer": lambda: adjacency().to_sparse(),
    "a compressed buffer": lambda: adjacency().to_sparse_csr(),
    "an expanded buffer": lambda: torch.full((1, 16), 0.3).expand(16, 16),
    "a conjugated buffer": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "a buffer without values": lambda: torch.ones(4, device="meta"),
    "a jagged buffer": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


class Odd(nn.Module):
    def __init__(self, kind: str, persistent: bool) -> None:
        super().__init__()
        self.layers = network()
        held = MADE[kind]()
        if isinstance(held, nn.Parameter):
            self.held = held
        else:
            self.register_buffer("held", held, persistent=persistent)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]


def trained(
    model: nn.Module, broken: int = -1, every: bool = False, **options: Any
) -> tuple[list[Tensor], hdet.Search | None]:
    """The optimizer holds what trains, or `every` parameter."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(model.parameters() if every else weights, lr=3e-3)
    search = hdet.attach(model, optimizer, probe=probe(), quiet=True, **options) if options else None
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = loss_of(model, batch(step))
        loss = loss * torch.nan if step == broken else loss
        (loss if search is None else search.loss(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach() for weight in weights], search


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state).*")
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("kind", MADE)
def test_what_trains_beside_it_is_what_it_was(kind: str, persistent: bool, assert_same: Any) -> None:
    plain, _ = trained(Odd(kind, persistent))
    held = {"schedule": None, "knobs": HELD, "window": 5, "guard": None, "tail": None}
    same, search = trained(Odd(kind, persistent), **held)
    assert_same(plain, same)
    assert search is not None
    state = search.state_dict()
    if kind != "an expanded buffer":  # which torch's own load_state_dict refuses
        search.load_state_dict(state)
    assert not any(record.faults for record in search.history)
    with pytest.warns(UserWarning, match="put the model and the optimizer back to step 10"):
        back, search = trained(Odd(kind, persistent), broken=12, **held)
    assert search is not None
    assert all(weight.isfinite().all() for weight in back)
    _, search = trained(Odd(kind, persistent), total_steps=STEPS)
    assert search is not None
    assert search.finished


def test_an_infinite_parameter_that_the_optimizer_holds_is_no_fault(assert_same: Any) -> None:
    plain, _ = trained(Odd("an infinite frozen parameter", True), every=True)
    held = {"schedule": None, "knobs": HELD, "window": 5, "guard": None, "tail": None}
    same, search = trained(Odd("an infinite frozen parameter", True), every=True, **held)
    assert_same(plain, same)
    assert search is not None
    assert not any(record.faults for record in search.history)


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state).*")
@pytest.mark.parametrize("kind", ["a frozen float8 parameter", "a frozen sparse parameter"])
@pytest.mark.parametrize("rates", ["together", "matrices"])
def test_what_has_no_arithmetic_may_be_held_by_the_optimizer(kind: str, rates: str) -> None:
    """As of quantized weights beside adapters: no step moves it, so that no line of rates leads through it."""
    _, search = trained(Odd(kind, True), every=True, total_steps=STEPS, rates=rates)
    assert search is not None
    assert search.finished


@pytest.mark.parametrize("rates", ["together", "matrices"])
def test_what_torch_makes_by_default_elsewhere_changes_nothing(rates: str, assert_same: Any) -> None:
    """As after `torch.set_default_device("cuda")`: a generator of the host's draws nothing there."""
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(7)
        model, batches = network(), [batch(step) for step in range(STEPS)]
        optimizer = adamw(model)
        search = attached(model, optimizer, rates=rates)
        with torch.device(device):
            for given in batches:
                search.loss(loss_of(model, given)).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert search.finished
        found.append([model.state_dict(), search.shifts])
    assert_same(*found)
