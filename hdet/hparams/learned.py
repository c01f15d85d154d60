"""What a run has learned of one knob, apart from where its schedule stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, repr=False)
class Learned:
    """A knob's value at the peak of its schedule: as it was set, and as it has been moved.

    A schedule that decays ends near 0 whatever was learned. These two numbers do not depend on it. Where the recipe
    looks ahead of a learning rate in its warm-up, it enters it four times below what was set: until a window has judged
    it, that is caution and nothing learned.

    Attributes:
        start: the value that was set.
        value: the value the run has moved it to, within bounds.

    >>> print(Learned(start=0.001, value=0.008))
    0.001 -> 0.008 (x 8)
    """

    start: float
    value: float

    @property
    def factor(self) -> float | None:
        """value / start; None where the start is 0."""
        return self.value / self.start if self.start != 0.0 else None

    def __str__(self) -> str:
        factor = "" if self.factor is None else f" (x {self.factor:.3g})"
        return f"{self.start:.4g} -> {self.value:.4g}{factor}"

    def __repr__(self) -> str:
        """Four digits: it is printed to be read, and the attributes hold the rest."""
        factor = "None" if self.factor is None else f"{self.factor:.4g}"
        return f"Learned(start={self.start:.4g}, value={self.value:.4g}, factor={factor})"
