"""What `hdet.torchft` sends where a group is gone: to the bit, and of any type. Sums are made here, by two threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hdet.errors import ConfigError, StepError
from hdet.replicas.distributed import buffer_mean, optimizer_mean

THERE = (0, 2)  # of three groups
Found = dict[str, Any]


class Unused:
    """What is made of torchft's, and here sends nothing."""

    def __init__(self, *given: Any) -> None:
        """Nothing."""


@pytest.fixture(autouse=True)
def torchft(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Names to import where torchft is not installed: it sends nothing here."""
    if find_spec("torchft") is not None:
        yield
        return
    groups = SimpleNamespace(ManagedProcessGroup=Unused)
    monkeypatch.setitem(sys.modules, "torchft", SimpleNamespace(Manager=Unused, ProcessGroupGloo=Unused))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torchft.process_group", groups)  # type: ignore[arg-type]
    yield
    sys.modules.pop("hdet.integrations.managed_exchange", None)


class Summing:
    """A manager whose all-reduce is a sum over the threads."""

    barrier: threading.Barrier
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


def each(target: Callable[[int, dict[int, Tensor], dict[int, Found]], None]) -> dict[int, Found]:
    """What it finds in a thread for each group that is there."""
    held: dict[int, Tensor] = {}
    found: dict[int, Found] = {}
    Summing.barrier = threading.Barrier(len(THERE), timeout=60)  # a broken one breaks no other test
    threads = [threading.Thread(target=target, args=(group, held, found)) for group in THERE]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def merge(group: int, held: dict[int, Tensor], found: dict[int, Found]) -> None:
    """Models without buffers, with batch statistics, with a cache of other lengths beside them, with other buffers."""
    from hdet.integrations.managed_exchange import ManagedExchange

    exchange = ManagedExchange(Summing(group, held), group, 3, torch.device("cpu"))
    exchange.meeting = True
    plain, normed, cached = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    cached.register_buffer("cache", torch.ones(1 + group))
    for model in (plain, normed, cached):
        for name, mean in model.named_buffers():
            if name == "running_mean":
                mean.fill_(group)
        buffer_mean.average(exchange, [model], [1.0, 0.0, 1.0], take_first=False)
    frozen = torch.full((100,), 0.1), torch.full((2,), 1.0 + group)
    buffer_mean.average_written(exchange, [frozen], [True, True], [1.0, 0.0, 2.0])
    plain.register_buffer("ours" if group else "theirs", torch.ones(1))
    with pytest.raises(StepError, match="do not hold the same buffers") as told:
        buffer_mean.average(exchange, [plain], [1.0, 0.0, 1.0], take_first=False)
    found[group] = {
        "normed": normed.running_mean,
        "cached": [cached.running_mean, cached.cache],
        "frozen": frozen,
        "told": str(told.value),
    }


def test_the_groups_that_are_there_merge_their_buffers() -> None:
    found = each(merge)
    for group in THERE:
        own = found[group]
        assert own["normed"].tolist() == [1.0, 1.0]
        assert [one.tolist() for one in own["cached"]] == [[1.0, 1.0], [1.0] * (1 + group)]
        assert torch.equal(own["frozen"][0], torch.full((100,), 0.1))  # alike in both: to the bit
        assert own["frozen"][1].tolist() == pytest.approx([7 / 3] * 2)
        assert "('ours', 'theirs')" in own["told"]


def test_the_groups_that_are_there_tell_each_other_everything() -> None:
    found = each(meet)
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
