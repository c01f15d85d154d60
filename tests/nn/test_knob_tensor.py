import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hdet.errors import ConfigError
from hdet.nn import Dropout, KnobAttribute, KnobModule, KnobTensor, Temperature, knob_tensors, named_modules


@given(st.floats(0, 1))
def test_host_and_tensor_agree_to_float32(value: float) -> None:
    knob = KnobTensor(0.5, low=0.0, high=1.0)
    knob.fill_(value)
    assert knob.value == value
    assert knob.tensor.item() == torch.tensor(value, dtype=torch.float32).item()


def test_fill_writes_the_same_tensor() -> None:
    knob = KnobTensor(0.5)
    before = knob.tensor
    assert knob.fill_(2.0) is knob
    assert knob.tensor is before
    assert before.shape == ()
    assert before.dtype == torch.float32
    assert not before.requires_grad


def test_a_value_that_is_there_is_not_written_again() -> None:
    """On a device each write is a kernel, and a dropout that stays at 0 is put in force in every pass."""
    knob = KnobTensor(0.0)
    version = knob.tensor._version
    assert knob.fill_(0.0) is knob
    assert knob.tensor._version == version
    knob.fill_(0.5).fill_(0.5)
    assert knob.tensor._version == version + 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.1])
def test_refuses_what_is_not_allowed_and_writes_nothing(value: float) -> None:
    knob = KnobTensor(0.25, role="dropout", low=0.0, high=1.0)
    with pytest.raises(ConfigError, match=r"dropout tensor was given .* finite number in \[0, 1\]"):
        knob.fill_(value)
    assert knob.value == 0.25
    assert knob.tensor.item() == 0.25
    with pytest.raises(ConfigError):
        KnobTensor(value, low=0.0, high=1.0)


def test_always_zero_turns_false_once() -> None:
    knob = KnobTensor(0.0)
    assert knob.fill_(0.0).always_zero
    assert not knob.fill_(0.1).always_zero
    assert not knob.fill_(0.0).always_zero
    assert not KnobTensor(0.1).always_zero


def test_is_no_part_of_the_module_state() -> None:
    module = Temperature(2.0)
    assert not list(module.parameters())
    assert not list(module.buffers())
    assert not module.state_dict()


def test_deepcopy_and_pickle_are_independent() -> None:
    module = Temperature(2.0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other.temperature = 3.0
        assert (other.temperature, other.temperature_knob.tensor.item()) == (3.0, 3.0)
        assert (module.temperature, module.temperature_knob.tensor.item()) == (2.0, 2.0)


def test_deepcopy_keeps_sharing() -> None:
    model = nn.ModuleList([Temperature(2.0), Temperature(2.0)])
    model[1].temperature_knob = model[0].temperature_knob
    other = copy.deepcopy(model)
    other[0].temperature = 5.0
    assert other[1].temperature == 5.0
    assert model[1].temperature == 2.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_to_dtype_keeps_float32(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Temperature(1.7)).to(dtype)
    assert model[0].weight.dtype == dtype
    assert model[1].temperature_knob.tensor.dtype == torch.float32
    assert model(torch.zeros(1, 2, dtype=dtype)).dtype == dtype


def test_follows_the_module_to_another_device() -> None:
    model = nn.Sequential(Temperature(1.7))
    model.to("meta")
    # Never on meta: its value is known.
    assert model[0].temperature_knob.tensor.item() == pytest.approx(1.7)
    moved = []

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        moved.append(tensor.device)
        return torch.empty_like(tensor, device="meta")

    knob = model[0].temperature_knob
    placed: list[torch.device | None] = []
    knob._place = placed.append
    model._apply(convert)
    assert moved == [torch.device("cpu")]
    assert placed == [torch.device("meta")]


def test_built_on_meta_and_materialised() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Dropout(0.3))
    model.to_empty(device="cpu")
    assert model[1].p == 0.3
    assert model[1].p_knob.tensor.item() == pytest.approx(0.3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moves_to_cuda_and_back_without_synchronising() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Dropout(0.3), Temperature(2.0)).cuda()
    knob = model[1].p_knob
    assert knob.tensor.device.type == "cuda"
    x = torch.ones(4, 2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        knob.fill_(0.6)
        model(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert knob.tensor.item() == pytest.approx(0.6)
    assert model.cpu()[1].p_knob.tensor.device.type == "cpu"


def test_on_copies_only_when_it_must() -> None:
    knob = KnobTensor(0.5)
    assert knob.on(torch.device("cpu")) is knob.tensor
    assert knob.on(torch.device("meta")).is_meta


class Margin(KnobModule):
    margin = KnobAttribute("margin", default=0.5, low=0.0)


class WiderMargin(Margin):
    margin = KnobAttribute("margin", default=2.0, low=1.0)
    slope = KnobAttribute("slope", default=0.0)


def test_attributes_of_own_modules_have_defaults_and_can_be_overridden() -> None:
    assert Margin().margin == 0.5
    module = WiderMargin()
    assert (module.margin, module.slope) == (2.0, 0.0)
    with pytest.raises(ConfigError, match="margin"):
        module.margin = 0.5
    assert isinstance(WiderMargin.margin, KnobAttribute)


def test_knob_tensors_selects_by_role_and_pattern() -> None:
    model = nn.ModuleDict(
        {
            "body": nn.Sequential(Dropout(0.1), nn.ReLU(), Dropout(0.2)),
            "head": nn.Sequential(Dropout(0.3), Temperature(), Margin()),
        }
    )
    assert {name: knob.value for name, knob in knob_tensors(model, "dropout").items()} == {
        "body.0.p": 0.1,
        "body.2.p": 0.2,
        "head.0.p": 0.3,
    }
    assert list(knob_tensors(model, "dropout", "body.*")) == ["body.0.p", "body.2.p"]
    assert list(knob_tensors(model, "temperature")) == ["head.1.temperature"]
    assert list(knob_tensors(model, "margin")) == ["head.2.margin"]
    assert knob_tensors(model, "label_smoothing") == {}
    assert list(knob_tensors(Dropout(0.1), "dropout")) == ["p"]


def test_knob_tensors_lists_a_shared_tensor_once() -> None:
    model = nn.Sequential(Dropout(0.1), Dropout(0.1))
    model[1].p_knob = model[0].p_knob
    assert list(knob_tensors(model, "dropout")) == ["0.p"]


def test_names_leave_wrappers_out() -> None:
    model = nn.Sequential(nn.Sequential(Dropout(0.1)))
    model[0] = torch.compile(model[0])
    assert list(knob_tensors(torch.compile(model), "dropout")) == ["0.0.p"]
    assert [name for name, _ in named_modules(nn.DataParallel(nn.ModuleDict({"module": nn.ReLU()})))] == [
        "",
        "",
        "module",
    ]
    parallel = torch.compile(nn.DataParallel(nn.Sequential(nn.ReLU())))
    assert [name for name, _ in named_modules(parallel)] == ["", "", "", "0"]  # type: ignore[arg-type]
    assert [name for name, _ in named_modules(nn.Sequential(nn.DataParallel(nn.Sequential(nn.ReLU()))))] == [
        "",
        "0",
        "0",
        "0.0",
    ]
    # A module that happens to be called "module" keeps its name where nothing wraps it.
    assert list(knob_tensors(nn.ModuleDict({"module": Dropout(0.1)}), "dropout")) == ["module.p"]
