"""The diagonal P of every optimizer we read, against the updates that torch makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, NAdam, Optimizer

import hdet.evidence.parts.preconditioner as room
from hdet.evidence.parts.preconditioner import MOST_MOMENTUM, decoupled, keeps_nothing, preconditioner, shrinkage

Make = Callable[[list[nn.Parameter]], Optimizer]
GRADIENT = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    before = set(room._warned)
    room._warned.clear()
    yield
    room._warned.clear()
    room._warned.update(before)


def trained(make: Make, gradients: list[Tensor]) -> tuple[Optimizer, nn.Parameter, Tensor]:
    """After a step on each gradient: the optimizer, the parameter, and what the last step took off it."""
    parameter = nn.Parameter(torch.tensor([3.0, 1.0, -2.0], dtype=torch.float64))
    optimizer = make([parameter])
    before = parameter.detach().clone()
    for gradient in gradients:
        before = parameter.detach().clone()
        parameter.grad = gradient.clone()
        optimizer.step()
    return optimizer, parameter, before - parameter.detach()


def read(optimizer: Optimizer, parameter: nn.Parameter) -> Any:
    return preconditioner(optimizer, optimizer.param_groups[0], parameter)


def varied(count: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(count)]


# With no memory of gradients (beta1 = 0, no momentum) an update is P g, so the table can be read off it.
MEMORYLESS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.9)),
    "adam with a large eps": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.9), eps=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.0, 0.99), weight_decay=0.0),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.5), amsgrad=True),
    "nadam": lambda p: NAdam(p, lr=0.1, betas=(0.0, 0.9)),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1, betas=(0.0, 0.9)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, eps=0.01),
    "rmsprop, centred": lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=0.01),
    "adagrad with a start and a decaying rate": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.3
    ),
    "adam that maximises": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.0, 0.9), maximize=True),
    "sgd that maximises": lambda p: SGD(p, lr=0.1, maximize=True),
    "a rate that is a tensor": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.1), betas=(0.0, 0.9), weight_decay=0.0, foreach=False
    ),
}


@pytest.mark.parametrize("name", MEMORYLESS)
@pytest.mark.parametrize("count", [1, 7])
def test_an_update_is_p_times_its_gradient(name: str, count: int) -> None:
    gradients = varied(count)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer, parameter, taken = trained(MEMORYLESS[name], gradients)
        scale = read(optimizer, parameter)
        last = preconditioner(optimizer, optimizer.param_groups[0], parameter, elements=slice(1, 3))
    torch.testing.assert_close(scale * gradients[-1], taken, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(last * gradients[-1][1:], taken[1:], rtol=1e-6, atol=1e-9)


OF_NO_MEMORY_OF_SIZE = ("sgd", "sgd that maximises")


@pytest.mark.parametrize("name", [name for name in MEMORYLESS if name not in OF_NO_MEMORY_OF_SIZE])
def test_an_element_that_never_had_a_gradient_has_no_p(name: str) -> None:
    """Else it would be lr / eps: a row of a table that no batch had would outweigh all the others."""
    felt = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    optimizer, parameter, _ = trained(MEMORYLESS[name], [felt * gradient for gradient in varied()])
    scale = read(optimizer, parameter)
    begun_higher = name == "adagrad with a start and a decaying rate"
    assert [bool(own) for own in scale] == [True, begun_higher, True]


# With memory, a gradient that lasts comes to P g in every step.
LASTING: dict[str, Make] = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.4),
    "dampening as large as momentum": lambda p: SGD(p, lr=0.1, momentum=0.5, dampening=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, momentum=0.8),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0, amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
}


@pytest.mark.parametrize("name", LASTING)
def test_a_lasting_gradient_comes_to_p_times_itself(name: str) -> None:
    optimizer, parameter, taken = trained(LASTING[name], [GRADIENT] * 300)
    torch.testing.assert_close(read(optimizer, parameter) * GRADIENT, taken, rtol=1e-3, atol=1e-9)


def test_momentum_and_dampening_by_hand() -> None:
    optimizer, parameter, _ = trained(lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.4), [GRADIENT])
    assert read(optimizer, parameter) == pytest.approx(0.1 * 0.6 / 0.1)
    # Dampening without momentum is without effect, in torch too.
    optimizer, parameter, _ = trained(lambda p: SGD(p, lr=0.1, dampening=0.4), [GRADIENT])
    assert read(optimizer, parameter) == pytest.approx(0.1)


@pytest.mark.parametrize("momentum", [1.0, 1.5])
@pytest.mark.parametrize("make", [SGD, torch.optim.RMSprop])
def test_where_nothing_fades_p_is_large_and_keeps_its_sign(make: Any, momentum: float) -> None:
    optimizer, parameter, _ = trained(lambda p: make(p, lr=0.1, momentum=momentum), [GRADIENT])
    nearly, other, _ = trained(lambda p: make(p, lr=0.1, momentum=MOST_MOMENTUM), [GRADIENT])
    assert torch.equal(torch.as_tensor(read(optimizer, parameter)), torch.as_tensor(read(nearly, other)))


def test_a_variance_that_rounding_makes_negative_is_0() -> None:
    """As of a gradient that hardly changes, whose mean square is the square of its mean."""
    optimizer, parameter, _ = trained(lambda p: torch.optim.RMSprop(p, lr=0.1, eps=0.01, centered=True), [GRADIENT])
    state = optimizer.state[parameter]
    state["grad_avg"].copy_(state["square_avg"].sqrt() * 1.0001)
    torch.testing.assert_close(read(optimizer, parameter), torch.full_like(GRADIENT, 0.1 / 0.01))


def test_before_the_first_step_there_is_nothing_to_read_but_for_sgd() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    assert read(torch.optim.AdamW([parameter], lr=0.1), parameter) is None
    assert read(SGD([parameter], lr=0.1, momentum=0.9), parameter) == pytest.approx(1.0)


class SignDescent(Optimizer):
    """Of no state at all."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad.sign())


class Homemade(Optimizer):
    """Keeps a state of its own, and gives no hint how it uses it."""

    def __init__(self, parameters: Any, lr: float = 0.1, weight_decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["memory"] = parameter.grad


class Looking(SignDescent):
    """It looks into the state, which makes one of no entries, and keeps nothing there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert not any(self.state[parameter] for group in self.param_groups for parameter in group["params"])
        super().step()


class CountsInGroups(torch.optim.Adam):
    """Adam, which counts its steps in its groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["step"] = max(float(self.state[parameter]["step"]) for parameter in group["params"])


class Adopt(torch.optim.Adam):
    """Whose mean of squares begins at the first of them, so that nothing is corrected."""


def test_steps_that_are_counted_in_groups_are_the_corrections() -> None:
    """An update of it is P g, whoever counts; of ADOPT nothing is corrected."""
    optimizer, parameter, update = trained(lambda p: CountsInGroups(p, lr=0.1, betas=(0.0, 0.999)), varied())
    del optimizer.state[parameter]["step"]
    assert parameter.grad is not None
    torch.testing.assert_close(read(optimizer, parameter) * parameter.grad, update)
    adopt, parameter, _ = trained(lambda p: Adopt(p, lr=0.1), [GRADIENT])
    torch.testing.assert_close(read(adopt, parameter), 0.1 / (adopt.state[parameter]["exp_avg_sq"].sqrt() + 1e-8))


class Noting(SignDescent):
    """It keeps a state of no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["norms"] = torch.ones(3)  # type: ignore[index, assignment]
        super().step()


def test_a_state_of_no_parameter_is_a_state() -> None:
    optimizer, *_ = trained(Noting, [GRADIENT])
    assert not keeps_nothing(optimizer)
    assert not keeps_nothing(trained(Homemade, [GRADIENT])[0])
    assert keeps_nothing(trained(Looking, [GRADIENT])[0])
    assert keeps_nothing(trained(lambda p: SGD(p, lr=0.1), [GRADIENT])[0])


@pytest.mark.parametrize("make", [Homemade, SignDescent, Looking, lambda p: torch.optim.Adadelta(p, lr=0.1)])
def test_an_unknown_optimizer_is_taken_for_plain_descent_and_named_once(make: Make) -> None:
    optimizer, parameter, _ = trained(make, [GRADIENT])
    with pytest.warns(UserWarning, match=type(optimizer).__name__):
        assert read(optimizer, parameter) == 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(optimizer, parameter) == 0.1


@pytest.mark.parametrize("odd", ["state", "eps"])
def test_means_of_squares_with_another_arithmetic_are_none_that_is_known(odd: str) -> None:
    optimizer, parameter, _ = trained(lambda p: torch.optim.Adam(p, lr=0.1), [GRADIENT])
    if odd == "state":
        optimizer.state[parameter]["exp_avg_sq"] = torch.tensor(4.0)  # one for all elements, as NovoGrad's
    else:
        optimizer.param_groups[0]["eps"] = (1e-30, 1e-3)  # as Adafactor's of Transformers
    with pytest.warns(UserWarning, match="does not know how Adam scales gradients"):
        assert read(optimizer, parameter) == 0.1


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda p: torch.optim.AdamW(p), True),
        (lambda p: torch.optim.Adam(p), False),
        (lambda p: SGD(p, lr=0.1), False),
        (lambda p: torch.optim.RMSprop(p), False),
        (lambda p: torch.optim.Adagrad(p), False),
        (lambda p: NAdam(p), False),
        (lambda p: NAdam(p, decoupled_weight_decay=True), True),
        (lambda p: torch.optim.RAdam(p, decoupled_weight_decay=True), True),
        (lambda p: torch.optim.Adafactor(p), True),
    ],
)
def test_whether_decay_acts_on_the_weights_is_as_torch_does_it(make: Make, want: bool) -> None:
    optimizer, _, _ = trained(make, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoupled(optimizer, optimizer.param_groups[0]) is want
    if not want:
        return
    # With no gradient a decoupled decay is lr * decay * weight.
    group = optimizer.param_groups[0]
    group["weight_decay"] = 0.3
    (parameter,) = group["params"]
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(before - parameter.detach(), float(group["lr"]) * 0.3 * before, rtol=1e-6, atol=1e-12)


def test_of_what_is_named_adamw_nothing_is_said() -> None:
    optimizer, _, _ = trained(type("AdamW8bit", (Homemade,), {}), [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoupled(optimizer, optimizer.param_groups[0])


def test_an_unknown_optimizers_decay_is_taken_for_decoupled_and_named_once() -> None:
    optimizer, _, _ = trained(Homemade, [])
    group = optimizer.param_groups[0]
    with pytest.warns(UserWarning, match="hdet does not know how Homemade decays weights") as caught:
        assert decoupled(optimizer, group)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoupled(optimizer, group)


class Told(Homemade):
    """Its groups tell how it decays."""

    def __init__(self, parameters: Any, **told: bool) -> None:
        super().__init__(parameters)
        self.param_groups[0].update(told)


class Adan(Told):
    """Which decays by a proximal step where it is not told to decouple decay."""


@pytest.mark.parametrize("entry", ["weight_decouple", "decouple", "decoupled"])
def test_what_groups_tell_of_decay_is_believed_and_said(entry: str) -> None:
    for kind, told, acts in [(Told, True, True), (Told, False, False), (Adan, False, True)]:
        optimizer, _, _ = trained(lambda p, kind=kind, told=told: kind(p, **{entry: told}), [])  # type: ignore[misc]
        taken_for = "lr . decay . weight" if acts else "a gradient of decay . weight, as its parameter groups say"
        with pytest.warns(UserWarning, match=f"{kind.__name__} decays weights, and takes it for {taken_for}"):
            assert decoupled(optimizer, optimizer.param_groups[0]) is acts


def test_a_decay_that_the_rate_does_not_scale() -> None:
    group = {"lr": 0.1, "weight_decay": 0.3}
    assert shrinkage(group) == shrinkage({**group, "fixed_decay": False, "weight_decouple": True}) == 0.1 * 0.3
    assert shrinkage({**group, "fixed_decay": True, "weight_decouple": True}) == 0.3
    assert (
        shrinkage({**group, "fixed_decay": True, "weight_decouple": False}) == 0.1 * 0.3
    )  # a gradient, for which the rate counts
