"""The length of windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hdet
from hdet.errors import ConfigError


@hdet.spec.register
class Own(hdet.windows.Windows):
    kind = "own_windows_of_the_tests"
    late: bool = False
    given: Any = 0

    def length(self, step: int) -> int:
        return 4 if self.late and step < 8 else self.given  # type: ignore[no-any-return]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("length", [0, -1, 1.5, "5"])
def test_a_window_of_no_length_is_refused(length: Any, late: bool, problem: Any, train: Any) -> None:
    """It would be waited for without end."""
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    knobs = [hdet.LearningRate(schedule=hdet.schedules.Constant(0.1))]
    window = Own(late=late, given=length)

    def run() -> None:
        train(hdet.Engine(hdet.replicate(model, optimizer, n=2), knobs, window=window, signal=problem.probe()), 12)

    with pytest.raises(ConfigError, match=r"Own\.length\((0|8)\) is .*a whole number \(an int\) of at least 1"):
        run()
    with pytest.raises(ConfigError, match=r"Own\.length\((0|8)\) is "):
        window.count(0, 12)
