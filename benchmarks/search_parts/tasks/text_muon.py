"""The small byte GPT with Muon for the matrices of its blocks and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import hdet
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, Setting, doubling, named_groups
from search_parts.text import IGNORANCE, TextProblem, TextTask

BY_MUON = "matrices of blocks"


def of_muon(name: str, parameter: nn.Parameter) -> str:
    """What Muon steps, embeddings with the head that is tied to them, and what is one-dimensional."""
    if parameter.ndim < 2:
        return "one-dimensional"
    return BY_MUON if name.startswith("blocks") else "embeddings"


class MuonProblem(TextProblem):
    """The text, with one group more."""

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return named_groups(model, of_muon)


@dataclass(frozen=True, kw_only=True)
class MuonTask(TextTask):
    """Muon's updates are as large as AdamW's in root mean square, so that one rate goes for both.

    Source: Liu et al. 2025, arXiv 2502.16982.
    """

    def optimizer(self, groups: Sequence[dict[str, Any]], setting: Setting) -> Optimizer:
        common: Any = {"lr": setting.lr, "weight_decay": setting.decay}
        return hdet.ChainedOptimizer(
            torch.optim.Muon(
                [group for group in groups if group["name"] == BY_MUON], **common, adjust_lr_fn="match_rms_adamw"
            ),
            AdamW([group for group in groups if group["name"] != BY_MUON], **common, betas=self.betas),
        )

    def problem(self, seed: int, dropout: float) -> TextProblem:
        return MuonProblem(self.text(dropout), seed=seed, batch=self.batch)


TASK = MuonTask(
    name="text_muon",
    title="Byte GPT, small (Muon and AdamW)",
    steps=600,
    batch=16,
    family="adamw",
    ignorance=IGNORANCE,
    grid=Grid(doubling(1e-3, 7), (0.1,)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    clip=1.0,
    width=48,
    depth=2,
)
