"""In what order replicas are overwritten by one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hdet.errors import ConfigError


def ordered(sources: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Target and source of every copy, none overwritten while it is still to be copied.

    Raises:
        ConfigError: there is no such order, since replicas go round in a circle, or a source is no replica.

    >>> list(ordered([0, 2, 0, 3]))
    [(1, 2), (2, 0)]
    """
    if not set(sources) <= set(range(len(sources))):
        raise ConfigError(f"sources are indices of {len(sources)} replicas, got {list(sources)}")
    left = {target: source for target, source in enumerate(sources) if target != source}
    while left:
        free = next((target for target in left if target not in left.values()), None)
        if free is None:
            raise ConfigError(f"replicas {sorted(left)} are to become one another's copies in a circle; break it")
        yield free, left.pop(free)
