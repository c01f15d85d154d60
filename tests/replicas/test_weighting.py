"""Weights of a merge, as they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hdet.errors import ConfigError
from hdet.replicas import weighting


@pytest.mark.parametrize(
    "weights",
    [[0.5, 0.5], [0.0, 0.0, 0.0], [1.0, -1.0, 0.0], [np.nan, 1.0, 0.0], [1.0, 1.0, 1.0], [[1.0], [0.0], [1.0]]],
)
def test_weights_that_cannot_be(weights: Any) -> None:
    with pytest.raises(ConfigError, match=r"a merge weighs 3 replicas.* give each valid one a finite weight"):
        weighting.shares([True, True, False], np.array(weights, dtype=np.float64))
