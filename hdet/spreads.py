"""How far the replicas' levels lie from the base."""

from hdet.hparams.spread import Geometric, OneSided, Spread, Symmetric, TwoLevel

__all__ = ["Geometric", "OneSided", "Spread", "Symmetric", "TwoLevel"]
