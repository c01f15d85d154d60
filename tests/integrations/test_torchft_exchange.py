"""What `hdet.torchft` sends where a group is gone: to the bit, and of any type. Sums are made here, by two threads."""

from __future__ import annotations

import threading
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hdet.errors import ConfigError
from hdet.replicas.distributed import optimizer_mean

pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="pip install 'hdet[torchft]'")
THERE = (0, 2)  # of three groups
Found = dict[str, Any]


class Summing:
    """A manager whose all-reduce is a sum over the threads."""

    barrier = threading.Barrier(len(THERE), timeout=60)
    held: dict[int, Tensor]

    def __init__(self, group: int, held: dict[int, Tensor]) -> None:
        from torchft import ProcessGroupGloo

        self.group, self.held, self._pg = group, held, ProcessGroupGloo()

    def errored(self) -> None:
        return None

    def allreduce(self, tensor: Tensor, reduce_op: Any = None) -> Any:
        self.held[self.group] = tensor.clone()
        self.barrier.wait()
        total = self.held[THERE[0]] + self.held[THERE[1]]
        self.barrier.wait()
        tensor.copy_(total)
        return SimpleNamespace(wait=lambda: True)


def meet(group: int, held: dict[int, Tensor], found: dict[int, Found]) -> None:
    from hdet.integrations.managed_exchange import ManagedExchange

    exchange = ManagedExchange(Summing(group, held), group, 3, torch.device("cpu"))
    exchange.meeting = True
    sent = [
        torch.tensor([True, False, group == 2]),
        torch.arange(5) * group,
        torch.full((3, 2), group * 1.0).bfloat16(),
    ]
    averaged = [torch.full((4,), group + 1.0), torch.full((2, 2), group * 1.0).half()]
    one, other = (torch.nn.Parameter(torch.ones(count)) for count in (3, 2))
    optimizer = torch.optim.AdamW([one, other])
    one.grad = torch.full((3,), 1.0 + group)
    if group == 2:  # so that only this one has a state of the other
        other.grad = torch.ones(2)
    optimizer.step()
    numbers = exchange.gather(torch.tensor([1.5 + group, -0.0], dtype=torch.float64))
    whole = exchange.gather(torch.tensor([-(2**62) + group]))
    objects = exchange.gather_objects("x" * group)
    exchange.broadcast(sent, 2)
    exchange.reduce(averaged, averaged, [1.0, 0.0, 3.0], mean=True)
    optimizer_mean.average(exchange, [optimizer], [1.0, 0.0, 1.0])
    moments = [state["exp_avg"].tolist() for state in optimizer.state.values()]
    found[group] = {
        "numbers": numbers,
        "whole": whole[:, 0].tolist(),
        "objects": objects,
        "sent": [tensor.tolist() for tensor in sent],
        "averaged": [tensor.flatten().tolist() for tensor in averaged],
        "moments": moments,
        "present": exchange.present,
    }


def test_the_groups_that_are_there_tell_each_other_everything() -> None:
    held: dict[int, Tensor] = {}
    found: dict[int, Found] = {}
    threads = [threading.Thread(target=meet, args=(group, held, found)) for group in THERE]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in THERE:
        own = found[group]
        assert own["present"] == [True, False, True]
        assert own["numbers"][[0, 2], 0].tolist() == [1.5, 3.5]
        assert own["numbers"][[0, 2], 1].signbit().all()
        assert own["numbers"][1].isnan().all()
        assert own["whole"] == [-(2**62), 0, -(2**62) + 2]
        assert own["objects"] == ["", None, "xx"]
        assert own["sent"] == [[True, False, True], [0, 2, 4, 6, 8], [[2.0, 2.0]] * 3]
        assert own["averaged"] == [[2.5] * 4, [1.5] * 4]
        assert own["moments"] == [pytest.approx([0.2] * 3), pytest.approx([0.1] * 2)]


def test_two_groups_of_one_number_are_refused() -> None:
    class Twice(Summing):
        """The other group sends what this one does."""

        def allreduce(self, tensor: Tensor, reduce_op: Any = None) -> Any:
            tensor += tensor
            return SimpleNamespace(wait=lambda: True)

    from hdet.integrations.managed_exchange import ManagedExchange

    exchange = ManagedExchange(Twice(1, {}), 1, 3, torch.device("cpu"))
    exchange.meeting = True
    with pytest.raises(ConfigError, match="2 replica groups have the number 1; give each its own group="):
        exchange.gather(torch.ones(1))
