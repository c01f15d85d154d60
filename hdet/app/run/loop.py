"""The training loop of a declared run: the engine's cycle, the schedule, checkpoints, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hdet.app.run.config import RunConfig
from hdet.app.run.folder import RunFolder
from hdet.app.run.launching import leads, led, rank, shared_out
from hdet.app.tasks import Workload
from hdet.engine.engine import Engine
from hdet.errors import CheckpointError, HdetError
from hdet.history import History, WindowRecord
from hdet.hparams import Knob, LearningRate
from hdet.replicas import Replicas, micro_batches, replicate
from hdet.replicas.distributed import distribute
from hdet.replicas.perturb import perturb
from hdet.signals import Objective

BATCHES = 8
"""Training batches that evidence which evaluates the training loss by itself is given in a window."""


class Watcher:
    """Is told what happens while a run goes on; this one does not care. The command line's shows it."""

    def begin(self, phase: str, first: int, steps: int) -> None:
        """A phase ("hdet" or "plain") starts at step `first` of `steps`."""

    def step(self, done: int, losses: Sequence[Tensor]) -> None:
        """`done` steps are made. The losses lie on the device: reading them waits for it."""

    def window(self, record: WindowRecord, bases: dict[str, float]) -> None:
        """A window has closed, and these are the bases of the next."""

    def end(self) -> None:
        """The phase is over, or has failed."""


class Training:
    """A run ready to go: data loaded, model built, every knob bound. Making it writes nothing.

    Raises:
        ConfigError: anything in the declaration that the task, the model or the engine cannot follow.
    """

    def __init__(self, config: RunConfig, workload: Workload) -> None:
        self.config = config
        self.workload = workload
        self.seconds = 0.0
        self._device = torch.device(config.device)
        model = workload.model()
        optimizer = config.optimizer.build(workload.groups(model))
        knobs = config.explored(model, optimizer)
        self.unexplored = unexplored_groups(knobs, model, optimizer)
        replicas = _homed(config, model, optimizer)
        perturb(replicas, config.noise, seed=config.seed, checkpoint=config.start_path)
        self.engine = Engine(
            replicas,
            knobs,
            window=config.window,
            signal=config.signal.build(workload),
            objective=Objective(workload.loss, lambda window: [workload.batch(window, j) for j in range(BATCHES)]),
            evidence=config.evidence,
            merge=config.merge,
            gradients=config.gradients,
            seed=config.seed,
            total_steps=config.steps,
            guard=config.guard,
            tail=config.tail,
        )

    @property
    def model(self) -> torch.nn.Module:
        """Replica 0's model; the result, once training is over."""
        return self.engine.replicas[0].model

    def run(self, folder: RunFolder, watcher: Watcher) -> None:
        """Train to the end from the folder's checkpoint, or from the start where it has none."""
        with seeded(self.config):
            self._resume(folder)
            watcher.begin("hdet", self.engine.step_count, self.config.steps)
            try:
                self._steps(folder, watcher)
            finally:
                watcher.end()

    def _steps(self, folder: RunFolder, watcher: Watcher) -> None:
        engine, workload, config = self.engine, self.workload, self.config
        earlier, began = self.seconds, time.perf_counter()
        for step in range(engine.step_count, config.steps):
            losses = []
            for replica in engine.replicas:
                with replica:
                    loss = workload.loss(replica.model, workload.batch(step, replica.data_index))
                    loss.backward()
                losses.append(loss.detach())
            engine.share_gradients()
            for optimizer in engine.optimizers:
                apply_schedule(config, optimizer, self.unexplored, step)
                update(config, optimizer)
            record = engine.step(losses)
            watcher.step(step + 1, losses)
            if record is not None:
                self.seconds = earlier + time.perf_counter() - began
                led(lambda: self._save(folder))
                watcher.window(record, engine.bases)

    def _save(self, folder: RunFolder) -> None:
        if self.engine.history.is_behind:
            raise HdetError(
                f"{folder.history} lacks windows that could not be written, and a checkpoint would be ahead of it; "
                f"make room, and --resume goes on from the one before"
            )
        folder.save_checkpoint(self._state())

    def _state(self) -> dict[str, Any]:
        generators = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state(self._device)
        return {"engine": self.engine.state_dict(), "generators": generators, "seconds": self.seconds}

    def _resume(self, folder: RunFolder) -> None:
        if leads():
            self.engine.history = History(folder.history, whole=True)
        state = folder.load_checkpoint()
        if state is None:
            self.engine.history.truncate(0)  # a first window may have been written and its checkpoint not
            return
        try:
            engine, generators, seconds = state["engine"], state["generators"], float(state["seconds"])
            torch.Generator().set_state(generators["cpu"])
        except KeyError as error:
            raise CheckpointError(f"{folder.checkpoint} lacks {error}; start anew by --force") from None
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{folder.checkpoint} is no checkpoint of a run ({error}); use --force") from None
        self.engine.load_state_dict(engine)
        if not leads():
            torch.manual_seed(_seed(self.config, self.engine.step_count))
        else:
            torch.set_rng_state(generators["cpu"])
        if leads() and "cuda" in generators:
            torch.cuda.set_rng_state(generators["cuda"], self._device)
        self.seconds = seconds


@contextmanager
def seeded(config: RunConfig) -> Iterator[None]:
    """Dropout draws from torch's global generator: seed it for the run, and restore the caller's after it."""
    device = torch.device(config.device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(_seed(config, 0))
        yield


def _seed(config: RunConfig, step: int) -> int:
    """Of torch's generator: the run's on the leading rank, another on each other, else their dropout were alike."""
    return config.seed if leads() else hash((config.seed, rank(), step)) % 2**63


def _homed(config: RunConfig, model: torch.nn.Module, optimizer: Optimizer) -> Replicas:
    """The run's replicas: all here, or this rank's share of them."""
    if not (dist.is_available() and dist.is_initialized()):
        return (replicate if config.copies else micro_batches)(model, optimizer, n=config.replicas)
    each = shared_out(config.replicas, dist.get_world_size())
    # In the order of the replicas: with one on each rank the numbers are those of a single process.
    if config.copies:
        return distribute(model, optimizer, copies=each, exact=True)
    return distribute(model, optimizer, micro_batches=each, exact=True)


def apply_schedule(config: RunConfig, optimizer: Optimizer, groups: Sequence[int], step: int) -> None:
    """Set the learning rate of some parameter groups to the schedule's value at a step."""
    if config.schedule is not None:
        for index in groups:
            optimizer.param_groups[index]["lr"] = config.schedule(step)


def update(config: RunConfig, optimizer: Optimizer) -> None:
    """Clip, step and clear the gradients of one optimizer."""
    if config.clip is not None:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], config.clip)
    optimizer.step()
    optimizer.zero_grad()


def unexplored_groups(knobs: Sequence[Knob], model: torch.nn.Module, optimizer: Optimizer) -> list[int]:
    """The parameter groups whose learning rate no knob writes, so that the loop must."""
    explored = {
        index for knob in knobs if isinstance(knob, LearningRate) for index in knob.bind(model, optimizer).indices
    }
    return [index for index in range(len(optimizer.param_groups)) if index not in explored]
