"""Whether the probe is large enough to tell what it is asked, and if not, how large it would have to be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from hdet.history import WindowRecord
from hdet.hparams.bound_knob import BoundKnob
from hdet.signals import Probe, Signal
from hdet.sub_batches import student
from hdet.user_warning import warn

WINDOWS = 8
REACH = 50
LARGER = 1.5
"""Times as many examples, from which it is worth saying."""
PROOF = 2.0
HOPELESS = 100.0
OFF = math.log(2.0)
WORTH = 1e-3


class ProbeSize:
    """Looks at the estimates of a knob's last windows, and warns once a knob if the probe cannot have told.

    Suspect is a knob whose |t| had a median below 1 over its last `WINDOWS` estimates. Its standard error falls as
    1 / sqrt(examples), so a probe (2 / D)^2 times as large would show at |t| = 2 what shows at |t| = D now. D is the
    largest of

    - |mean t|: what slopes of one sign come to;
    - the t that the slope would have with the base a factor of 2 off, by the curvature, where the windows together
      prove one. A knob that stands at its best has no slope, and that is no fault of the probe;
    - the t of a slope of 0.1 % of the held-out loss, where the evidence tells that loss: less is not worth knowing.

    From 2 on the probe is large enough. Below, and unless the windows together prove a slope, nothing tells a probe
    that is too small from a knob that does nothing, and the warning says so. What windows prove together does not take
    them for independent, since on a fixed probe they err alike: slopes are added up by sub-batch where there are such
    (`Estimate.slopes`), and errors of curvatures as though all were one.

    Where slope and error are exactly 0 in all those windows, and the loss the same, although the base was not 0, the
    probe's loss does not depend on the model at all.

    Only evidence whose standard error is the probe's own is looked at: that of `Contrast` is its training
    gradients', and that of diverged replicas under local gradients is the replicas' too.

    Args:
        knobs: of the engine.
        signal: what they are judged by; without a `Probe` there is nothing to look at.
        gradients: "shared" or "local".
    """

    def __init__(self, knobs: Sequence[BoundKnob], signal: Signal, gradients: str) -> None:
        self._told: set[str] | None = None
        self._probe = signal if isinstance(signal, Probe) else None
        self._names = [
            knob.name
            for knob in knobs
            if (knob.evidence.needs_probe and not knob.evidence.shared)
            or (knob.evidence.diverges and gradients == "shared")
        ]

    def look(self, earlier: Sequence[WindowRecord], record: WindowRecord) -> list[dict[str, Any]]:
        """The hints of the window that has closed, after the latest ones before it; each is warned of too.

        The first call is given all of a run that goes on, and notes what was said before the resume.
        """
        if self._probe is None:
            return []
        if self._told is None:
            self._told = {str(hint["knob"]) for one in earlier for hint in one.hints if "knob" in hint}
        found: list[dict[str, Any]] = []
        too_small: dict[str, list[str]] = {}  # knobs by what is said of them: learning rates may share a slope
        latest = [record, *islice(reversed(earlier), REACH)]
        for name in self._names:
            if name in self._told:
                continue
            given = (one.estimates.get(name, {}) for one in latest)
            recent = list(islice((estimate for estimate in given if testable(estimate)), WINDOWS))
            if dead(latest[:WINDOWS], name):
                self._told.add(name)
                found.append({"kind": "dead_probe", "knob": name, "step": record.stop})
                warn(
                    f"the probe's loss does not depend on what is trained: over {WINDOWS} windows it was the same, "
                    f"wherever {name} was read. Let loss(model, batch) evaluate the model that it is handed, no copy"
                )
            if len(recent) < WINDOWS:
                continue
            t, factor, proven = growth(recent)
            if t >= 1.0 or factor < LARGER:
                continue
            self._told.add(name)
            found.append({"kind": "small_probe", "knob": name, "step": record.stop, "factor": round(factor, 1)})
            batches = len(self._probe.draw(record.window))
            needed = f" ({_batches(math.ceil(batches * factor))})" if factor < math.inf else " (more than any)"
            counted = f"The probe has {_batches(batches)}; a"
            if batches == 1:  # of several losses, as of one graph: more examples are no more batches
                counted, needed = "A", "" if factor < math.inf else needed
            nothing = "" if proven and factor <= HOPELESS else ", or the knob does nothing here"
            said = (
                f"over {WINDOWS} windows the |t| of its slope had a median of "
                f"{t:.2f}. {counted} slope worth knowing would show with |t| = 2 in about "
                f"{factor:.3g} times as many examples{needed}{nothing}"
            )
            too_small.setdefault(said, []).append(name)
        for said, names in too_small.items():
            others = f" and {len(names) - 1} more of the same evidence" if len(names) > 1 else ""
            warn(f"the probe is too small for {names[0]}{others}: {said}")
        return found


def dead(windows: Sequence[WindowRecord], name: str) -> bool:
    """Whether neither training nor what a knob did made any difference to the probe."""
    told = [one.estimates.get(name, {}) for one in windows if one.bases.get(name)]
    same = len({one.get("level") for one in told} - {None}) == 1
    return same and len(told) == WINDOWS and all(one.get("slope") == one.get("stderr") == 0.0 for one in told)


def growth(estimates: Sequence[Mapping[str, Any]]) -> tuple[float, float, bool]:
    """The median |t|, the factor by which the probe must grow for |t| = 2, and whether an effect is proven at all.

    >>> growth([{"slope": 0.5 + 0.1 * (-1) ** i, "stderr": 1.0} for i in range(8)])
    (0.5, 16.0, False)
    """
    slopes, errors = _column(estimates, "slope"), _column(estimates, "stderr")
    t = slopes / errors
    seen = [abs(float(t.mean()))]
    proven = abs(_together(estimates, t)) > PROOF
    curvatures, doubts = _column(estimates, "curvature"), _column(estimates, "curvature_stderr")
    if float(curvatures.sum()) > PROOF * float(doubts.sum()):
        seen.append(float(np.mean(OFF * curvatures / errors)))
        proven = True
    levels = _column(estimates, "level")
    if np.isfinite(levels).all():
        seen.append(float(np.mean(WORTH * np.abs(levels) / errors)))
    largest = max(seen)
    return float(np.median(np.abs(t))), (PROOF / largest) ** 2 if largest > 0.0 else math.inf, proven


def _together(estimates: Sequence[Mapping[str, Any]], t: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """t of all windows together; as of independent ones where they have no sub-batches in common."""
    by_window = [estimate.get("slopes") or () for estimate in estimates]
    if len(by_window[0]) < 2 or len(set(map(len, by_window))) > 1:
        return float(t.mean()) * math.sqrt(len(t))
    weights = 1.0 / _column(estimates, "stderr")
    sums: list[float] = (weights @ np.asarray(by_window, dtype=np.float64)).tolist()
    return student(sums)


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"{count} batches"


def _column(estimates: Sequence[Mapping[str, Any]], key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = (estimate.get(key) for estimate in estimates)
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def testable(estimate: Mapping[str, Any]) -> bool:
    """Whether there is a slope with an error: finite ones, as a history's file gives back too."""
    slope, stderr = estimate.get("slope"), estimate.get("stderr")
    return slope is not None and stderr is not None and math.isfinite(slope) and 0.0 < stderr < math.inf
