"""Which engine drives a model and its optimizer: the one that was made last."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from hdet.errors import StepError
from hdet.replicas import Replicas

_drivers: WeakKeyDictionary[object, Driver] = WeakKeyDictionary()


class Driver:
    """An engine's claim on the models and optimizers of this process, which a later engine takes over.

    Attributes:
        is_lost: a later engine has been made on a part of them.
    """

    def __init__(self, replicas: Replicas) -> None:
        for part in (part for host in replicas.hosts for part in host):
            earlier = _drivers.get(part)
            if earlier is not None:
                earlier.is_lost = True
            _drivers[part] = self
        self.is_lost: bool = False  # one optimizer may step several models

    def refuse(self) -> None:
        """The claim is lost.

        Raises:
            StepError: always.
        """
        raise StepError(
            "another engine has been made on this model or its optimizer since (hdet.Engine, attach, explore and "
            "OneCycleHDET make one each), and two that write its knobs and put its weights back overwrite each "
            "other; step the one that was made last, or declare all knobs in one engine"
        )
