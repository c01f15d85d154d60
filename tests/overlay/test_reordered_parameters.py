"""A parameter that a tool registers anew, after others, while a search is under way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import hdet
from hdet.evidence.parts.gradient_sketch import GradientSketch
from hdet.replicas import tensors

STEPS = 60


class Normed(nn.Module):
    """A norm whose weight and bias have one shape, and a dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 3)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.last(self.dropout(F.relu(self.norm(self.first(inputs))))), labels)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(seed))
    noise = torch.randn(32, 3, generator=torch.Generator().manual_seed(seed + 1000))
    return inputs, (inputs[:, :3] + noise).argmax(1)


PROBE = hdet.Probe(lambda model, own: model(own), [batch(-number) for number in range(1, 9)])


def pruned(step: int | None) -> tuple[Normed, hdet.Search, list[Tensor]]:
    """A run in which the norm's weight is registered anew, after its bias; and that weight, step by step."""
    torch.manual_seed(0)
    model = Normed(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    weight, held = model.norm.weight, list[Tensor]()
    search = hdet.attach(
        model,
        optimizer,
        probe=PROBE,
        total_steps=STEPS,
        window=6,
        schedule=hdet.schedules.Constant(0.1),
        knobs=[hdet.LearningRate(controller=hdet.controllers.Hold())],
        exclude=["weight_decay", "dropout"],
        tail=hdet.TailAverage(starts=(0.5, 0.7)),
        quiet=True,
    )
    for number in range(STEPS):
        if number == step:
            prune.l1_unstructured(model.norm, "weight", 0.05)
        model(batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if STEPS // 2 <= number < STEPS - 1:  # the last step ends with a mean
            held.append(weight.detach().clone())
    return model, search, held


def test_a_mean_at_the_end_is_of_each_parameter_alone() -> None:
    """Of a norm that is pruned amid the tail, what was taken in before it had weight and bias in another order."""
    for step, weight in ((None, "norm.weight"), (45, "norm.weight_orig")):
        model, search, held = pruned(step)
        tail = search.history.windows[-1].tail
        assert tail is not None
        assert (tail["parts"][0]["start"] < 45) is (step is None)
        ended = model.get_parameter(weight).detach()
        lowest, highest = torch.stack(held).amin(0) - 0.05, torch.stack(held).amax(0) + 0.05
        assert bool(((lowest <= ended) & (ended <= highest)).all())


def test_a_sketch_of_values_follows_the_parameters() -> None:
    model = Normed(0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    sketch = GradientSketch([(model, optimizer)], 4096)

    def folded() -> Tensor:
        return sketch.folded_trained(lambda place, _: tensors.trained(model)[place].detach())

    before = folded()
    for layer in (model.first, model.norm):
        prune.l1_unstructured(layer, "weight", 0.5)
    assert next(iter(dict(model.named_parameters()))) == "first.bias"
    assert torch.equal(folded(), before)
    model.first.weight_orig.requires_grad_(False)
    assert not torch.equal(folded(), before), "one that was frozen since counts as zeros"
