"""How far the replicas' levels lie from the base."""

from hdet.hparams.spread import OneSided, Spread, Symmetric, TwoLevel

__all__ = ["OneSided", "Spread", "Symmetric", "TwoLevel"]
