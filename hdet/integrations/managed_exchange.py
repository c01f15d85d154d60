"""Collectives over the replica groups that torchft manages, of which some may be gone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft import Manager
from torchft.process_group import ManagedProcessGroup

from hdet.errors import ConfigError, LostRankError
from hdet.replicas.distributed.exchange import Exchange
from hdet.replicas.distributed.layout import Group, Layout
from hdet.replicas.tensors import copy_

SUM = dist.ReduceOp.SUM


class ManagedExchange(Exchange):
    """Collectives by a torchft Manager, over the groups of its quorum.

    Between meetings nobody else is there: all replicas are taken to be as this one is.

    Attributes:
        meeting: whether the groups are at the end of a window together.
    """

    def __init__(self, manager: Manager, group: int, groups: int, device: torch.device) -> None:
        self.manager = manager
        self.meeting = False
        self._group = ManagedProcessGroup(manager)  # a layout holds it weakly
        table = np.arange(groups, dtype=np.int64).reshape(groups, 1)
        everyone = Group(self._group)
        super().__init__(Layout(everyone, everyone, table, group, 0, tuple(range(groups))), device, exact=False)

    def reduce(self, sources: Any, targets: Any, weights: Any, *, mean: bool) -> None:
        if self.meeting:
            super().reduce(sources, targets, weights, mean=mean)
            return
        scale = 1.0 if mean else float(sum(weights))
        copy_(list(targets), [source * scale for source in sources])

    def begin_sum(self, flat: Tensor) -> Callable[[], object]:
        work = self.manager.allreduce(flat, reduce_op=SUM)
        return partial(self._finish, work)

    def _finish(self, work: dist.Work) -> None:
        """Wait for a sum. The manager reports no error of a collective to who waits for it."""
        work.wait()
        error = self.manager.errored()
        if error is not None:
            raise LostRankError(f"a replica group was lost while the groups met at a window's end: {error}")

    def send(self, flat: Tensor, place: int) -> None:
        if not self.meeting:
            return
        if self.layout.place != place:
            flat.zero_()
        self.begin_sum(flat.view(torch.uint8))()

    def gather(self, row: Tensor) -> Tensor:
        """[M] of each group -> [N, M]; of groups that are not there NaN, or 0 where numbers are whole.

        Raises:
            ConfigError: two groups have one number.
        """
        row = row.to(self.device).contiguous()
        if not self.meeting:
            return row.expand(self.layout.places, -1).clone()
        # As bytes, of which all others' are 0: what is gathered stays the same to the bit.
        own = row.view(torch.uint8)
        flat = torch.zeros(self.layout.places, len(own) + 1, dtype=torch.uint8, device=self.device)
        flat[self.layout.place, :-1] = own
        flat[self.layout.place, -1] = 1
        self.begin_sum(flat)()
        there = flat[:, -1].tolist()
        if max(there) > 1:
            raise ConfigError(
                f"{max(there)} replica groups have the number {there.index(max(there))}; give each its own group="
            )
        self.present = [bool(count) for count in there]
        rows = flat[:, :-1].contiguous().view(row.dtype)
        if rows.is_floating_point():
            rows[~torch.tensor(self.present, device=rows.device)] = torch.nan
        return rows

    def gather_objects(self, own: Any, *, of_all: bool = False) -> list[Any]:
        if not self.meeting:
            return [own] * self.layout.places
        held = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        lengths = [int(length) for length in self.gather(torch.tensor([len(held)]))[:, 0]]
        rows = self.gather(nn.functional.pad(held, (0, max(lengths) - len(held)))).cpu()
        return [
            pickle.loads(bytes(row[:length].tolist())) if length else None
            for row, length in zip(rows, lengths, strict=True)
        ]

    def broadcast_object(self, own: Any, place: int) -> Any:
        return self.gather_objects(own)[place]
