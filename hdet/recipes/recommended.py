"""The recipe we stand behind: which knobs, judged by what evidence, moved by which rule."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from hdet.engine.defaults import complete
from hdet.engine.engine import Engine
from hdet.engine.guard import Rewind
from hdet.errors import ConfigError, MatchError
from hdet.evidence import Line, MixedDifference
from hdet.history import History
from hdet.hparams import Dropout, Knob, LabelSmoothing, LearningRate, Schedule, WeightDecay
from hdet.hparams.schedule import Linear
from hdet.replicas import Replicas, in_process
from hdet.replicas.distributed import refusals
from hdet.signals import Objective, Probe
from hdet.windows import GrowingWindow

WARMUP = 0.3
CAUTION = 4.0
LEAST, MOST = 0.02, 0.5
BY_GRADIENTS = "micro-batches run at two levels, fresh signs every step; their gradients are compared along the probe's"
BY_FORWARD_PASSES = "training batches run at two levels at a window's end, on both sides along the probe's gradient"


@dataclass(frozen=True)
class Choice:
    """One decision of the recipe: a knob, or why there is none, and the reason."""

    subject: str
    knob: Knob | None
    reason: str


def choose(
    model: nn.Module,
    optimizer: Optimizer,
    total_steps: int,
    schedule: Schedule | None = None,
    objective: Objective | None = None,
) -> list[Choice]:
    """What the recipe explores on this model and optimizer, and why; nothing is changed.

    Args:
        schedule: of the learning rate; by default 30 % linear warm-up and a straight line to 0, with the first
            parameter group's present rate as its peak.
        objective: the training loss and training batches, by which knobs of the forward pass are judged where the
            model is sharded over ranks.
    """
    peak = float(optimizer.param_groups[0]["lr"])
    course = schedule if schedule is not None else Linear(peak=peak, total_steps=total_steps, warmup=WARMUP)
    # Only a warm-up that is looked ahead of can be entered from below: nothing else makes up for it in time.
    cautious = course(0) < Line().preview * course_peak(course)
    shift = -math.log(CAUTION) if cautious else 0.0
    choices = [
        Choice(
            "learning rate",
            complete(LearningRate(schedule=course, initial_shift=shift), None, diverge=False),
            f"heads for a peak of {course_peak(course):g}"
            + (f", from {CAUTION:g} times below while it looks ahead" if cautious else "")
            + "; read off the window's own update, raised on what the last weights prove, lowered on what averaged "
            "weights prove",
        )
    ]
    if any(float(group.get("weight_decay", 0.0)) > 0.0 for group in optimizer.param_groups):
        choices.append(
            Choice(
                "weight decay",
                complete(WeightDecay(), None, diverge=False),
                "its pull on the weights is known by its formula; the probe is read on both sides of it",
            )
        )
    else:
        choices.append(Choice("weight decay", None, "no parameter group decays (0 stays 0 in log space)"))
    sharded = refusals.sharded(model)
    forward = MixedDifference() if sharded else None
    for subject, knob in (
        ("dropout", complete(Dropout(), forward, diverge=False)),
        ("label smoothing", complete(LabelSmoothing(), forward, diverge=False)),
    ):
        try:
            value = knob.bind(model, optimizer).read()
        except MatchError:
            choices.append(Choice(subject, None, "the model has none (plain nn.Dropout counts; see hdet.nn)"))
        except ConfigError as error:
            choices.append(Choice(subject, None, f"left alone: {error}"))
        else:
            if value == 0.0 and subject == "label smoothing":
                choices.append(Choice(subject, None, "is off; declare LabelSmoothing() to explore it"))
                continue
            if sharded and objective is None:
                choices.append(
                    Choice(
                        subject,
                        None,
                        "left alone: on shards no gradient is seen whole; give objective=hdet.Objective(loss, batches) "
                        "to have it judged by forward passes",
                    )
                )
                continue
            reason = BY_FORWARD_PASSES if sharded else BY_GRADIENTS
            if value > MOST:
                # Networks of which most is dropped may learn nothing at all, and then nothing tells why.
                knob = knob.replace(initial_shift=knob.space.difference(MOST, value))
                reason = f"entered at {MOST:g}; {reason}"
            if value > LEAST:
                # A base at 0 can only be explored on one side and rarely; who set a rate wants one.
                knob = knob.replace(bounds=(LEAST, knob.bounds[1]))
            choices.append(Choice(subject, knob, reason))
    return choices


def course_peak(course: Schedule) -> float:
    """The largest value of a schedule."""
    return max(course(step) for step in range(course.total_steps or 1))


def recommended(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    total_steps: int,
    probe: Probe,
    objective: Objective | None = None,
    micro_batches: int = 1,
    replicas: Replicas | None = None,
    schedule: Schedule | None = None,
    seed: int = 0,
    history: str | os.PathLike[str] | History | None = None,
    quiet: bool = False,
) -> Engine:
    """An engine with the recipe we stand behind: nothing diverges, no replicas are made, one run is paid for.

    Learning rate, weight decay, dropout and label smoothing are explored where the model and optimizer have
    them, all by counterfactual evidence. A guard (`hdet.Rewind`) goes back to the best point where training went
    wrong; it keeps one copy of model and optimizer state in host memory, early in the warm-up two. What was chosen,
    and why, is printed.

    Args:
        model, optimizer: the rates set in the optimizer are the starting point; the first group's is the peak of
            the schedule.
        total_steps: the run's length in optimizer steps.
        probe: held-out loss; 8 sub-batches, together about as large as one training batch.
        objective: the training loss and training batches. Where the model is sharded over ranks, dropout and label
            smoothing are explored by `MixedDifference`, which needs it, and left alone without it.
        micro_batches: how many micro-batches (gradient accumulation) make a step. More than one lets forward
            knobs be compared within a step; with one they are compared between steps, more noisily.
        replicas: instead, replicas made by `hdet.replicate` or `hdet.distribute`.
        schedule: of the learning rate, instead of 30 % warm-up and a straight line to 0.
        seed: of the designs.
        history: a path for one JSON line a window, or a `History`.
        quiet: print nothing.

    Raises:
        ConfigError: the declaration cannot be.

    >>> import torch, hdet
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> probe = hdet.Probe(lambda model, x: model(x).square().mean(1), [torch.ones(8, 2)])
    >>> engine = hdet.recommended(model, optimizer, total_steps=100, probe=probe, quiet=True)
    >>> [knob.name for knob in engine.knobs]
    ['learning_rate', 'weight_decay', 'dropout']
    """
    if not isinstance(probe, Probe):
        raise ConfigError(f"probe must be an hdet.Probe, got {type(probe).__name__}")
    choices = choose(model, optimizer, total_steps, schedule, objective)
    if not quiet:
        print(describe(choices))
    return Engine(
        replicas if replicas is not None else in_process.micro_batches(model, optimizer, micro_batches),
        [choice.knob for choice in choices if choice.knob is not None],
        window=GrowingWindow(),
        signal=probe,
        objective=objective,
        seed=seed,
        total_steps=total_steps,
        history=history,
        guard=Rewind(),
    )


def describe(choices: list[Choice]) -> str:
    """The choices in words, a line each."""
    lines = ["hdet explores, without any replica diverging:"]
    for choice in choices:
        mark = "+" if choice.knob is not None else "-"
        lines.append(f"  {mark} {choice.subject}: {choice.reason}")
    lines.append(
        "  a guard: where training stands still and the held-out loss got worse, it goes back to the best point and on "
        "with a lower rate; where the first steps were far too large it begins anew"
    )
    return "\n".join(lines)
