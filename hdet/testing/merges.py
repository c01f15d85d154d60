"""The laws of merges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.replicas import Copies, replicate
from hdet.replicas.merge import Merge
from hdet.testing.ground import ADAMW, Ground
from hdet.testing.law import require

REPLICAS = 4
Hosts = list[tuple[nn.Module, Optimizer]]


def _trained(ground: Ground | None, batches: Sequence[int]) -> Hosts:
    """One replica for each number, each trained for three steps on the batches of that number."""
    ground = ground or ADAMW
    hosts = list(replicate(*ground.make(), n=len(batches)).hosts)
    with torch.random.fork_rng(devices=[]):
        for (model, optimizer), batch in zip(hosts, batches, strict=True):
            for step in range(3):
                torch.manual_seed(step)
                ground.loss(model, step, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    return hosts


def _held(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def identical_replicas_stay_as_they_are(merge: Merge, ground: Ground | None) -> None:
    """Replicas that are all alike are not changed, bit for bit."""
    for n in (1, 2, 3, REPLICAS):
        hosts = _trained(ground, [0] * n)
        before = _held(hosts[0][0])
        merge(Copies(hosts), [True] * n)
        for number, (model, _) in enumerate(hosts):
            for name, value in model.state_dict().items():
                require(
                    torch.equal(value, before[name]),
                    f"{name} of replica {number} of {n} alike ones was changed",
                )


def all_replicas_become_one(merge: Merge, ground: Ground | None) -> None:
    """After the merge all replicas hold the same parameters and buffers, bit for bit, and train on."""
    hosts = _trained(ground, range(REPLICAS))
    merge(Copies(hosts), [True] * REPLICAS)
    _require_alike(hosts)
    for model, optimizer in hosts:
        (ground or ADAMW).loss(model, 9, 0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        require(
            all(p.isfinite().all() for p in model.parameters()),
            "a step after the merge gave non-finite weights",
        )


def the_order_of_replicas_does_not_matter(merge: Merge, ground: Ground | None) -> None:
    """Replicas in another order merge to the same model, up to rounding."""
    merged = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        hosts = _trained(ground, order)
        merge(Copies(hosts), [True] * REPLICAS)
        merged.append(hosts[0][0])
    _require_close(merged[0], merged[1], "with the replicas in the order 2, 0, 3, 1")


def a_failed_replica_takes_no_part(merge: Merge, ground: Ground | None) -> None:
    """A replica that is not valid, NaN or not, changes the result no more than its absence."""
    for poison in (float("nan"), 1e6):
        hosts = _trained(ground, range(REPLICAS))
        failed = hosts[2]
        with torch.no_grad():
            for parameter in failed[0].parameters():
                parameter.fill_(poison)
            for state in failed[1].state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        value.fill_(poison)
        merge(Copies(hosts), [True, True, False, True])
        for name, value in hosts[0][0].named_parameters():
            require(
                bool(value.isfinite().all()),
                f"{name} is not finite, with a replica of weights {poison} not valid",
            )
        _require_alike(hosts)
        alone = _trained(ground, [0, 1, 3])
        merge(Copies(alone), [True] * 3)
        _require_close(alone[0][0], hosts[0][0], f"with a replica of weights {poison} that is not valid")
        for (_, one), (_, other) in zip(alone, [host for host in hosts if host is not failed], strict=True):
            _require_states_close(one, other, f"with a replica of weights {poison} that is not valid")
        for state in failed[1].state.values():
            for name, value in state.items():
                sound = not isinstance(value, Tensor) or bool((value.isfinite() & (value != 1e6)).all())
                require(sound, f"the failed replica's optimizer still holds its {name}")


def _require_alike(hosts: Hosts) -> None:
    first = hosts[0][0].state_dict()
    for number, (model, _) in enumerate(hosts[1:], start=1):
        for name, value in model.state_dict().items():
            require(torch.equal(value, first[name]), f"{name} of replica {number} differs from replica 0's")


def _require_close(one: nn.Module, other: nn.Module, when: str) -> None:
    held = other.state_dict()
    for name, value in one.state_dict().items():
        if value.is_floating_point():
            near = torch.allclose(value, held[name], rtol=1e-4, atol=1e-6)
            require(
                near,
                f"{name} is {value.flatten()[:4].tolist()}, and {held[name].flatten()[:4].tolist()} {when}",
            )


def _require_states_close(one: Optimizer, other: Optimizer, when: str) -> None:
    for (_, state), (_, held) in zip(one.state.items(), other.state.items(), strict=True):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                near = torch.allclose(value, held[name], rtol=1e-4, atol=1e-6)
                require(near, f"the optimizer's {name} is another {when}")


LAWS = (
    identical_replicas_stay_as_they_are,
    all_replicas_become_one,
    the_order_of_replicas_does_not_matter,
    a_failed_replica_takes_no_part,
)
