"""The laws of merges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine.engine import Engine
from hdet.evidence.scene import Harvest, Scene, Window
from hdet.merging import Merge, Merger
from hdet.replicas import Copies, replicate
from hdet.replicas.anchor import Anchor
from hdet.replicas.average import Averages
from hdet.replicas.moving import Moving
from hdet.signals import TrainingLoss
from hdet.testing.ground import ADAMW, Ground
from hdet.testing.law import require, require_same_model

REPLICAS = 4


class Trained:
    """Replicas at the end of a window of three steps, each trained on the batches of a number of its own, and of a run.

    Args:
        batches: the number of each; the lower it is, the better the replica's signal.
    """

    def __init__(self, ground: Ground | None, batches: Sequence[int]) -> None:
        ground = ground or ADAMW
        self.hosts = list(replicate(*ground.make(), n=len(batches)).hosts)
        self.losses = np.array([1.0 + number for number in batches])
        moving, anchor = Moving(self.hosts), Anchor(*self.hosts[0])
        anchor.take(0)
        averages, objective = Averages(moving), ground.objective()
        self.scene = Scene(
            Copies(self.hosts), TrainingLoss(), "local", 0, anchor, moving, averages, nullcontext, True, objective
        )
        with torch.random.fork_rng(devices=[]):
            for (model, optimizer), batch in zip(self.hosts, batches, strict=True):
                for step in range(3):
                    torch.manual_seed(step)
                    ground.loss(model, step, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    def merge(self, merge: Merge, failed: int | None = None) -> None:
        """End the window; the replica `failed` is not valid."""
        valid = np.arange(len(self.hosts)) != (-1 if failed is None else failed)
        losses = np.where(valid, self.losses, np.nan)
        merger: object = merge.at_work(self.scene)
        require(isinstance(merger, Merger), f"at_work returned {merger!r}; it returns a hdet.merges.Merger")
        assert isinstance(merger, Merger)
        merger.merge(Harvest(Window(0, 0, 3, 3), losses, valid))
        merger.step()


def identical_replicas_stay_as_they_are(merge: Merge, ground: Ground | None) -> None:
    """Replicas that are all alike stay alike, and a merge that is a mean leaves them as they are, bit for bit."""
    for n in (1, 2, 3, REPLICAS):
        trained = Trained(ground, [0] * n)
        before = deepcopy(trained.hosts[0][0])
        trained.merge(merge)
        _require_alike(trained.hosts)
        if merge.is_mean:
            require_same_model(trained.hosts[0][0], before, f"of {n} alike replicas was changed")


def all_replicas_become_one(merge: Merge, ground: Ground | None) -> None:
    """After the merge all replicas hold the same parameters and buffers, bit for bit, and train on."""
    trained = Trained(ground, range(REPLICAS))
    trained.merge(merge)
    _require_alike(trained.hosts)
    for model, optimizer in trained.hosts:
        (ground or ADAMW).loss(model, 9, 0).backward()
        optimizer.step()
        require(all(p.isfinite().all() for p in model.parameters()), "a step after the merge gave non-finite weights")


def the_order_of_replicas_does_not_matter(merge: Merge, ground: Ground | None) -> None:
    """Replicas in another order merge to the same model, up to rounding."""
    merged = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        trained = Trained(ground, order)
        trained.merge(merge)
        merged.append(trained.hosts[0][0])
    _require_close(merged[0], merged[1], "with the replicas in the order 2, 0, 3, 1")


def a_failed_replica_takes_no_part(merge: Merge, ground: Ground | None) -> None:
    """A replica that is not valid, NaN or not, changes the result no more than its absence."""
    for poison in (float("nan"), 1e6):
        trained = Trained(ground, range(REPLICAS))
        hosts, failed = trained.hosts, trained.hosts[2]
        with torch.no_grad():
            for parameter in failed[0].parameters():
                parameter.fill_(poison)
            for state in failed[1].state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        value.fill_(poison)
        trained.merge(merge, failed=2)
        for name, value in hosts[0][0].named_parameters():
            require(bool(value.isfinite().all()), f"{name} is not finite, with a replica of weights {poison} not valid")
        _require_alike(hosts)
        without = Trained(ground, [0, 1, 3])
        without.merge(merge)
        alone = without.hosts
        _require_close(alone[0][0], hosts[0][0], f"with a replica of weights {poison} that is not valid")
        for (_, one), (_, other) in zip(alone, [host for host in hosts if host is not failed], strict=True):
            _require_states_close(one, other, f"with a replica of weights {poison} that is not valid")
        for state in failed[1].state.values():
            for name, value in state.items():
                sound = not isinstance(value, Tensor) or bool((value.isfinite() & (value != 1e6)).all())
                require(sound, f"the failed replica's optimizer still holds its {name}")


def a_resume_is_the_same_run(merge: Merge, ground: Ground | None) -> None:
    """Saved after a merge as plain numbers and tensors and taken up anew, a run ends in the same bits."""
    own, windows, steps = ground or ADAMW, 3, 4

    def make() -> Engine:
        return Engine(
            replicate(*own.make(), n=REPLICAS),
            [],
            window=steps,
            objective=own.objective(),
            gradients="local",
            total_steps=windows * steps,
            merge=merge,
        )

    with torch.random.fork_rng(devices=[]):
        whole, second = make(), own.taken_up(make, steps + steps // 2)
        for engine in (whole, second):
            own.train(engine, windows * steps)
    one, other = (engine.replicas[0].model for engine in (whole, second))
    require_same_model(one, other, "differs at the end of the run that was taken up")


def _require_alike(hosts: Sequence[tuple[nn.Module, Optimizer]]) -> None:
    for number, (model, _) in enumerate(hosts[1:], start=1):
        require_same_model(model, hosts[0][0], f"of replica {number} differs from replica 0's")


def _require_close(one: nn.Module, other: nn.Module, when: str) -> None:
    held = other.state_dict()
    for name, value in one.state_dict().items():
        if value.is_floating_point():
            near = torch.allclose(value, held[name], rtol=1e-4, atol=1e-6)
            one_has, other_has = value.flatten()[:4].tolist(), held[name].flatten()[:4].tolist()
            require(near, f"{name} is {one_has}, and {other_has} {when}")


def _require_states_close(one: Optimizer, other: Optimizer, when: str) -> None:
    for (_, state), (_, held) in zip(one.state.items(), other.state.items(), strict=True):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                near = torch.allclose(value, held[name], rtol=1e-4, atol=1e-6)
                require(near, f"the optimizer's {name} is another {when}")
