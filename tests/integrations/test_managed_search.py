"""What replica groups that search alike average, as torchft's all-reduce does: a sum, divided by their number."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hdet.errors import ConfigError
from hdet.integrations.managed_search import in_parts, require_managed, together


@pytest.mark.parametrize("groups", [2, 3, 5, 6, 7])
def test_the_mean_of_equal_shifts_is_that_shift_to_the_last_bit(groups: int) -> None:
    shifts = (torch.rand(1000, dtype=torch.float64) * 6 - 3).tolist()
    told = in_parts(shifts)
    total = told.clone()
    for _ in range(groups - 1):
        total += told
    assert together(total / groups) == shifts


def test_the_mean_of_others_is_their_mean() -> None:
    one, other = torch.rand(2, 1000, dtype=torch.float64).tolist()
    mean = together((in_parts(one) + in_parts(other)) / 2)
    assert mean == pytest.approx([(x + y) / 2 for x, y in zip(one, other, strict=True)], rel=1e-15)
    assert together(in_parts([])) == []


def test_a_manager_and_a_group_under_which_none_can_go_on_are_refused() -> None:
    with pytest.raises(ConfigError, match="a group that comes back takes over weights and bases before it trains"):
        require_managed(SimpleNamespace(_use_async_quorum=True))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ConfigError, match="of 2 processes, and a managed replica is one process"):
            require_managed(SimpleNamespace(_use_async_quorum=False))
    finally:
        dist.destroy_process_group()
