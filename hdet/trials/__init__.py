"""Short runs before the run: what a good learning rate is, found on copies of the model."""

from __future__ import annotations

from hdet.trials.bracket import Trial, Verdict
from hdet.trials.find import find
from hdet.trials.rate_estimate import RateEstimate

__all__ = ["RateEstimate", "Trial", "Verdict", "find"]
