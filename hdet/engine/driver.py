"""Which engine drives a model: the one that was made last."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

from hdet.errors import StepError
from hdet.replicas import Replicas

_drivers: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()


class Driver:
    """An engine's claim on the models of this process, which a later engine takes over."""

    def __init__(self, replicas: Replicas) -> None:
        self._models = [model for model, _ in replicas.hosts]
        self._claim = object()
        for model in self._models:
            _drivers[model] = self._claim

    def require(self) -> None:
        """No engine was made on these models since.

        Raises:
            StepError: one was.
        """
        if any(_drivers.get(model, self._claim) is not self._claim for model in self._models):
            raise StepError(
                "another engine has been made on this model since, and two that write its knobs and put its weights "
                "back overwrite each other; step the one that was made last, or declare all knobs in one engine"
            )
