"""Which weights a run ended with, in words."""

from __future__ import annotations

from collections.abc import Sequence

from hdet.record import WindowRecord


def ending(history: Sequence[WindowRecord]) -> str:
    """What took the place of the last weights, and what the probe says of it; nothing where they stayed.

    >>> last = WindowRecord(4, 520, 600, {}, {}, [1.0], {}, {}, False)
    >>> ending([last])
    ''
    >>> last.tail.update(start=315, difference=-0.0268, stderr=0.0101)
    >>> ending([last])
    'ends with the mean of the weights from step 315 on, whose held-out loss is 0.0268 ± 0.0101 below that of the last'
    """
    told = history[-1].tail if history else {}
    if not told:
        return ""
    return (
        f"ends with the mean of the weights from step {told['start']:.0f} on, whose held-out loss is "
        f"{-told['difference']:.4f} ± {told['stderr']:.4f} below that of the last"
    )
