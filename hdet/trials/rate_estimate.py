"""What `hdet.find` returns: a value to put into a config, how sure it is, and the trials it rests on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from hdet.report.advice import yaml_number
from hdet.report.figures import BLUE, GREY, RED, Figure, blank_figure
from hdet.trials.bracket import Minimum, Trial, Verdict

LENGTH_EXPONENT = 0.2
"""The best peak falls with a run's length as length^-LENGTH_EXPONENT; docs/find.md has what it was chosen by.

Language models of billions of tokens have 0.32 (Bjorck et al. 2024, arXiv:2409.19913).
"""

INTERVAL_FACTOR = 12.0
"""By how much short runs may mislead about a long one, either way: docs/find.md says how often more."""

FEWEST_STEPS = 12
"""Shorter trials were seen to find rates at which runs do not train."""

ADVICE: dict[Verdict, str] = {
    "settled": "rates on both sides ended clearly worse",
    "flat": "a neighbouring rate ended about as well",
    "still rising": "the highest rate that was tried is the best; give more trials or begin higher",
    "still falling": "the lowest rate that was tried is the best; give more trials or begin lower",
    "too short": f"trials this short mislead; give at least {FEWEST_STEPS} steps a trial",
    "no clear sign": "no trial ended clearly better than it began; give more steps, or a larger probe",
}


@dataclass(frozen=True, repr=False)
class RateEstimate:
    """A learning rate for a run, read off short trials of it.

    Attributes:
        given: the learning rate that the optimizer held, of its first group with one.
        trial_steps: optimizer steps of each trial. total_steps: of the run that the rate is meant for.
        before: the held-out losses of the weights that all trials began with; its rate is 0.
        trials: in the order in which they were run.
        at_trial_length: the best rate for runs as short as a trial.
        ratios: of each parameter group's rate to that of the first with one, which they keep.

    >>> from hdet.trials.bracket import Minimum, Trial
    >>> trials = tuple(Trial(rate, (loss, loss + 0.1)) for rate, loss in ((0.1, 1.5), (0.4, 1.0), (1.6, 1.4)))
    >>> estimate = RateEstimate(0.1, 100, 3200, Trial(0.0, (2.3, 2.4)), trials, Minimum(0.45, 0.4, 0.5, "settled"))
    >>> round(estimate.learning_rate, 3)
    0.225
    """

    given: float
    trial_steps: int
    total_steps: int
    before: Trial
    trials: tuple[Trial, ...]
    at_trial_length: Minimum
    ratios: tuple[float, ...] = ()

    @property
    def learning_rate(self) -> float:
        """The peak for the whole run: the best of the trials, lowered by (trial_steps / total_steps)^0.2."""
        return self.at_trial_length.rate * self._lowered

    @property
    def low(self) -> float | None:
        """The low end of the interval, 12 times below what the trials allow. None where no trial bounds it."""
        return self._moved(self.at_trial_length.low, 1 / INTERVAL_FACTOR)

    @property
    def high(self) -> float | None:
        """The high end of the interval, 12 times above what the trials allow. None where no trial bounds it."""
        return self._moved(self.at_trial_length.high, INTERVAL_FACTOR)

    @property
    def verdict(self) -> Verdict:
        """Whether the trials settle it; see `hdet.trials.bracket.Minimum`, and "too short" where they cannot."""
        return "too short" if self.trial_steps < FEWEST_STEPS else self.at_trial_length.verdict

    def _moved(self, end: float | None, factor: float) -> float | None:
        return None if end is None else end * self._lowered * factor

    @property
    def _lowered(self) -> float:
        return math.pow(self.trial_steps / self.total_steps, LENGTH_EXPONENT)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        told = {"learning_rate": self.learning_rate, "low": self.low, "high": self.high, "verdict": self.verdict}
        return {**told, **asdict(self)}

    def to_yaml(self) -> str:
        """The lines to put into a config of `hdet run`; with a comment where the trials have not settled them."""
        why = f"trials of {self.trial_steps} steps" if self.verdict == "too short" else self.verdict
        notes = [f"not settled: {why}"] if self.verdict not in ("settled", "flat") else []
        notes += [self._others] if self._others else []
        comment = f"  # {'; '.join(notes)}" if notes else ""
        return f"optimizer:\n  lr: {yaml_number(f'{self.learning_rate:.3g}')}{comment}"

    @property
    def _others(self) -> str:
        """Which group's rate it is, where there are others."""
        if len({f"{ratio:.3g}" for ratio in self.ratios}) < 2:
            return ""
        every = ", ".join(f"{self.learning_rate * ratio:.3g}" for ratio in self.ratios)
        return f"of the first group with a rate; the groups in turn: {every}"

    def __str__(self) -> str:
        between = f"{_end(self.low)} and {_end(self.high)}"
        lines = [
            f"learning rate {self.given:.3g} -> {self.learning_rate:.3g} (between {between}), {self.verdict}: "
            f"{ADVICE[self.verdict]}",
            f"  {len(self.trials)} trials of {self.trial_steps} steps, for a run of {self.total_steps}; the best for "
            f"runs as short as that is {self.at_trial_length.rate:.3g}",
            *([f"  {self._others}"] if self._others else []),
            f"  {'rate':>10}  held-out loss at the end ({self.before.loss:.4f} at the beginning)",
        ]
        for trial in sorted(self.trials, key=lambda one: one.rate):
            loss = f"{trial.loss:.4f}" if math.isfinite(trial.loss) else "not finite"
            lines.append(f"  {trial.rate:>10.3g}  {loss}")
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self) -> Figure:
        """Held-out loss by rate, with the rate found and its interval.

        Raises:
            MissingExtraError: matplotlib is not installed (the extra `report`).
        """
        figure = blank_figure(6.0, 3.6)
        axis = figure.add_subplot()
        finite = sorted((one.rate, one.loss) for one in self.trials if math.isfinite(one.loss))
        axis.plot(*zip(*finite, strict=True), "o-", color=BLUE, label=f"trials of {self.trial_steps} steps")
        lost = [one.rate for one in self.trials if not math.isfinite(one.loss)]
        for number, rate in enumerate(lost):
            axis.axvline(rate, color=GREY, linestyle=":", label="" if number else "not finite")
        heights = [self.before.loss, *(loss for _, loss in finite if loss <= self.before.loss)]
        if any(loss > self.before.loss + abs(self.before.loss) for _, loss in finite) and max(heights) > min(heights):
            axis.set_ylim(top=max(heights) + 0.5 * (max(heights) - min(heights)))  # one that diverged hides no other
        axis.axhline(self.before.loss, color=GREY, linewidth=1, linestyle="--", label="before training")
        axis.axvline(self.learning_rate, color=RED, label=f"found: {self.learning_rate:.3g}")
        axis.axvspan(self.low or finite[0][0], self.high or finite[-1][0], color=RED, alpha=0.1)
        axis.set_xscale("log")
        axis.set_xlabel("learning rate")
        axis.set_ylabel("held-out loss")
        axis.legend(fontsize=8, frameon=False)
        return figure


def _end(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"
