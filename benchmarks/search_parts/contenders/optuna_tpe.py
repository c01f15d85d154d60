"""Optuna's TPE with Hyperband, at Optuna's defaults but for the seed and the number of steps."""

from __future__ import annotations

import optuna

from search_parts.optuna_search import OptunaSearch
from search_parts.stopped_early import RUNGS


def sampler(seed: int) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=seed)


def pruner() -> optuna.pruners.BasePruner:
    return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=RUNGS)


CONTENDER = OptunaSearch("optuna", "Optuna, TPE and Hyperband", sampler, pruner)
