"""Where a value lives, and that what is written there is what was asked for and never out of bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reads import Reads
from torch import nn

import hdet
from hdet.errors import ConfigError
from hdet.hparams.binding import Attribute, FunctionBinding, GroupBinding, ModelBinding, fit
from hdet.nn import KnobTensor

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
positive = st.floats(1e-3, 300)


@settings(max_examples=200)
@given(low=positive, ratio=st.floats(1.05, 100), where=st.floats(0, 1), dtype=st.sampled_from(DTYPES))
def test_a_fitted_value_is_held_exactly_and_within_bounds(low: float, ratio: float, where: float, dtype: Any) -> None:
    """At the bounds themselves above all, which the format may round outwards."""
    bounds = (low, low * ratio)
    for value in (low, bounds[1], low + where * (bounds[1] - low)):
        value = min(value, bounds[1])
        held = fit(value, bounds, dtype)
        assert bounds[0] <= held <= bounds[1]
        assert torch.tensor(held, dtype=dtype).item() == held
        assert abs(held - value) <= 2 * torch.finfo(dtype).eps * value


def test_the_default_device_has_no_say() -> None:
    value, bounds = 0.7, (0.7, 1.0)
    with torch.device("meta"):
        held = fit(value, bounds, torch.bfloat16)
    assert held == fit(value, bounds, torch.bfloat16)


def test_double_precision_is_left_alone() -> None:
    assert fit(0.1, (0.0, 1.0), torch.float64) == 0.1


def optimizer(**options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(3)]
    return torch.optim.AdamW(groups, **{"lr": 0.1, **options})


def binding(own: torch.optim.Optimizer, **changes: Any) -> GroupBinding:
    fields: dict[str, Any] = {
        "optimizer": own,
        "indices": (0, 2),
        "ratios": (1.0, 0.5),
        "key": "lr",
        "item": None,
        "bounds": (0.0, 1.0),
    }
    return GroupBinding(**{**fields, **changes})


def test_groups_keep_their_ratio_and_others_are_left_alone() -> None:
    own = optimizer()
    one = binding(own)
    one.write(0.4)
    assert [group["lr"] for group in own.param_groups] == [0.4, 0.1, 0.2]
    assert one.read() == 0.4
    assert len(one.parameters()) == 2


def test_groups_are_looked_up_at_every_write() -> None:
    """`load_state_dict` replaces their dicts."""
    own = optimizer()
    one = binding(own)
    own.load_state_dict(own.state_dict())
    one.write(0.3)
    assert own.param_groups[2]["lr"] == 0.15


def test_one_of_a_pair() -> None:
    own = optimizer(betas=(0.9, 0.99))
    one = binding(own, key="betas", item=1, ratios=(1.0, 1.0))
    one.write(0.5)
    assert [group["betas"] for group in own.param_groups] == [(0.9, 0.5), (0.9, 0.99), (0.9, 0.5)]
    assert one.read() == 0.5


def test_tensors_are_written_in_place_and_within_bounds() -> None:
    own = optimizer(lr=torch.tensor(0.1))
    held = torch.tensor(0.0)
    own.param_groups[2]["lr"] = held
    top = 0.1  # float32 rounds it up
    one = binding(own, ratios=(1.0, 1.0), bounds=(0.0, top))
    one.write(top)
    assert own.param_groups[2]["lr"] is held
    assert held.item() == np.nextafter(np.float32(0.1), np.float32(0)) < top
    half = binding(own, bounds=(0.0, top))
    half.write(top)
    assert held.item() <= top / 2


def test_betas_that_are_tensors() -> None:
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    own = optimizer(betas=betas)
    binding(own, key="betas", item=0, ratios=(1.0, 1.0)).write(0.5)
    assert own.param_groups[0]["betas"][0].item() == 0.5


def test_targets_tell_scalars_apart() -> None:
    own, other = optimizer(), optimizer()
    assert not binding(own).targets & binding(other).targets
    assert not binding(own).targets & binding(own, key="weight_decay").targets
    assert not binding(own, item=0).targets & binding(own, item=1).targets
    assert binding(own).targets & binding(own, indices=(2,), ratios=(1.0,)).targets


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 3
        self.text = "0.5"
        self.flag = True
        self.register_buffer("tensor", torch.tensor(0.5))
        self.register_buffer("vector", torch.zeros(2))
        self.knob = KnobTensor(0.5, role="x")


def test_attributes_tensors_and_knob_tensors_move_together() -> None:
    module = Holder()
    module.number = 0.5  # type: ignore[assignment]
    tensor = module.tensor
    one = ModelBinding([Attribute(module, "number"), Attribute(module, "tensor"), module.knob], (0.0, 0.1))
    assert one.read() == 0.5
    one.write(0.1)
    assert module.number == module.knob.value
    assert module.tensor is tensor
    for held in (module.tensor.item(), module.knob.value, module.knob.tensor.item()):
        assert held <= 0.1
        assert held == pytest.approx(0.1)
    assert len(one.targets) == 3


def test_a_float_and_a_knob_tensor_that_were_written_hold_the_very_value() -> None:
    module = Holder()
    one = ModelBinding([Attribute(module, "number"), module.knob], (0.0, 1.0))
    one.write(0.6)
    assert one.read() == module.knob.value == 0.6


def test_a_knob_tensor_that_something_else_writes_is_told_of() -> None:
    module = Holder()
    one = ModelBinding([module.knob], (0.0, 0.1))
    one.write(0.1)
    assert one.overwritten(0.1) is None
    holding = one.holdings()[0]  # type: ignore[index]
    assert holding.owner[holding.key] is holding.value
    module.knob.fill_(0.7)
    assert holding.owner[holding.key] is not holding.value
    found = one.overwritten(0.1)
    assert found is not None
    assert (found.entry, found.found) == ("a x tensor", 0.7)


def test_values_that_differ_have_no_base() -> None:
    module = Holder()
    one = ModelBinding([Attribute(module, "number"), module.knob], (0.0, 10.0))
    with pytest.raises(ConfigError, match=r"different values: \[0.5, 3.0\]; declare one knob for each .* a schedule"):
        one.read()


@pytest.mark.parametrize(
    ("name", "what"), [("text", "str"), ("flag", "bool"), ("vector", r"a tensor of shape \(2,\)"), ("training", "bool")]
)
def test_what_is_no_scalar(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"0-dim float tensor or KnobTensor; '{name}' holds {what}"):
        ModelBinding([Attribute(Holder(), name)], (0.0, 1.0))


def test_a_getter_and_a_setter() -> None:
    model = Holder()
    one = FunctionBinding(model, "number", lambda m: m.number, lambda m, v: setattr(m, "number", v))
    assert one.read() == 3.0
    one.write(4.5)
    assert model.number == 4.5
    assert not one.targets & FunctionBinding(model, "other", one.get, one.set).targets


def test_infinite_bounds() -> None:
    assert fit(0.5, (-math.inf, math.inf), torch.float32) == 0.5


def test_a_tensor_that_groups_share_is_read_by_nobody_until_somebody_writes_it() -> None:
    """By autograd's count of changes: a tensor may lie on a device, and reading it would wait."""
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=rate)
    binding = hdet.LearningRate().bind(torch.nn.ParameterList(parameters), optimizer)
    binding.write(0.2)
    with Reads() as reads:
        assert binding.overwritten(0.2) is None
    assert reads.seen == []
    optimizer.param_groups[1]["lr"].fill_(0.3)
    found = binding.overwritten(0.2)
    assert found is not None
    assert (found.found, found.expected) == (pytest.approx(0.3), pytest.approx(0.2))


@pytest.mark.parametrize(("betas", "told"), [((0.9, 0.99), True), ([0.9, 0.99], False)])
def test_a_list_that_can_be_changed_in_place_is_not_told_by_its_identity(betas: Any, told: bool) -> None:
    own = optimizer()
    for group in own.param_groups:
        group["betas"] = betas
    assert (binding(own, key="betas", item=1, ratios=(1.0, 1.0)).holdings() is not None) is told
