"""What is held of a model's parameters is what the model has at every call."""

import torch
from torch import nn

from hdet.replicas.walk import Walk


def found_again(model: nn.Module, walk: Walk) -> bool:
    """The same objects as a walk of the model itself finds."""
    now = [parameter for parameter in model.parameters() if parameter.numel()]
    held = walk.parameters()
    assert [id(parameter) for parameter in walk.every()] == [id(parameter) for parameter in model.parameters()]
    return len(held) == len(now) and all(one is other for one, other in zip(held, now, strict=True))


def model_and_walk() -> tuple[nn.Sequential, Walk]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    walk = Walk(model)
    assert found_again(model, walk)
    return model, walk


def test_the_same_list_is_given_while_nothing_changes():
    model, walk = model_and_walk()
    held = walk.parameters()
    model[0].weight.requires_grad_(False)
    model[0].weight.data.zero_()
    assert walk.parameters() is held


def test_whatever_is_put_in_taken_out_or_replaced_is_seen():
    model, walk = model_and_walk()
    changes = {
        "a parameter replaced": lambda: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
        "a parameter added": lambda: model[1][0].register_parameter("scale", nn.Parameter(torch.ones(2))),
        "a parameter removed": lambda: delattr(model[1][0], "bias"),
        "one without elements": lambda: model[0].register_parameter("none", nn.Parameter(torch.ones(0))),
        "none where there was one": lambda: setattr(model[0], "bias", None),
        "a module replaced": lambda: model[1].__setitem__(0, nn.Linear(2, 3)),
        "a module added": lambda: model.append(nn.Linear(2, 1)),
        "a module removed": lambda: model.__delitem__(0),
        "weights tied": lambda: setattr(model[-1], "weight", model[0][0].weight),
    }
    for name, change in changes.items():
        change()
        assert found_again(model, walk), name
