"""The digits task: disjoint splits, honest label noise, a seeded perceptron."""

from __future__ import annotations

import sys

import pytest
import torch

import hdet
from hdet.app.tasks import Digits, Workload
from hdet.errors import MissingExtraError

NOISY = Digits(width=16, label_noise=0.4, dropout=0.3)


def test_it_is_a_workload() -> None:
    assert isinstance(NOISY.build(seed=0, batch_size=8), Workload)


def test_the_splits_are_disjoint_and_hold_all_digits() -> None:
    splits = Digits().build(seed=0, batch_size=8).splits
    assert {name: len(labels) for name, (_, labels) in splits.items()} == {"train": 997, "probe": 400, "test": 400}
    rows = [tuple(row) for pixels, _ in splits.values() for row in pixels.tolist()]
    assert len(rows) == len(set(rows)) == 1797, "a digit is in two splits"
    assert splits["train"][0].min() == 0.0
    assert splits["train"][0].max() == 1.0


@pytest.mark.parametrize("noise", [0.0, 0.4, 1.0])
def test_label_noise_replaces_that_share_of_labels(noise: float) -> None:
    clean = Digits().build(seed=0, batch_size=8).splits
    noisy = Digits(label_noise=noise).build(seed=0, batch_size=8).splits
    for name, (pixels, labels) in noisy.items():
        assert torch.equal(pixels, clean[name][0])
        wrong = (labels != clean[name][1]).double().mean().item()
        assert wrong == pytest.approx(0.9 * noise, abs=0.08), "one replacement in ten is the right label"


def test_data_do_not_follow_the_seed_but_batches_and_weights_do() -> None:
    one, two = NOISY.build(seed=0, batch_size=8), NOISY.build(seed=1, batch_size=8)
    assert one.facts == two.facts
    assert one.facts["train"] != Digits().build(seed=0, batch_size=8).facts["train"]
    assert torch.equal(one.batch(3, 1)[0], NOISY.build(seed=0, batch_size=8).batch(3, 1)[0])
    assert not torch.equal(one.batch(3, 1)[0], two.batch(3, 1)[0])
    assert not torch.equal(one.batch(3, 1)[0], one.batch(3, 2)[0])
    assert not torch.equal(one.model().layers[0].weight, two.model().layers[0].weight)  # type: ignore[arg-type]


def test_the_model_leaves_the_global_generator_alone() -> None:
    workload = NOISY.build(seed=0, batch_size=8)
    before = torch.get_rng_state()
    one, two = workload.model(), workload.model()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_a_batch_pairs_pixels_with_their_own_labels() -> None:
    workload = NOISY.build(seed=0, batch_size=64)
    pixels, labels = workload.splits["train"]
    known = {tuple(row): label for row, label in zip(pixels.tolist(), labels.tolist(), strict=True)}
    for row, label in zip(*(part.tolist() for part in workload.batch(0, 0)), strict=True):
        assert known[tuple(row)] == label


def test_probe_and_test_are_held_out_and_in_eval_mode() -> None:
    workload = NOISY.build(seed=0, batch_size=8)
    parts = workload.probe(0)
    assert [len(labels) for _, labels in parts] == [32] * 8
    train = {tuple(row) for row in workload.splits["train"][0].tolist()}
    assert not any(tuple(row) in train for pixels, _ in parts for row in pixels.tolist())
    model = workload.model()
    state = torch.get_rng_state()
    assert workload.test_loss(model) == workload.test_loss(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_and_label_smoothing_can_be_knobs() -> None:
    workload = NOISY.build(seed=0, batch_size=8)
    model = workload.model()
    optimizer = torch.optim.SGD(workload.groups(model), lr=0.1)
    assert hdet.Dropout().bind(model, optimizer).read() == 0.3
    smoothing = hdet.LabelSmoothing(schedule=0.1).bind(model, optimizer)
    batch = workload.batch(0, 0)
    plain = workload.loss(model.eval(), batch)
    smoothing.write(0.5)
    assert torch.equal(workload.loss(model, batch), plain), "eval mode must not smooth"
    hdet.Dropout().bind(model, optimizer).write(0.0)
    assert workload.loss(model.train(), batch) != plain, "training must smooth"


def test_it_learns() -> None:
    workload = Digits(width=32).build(seed=0, batch_size=64)
    model = workload.model()
    optimizer = torch.optim.SGD(workload.groups(model), lr=0.3)
    for step in range(150):
        workload.loss(model, workload.batch(step, 0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    assert workload.test_loss(model) < 0.5


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'hdet\[cli\]'"):
        NOISY.build(seed=0, batch_size=8)
