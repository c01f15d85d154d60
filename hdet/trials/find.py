"""`hdet.find`: a tenth of a run, spent before it, on what its learning rate should be."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.engine.admission import counted, declared, trained
from hdet.errors import ConfigError, DivergedError, StepError
from hdet.hparams import LearningRate, Schedule
from hdet.hparams.binding import given
from hdet.hparams.param_groups import parameters_of
from hdet.hparams.schedule import LinearDecay
from hdet.overlay.attach import refuse_own_rate, refuse_own_steps, searched
from hdet.recipes.recommended import WARMUP
from hdet.replicas import tensors
from hdet.replicas.dense import can_be_written
from hdet.replicas.generators import generators_kept
from hdet.replicas.in_process import check_pair, twin
from hdet.replicas.parallel import require_alone
from hdet.replicas.random_numbers import accelerators, seeded
from hdet.signals import Probe
from hdet.trials.bracket import Trial, minimum, next_rate
from hdet.trials.rate_estimate import RateEstimate

SHARE_OF_RUN = 0.1
"""The steps of all trials together, as a share of the run's."""

RATE_FACTOR = 4.0
"""By how much the next rate is above the highest or below the lowest."""

FINITE_CHECKS = 8
"""How often in a trial it is asked whether the loss is still finite, which waits for the device."""

PROBE_WINDOWS = 4
"""Windows' batches that a trial is judged on, of a probe that has fresh ones for each."""

Batches = Callable[[int], Any] | Iterable[Any]


def find(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    loss: Callable[[Any, Any], Tensor],
    batches: Batches,
    probe: Probe,
    total_steps: int,
    steps: int | None = None,
    trials: int = 5,
    schedule: Schedule | None = None,
    micro_batches: int = 1,
    clip: float | None = None,
    seed: int = 0,
) -> RateEstimate:
    """A learning rate for a run, from short trials on copies of the model and the optimizer.

    Each trial trains a copy from the given weights over the whole schedule, compressed to a trial's steps, and is
    judged by the held-out loss it ends with. The first is at the rate that the optimizer holds. The next are four times
    higher, as long as that is not clearly worse, or four times lower; the last ones lie between the best and its
    neighbour. The best rate for such short runs is lowered by (trial steps / total_steps)^0.2 for the run.

    All trials draw the same random numbers from the global generators of torch, Python and NumPy and from those that a
    DataLoader, its samplers and its data sets hold, so that shuffled batches are the same, too. These generators, model
    and optimizer are left as they were. Generators that are held elsewhere are left alone, and so are those of
    `persistent_workers`.

    Args:
        model, optimizer: as the run will begin with. Memory for one copy of both is needed.
        loss: `loss(model, batch)`, the training loss of one batch by the model that it is given.
        batches: training batches: a DataLoader, a list or another iterable that can be gone through again and again, or
            a function from 0, 1, 2, ... to them.
        probe: the held-out loss; of a probe with fresh batches for each window the first four windows' are used.
        total_steps: the run's length in optimizer steps.
        steps: of all trials together; by default a tenth of `total_steps`.
        trials: how many, 3 or more.
        schedule: of the run, of which the shape is kept; by default 30 % warm-up and a straight line to 0. Of one
            without an end the run's `total_steps` are taken.
        micro_batches: batches whose mean gradient makes a step.
        clip: the largest norm of the gradient; None leaves it as it is.
        seed: of the trials' random numbers.

    Returns:
        The rate for the run, with how far it may be off and every trial.

    Raises:
        ConfigError: what was given cannot be; the message names it and the way out.
        StepError: `batches` has none.
        DivergedError: every trial diverged, so that no rate can be told, or a loss is not finite to begin with.

    >>> import torch, hdet
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    >>> data = [(x, x.sum(1, keepdim=True)) for x in torch.randn(40, 8, 4)]
    >>> loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    >>> probe = hdet.Probe(loss, data[:8])
    >>> estimate = hdet.find(model, optimizer, loss=loss, batches=data[8:], probe=probe, total_steps=500)
    >>> estimate.learning_rate > 0.01, optimizer.param_groups[0]["lr"]
    (True, 0.001)
    """
    _require(model, optimizer, loss, probe, batches)
    total_steps, trials = counted("total_steps", total_steps), counted("trials", trials)
    micro_batches = counted("micro_batches", micro_batches)
    steps = max(1, round(SHARE_OF_RUN * total_steps)) if steps is None else counted("steps", steps)
    if trials < 3:
        raise ConfigError(f"trials must be 3 or more, of which two lie on both sides of the best; got {trials}")
    if steps // trials < 2:
        raise ConfigError(
            f"{steps} steps in {trials} trials leave fewer than 2 a trial; raise steps (by default a tenth of "
            f"total_steps={total_steps})"
        )
    if steps // trials > total_steps:
        raise ConfigError(
            f"{steps} steps in {trials} trials make each longer than the run of {total_steps}, and a trial is a short "
            f"run; give fewer steps (by default a tenth of total_steps)"
        )
    declared("schedule", schedule, Schedule, type(None))
    if clip is not None and not (isinstance(clip, Real) and not isinstance(clip, bool) and clip > 0.0):
        raise ConfigError(f"clip is the largest norm of the gradient, above 0, got {clip!r}; None leaves it as it is")
    length = steps // trials
    start = given(optimizer, _first_group(optimizer), "lr")
    shape = _shape(schedule, length, total_steps)

    def trial(rate: float) -> Trial:
        copied, other = twin(model, optimizer)
        rates = LearningRate().bind(copied, other)
        with seeded(accelerators(copied), f"hdet.find:{seed}"), generators_kept(batches):
            following = _endless(batches)
            for step in range(length):
                rates.write(rate * shape(step))
                told = _step(copied, other, loss, following, micro_batches, clip)
                if step == 0 and not math.isfinite(float(told)):
                    raise DivergedError(
                        "the training loss is not finite in a trial's first step, before any update, so no rate would "
                        "help; look at the data, the model's weights and the loss"
                    )
                if (step + 1) % max(1, length // FINITE_CHECKS) == 0 and not math.isfinite(float(told)):
                    return Trial(rate, None)
            return Trial(rate, _judged(probe, copied, other))

    with _left_alone(model):
        with seeded(accelerators(model), f"hdet.find:{seed}"), generators_kept(batches):
            before = Trial(0.0, _judged(probe, *twin(model, optimizer)))
        if before.losses is None:
            raise DivergedError(
                "the held-out loss is not finite before any training, so no rate would help; look at the probe's "
                "batches, the model's weights and the loss"
            )
        done = [trial(start)]
        while len(done) < trials:
            done.append(trial(next_rate(done, before, RATE_FACTOR)))
    if all(one.losses == before.losses for one in done):
        raise ConfigError(
            f"the held-out loss is the same to the last bit before and after every trial, at rates up to "
            f"{max(one.rate for one in done):.3g}: the probe's loss(model, batch) must use the model that it is given, "
            f"a copy that a trial trains; else the rates are too small to change a weight"
        )
    ratios = tuple(given(optimizer, index, "lr") / start for index in range(len(optimizer.param_groups)))
    return RateEstimate(start, length, total_steps, before, tuple(done), minimum(done, before), ratios)


def _require(model: nn.Module, optimizer: Optimizer, loss: object, probe: Probe, batches: Batches) -> None:
    """Trials can be run on these; a ConfigError says why not."""
    if not callable(loss):
        raise ConfigError(f"loss is a function loss(model, batch), got {type(loss).__name__}")
    if not isinstance(probe, Probe):
        raise ConfigError(f"probe must be an hdet.Probe, got {type(probe).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    refuse_own_steps(optimizer)
    refuse_own_rate(optimizer)
    trained(optimizer)
    check_pair(model, optimizer, 1)
    require_alone(model, "hdet.find")
    if searched(optimizer):
        raise ConfigError("a search is attached to this optimizer; call hdet.find before hdet.attach, or detach it")
    if not model.training:
        raise ConfigError("the model is in eval mode, in which it would not train as in the run; call model.train()")
    if isinstance(batches, Iterator):
        raise ConfigError(
            f"batches is a {type(batches).__name__}, which can be gone through once, and every trial begins anew; give "
            f"a DataLoader, a list, or a function from 0, 1, 2, ... to a batch"
        )
    if not (callable(batches) or isinstance(batches, Iterable)):
        raise ConfigError(f"batches is an iterable or a function from a number, got {type(batches).__name__}")
    if callable(batches) and not _takes_number(batches):
        raise ConfigError("batches, as a function, takes a number, 0, 1, 2, ..., and returns the batch of that number")


def _takes_number(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one number."""
    try:
        inspect.signature(function).bind(0)
    except TypeError:
        return False
    except ValueError:  # nothing is known of what it takes, as of some that are written in C
        return True
    return True


def _first_group(optimizer: Optimizer) -> int:
    """The first parameter group with a rate, which all others keep their ratio to."""
    for index, group in enumerate(optimizer.param_groups):
        if "initial_lr" in group:
            raise ConfigError(
                f"a torch scheduler drives this optimizer (its groups hold 'initial_lr'), so the rate it holds now, "
                f"{float(group['lr']):g}, is no peak; call hdet.find before the scheduler is made"
            )
        if given(optimizer, index, "lr") > 0.0:
            return index
    raise ConfigError("every parameter group has a learning rate of 0, which no factor moves; set one above 0")


def _shape(schedule: Schedule | None, length: int, total_steps: int) -> Callable[[int], float]:
    """The schedule of a trial, as a share of its peak; one without an end is taken over the run's steps."""
    if schedule is None:
        schedule = LinearDecay(peak=1.0, total_steps=length, warmup=WARMUP)
    total = schedule.total_steps or total_steps
    peak = max(schedule(step) for step in range(total)) if schedule.total_steps is None else schedule.nominal_peak()
    if not peak > 0.0:
        raise ConfigError("the schedule is 0 at every step; give one with a peak above 0")
    return lambda step: schedule(round(step * (total - 1) / max(1, length - 1))) / peak


def _endless(batches: Batches) -> Iterator[Any]:
    """Batch after batch, from the first, and round again."""
    if callable(batches):
        number = 0
        while True:
            yield batches(number)
            number += 1
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise StepError("batches is empty; give at least one training batch")


def _step(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Tensor],
    batches: Iterator[Any],
    micro_batches: int,
    clip: float | None,
) -> Tensor:
    """One optimizer step; returns the loss of its last batch."""
    for _ in range(micro_batches):
        told = loss(model, next(batches))
        if not isinstance(told, Tensor) or told.numel() != 1:
            got = f"a tensor of shape {tuple(told.shape)}" if isinstance(told, Tensor) else type(told).__name__
            raise ConfigError(f"loss(model, batch) gives the batch's mean loss, a tensor of one number; got {got}")
        if not told.requires_grad:
            raise ConfigError(
                "loss(model, batch) gave a loss that no gradient can be taken of; leave out detach() and "
                "torch.no_grad(), and use the model that it is given"
            )
        (told / micro_batches).backward()
    if all(parameter.grad is None for parameter in model.parameters()):
        raise ConfigError(
            "loss(model, batch) must use the model that it is given, a copy that a trial trains; no parameter of it "
            "has a gradient, as where loss calls a model from outside"
        )
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters_of(optimizer), clip)
    try:
        optimizer.step()
    except Exception as error:
        if "closure" not in str(error):
            raise
        raise ConfigError(
            f"{type(optimizer).__name__} steps with a closure only ({error}), and a trial has none; give hdet.find "
            f"an optimizer that steps once a gradient, such as the one that it wraps"
        ) from error
    optimizer.zero_grad()
    return told.detach()


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Buffers and gradients are after the block as they were: a loss may call this model and not the copy."""
    parameters, buffers = list(model.parameters()), list(filter(can_be_written, model.buffers()))
    gradients, saved = [parameter.grad for parameter in parameters], tensors.clones(buffers)
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        tensors.copy_(buffers, saved)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _judged(probe: Probe, model: nn.Module, optimizer: Optimizer) -> tuple[float, ...] | None:
    """The held-out loss by sub-batch; None where one is not finite."""
    losses = torch.cat(
        [probe.measure(model, number, optimizer) for number in range(PROBE_WINDOWS if callable(probe.batches) else 1)]
    )
    return tuple(losses.tolist()) if bool(torch.isfinite(losses).all()) else None
