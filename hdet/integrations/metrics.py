"""What a logger is told of a window: plain numbers under grouped names."""

from __future__ import annotations

import math

from hdet.record import WindowRecord


def metrics(record: WindowRecord) -> dict[str, float]:
    """A window's outcome, its names in groups; what is not finite is left out.

    | name | is |
    |---|---|
    | `hdet/value/KNOB` | what was learned: the value at the peak of the knob's schedule |
    | `hdet/factor/KNOB` | that value, divided by the one that was set |
    | `hdet/now/KNOB` | the base in force at the window's last step, schedule included |
    | `hdet/evidence/KNOB` | the estimated slope in standard errors (t): beyond 2 it says something |
    | `hdet/window/loss` | the mean training loss, where it was told |
    | `hdet/window/steps`, `hdet/window/seconds`, `hdet/window/closing` | length, wall time, the part spent at its end |
    | `hdet/window/faults` | how many things went wrong |
    """
    found: dict[str, float] = {}
    for name, learned in record.learned.items():
        found[f"hdet/value/{name}"] = learned["closed"]
        if learned["start"] != 0.0:
            found[f"hdet/factor/{name}"] = learned["closed"] / learned["start"]
    for name, base in record.bases.items():
        found[f"hdet/now/{name}"] = base
    for name, estimate in record.estimates.items():
        if estimate.get("t") is not None:
            found[f"hdet/evidence/{name}"] = float(estimate["t"])
    found["hdet/window/loss"] = record.loss
    found["hdet/window/steps"] = float(record.stop - record.start)
    found["hdet/window/seconds"] = record.seconds
    found["hdet/window/closing"] = record.closing
    found["hdet/window/faults"] = float(len(record.faults))
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}
