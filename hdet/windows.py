"""Windows: how many steps lie between two converges."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pydantic import Field

from hdet.errors import ConfigError
from hdet.spec import Spec, register

__all__ = ["FixedWindow", "GrowingWindow", "Windows"]


class Windows(Spec, family="window"):
    """The length of each window, by the step it opens at."""

    @abstractmethod
    def length(self, step: int) -> int:
        """Steps in the window that opens at `step` (0-based), at least 1."""

    def at(self, step: int) -> int:
        """`length`, checked.

        Raises:
            ConfigError: it is no whole number, or below 1.
        """
        length = self.length(step)
        if not isinstance(length, int) or length < 1:
            raise ConfigError(
                f"{type(self).__name__}.length({step}) is {length!r}; a window's length is a whole number (an int) of "
                f"at least 1"
            )
        return length

    def count(self, start: int, stop: int) -> int:
        """How many windows lie between two steps, the last one cut short if need be."""
        windows = 0
        while start < stop:
            start += self.at(start)
            windows += 1
        return windows


@register
class FixedWindow(Windows):
    """T steps, always: the paper's.

    >>> FixedWindow(50).length(1000)
    50
    """

    kind: ClassVar[str] = "fixed"
    steps: int = Field(ge=1, kw_only=False)

    def length(self, step: int) -> int:
        return self.steps

    def count(self, start: int, stop: int) -> int:
        return max(0, -(-(stop - start) // self.steps))


@register
class GrowingWindow(Windows):
    """T_k = max(minimum, fraction * t): long runs are judged over longer windows, which short-horizon bias needs.

    >>> GrowingWindow(minimum=10, fraction=0.15).length(1000)
    150
    """

    kind: ClassVar[str] = "growing"

    minimum: int = Field(default=10, ge=1)
    fraction: float = Field(default=0.15, gt=0, le=1)

    def length(self, step: int) -> int:
        return max(self.minimum, int(self.fraction * step))
