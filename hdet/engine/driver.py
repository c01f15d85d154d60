"""Which engine drives a model and its optimizer: the one that was made last."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from hdet.errors import StepError
from hdet.replicas import Replicas

_drivers: WeakKeyDictionary[object, object] = WeakKeyDictionary()


class Driver:
    """An engine's claim on the models and optimizers of this process, which a later engine takes over."""

    def __init__(self, replicas: Replicas) -> None:
        self._driven: list[object] = [part for host in replicas.hosts for part in host]
        self._claim = object()
        for part in self._driven:
            _drivers[part] = self._claim

    def require(self) -> None:
        """No engine was made on any of these since.

        Raises:
            StepError: one was.
        """
        if any(_drivers.get(part, self._claim) is not self._claim for part in self._driven):
            raise StepError(
                "another engine has been made on this model or its optimizer since (hdet.Engine, attach, explore and "
                "OneCycleHDET make one each), and two that write its knobs and put its weights back overwrite each "
                "other; step the one that was made last, or declare all knobs in one engine"
            )
