"""Coordinates that knobs are seen through."""

from hdet.hparams.space import Arcsine, Linear, Log, Logit, Relative, Space

__all__ = ["Arcsine", "Linear", "Log", "Logit", "Relative", "Space"]
