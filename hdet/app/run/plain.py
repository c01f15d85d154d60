"""The same run without hdet: plain data parallelism over the same batches, for comparison."""

from __future__ import annotations

import torch

from hdet.app.run.config import RunConfig
from hdet.app.run.loop import Watcher, apply_schedule, seeded, unexplored_groups, update
from hdet.app.tasks import Workload
from hdet.replicas.perturb import perturb


def train_plain(config: RunConfig, workload: Workload, watcher: Watcher) -> torch.nn.Module:
    """One model, trained on the mean gradient of the batches that the run's replicas see.

    Initial weights, data, steps, optimizer and compute are those of the run, and every knob follows its
    schedule, or stays where it starts. Returns the trained model.
    """
    model = workload.model()
    perturb(model, 0.0, replica=0, checkpoint=config.start_path)
    optimizer = config.optimizer.build(workload.groups(model))
    knobs = config.explored(model, optimizer, warmup_steps=0)  # the schedule as it was declared
    groups = unexplored_groups(knobs, model, optimizer)
    of_model = [knob for knob in knobs if knob.acts_on != "merge"]
    scheduled = [(knob.bind(model, optimizer), knob.schedule) for knob in of_model if knob.schedule is not None]
    with seeded(config):
        watcher.begin("plain", 0, config.steps)
        try:
            for step in range(config.steps):
                for binding, schedule in scheduled:
                    binding.write(schedule(step))
                losses = []
                for index in range(config.replicas):
                    loss = workload.loss(model, workload.batch(step, index))
                    (loss / config.replicas).backward()
                    losses.append(loss.detach())
                apply_schedule(config, optimizer, groups, step)
                update(config, optimizer)
                watcher.step(step + 1, losses)
        finally:
            watcher.end()
    return model
