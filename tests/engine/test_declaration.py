"""What processes compare before they train together: what differs, and nothing that each may have of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import hdet
from hdet.engine.declaration import declaration


def declared(knob: hdet.Knob) -> dict[str, str]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    replicas = hdet.replicate(model, optimizer, n=2)
    judged = hdet.Probe(lambda model, given: model(given).square().mean(1), [torch.ones(4, 2)])
    return declaration(hdet.Engine(replicas, [knob], signal=judged, gradients="local", total_steps=20).plan)


def slope(get: Any, **fields: Any) -> hdet.Knob:
    return hdet.Scalar(**{"name": "slope", "get": get, "set": lambda model, value: None, "bounds": (0.01, 1), **fields})


def read(model: nn.Module) -> float:
    return 0.1


def test_a_getter_has_no_common_text_whatever_it_is() -> None:
    assert declared(slope(lambda model: 0.1)) == declared(slope(partial(read)))


@pytest.mark.parametrize("written", [True, False], ids=["a knob with a text", "a knob without"])
def test_bounds_may_differ_by_rounding_alone(written: bool) -> None:
    def bounded(above: float) -> dict[str, str]:
        bounds = (0.01, above)
        return declared(hdet.WeightDecay(bounds=bounds) if written else slope(read, bounds=bounds))

    same, rounded, other = (bounded(above) for above in (0.3, 0.1 + 0.2, 0.3001))
    assert same == rounded
    assert same["knobs"] != other["knobs"]


def test_other_fields_of_a_knob_without_a_text_are_compared() -> None:
    one, other = declared(slope(read)), declared(slope(read, controller=hdet.controllers.Hold()))
    assert one["knobs"] != other["knobs"]
