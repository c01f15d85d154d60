"""A probe that is too small says so, with the number needed; one that suffices, or cannot help, does not."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hdet
from hdet.controllers import Estimate
from hdet.engine.probe_size import WINDOWS, ProbeSize, growth
from hdet.evidence.parts.line_fit import along
from hdet.history import WindowRecord

Batch = tuple[Tensor, Tensor]


def estimates(slopes: Any, **more: Any) -> list[dict[str, Any]]:
    return [Estimate(slope=float(slope), stderr=1.0, **more).to_dict() for slope in slopes]


STEADY = [0.5, 0.9] * (WINDOWS // 2)
CHANGING = [0.5, -0.5] * (WINDOWS // 2)


# -- the number -----------------------------------------------------------------------------------


def test_the_factor_is_what_the_probe_must_grow_by() -> None:
    """Sub-batches of as many more examples bring the mean t to 2."""
    random = np.random.default_rng(0)
    x = (-1.0, 0.0, 1.0)

    def fits(examples: int) -> list[dict[str, Any]]:
        """Of a slope of 0.1 that differs between examples by 1, along three points and 8 sub-batches."""
        slopes = 0.1 + random.standard_normal((200, 8, examples)).mean(axis=2)
        return [along(x, np.outer(x, own)).to_dict() for own in slopes]

    factor = growth(fits(4))[1]
    assert factor > 5
    assert np.mean([estimate["t"] for estimate in fits(round(4 * factor))]) == pytest.approx(2.0, rel=0.15)


def test_slopes_of_one_sign_prove_an_effect_and_changing_ones_do_not() -> None:
    assert growth(estimates([0.8, 1.0] * (WINDOWS // 2))) == (pytest.approx(0.9), pytest.approx((2 / 0.9) ** 2), True)
    assert growth(estimates(CHANGING)) == (0.5, math.inf, False)


def test_windows_on_one_probe_prove_no_more_than_one_of_them() -> None:
    """Of a knob that does nothing: 8 windows of t = 0.9 are proof if their errors are their own, not if all are one."""
    random = np.random.default_rng(0)
    shared = random.standard_normal(8)
    shared += 0.9 * shared.std(ddof=1) / math.sqrt(8) - shared.mean()
    x = (-1.0, 1.0)

    def proven(own: float) -> bool:
        windows = [shared + own * random.standard_normal(8) for _ in range(WINDOWS)]
        return growth([along(x, np.outer(x, window)).to_dict() for window in windows])[2]

    assert not proven(own=0.1)
    one = [Estimate(slope=0.9, stderr=1.0).to_dict()] * WINDOWS
    assert growth(one)[2], "without sub-batches they are taken for independent"


def test_a_base_that_stands_at_its_best_is_no_fault_of_the_probe() -> None:
    """It has no slope; but what it would have elsewhere shows in the curvature."""
    _, factor, proven = growth(estimates(CHANGING, curvature=5.0, curvature_stderr=1.0))
    assert (factor < 1.0, proven) == (True, True)
    assert growth(estimates(CHANGING, curvature=5.0, curvature_stderr=100.0))[1] == math.inf
    assert growth(estimates(CHANGING, curvature=-5.0, curvature_stderr=1.0))[1] == math.inf


def test_what_is_not_worth_knowing_needs_no_larger_probe() -> None:
    assert growth(estimates(CHANGING, level=3000.0))[1] < 1.0
    assert growth(estimates(CHANGING, level=200.0))[1] == pytest.approx(100.0)


# -- who is looked at -----------------------------------------------------------------------------


def engine(probe: Any = None, evidence: Any = None, **options: Any) -> hdet.Engine:
    model = nn.Linear(20, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probe = probe or hdet.Probe(cross_entropy, [draw(1, 4), draw(2, 4)])
    knob = hdet.LearningRate(evidence=evidence)
    return hdet.Engine(hdet.replicate(model, optimizer, n=2), [knob], signal=probe, window=2, **options)


def records(given: list[dict[str, Any]], name: str = "learning_rate") -> list[WindowRecord]:
    return [
        WindowRecord(number, number, number + 1, {}, {}, [], {name: estimate}, {}, merged=False)
        for number, estimate in enumerate(given)
    ]


def found(size: ProbeSize, history: list[WindowRecord]) -> list[dict[str, Any]]:
    """The hints of all windows, one after the other."""
    for number, record in enumerate(history):
        record.hints.extend(size.look(history[:number], record))
    return [hint for record in history for hint in record.hints]


def looker(**options: Any) -> ProbeSize:
    made = engine(**options)
    return ProbeSize(made.knobs, made.plan.signal, made.plan.gradients)


def test_it_tells_once_after_enough_windows_that_taught_something() -> None:
    silent = [Estimate.nothing().to_dict(), {"slope": None, "stderr": None}]
    history = records([*silent, *estimates(STEADY * 3)])
    with pytest.warns(
        UserWarning, match=r"too small for learning_rate: .* median of 0\.70\. The probe has 2 batches"
    ) as told:
        hints = found(looker(), history)
    assert len(told) == 1
    assert hints == [{"kind": "small_probe", "knob": "learning_rate", "step": WINDOWS + 2, "factor": 8.2}]
    assert "(17 batches)" in str(told[0].message)


def test_one_batch_of_several_losses_is_not_told_to_be_more_batches() -> None:
    several = hdet.Probe(lambda model, batch: cross_entropy(model, batch).expand(2), [draw(1, 4)])
    with pytest.warns(UserWarning, match=r"of 0\.70\. A slope .* about 8\.16 times as many examples, or the knob"):
        found(looker(probe=several), records(estimates(STEADY)))
    with pytest.warns(UserWarning, match=r"in about inf times as many examples \(more than any\), or the knob"):
        found(looker(probe=several), records(estimates(CHANGING)))


def test_learning_rates_that_share_a_slope_are_named_in_one_warning() -> None:
    made = looker(evidence=None)
    made._names = [f"learning_rate[{number}]" for number in range(3)]
    history = records(estimates(STEADY * 3))
    for record in history:
        record.estimates.update(dict.fromkeys(made._names, record.estimates.pop("learning_rate")))
    with pytest.warns(UserWarning, match=r"learning_rate\[0\] and 2 more of the same evidence: over") as told:
        hints = found(made, history)
    assert len(told) == 1
    assert [hint["knob"] for hint in hints] == made._names


def test_a_probe_that_nothing_changes_is_told_and_a_rate_of_0_is_no_reason() -> None:
    flat = [{"slope": 0.0, "stderr": 0.0, "level": 2.5}] * (WINDOWS + 1)
    at_work = [replace(record, bases={"learning_rate": 0.01}) for record in records(flat)]
    with pytest.warns(UserWarning, match="does not depend on what is trained: over 8 windows") as told:
        hints = found(looker(), at_work)
    assert len(told) == 1
    assert hints == [{"kind": "dead_probe", "knob": "learning_rate", "step": WINDOWS}]
    other = {**flat[0], "level": 2.4}
    trained = [replace(record, estimates={"learning_rate": other}, hints=[]) for record in at_work[:1]]
    assert found(looker(), [*trained, *(replace(record, hints=[]) for record in at_work[1:WINDOWS])]) == []
    at_0 = [replace(record, bases={"learning_rate": 0.0}, hints=[]) for record in records(flat)]
    assert found(looker(), at_0) == []
    assert found(looker(), [replace(record, hints=[]) for record in at_work[1:]][: WINDOWS - 1]) == []


def test_where_nothing_shows_it_says_that_the_knob_may_do_nothing() -> None:
    with pytest.warns(UserWarning, match="or the knob does nothing here"):
        found(looker(), records(estimates(CHANGING)))
    with pytest.warns(UserWarning, match="too small") as told:
        found(looker(), records(estimates([0.8, 0.95] * (WINDOWS // 2))))
    assert "does nothing" not in str(told[0].message)


@pytest.mark.parametrize("slopes", [[2.5] * WINDOWS, [1.2, -1.2] * WINDOWS, STEADY[1:]])
def test_it_is_silent_where_windows_tell_something_or_are_few(slopes: list[float]) -> None:
    assert found(looker(), records(estimates(slopes))) == []


def test_a_history_that_holds_the_notice_is_not_told_again() -> None:
    """As after a resume, by an engine that knows nothing of the one before."""
    history = records(estimates(STEADY))
    with pytest.warns(UserWarning, match="too small"):
        assert found(looker(), history)
    assert looker().look(history, records(estimates(STEADY))[-1]) == []


def test_errors_that_are_not_the_probes_own_are_not_looked_at() -> None:
    assert found(looker(gradients="local", evidence=hdet.evidence.Divergent()), records(estimates(STEADY))) == []
    assert (
        found(looker(probe=hdet.signals.TrainingLoss(), evidence=hdet.evidence.Divergent()), records(estimates(STEADY)))
        == []
    )
    model = nn.Sequential(nn.Linear(20, 10), hdet.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    probe = hdet.Probe(cross_entropy, [draw(1, 4), draw(2, 4)])
    made = hdet.Engine(hdet.micro_batches(model, optimizer, 2), [hdet.Dropout()], signal=probe)
    assert found(ProbeSize(made.knobs, probe, "shared"), records(estimates(STEADY), "dropout")) == []
    with pytest.warns(UserWarning, match="too small"):
        assert found(looker(evidence=hdet.evidence.Divergent()), records(estimates(STEADY)))


# -- real runs ------------------------------------------------------------------------------------

STEPS = 250
CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))


def draw(seed: int, count: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    return CENTRES[labels] + 2 * torch.randn(count, 20, generator=generator), labels


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def run(examples: int, history: Path | None = None) -> list[warnings.WarningMessage]:
    """A classifier trained by the recipe with eight probe batches of so many examples; what was warned of."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    probe = hdet.Probe(cross_entropy, [draw(-1 - number, examples) for number in range(8)])
    made = hdet.recommended(model, optimizer, total_steps=STEPS, probe=probe, quiet=True, history=history)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(STEPS):
            with made.replicas[0] as replica:
                loss = cross_entropy(replica.model, draw(step, 32))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            made.step(loss.detach())
    return [one for one in told if "probe is too small" in str(one.message)]


def test_a_run_with_sixteen_examples_is_told_and_finds_it_in_its_history(tmp_path: Path) -> None:
    told = run(2, tmp_path / "history.jsonl")
    names = [str(one.message).split(":")[0].rpartition(" ")[2] for one in told]
    assert "weight_decay" in names
    assert len(set(names)) == len(names)
    assert all(one.filename == __file__ for one in told)  # the user's line, not the engine's
    history = hdet.History(tmp_path / "history.jsonl")
    hints = [hint for record in history for hint in record.hints]
    assert [hint["knob"] for hint in hints if hint["kind"] == "small_probe"] == names
    assert all(hint["factor"] > 1.0 for hint in hints if hint["kind"] == "small_probe")
    assert not any(record.faults for record in history), "advice is no fault"


def test_a_run_with_a_thousand_examples_is_left_in_peace() -> None:
    assert run(128) == []
