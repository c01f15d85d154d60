"""What a torchft Manager carries of hdet from a group that is there to one that comes back."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from hdet.errors import CheckpointError, ConfigError

_by_manager: weakref.WeakKeyDictionary[Any, weakref.ref[Carried]] = weakref.WeakKeyDictionary()


class Served(Protocol):
    """A search, or an engine."""

    def state(self) -> dict[str, Any]: ...

    def take_over(self, state: dict[str, Any]) -> None: ...


class Carried:
    """The one place for hdet in a manager's state, and what is there now.

    A manager takes a state function once, and keeps it: what it serves must be able to leave. The manager alone keeps
    this object.
    """

    def __init__(self) -> None:
        self._served: Served | None = None

    @classmethod
    def by(cls, manager: Any) -> Carried:
        """A manager's; registered with it the first time."""
        reference = _by_manager.get(manager)
        carried = reference() if reference is not None else None
        if carried is None:
            carried = cls()
            manager.register_state_dict_fn("hdet", carried._take_over, carried._state)
            _by_manager[manager] = weakref.ref(carried)
        return carried

    def take(self, served: Served) -> None:
        """Serve this one from now on.

        Raises:
            ConfigError: another is there.
        """
        if self._served is not None:
            raise ConfigError(
                "this torchft Manager carries another search or managed engine from group to group; detach that search "
                "first, or give each a Manager of its own"
            )
        self._served = served

    def leave(self) -> None:
        """Serve nothing."""
        self._served = None

    def _state(self) -> dict[str, Any]:
        return self._served.state() if self._served is not None else {}

    def _take_over(self, state: dict[str, Any]) -> None:
        if bool(state) != (self._served is not None):
            raise CheckpointError(
                f"the replica group to take over from has {'a' if state else 'no'} search attached, and this one has "
                f"{'none' if state else 'one'}; attach and detach at the same steps in all groups"
            )
        if self._served is not None:
            self._served.take_over(state)
