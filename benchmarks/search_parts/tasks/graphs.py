"""How many triangles of three colours a graph has, by rounds of messages between its nodes with AdamW."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from hdet.nn import Dropout
from search_parts.examples import DrawnProblem, DrawnTask
from search_parts.task import ALL_OFF, DECAYS, LEARNING_RATES, Grid, doubling

SIZES = {"train": 8000, "probe": 2000, "test": 4000}
NODES, COLOURS, WIDTH, ROUNDS = 14, 3, 48, 3
Examples = tuple[Tensor, Tensor, Tensor]


@lru_cache(maxsize=1)
def examples() -> dict[str, Examples]:
    """(colours [n, 14, 3], edges [n, 14, 14], target [n]) of each split.

    Nodes are points of a square, joined where they are near; how near differs by graph. The target is the logarithm of
    one more than the number of triangles whose nodes all differ in colour, in units of its standard deviation.
    """
    rng = np.random.default_rng(20261201)
    count = sum(SIZES.values())
    places, reach = rng.random((count, NODES, 2)), rng.uniform(0.25, 0.6, size=(count, 1, 1))
    apart = np.sqrt(((places[:, :, None] - places[:, None]) ** 2).sum(axis=3))
    edges = (apart < reach) & ~np.eye(NODES, dtype=bool)
    colours = np.eye(COLOURS)[rng.integers(COLOURS, size=(count, NODES))]
    first, second, third = (edges * colours[:, None, :, colour] for colour in range(COLOURS))
    walks = np.einsum(
        "nab,nbc,nca,na->n", second.astype(float), third.astype(float), first.astype(float), colours[..., 0]
    )
    target = np.log1p(walks)
    target = (target - target.mean()) / target.std()
    columns = [torch.from_numpy(column).float() for column in (colours, edges.astype(np.float32), target)]
    parts = zip(*(torch.split(column, list(SIZES.values())) for column in columns), strict=True)
    return dict(zip(SIZES, parts, strict=True))


class Messages(nn.Module):
    """Rounds in which each node reads itself and the sum of its neighbours, and a layer on the sum of all nodes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(COLOURS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(ROUNDS))
        self.rounds = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.ReLU(), Dropout(dropout), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(ROUNDS)
        )
        self.leave = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, colours: Tensor, edges: Tensor) -> Tensor:
        """[batch, nodes, colours] and [batch, nodes, nodes] to [batch]."""
        x = self.enter(colours)
        for norm, layers in zip(self.norms, self.rounds, strict=True):
            own = norm(x)
            x = x + layers(torch.cat([own, edges @ own / NODES**0.5], dim=2))
        return self.leave(x.mean(dim=1))[:, 0]  # type: ignore[no-any-return]


class GraphProblem(DrawnProblem):
    """The generated graphs."""

    splits = examples
    network = Messages

    def example_losses(self, model: nn.Module, batch: Examples) -> Tensor:
        colours, edges, target = batch
        return (model(colours, edges) - target).square()  # type: ignore[no-any-return]


TASK = DrawnTask(
    name="graphs",
    title="Triangles of three colours, messages on graphs (AdamW)",
    steps=500,
    batch=64,
    family="adamw",
    ignorance=1.0,
    grid=Grid(doubling(0.0005, 7), (0.03, 0.3)),
    starts=LEARNING_RATES + DECAYS + ALL_OFF,
    micro_batches=4,
    shorter=4,
    problems=GraphProblem,
)
