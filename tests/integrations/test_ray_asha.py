"""The search benchmark's `ray_asha`: Ray Tune's scheduler, told the losses of one trial after another."""

from __future__ import annotations

import math
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hdet

sys.path.insert(0, str(Path(hdet.__file__).parent.parent / "benchmarks"))
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'hdet[ray]'")


def test_ray_stops_what_is_not_among_the_best_quarter() -> None:
    from search_parts.ray_halving import RayHalving
    from search_parts.task import Setting

    search = RayHalving([Setting(0.1, 0.0, 0.0)] * 5)
    stopped = []
    for loss in (1.0, 2.0, 0.5, 0.9, 0.4):
        search.draw()
        search.report(1, loss)
        stopped.append(search.stops())
        search.ended(loss, complete=not stopped[-1])
    assert stopped == [False, True, False, True, False]


def test_ray_judges_after_one_and_four_of_five_parts() -> None:
    from search_parts.ray_halving import RayHalving
    from search_parts.task import Setting

    search = RayHalving([Setting(0.1, 0.0, 0.0)] * 2)
    told = []
    for losses in ((1.0, 1.0, 1.0, 1.0), (0.9, 9.0, 9.0, 2.0)):
        search.draw()
        for rung, loss in enumerate(losses, start=1):
            search.report(rung, loss)
            told.append(search.stops())
        search.ended(losses[-1], complete=not told[-1])
    assert told == [False] * 7 + [True]


def test_a_run_spends_its_budget_on_trials_most_of_which_are_stopped() -> None:
    from search_parts.found import all_contenders, all_tasks
    from search_parts.meter import Meter
    from search_parts.stopped_early import SHARE
    from search_parts.task import Setting

    task, meter = all_tasks()["tabular"].quickened(), Meter()
    outcome = all_contenders()["ray_asha"].run(task, Setting(0.064, 3.0, 0.0), 0, meter)
    assert outcome.model is not None
    assert 0.9 * task.budget < meter.passes <= task.budget
    assert outcome.details["trials"] > SHARE
    assert math.isfinite(outcome.details["lr"])
