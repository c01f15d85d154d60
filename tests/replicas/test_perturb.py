"""The warm noisy start: who is moved, by how much, and by whose numbers."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hdet
from hdet.app.run.config import RunConfig
from hdet.app.run.loop import Training
from hdet.errors import ConfigError
from hdet.replicas.perturb import _normals


class Net(nn.Module):
    """Everything a model may hold: large and small weights, zeros, a frozen and a tied parameter, buffers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.large = nn.Parameter(10 * torch.randn(80, 80, generator=generator))
        self.small = nn.Parameter(0.1 * torch.randn(80, 80, generator=generator))
        self.zeros = nn.Parameter(torch.zeros(6))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.tied = self.small
        self.norm = nn.BatchNorm1d(4)
        self.counter: torch.Tensor
        self.register_buffer("counter", torch.arange(3))


def replicas(n: int) -> hdet.replicas.Copies:
    model = Net()
    return hdet.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), n=n)


def relative(after: torch.Tensor, before: torch.Tensor) -> float:
    return float(((after - before).norm() / before.norm()).detach())


def test_each_tensor_is_moved_by_the_noise_relative_to_its_own_norm() -> None:
    home, start = replicas(2), Net()
    hdet.perturb(home, noise=0.02)
    for replica in home.local:
        for name in ("large", "small"):
            moved = relative(replica.model.get_parameter(name), start.get_parameter(name))
            assert moved == pytest.approx(0.02, rel=0.03)  # sd of a norm over 6400 numbers: 0.9 %


def test_complex_parameters_are_moved_in_both_parts() -> None:
    model = nn.Module()
    model.turns = nn.Parameter(torch.full((80, 80), 3.0 + 1.0j))
    before = model.turns.detach().clone()
    hdet.perturb(model, noise=0.02, replica=0)
    moved = model.turns.detach() - before
    assert relative(model.turns, before) == pytest.approx(0.02, rel=0.03)
    assert float(moved.real.norm()) == pytest.approx(float(moved.imag.norm()), rel=0.05)


def test_global_scale_moves_every_element_alike() -> None:
    home, start = replicas(1), Net()
    hdet.perturb(home, noise=0.02, scale="global")
    model = home.local[0].model
    trained = [p for p in start.parameters() if p.requires_grad]
    total = sum(float(p.detach().double().square().sum()) for p in trained)
    deviation = 0.02 * (total / sum(p.numel() for p in trained)) ** 0.5
    for name in ("large", "small"):
        change = model.get_parameter(name) - start.get_parameter(name)
        assert float(change.detach().std()) == pytest.approx(deviation, rel=0.03)
    assert model.get_parameter("zeros").abs().max() > 0


def test_zeros_frozen_parameters_and_buffers_stay() -> None:
    home, start = replicas(2), Net()
    hdet.perturb(home, noise=0.5)
    for replica in home.local:
        assert torch.equal(replica.model.get_parameter("zeros"), start.zeros)
        assert torch.equal(replica.model.get_parameter("frozen"), start.frozen)
        for (name, buffer), (_, own) in zip(replica.model.named_buffers(), start.named_buffers(), strict=True):
            assert torch.equal(buffer, own), name


def test_a_tied_parameter_is_moved_once_and_stays_tied() -> None:
    home = replicas(1)
    hdet.perturb(home, noise=0.02)
    model = home.local[0].model
    assert model.tied is model.small  # type: ignore[union-attr]
    assert relative(model.get_parameter("small"), Net().small) == pytest.approx(0.02, rel=0.03)


def test_replicas_differ_tensors_differ_and_a_seed_repeats() -> None:
    first, second = replicas(3), replicas(3)
    hdet.perturb(first, seed=7)
    hdet.perturb(second, seed=7)
    starts = [r.model.get_parameter("large").detach() for r in first.local]
    for one, other in zip(first.local, second.local, strict=True):
        assert torch.equal(one.model.get_parameter("large"), other.model.get_parameter("large"))
    assert not torch.equal(starts[0], starts[1])
    # independent streams: correlations of 6400 pairs have sd 0.0125
    changes = [s - Net().large for s in starts] + [
        10 / 0.1 * (first.local[0].model.get_parameter("small") - Net().small)
    ]
    correlation = np.corrcoef([c.detach().flatten().numpy() for c in changes])
    assert np.abs(correlation - np.eye(4)).max() < 0.06
    hdet.perturb(third := replicas(3), seed=8)
    assert not torch.equal(third.local[0].model.get_parameter("large"), starts[0])


def test_a_replica_s_noise_does_not_depend_on_how_many_there_are_or_where_it_lives() -> None:
    home, alone = replicas(4), Net()
    hdet.perturb(home, seed=3)
    hdet.perturb(alone, seed=3, replica=2)
    assert torch.equal(home.local[2].model.get_parameter("large"), alone.large)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "data parallel": nn.DataParallel,
    "compiled": torch.compile,
    "compiled, then wrapped": lambda model: nn.DataParallel(torch.compile(model)),
    "wrapped, then compiled": lambda model: torch.compile(nn.DataParallel(model)),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_changes_neither_the_noise_nor_the_checkpoint(wrapper: str) -> None:
    wrap, trained = WRAPPERS[wrapper], Net()
    with torch.no_grad():
        trained.large.mul_(3.0)
    bare = Net()
    hdet.perturb(bare, seed=3, replica=2, checkpoint=trained.state_dict())
    for checkpoint in (trained.state_dict(), wrap(trained).state_dict()):
        model = Net()
        hdet.perturb(wrap(model), seed=3, replica=2, checkpoint=checkpoint)
        assert torch.equal(model.large, bare.large)
        own = Net()
        hdet.perturb(own, seed=3, replica=2, checkpoint=checkpoint)
        assert torch.equal(own.large, bare.large)


def test_a_submodule_of_a_wrapper_s_name_is_no_wrapper() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(30, 30)

    first, second = Own(), Own()
    second.load_state_dict(first.state_dict())
    hdet.perturb(first, replica=1, checkpoint=first.state_dict())
    hdet.perturb(second.module, replica=1)
    assert not torch.equal(first.module.weight, second.module.weight)  # "module.weight" is its name


def test_the_global_generators_are_not_touched() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    hdet.perturb(replicas(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()  # type: ignore[index]


def test_the_numbers_are_standard_normal_and_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(_normals(20_000, 0, 0, "weight")))
    assert abs(whole.mean()) < 0.03
    assert whole.std() == pytest.approx(1.0, abs=0.02)
    assert (whole**4).mean() == pytest.approx(3.0, abs=0.25)
    monkeypatch.setattr(sys.modules["hdet.replicas.perturb"], "CHUNK", 1001)
    blocks = list(_normals(2500, 0, 0, "weight"))
    assert [len(block) for block in blocks] == [1001, 1001, 498]
    assert len(set(np.concatenate(blocks))) == 2500


def test_it_starts_from_a_checkpoint(tmp_path: Path) -> None:
    trained = Net()
    with torch.no_grad():
        trained.large.mul_(3.0)
        trained.norm.running_mean.fill_(0.5)  # type: ignore[union-attr]
    torch.save(trained.state_dict(), tmp_path / "model.pt")
    for checkpoint in (trained.state_dict(), tmp_path / "model.pt"):
        home = replicas(2)
        hdet.perturb(home, noise=0.01, checkpoint=checkpoint)
        for replica in home.local:
            assert relative(replica.model.get_parameter("large"), trained.large) == pytest.approx(0.01, rel=0.03)
            assert torch.equal(replica.model.norm.running_mean, trained.norm.running_mean)  # type: ignore[union-attr]


def test_it_starts_from_an_engine_s_converged_point(tmp_path: Path) -> None:
    home = replicas(2)
    engine = hdet.Engine(home, [hdet.LearningRate()], window=5, total_steps=10)
    torch.save(engine.state_dict(), tmp_path / "checkpoint.pt")
    fresh = replicas(2)
    with torch.no_grad():
        for replica in fresh.local:
            replica.model.get_parameter("large").zero_()
    hdet.perturb(fresh, noise=0.0, checkpoint=tmp_path / "checkpoint.pt")
    assert torch.equal(fresh.local[1].model.get_parameter("large"), Net().large)


def test_the_noise_lives_for_a_window_and_is_then_averaged() -> None:
    home = replicas(2)
    hdet.perturb(home, noise=0.1)
    ends = [r.model.get_parameter("large").detach().clone() for r in home.local]
    engine = hdet.Engine(home, [], window=2, total_steps=4)
    assert torch.equal(home.local[1].model.get_parameter("large"), ends[1])
    engine.step([torch.zeros(()), torch.zeros(())])
    assert torch.equal(home.local[1].model.get_parameter("large"), ends[1])
    record = engine.step([torch.zeros(()), torch.zeros(())])
    assert record is not None
    assert record.merged
    for replica in home.local:
        torch.testing.assert_close(replica.model.get_parameter("large"), (ends[0] + ends[1]) / 2)


def test_a_noise_of_zero_changes_no_bit() -> None:
    home = replicas(2)
    hdet.perturb(home, noise=0.0)
    assert torch.equal(home.local[1].model.get_parameter("large"), Net().large)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": -0.1}, "noise must be 0 or more"),
        ({"noise": float("nan")}, "noise must be 0 or more"),
        ({"noise": float("inf")}, "noise must be 0 or more and finite"),
        ({"scale": "row"}, "scale must be"),
        ({"replica": 1}, "leave replica= out"),
        ({"checkpoint": {"large": torch.zeros(3)}}, "does not fit"),
        ({"checkpoint": {"step": 3}}, "a checkpoint is"),
        ({"checkpoint": "nowhere.pt"}, r"nowhere\.pt.*cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hdet.perturb(replicas(2), **options)  # type: ignore[arg-type]


def test_a_single_model_needs_its_index() -> None:
    with pytest.raises(ConfigError, match="replica="):
        hdet.perturb(Net())


def test_a_declared_run_with_noise_has_copies_and_merges_them_once() -> None:
    declared = {"task": "digits", "steps": 9, "replicas": 2, "knobs": [], "signal": "training_loss", "window": 3}
    config = RunConfig.from_dict({**declared, "noise": 0.1})
    training = Training(config, config.task.build(seed=0, batch_size=4))
    first, second = (next(model.parameters()) for model, _ in training.engine.hosts)
    assert not torch.equal(first, second)
    for _ in range(3):
        training.engine.step()
    assert torch.equal(first, second)


def test_a_damaged_checkpoint_is_not_set_out_from(tmp_path: Path) -> None:
    """torch alone would load the flipped bit."""
    model = torch.nn.Linear(50, 20)
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    content = bytearray(path.read_bytes())
    place = content.find(model.weight.detach().numpy().tobytes()[:64])
    content[place + 3] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["weight"], model.weight)
    with pytest.raises(ConfigError, match="in it is not as it was written"):
        hdet.perturb(model, replica=0, checkpoint=path)
