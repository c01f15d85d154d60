"""Which engine drives a model and its optimizer: the one that was made last."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from hdet.errors import StepError
from hdet.replicas import Replicas


class Claim:
    """One engine's, on what it drives.

    Attributes:
        is_lost: a later engine has been made on a part of it.
    """

    def __init__(self) -> None:
        self.is_lost = False


_claims: WeakKeyDictionary[object, Claim] = WeakKeyDictionary()


class Driver:
    """An engine's claim on the models and optimizers of this process, which a later engine takes over."""

    def __init__(self, replicas: Replicas) -> None:
        self.claim = Claim()
        for part in (part for host in replicas.hosts for part in host):
            earlier = _claims.get(part)
            if earlier is not None:
                earlier.is_lost = True
            _claims[part] = self.claim
        self.claim.is_lost = False  # one optimizer may step several models

    def require(self) -> None:
        """No engine was made on any of these since.

        Raises:
            StepError: one was.
        """
        if self.claim.is_lost:
            raise StepError(
                "another engine has been made on this model or its optimizer since (hdet.Engine, attach, explore and "
                "OneCycleHDET make one each), and two that write its knobs and put its weights back overwrite each "
                "other; step the one that was made last, or declare all knobs in one engine"
            )
