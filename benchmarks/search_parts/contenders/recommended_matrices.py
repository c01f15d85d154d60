"""hdet's recommended recipe with a learning rate for each matrix."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

import hdet
from hdet.hparams.binding import given
from hdet.hparams.update import Groups
from hdet.overlay.split_groups import SplitGroups, by_matrix
from hdet.recipes.recommended import choose, own_schedule
from hdet.schedules import Schedule
from search_parts.contenders.recommended import Recommended

OTHER_KNOBS = ("weight_decay", "dropout", "label_smoothing")


class RecommendedMatrices(Recommended):
    """The groups that `rates="matrices"` of `hdet.attach` makes, in the loop of the others."""

    name = "hdet_matrices"
    title = "hdet, a rate for each matrix"
    order = 2

    def knobs(self, model: nn.Module, optimizer: Optimizer, steps: int) -> Sequence[hdet.Knob]:
        split = SplitGroups(optimizer, by_matrix(model, optimizer))
        split.put_in()
        names: dict[Groups, str] = {tuple(indices): name for name, indices in split.indices.items()}
        courses: dict[Groups, Schedule] = {
            tuple(indices): self.schedule(given(optimizer, indices[0], "lr"), steps)
            or own_schedule(optimizer, steps, indices[0])
            for indices in split.indices.values()
        }
        choices = choose(
            model,
            optimizer,
            steps,
            rates=courses,
            rate_names=names,
            exclude=OTHER_KNOBS,
            warmup_steps=self.warmup_steps,
        )
        return [choice.knob for choice in choices if choice.knob is not None]


CONTENDER = RecommendedMatrices()
