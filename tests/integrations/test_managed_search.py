"""What replica groups that search alike average, as torchft's all-reduce does: a sum, divided by their number."""

from __future__ import annotations

import pytest
import torch

from hdet.integrations.managed_search import in_parts, together


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
