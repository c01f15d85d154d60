"""Who gets which level."""

from hdet.hparams.design import Design, Fixed, Hadamard, LatinHypercube, Permutation

__all__ = ["Design", "Fixed", "Hadamard", "LatinHypercube", "Permutation"]
