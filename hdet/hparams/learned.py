"""What a run has learned of its knobs, apart from where their schedules stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hdet.digits import four_digits
from hdet.record import ByKnob, named


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
        return f"{four_digits(self.start)} -> {four_digits(self.value)}{factor}"

    def __repr__(self) -> str:
        """Four digits: it is printed to be read, and the attributes hold the rest."""
        factor = "None" if self.factor is None else f"{self.factor:.4g}"
        return f"Learned(start={four_digits(self.start)}, value={four_digits(self.value)}, factor={factor})"


class Shifts(ByKnob[Learned]):
    """What a run has learned of each knob, by name: a dict that prints as a table.

    Knobs of one kind of which the same was learned, as of the rates of many matrices, share a line. Of several of a
    kind, as `learning_rate[head]`, the kind's name in brackets, `shifts["learning_rate"]`, gives the one in the middle.

    Args:
        learned: by the knob's name.
        steps: how many optimizer steps it was learned in.
        total_steps: how many the run has. Where `steps` falls short of them the table's last line says so.

    >>> print(Shifts({"learning_rate": Learned(1e-3, 8e-3), "weight_decay": Learned(0.1, 0.05)}))
    learning_rate  0.001 -> 0.008 (x 8)
    weight_decay   0.1 -> 0.05 (x 0.5)
    >>> rates = {f"learning_rate[{name}]": Learned(1e-3, value) for name, value in zip("abc", (1e-2, 1e-3, 2e-3))}
    >>> Shifts(rates)["learning_rate"]
    Learned(start=0.001, value=0.002, factor=2)
    """

    def __init__(
        self, learned: Mapping[str, Learned] | None = None, steps: int = 0, total_steps: int | None = None
    ) -> None:
        super().__init__(learned or {})
        short = total_steps is not None and steps < total_steps
        unstepped = "" if steps else ": the optimizer was not stepped, so nothing is learned; a lower rate is caution"
        self._short = f"(in {steps} of {total_steps} steps{unstepped})" if short else ""

    def __str__(self) -> str:
        lines = self.lines()
        width = max(map(len, lines), default=0)
        table = [f"{names:<{width}}  {told}" for names, told in lines.items()]
        return "\n".join([*table, self._short] if self._short else table)

    __repr__ = __str__

    def _places(self) -> dict[str, float]:
        return {name: learned.value for name, learned in self.items()}

    def lines(self) -> dict[str, str]:
        """What was learned, in words, by the names of the knobs that it was learned of."""
        alike: dict[tuple[str, str], list[str]] = {}
        for name, learned in self.items():
            alike.setdefault((name.partition("[")[0], str(learned)), []).append(name)
        return {named(names): told for (_, told), names in alike.items()}
