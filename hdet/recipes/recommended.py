"""The recipe we stand behind: which knobs, judged by what evidence, moved by which rule."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from hdet.controllers import Calibrate, Pooled
from hdet.controllers.rules import Fall
from hdet.engine.admission import (
    as_many_passes,
    counted,
    declared,
    listed,
    of_these,
    trained,
    unique_names,
    whole,
    windows,
)
from hdet.engine.defaults import complete
from hdet.engine.engine import Engine
from hdet.engine.guard import Guard, Rewind
from hdet.engine.tail import Tail, TailAverage, possible
from hdet.errors import ConfigError, MatchError
from hdet.evidence import Analytic, GroupLines, Line, MixedDifference
from hdet.evidence.parts.step_ratio import ALIKE
from hdet.history import History
from hdet.hparams import Dropout, Knob, LabelSmoothing, LearningRate, Schedule, WeightDecay
from hdet.hparams.binding import given
from hdet.hparams.forward import ModuleKnob
from hdet.hparams.schedule import Constant, LinearDecay
from hdet.hparams.update import Groups
from hdet.nn.names import named_modules
from hdet.recipes import dropouts
from hdet.replicas import Replicas, in_process, tensors
from hdet.replicas.distributed import refusals
from hdet.signals import Objective, Probe
from hdet.user_warning import warn
from hdet.windows import GrowingWindow, Windows

WARMUP = 0.3
MOST_WARMUP_STEPS = 300
CAUTION = 4.0
MOST, ENTERED = 0.5, 0.1
"""Networks of which more than `MOST` is dropped may learn nothing at all, and then nothing tells why. They are entered
with `ENTERED`."""
RATE_OF = "learning rate of group "
ALIKE_FIRST = 0.5
ALIKE_AGAIN = (0.2,)
"""Of groups that were given one rate, which is likely right: `GroupLines.first` and `GroupLines.again`."""
RATE_GRID = 0.25
"""Of groups' learning rates, `Pooled.grid`."""
BY_GRADIENTS = "micro-batches train at values near it"
GUARD = "  guard: where training breaks down, back to the best point (or the first) and on at a lower rate"
DEFAULT_GUARD = Rewind()
TAIL = "  end: averaged weights, where the probe finds them better than the last ones"
DEFAULT_TAIL = TailAverage()
ALONG_A_LINE = Calibrate(rules=(*Calibrate().rules, Fall()))
"""Of a learning rate whose schedule is a straight line to 0, the recipe's own."""
FORWARD = ("dropout", "label_smoothing")
"""The recipe's knobs of the forward pass."""
BY_FORWARD_PASSES = "at each window's end a training batch runs at values near it"


@dataclass(frozen=True)
class Choice:
    """One decision of the recipe: a knob, or why there is none, and the reason."""

    subject: str
    knob: Knob | None
    reason: str


def choose(
    model: nn.Module,
    optimizer: Optimizer,
    total_steps: int | None,
    schedule: Schedule | None = None,
    objective: Objective | None = None,
    *,
    rates: Mapping[Groups, Schedule] | None = None,
    rate_names: Mapping[Groups, str] | None = None,
    knobs: Sequence[Knob] = (),
    exclude: Sequence[str] = (),
    stride: int | None = None,
    warmup_steps: int | None = None,
    window: int | Windows | None = None,
    unseen: bool = False,
) -> list[Choice]:
    """What the recipe explores on this model and optimizer, and why; nothing is changed.

    Args:
        schedule: of the learning rate; by default 30 % linear warm-up and a straight line to 0, with the first
            parameter group's present rate as its peak.
        objective, knobs, exclude, stride, warmup_steps: as of `recommended`.
        rates: instead of `schedule`, the schedule of each learning rate that is explored on its own, by its groups
            (`None` for one rate of all groups). Several are judged together, by `GroupLines`.
        rate_names: what these groups are called; by default what they are given as.
        window: of the run; by default a `GrowingWindow`. One whose first end comes too late to look ahead is not
            entered with caution.
        unseen: whether a replica's own gradient is seen by nobody, as under a `fully_shard` that averages it and
            holds it whole.

    Raises:
        ConfigError: `exclude` names a knob that the recipe does not have, or one that `knobs` declares; `warmup_steps`
            is no number of steps within the run, or there is no schedule whose peak is known; `window` or `stride` is
            of another type; two of `knobs` have one name.
    """
    declared("window", window, int, Windows, type(None))
    if stride is not None:
        stride = counted("stride", stride)
    rates = rates if rates is not None else {None: schedule or own_schedule(optimizer, total_steps)}
    groups_judged = _judged_together(rates.values()) if len(rates) > 1 else None
    names = rate_names or {}
    least = _warmup_steps(warmup_steps, total_steps, rates.values())
    for length in {course.total_steps for course in rates.values()}:
        if length is not None and total_steps is not None and length > total_steps:
            warn(
                f"the learning rate's schedule is one of {length} steps, and the run has {total_steps}, so the run "
                f"ends before the schedule has come down; give the schedule the run's total_steps"
            )
    first = GrowingWindow().minimum if window is None else windows(window).at(0)
    choices = [
        _rate(groups, names.get(groups), course, least, stride, groups_judged, total_steps, first)
        for groups, course in rates.items()
    ]
    choices.append(_decay(optimizer, stride))
    sharded = unseen or refusals.sharded(model)
    choices += _dropouts(model, optimizer, sharded, objective)
    choices.append(_forward(LabelSmoothing(), model, optimizer, sharded, objective))
    return _adapted(choices, knobs, exclude)


def own_schedule(optimizer: Optimizer, total_steps: int | None, group: int | None = None) -> Schedule:
    """The recipe's schedule of a learning rate, around what a parameter group holds.

    Args:
        group: which; by default the first that has a rate, which all others keep their ratio to.

    Raises:
        ConfigError: without the run's length; a scheduler drives the rate.
    """
    if total_steps is None:
        raise ConfigError("the recipe's schedule ends with the run; give total_steps=, or a schedule of your own")
    if group is None:
        rates = [given(optimizer, index, "lr") for index in range(len(optimizer.param_groups))]
        group = next((index for index, rate in enumerate(rates) if rate != 0.0), 0)
    if "initial_lr" in optimizer.param_groups[group]:
        raise ConfigError(
            f"a torch scheduler drives this optimizer (its groups hold 'initial_lr'), so the rate it holds now, "
            f"{float(optimizer.param_groups[group]['lr']):g}, is no peak; drop the scheduler and give "
            f"schedule=hdet.schedules.OneCycle(...) or another, or keep it and use hdet.attach(..., "
            f"scheduler=scheduler)"
        )
    peak = given(optimizer, group, "lr")
    return LinearDecay(peak=peak, total_steps=total_steps, warmup=WARMUP)


def _rate(
    groups: Groups,
    name: str | None,
    course: Schedule,
    warmup_steps: int,
    stride: int | None,
    together: GroupLines | None,
    total_steps: int | None,
    first_window: int,
) -> Choice:
    as_given = course
    if course.total_steps is not None:
        course = course.with_warmup(warmup_steps)
    peak = course.nominal_peak()
    subject = "learning rate" if groups is None else f"{RATE_OF}{name or groups}"
    if groups is not None and peak == 0.0:
        return Choice(subject, None, "is 0, which no factor moves")
    # Only a warm-up that is looked ahead of can be entered from below: nothing else makes up for it in time.
    seen_ahead = Line().preview * peak
    cautious = course(0) < seen_ahead and _rises_at(course, first_window)
    shift = -math.log(CAUTION) if cautious else 0.0
    # Where the peak is not known, nothing can be looked ahead at.
    line = Line(stride=stride) if course.total_steps is not None else Line(stride=stride, preview=0.0)
    # Another form of a schedule than the recipe's own, or a rate to end at, is somebody's decision.
    controller = ALONG_A_LINE if isinstance(as_given, LinearDecay) and as_given.floor == 0.0 else Calibrate()
    label = f"learning_rate[{name}]" if name and groups is not None else None
    knob = LearningRate(
        name=label,
        groups=groups,
        schedule=course,
        initial_shift=shift,
        evidence=together.replace(line=line) if together is not None else line,
        controller=Pooled(common=controller, grid=RATE_GRID) if together is not None else controller,
    )
    if isinstance(course, Constant):
        heads = f"starts at {peak:g}, held but for what is learned"
    elif course.total_steps is None:
        heads = "follows what the optimizer is given"
    else:
        heads = f"heads for a peak of {peak:g}"
    if any(course(step) != as_given(step) for step in range(warmup_steps)):
        heads += f" by a warm-up of {warmup_steps} steps, longer than its schedule's"
    elif isinstance(course, LinearDecay):
        heads += f" at step {round(course.warmup * course.total_steps)}, then for {course.floor:g}"
    if cautious:
        heads += f"; entered {CAUTION:g} times lower, while it looks ahead"
    if course.total_steps is not None and total_steps is not None and course.total_steps < total_steps:
        heads += f"; its schedule ends at step {course.total_steps} of {total_steps}"
    if total_steps is not None and first_window >= total_steps:
        heads += f"; the first window has {first_window} steps, so nothing is learned before the run ends"
    elif course.total_steps is not None and _second_window(course, course.total_steps, first_window) >= seen_ahead:
        heads += "; its warm-up is too short to look ahead twice, which can do harm (docs/attach.md)"
    return Choice(subject, complete(knob, None, diverge=False), heads)


def _judged_together(courses: Iterable[Schedule]) -> GroupLines:
    """How several learning rates are compared: those that were given alike by more than their first steps."""
    peaks = [peak for course in courses if (peak := course.nominal_peak()) > 0.0]
    if peaks and math.isclose(min(peaks), max(peaks), rel_tol=ALIKE):
        return GroupLines(again=ALIKE_AGAIN, first=ALIKE_FIRST)
    return GroupLines()


def _warmup_steps(wanted: int | None, total_steps: int | None, courses: Iterable[Schedule]) -> int:
    """The least number of steps in which learning rates are to come to their peaks.

    Raises:
        ConfigError: the number is none, or does not lie within the run, or no peak is known.
    """
    known = [course.total_steps for course in courses if course.total_steps is not None]
    total = min([*known, *([total_steps] if total_steps is not None else [])], default=0)
    if wanted is None:
        return min(round(WARMUP * total), MOST_WARMUP_STEPS) if known else 0
    wanted = whole("warmup_steps", wanted)
    if wanted and not known:
        raise ConfigError("warmup_steps leads to the peak of a schedule, and of one without an end nobody knows it")
    if not 0 <= wanted < max(1, total):
        raise ConfigError(f"warmup_steps={wanted} lies outside 0 and the {total} steps of the run and its schedule")
    return wanted


def _rises_at(course: Schedule, step: int) -> bool:
    """Whether the schedule's warm-up is not over at a step."""
    return course.total_steps is not None and (
        step < course.total_steps and course(step - 1) <= course(step) < course.nominal_peak()
    )


def _second_window(course: Schedule, total_steps: int, steps: int) -> float:
    """The rate in the middle of the run's second window, where the first one has so many steps."""
    last = total_steps - 1
    return (course(min(steps, last)) + course(min(2 * steps - 1, last))) / 2


def _decay(optimizer: Optimizer, stride: int | None) -> Choice:
    values = {decay for group in optimizer.param_groups if (decay := float(group.get("weight_decay", 0.0))) > 0.0}
    if not values:
        return Choice("weight decay", None, "no parameter group decays (0 stays 0 in log space)")
    knob = complete(WeightDecay(evidence=Analytic(stride=stride)), None, diverge=False)
    told = [f"{value:g}" for value in sorted(values)]
    return Choice(
        "weight decay", knob, f"starts at {', '.join(told) if len(told) <= 3 else f'{told[0]} to {told[-1]}'}"
    )


def _dropouts(model: nn.Module, optimizer: Optimizer, sharded: bool, objective: Objective | None) -> list[Choice]:
    """A choice for the dropouts of each rate; a rate of 0 among others is somebody's decision."""
    try:
        found = dropouts.by_rate(model)
    except ConfigError as error:
        return [Choice("dropout", None, f"left alone: {str(error).removeprefix('dropout: ')}")]
    numbers = dropouts.plain_numbers(model)
    if not found and not numbers:
        found = {0.0: Dropout()}  # which says that there is none
    off = found.pop(0.0) if len(found) > 1 and 0.0 in found else None
    knobs = list(found.values())
    choices = [_forward(knob, model, optimizer, sharded, objective) for knob in knobs[: dropouts.MOST_KNOBS]]
    too_many = "left alone: a knob too many; declare it by its pattern"
    choices += [Choice(knob.label, None, too_many) for knob in knobs[dropouts.MOST_KNOBS :]]
    if off is not None:
        unlike = "is off where others are not; declare Dropout(pattern=...) to explore it"
        choices.append(Choice(off.label, None, unlike))
    modules = dict(named_modules(model))
    choices += [
        Choice(
            attribute.replace("_", " "),
            None,
            f"is a plain number that {f'{len(names)} modules may read' if len(names) > 1 else 'one module may read'} "
            f"({names[0] or 'the model itself'}{', ...' if len(names) > 1 else ''}), and no module's rate; "
            + _explorable(attribute, [modules[name] for name in names], names[0]),
        )
        for attribute, names in numbers.items()
    ]
    return choices


def _explorable(attribute: str, modules: Sequence[nn.Module], first: str) -> str:
    """How a plain number of these modules can be explored. A knob named `dropout` would take the recipe's own place."""
    name = attribute if attribute not in FORWARD else f"{first.rpartition('.')[2] or 'own'}_{attribute}"
    swapped = [isinstance(module, nn.MultiheadAttention) for module in modules]
    ways = ["hdet.nn.swap(model) makes nn.MultiheadAttention's explorable"] if any(swapped) else []
    if not all(swapped):
        ways.append(
            f"to explore it, give knobs=[hdet.Scalar({name!r}, get=..., set=..., space=hdet.spaces.Arcsine(), "
            f"bounds=(0, 0.9))]"
        )
    return "; ".join(ways)


def _forward(
    declared: ModuleKnob, model: nn.Module, optimizer: Optimizer, sharded: bool, objective: Objective | None
) -> Choice:
    subject = declared.label.replace("_", " ")
    knob = complete(declared, MixedDifference() if sharded else None, diverge=False)
    try:
        value = knob.bind(model, optimizer).read()
    except MatchError:
        if isinstance(declared, Dropout):
            return Choice(subject, None, _rates_in_config(model) or "the model has no nn.Dropout (see hdet.nn)")
        return Choice(subject, None, _smoothed_by_torch(model) or "the model has no hdet.nn.CrossEntropyLoss")
    except ConfigError as error:
        return Choice(subject, None, f"left alone: {error}")
    if not knob.bounds[0] <= value <= knob.bounds[1]:
        return Choice(
            subject, None, f"left alone: {value:g} lies outside of {knob.bounds}, within which it is explored"
        )
    if value == 0.0 and isinstance(knob, LabelSmoothing):
        return Choice(subject, None, "is off; declare LabelSmoothing() to explore it")
    if sharded and objective is None:
        return Choice(
            subject,
            None,
            "left alone: on shards no gradient is seen whole; give objective=hdet.Objective(loss, batches) to have it "
            "judged by forward passes",
        )
    starts = f"starts at {value:g}"
    if value > MOST:
        entered = ENTERED if isinstance(knob, Dropout) else MOST
        knob = knob.replace(initial_shift=knob.space.difference(entered, value))
        starts = f"starts at {entered:g} in place of {value:g}"
    return Choice(subject, knob, f"{starts}; {BY_FORWARD_PASSES if sharded else BY_GRADIENTS}")


def _rates_in_config(model: nn.Module) -> str:
    """Dropout that is a plain number in a model's `config`, as in many of Hugging Face's; in words, or nothing."""
    fields = getattr(getattr(model, "config", None), "__dict__", {})
    told = [
        f"{name}={value:g}"
        for name, value in sorted(fields.items())
        if name.endswith(("dropout", "pdrop", "dropout_prob")) and isinstance(value, float) and value > 0.0
    ]
    if not told:
        return ""
    return (
        f"found {', '.join(told)} in the model's config, but not explorable: no module holds a rate; use "
        f"hdet.nn.Dropout in the model, or declare hdet.Scalar for the attribute that the forward pass reads"
    )


def _smoothed_by_torch(model: nn.Module) -> str:
    """Label smoothing that torch's own loss holds; in words, or nothing."""
    for name, module in named_modules(model):
        if isinstance(module, nn.CrossEntropyLoss) and module.label_smoothing > 0.0:
            return (
                f"{name} smooths by {module.label_smoothing:g}, a plain number; hdet.nn.swap(model) makes it explorable"
            )
    return ""


def excluding(given: str | Iterable[str], *more: str) -> list[str]:
    """The names that are left out; one alone may be given without a list.

    Raises:
        ConfigError: something else is given.
    """
    alone = isinstance(given, str) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0
    names = (given,) if alone else tuple(given)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"exclude is a list of knobs' names, got {given!r}; give ['weight_decay'], say")
    return [*names, *more]


def _adapted(choices: Sequence[Choice], knobs: Sequence[Knob], exclude: Sequence[str]) -> list[Choice]:
    """The recipe's choices with the caller's own: by name left out, replaced or added.

    A name stands for all of its kind too: `dropout` for `dropout[0.1]` and `dropout[0.05]`; and a knob of the caller's
    takes the place of all of its kind unless it bears the name of one.
    """
    exclude = excluding(exclude)
    unique_names(knobs)
    known = {_name(choice) for choice in choices}
    own = {knob.label: knob for knob in knobs}
    for name in exclude:
        # Of dropouts that are plain numbers alone there is none by that name, and it is left out all the same.
        if name not in known | {_kind(one) for one in known} | set(FORWARD):
            raise ConfigError(f"exclude names {name!r}, which the recipe does not explore; it has {_by_kind(known)}")
        if name in own:
            raise ConfigError(f"{name!r} is both in knobs= and in exclude=; leave one of them out")
    taken = {_kind(name) for name in own if name not in known}
    adapted = []
    for choice in choices:
        name = _name(choice)
        if name in own:
            adapted.append(Choice(choice.subject, own.pop(name), "as you declared it"))
        elif {name, _kind(name)} & set(exclude):
            as_written = "; it stays what you or your scheduler write" if isinstance(choice.knob, LearningRate) else ""
            left_out = Choice(choice.subject, None, f"excluded{as_written}")
            if left_out not in adapted:  # as a dropout and a plain number of that name
                adapted.append(left_out)
        elif _kind(name) not in taken:
            adapted.append(choice)
    return [*adapted, *(Choice(name.replace("_", " "), knob, "as you declared it") for name, knob in own.items())]


def _by_kind(names: Iterable[str]) -> str:
    """Names of knobs by kind; of several of a kind, which may be many, one as an example."""
    kinds = [(kind, list(own)) for kind, own in groupby(sorted(names), key=_kind)]
    return ", ".join(
        repr(kind) + ("" if own == [kind] else f" ({len(own)} by name, as {own[0]!r})") for kind, own in kinds
    )


def _name(choice: Choice) -> str:
    return choice.knob.label if choice.knob is not None else choice.subject.replace(" ", "_")


def _kind(name: str) -> str:
    """A name without what tells knobs of one kind apart."""
    return name.partition("[")[0]


def recommended(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    total_steps: int,
    probe: Probe,
    objective: Objective | None = None,
    micro_batches: int | None = None,
    replicas: Replicas | None = None,
    schedule: Schedule | None = None,
    seed: int = 0,
    history: str | os.PathLike[str] | History | None = None,
    quiet: bool = False,
    knobs: Sequence[Knob] = (),
    exclude: Sequence[str] = (),
    window: int | Windows | None = None,
    guard: Guard | None = DEFAULT_GUARD,
    tail: Tail | None = DEFAULT_TAIL,
    anchor: Literal["device", "host"] = "device",
    averages: Literal["device", "host"] = "device",
    stride: int | None = None,
    noise_scale: bool = False,
    warmup_steps: int | None = None,
) -> Engine:
    """An engine with the recipe we stand behind: nothing diverges, no replicas are made, one run is paid for.

    Learning rate, weight decay, dropout and label smoothing are explored where the model and optimizer have
    them, all by counterfactual evidence. A guard (`hdet.Rewind`) goes back to the best point where training went
    wrong. The run ends with averaged weights where the probe finds them better (`hdet.TailAverage`). What was chosen,
    and why, is printed.

    Held beyond plain training: the window's first weights (`anchor`), the mean of its weights (`averages`), for each
    knob of the forward pass the sketches of `hdet.evidence.Contrast`, and in host memory the guard's copy of model and
    optimizer state, early in the warm-up two, and late in the run the tail's three means of the weights;
    docs/overhead.md has the sizes. Every window evaluates the probe several times, and short runs have short windows:
    there a probe larger than a training batch can take longer than training.

    Args:
        model, optimizer: the rates set in the optimizer are the starting point; the first group's is the peak of
            the schedule.
        total_steps: the run's length in optimizer steps.
        probe: held-out loss; 8 sub-batches, together about as large as one training batch.
        objective: the training loss and training batches. Where the model is sharded over ranks, dropout and label
            smoothing are explored by `MixedDifference`, which needs it, and left alone without it.
        micro_batches: how many micro-batches (gradient accumulation) make a step, by default 1. More than one lets
            forward knobs be compared within a step; with one they are compared between steps, more noisily.
        replicas: instead, replicas made by `hdet.replicate` or `hdet.distribute`, of this model and optimizer.
        schedule: of the learning rate, instead of 30 % warm-up and a straight line to 0.
        seed: of what hdet draws: which levels a pass has, and the random numbers of passes that are compared.
        history: a path for one JSON line a window; `hdet.History(path)` for a run that may go on with an old file.
        quiet: print nothing.
        knobs: in place of the recipe's knob of the same name, or beside them.
        exclude: names of the recipe's knobs (or one name) that are left as they are: "learning_rate", "weight_decay",
            "dropout", "label_smoothing".
        window: steps between two readings, or a rule for them; by default `hdet.windows.GrowingWindow()`.
        guard: instead of `hdet.Rewind()`; None goes on whatever happens.
        tail: instead of `hdet.TailAverage()`; None ends with the last weights.
        anchor, averages: where the window's first weights, and its averaged weights, are kept.
        stride: of averaged weights, take every stride-th step's; by default as many as leave at least 128 in a window.
        noise_scale: read the gradient noise scale off the micro-batches (`engine.noise_scale`).
        warmup_steps: in how many steps at least the learning rate comes to its peak: a schedule that warms up for much
            fewer is held below a straight line (`hdet.schedules.LinearWarmup`), since a rate that is too high is seen
            while it rises. By default 30 % of the run's steps, at most 300; 0 leaves the schedule as it is.

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
    listed(knobs)
    trained(optimizer)
    total_steps = counted("total_steps", total_steps)
    micro_batches = None if micro_batches is None else counted("micro_batches", micro_batches)
    declared("replicas", replicas, Replicas, type(None))
    if replicas is not None:
        tensors.reshard(model)  # a look at the model before it trains leaves it gathered
        of_these(replicas, model, optimizer)
        as_many_passes(replicas, micro_batches)
    choices = choose(
        model,
        optimizer,
        total_steps,
        schedule,
        objective,
        knobs=knobs,
        exclude=exclude,
        stride=stride,
        warmup_steps=warmup_steps,
        window=window,
    )
    tail = possible(tail, optimizer, total_steps)
    if not quiet:
        print(describe(choices, guard=guard, tail=tail))
    return Engine(
        replicas if replicas is not None else in_process.micro_batches(model, optimizer, micro_batches or 1),
        [choice.knob for choice in choices if choice.knob is not None],
        window=window if window is not None else GrowingWindow(),
        signal=probe,
        objective=objective,
        seed=seed,
        total_steps=total_steps,
        history=history,
        guard=guard,
        tail=tail,
        anchor=anchor,
        averages=averages,
        noise_scale=noise_scale,
    )


def describe(
    choices: Sequence[Choice], *, guard: Guard | None = DEFAULT_GUARD, tail: Tail | None = DEFAULT_TAIL
) -> str:
    """The choices in words, a line each."""
    lines = ["hdet explores:"]
    for (explored, reason, rates), alike in groupby(choices, key=_alike):
        subjects = [choice.subject for choice in alike]
        if rates and len(subjects) > 1:
            first, last = (subject.removeprefix(RATE_OF) for subject in (subjects[0], subjects[-1]))
            subjects = [f"learning rates of {len(subjects)} groups, {first} to {last}"]
        lines += [f"  {'+' if explored else '-'} {subject}: {reason}" for subject in subjects]
    lines += [GUARD] * (guard is not None) + [TAIL] * (tail is not None)
    return "\n".join(lines)


def _alike(choice: Choice) -> tuple[bool, str, bool]:
    """What lines of one sort have in common: explored or not, the reason, and whether they are of groups' rates."""
    return choice.knob is not None, choice.reason, choice.subject.startswith(RATE_OF)
