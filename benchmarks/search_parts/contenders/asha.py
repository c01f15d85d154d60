"""Asynchronous successive halving (ASHA, Li et al. 2020, arXiv:1810.05934), as Optuna has it, over random settings."""

from __future__ import annotations

import optuna

from search_parts.optuna_search import OptunaSearch


def sampler(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.RandomSampler(seed=seed)


def pruner() -> optuna.pruners.BasePruner:
    """Judges after a fifth and four fifths of a trial, and keeps a quarter: Optuna's default reduction factor."""
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=1)


CONTENDER = OptunaSearch("asha", "ASHA (Optuna's), random settings", sampler, pruner)
