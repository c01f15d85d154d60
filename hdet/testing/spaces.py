"""The laws of spaces."""

from __future__ import annotations

import math
from itertools import pairwise

from hdet.hparams import Space
from hdet.testing.law import refused, require

SHIFTS = (-20.0, -2.0, -0.5, -0.1, -1e-3, -1e-8, 1e-8, 1e-3, 0.1, 0.5, 2.0, 20.0)
FRACTIONS = (1e-6, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1 - 1e-6)
MAGNITUDES = (1e-30, 1e-8, 3e-4, 0.1, 1.0, 7.0, 1e3, 1e12)


def _values(space: Space) -> list[float]:
    """Values of the domain, ascending, its finite ends among them."""
    low, high = space.domain
    if math.isfinite(low) and math.isfinite(high):
        inner = [low + fraction * (high - low) for fraction in FRACTIONS]
    elif math.isfinite(low):
        inner = [low + size for size in MAGNITUDES]
    elif math.isfinite(high):
        inner = [high - size for size in MAGNITUDES]
    else:
        inner = [0.0, *MAGNITUDES, *(-size for size in MAGNITUDES)]
    return sorted({*inner, *(end for end in space.domain if math.isfinite(end))})


def _about(space: Space, value: float) -> list[float]:
    """The values that lie some roundings below and above another, within the domain."""
    low, high = space.domain
    return [min(max(value + times * math.ulp(value), low), high) for times in (-16, 16)]


def shift_zero_is_the_identity(space: Space) -> None:
    """apply(v, 0) is v, bit for bit, and difference(v, v) is 0."""
    for value in _values(space):
        moved = space.apply(value, 0.0)
        require(moved == value, f"apply({value!r}, 0) is {moved!r}")
        shift = space.difference(value, value)
        require(shift == 0.0, f"difference({value!r}, {value!r}) is {shift!r}")


def the_domain_is_never_left(space: Space) -> None:
    """A moved value lies in the domain, and a value outside it is refused."""
    low, high = space.domain
    for value in _values(space):
        for shift in SHIFTS:
            moved = space.apply(value, shift)
            require(low <= moved <= high, f"apply({value!r}, {shift!r}) is {moved!r}, outside {space.domain}")
    outside = [math.nan, math.inf, -math.inf]
    outside += [low - 1.0] if math.isfinite(low) else []
    outside += [high + 1.0] if math.isfinite(high) else []
    inside = _values(space)[1]
    for value in outside:
        refused(lambda value=value: space.apply(value, 0.1), f"apply({value!r}, 0.1)")  # type: ignore[misc]
        refused(lambda value=value: space.difference(inside, value), f"difference({inside!r}, {value!r})")  # type: ignore[misc]
    refused(lambda: space.apply(inside, math.nan), f"apply({inside!r}, nan)")


def difference_inverts_apply(space: Space) -> None:
    """difference(apply(v, s), v) is s up to rounding, wherever the result is inside the domain."""
    for value in _values(space):
        for shift in SHIFTS:
            moved = space.apply(value, shift)
            if moved == value or not _inside(space, moved) or not math.isfinite(moved):
                continue
            found = space.difference(moved, value)
            # What rounding of the two values alone makes of it, whatever the space. Beside a coordinate that is itself
            # large, as of a root, one unit in the last place of a value may show as nothing, and many do show.
            slack = 1e-9 * abs(shift) + 1e-12
            for nearby in _about(space, moved):
                slack += abs(space.difference(nearby, value) - found)
            for nearby in _about(space, value):
                slack += min(abs(space.difference(moved, nearby) - found), 16e-6)
            require(
                abs(found - shift) <= slack,
                f"apply({value!r}, {shift!r}) is {moved!r}, and the difference back is {found!r}",
            )


def order_is_kept(space: Space) -> None:
    """A larger shift never gives a smaller value, nor a larger value a smaller one."""
    values = _values(space)
    steps = sorted({0.0, *SHIFTS})
    slack = 1e-12
    for value in values:
        for one, other in pairwise(steps):
            low, high = space.apply(value, one), space.apply(value, other)
            require(
                low <= high + slack * abs(high),
                f"apply({value!r}, {one!r}) is {low!r}, above apply({value!r}, {other!r}), which is {high!r}",
            )
    for shift in steps:
        for one, other in pairwise(values):
            low, high = space.apply(one, shift), space.apply(other, shift)
            require(
                low <= high + slack * abs(high),
                f"apply({one!r}, {shift!r}) is {low!r}, above apply({other!r}, {shift!r}), which is {high!r}",
            )


def room_reaches_the_bounds(space: Space) -> None:
    """room is never negative, and a shift by it, where finite, ends on the bound."""
    inner = [value for value in _values(space) if _inside(space, value)]
    bounds = (inner[1], inner[-2])
    for value in inner:
        down, up = space.room(value, bounds)
        require(down >= 0 and up >= 0, f"room({value!r}, {bounds}) is {(down, up)}")
        if not bounds[0] <= value <= bounds[1]:
            continue
        for bound, shift in zip(bounds, (-down, up), strict=True):
            if math.isfinite(shift):
                reached = space.apply(value, shift)
                close = math.isclose(reached, bound, rel_tol=1e-6, abs_tol=1e-9 * abs(value))
                require(close, f"room({value!r}, {bounds}) is {(down, up)}, but {shift!r} leads to {reached!r}")


def bounds_are_checked(space: Space) -> None:
    """check accepts bounds in the domain, and refuses reversed ones, equal ones and ones outside."""
    inner = [value for value in _values(space) if _inside(space, value)]
    low, high = inner[0], inner[-1]
    space.check((low, high))
    bad = [(high, low), (low, low), (math.nan, high), (low, math.nan)]
    bad += [(space.domain[0] - 1.0, high)] if math.isfinite(space.domain[0]) else []
    bad += [(low, space.domain[1] + 1.0)] if math.isfinite(space.domain[1]) else []
    for bounds in bad:
        refused(lambda bounds=bounds: space.check(bounds), f"check({bounds})")  # type: ignore[misc]


def _inside(space: Space, value: float) -> bool:
    return space.domain[0] < value < space.domain[1]
