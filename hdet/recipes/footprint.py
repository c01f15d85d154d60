"""What a search holds in memory and moves about, worked out without running it: on the meta device, for any size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hdet.engine import admission
from hdet.engine.defaults import complete
from hdet.engine.guard import Guard, Rewind
from hdet.engine.tail import Tail, TailAverage
from hdet.errors import ConfigError
from hdet.evidence import Analytic, Contrast, Evidence, GroupLines, Line, MixedDifference, OuterLine, Recursion
from hdet.evidence.parts.sketch import sizes
from hdet.hparams.clipping import ClipNorm
from hdet.hparams.knob import Knob
from hdet.hparams.param_groups import ids_of
from hdet.merging import Mean, Merge, Outer
from hdet.recipes.recommended import DEFAULT_GUARD, DEFAULT_TAIL
from hdet.replicas import tensors
from hdet.replicas.chained_optimizer import chained, steps_by
from hdet.replicas.held_optimizer import OF_GRADIENTS
from hdet.replicas.schedule_free import is_schedule_free

Place = Literal["device", "host"]
When = Literal["always", "early", "late", "window's end"]
Link = Literal["memory", "host link", "network"]

END: When = "window's end"

NUMBERS = 10
"""What a replica tells the others at a window's end: loss, bad steps, losses told, three places, four marks."""


@dataclass(frozen=True)
class Held:
    """Something held beyond plain training.

    Attributes:
        what: in words.
        where: in which memory.
        size: bytes, of sharded weights one rank's.
        when: `always`; `early`, while the warm-up is looked ahead of; `late`, over the tail of the run; or for a moment
            at a `window's end`, one after the other.
    """

    what: str
    where: Place
    size: int
    when: When = "always"


@dataclass(frozen=True)
class Moved:
    """Something that travels.

    Attributes:
        what: in words.
        over: within the device's `memory` (bytes read and written), over the `host link`, or the `network`.
        size: bytes each time.
        per: how often that is.
    """

    what: str
    over: Link
    size: int
    per: Literal["step", "window"]


@dataclass(frozen=True)
class Footprint:
    """What a search costs a process, beyond plain training.

    Attributes:
        parameters: P, the bytes of the parameters that training can change, in their own dtype.
        held, moved: what it comes to.
    """

    parameters: int
    held: tuple[Held, ...]
    moved: tuple[Moved, ...]

    def bytes(self, where: Place, *, early: bool = False, late: bool = False) -> int:
        """What is held throughout; `early` with what is held in the warm-up besides, `late` over the run's tail."""
        times = ("always", early and "early", late and "late")
        return sum(part.size for part in self.held if part.where == where and part.when in times)

    @property
    def momentary(self) -> int:
        """The most that the device holds for a moment at a window's end."""
        return max((part.size for part in self.held if part.when == END), default=0)

    def seconds(self, bandwidths: Mapping[Link, float], per: Literal["step", "window"]) -> float:
        """How long the traffic of a step, or of a window's two ends, takes if nothing overlaps.

        Args:
            bandwidths: bytes a second of each link that something travels over.

        Raises:
            ConfigError: one is missing, or not above 0.
        """
        found = 0.0
        for part in self.moved:
            if part.per == per:
                if not bandwidths.get(part.over, 0.0) > 0.0:
                    raise ConfigError(
                        f"{part.what} travels over the {part.over}, whose bandwidth was not given; give "
                        f"{part.over!r} in bytes a second, above 0, got {dict(bandwidths)}"
                    )
                found += part.size / bandwidths[part.over]
        return found

    def __str__(self) -> str:
        power, unit = (20, "MiB") if self.parameters >= 2**20 else (10, "KiB")

        def sized(size: int) -> str:
            return f"{size / 2**power:12,.1f} {unit} {size / max(1, self.parameters):7.2f} P"

        lines = [f"P, the parameters that are trained: {self.parameters / 2**power:,.1f} {unit}", "held:"]
        lines += [f"  {part.what:<46}{part.where:<8}{part.when:<14}{sized(part.size)}" for part in self.held]
        for where in ("device", "host"):
            lines.append(f"  {'in all':<46}{where:<8}{'always':<14}{sized(self.bytes(where))}")
        lines.append(f"  {'the most':<46}{'device':<8}{END:<14}{sized(self.momentary)}")
        lines.append("moved:")
        lines += [f"  {part.what:<46}{part.over:<11}a {part.per:<9}{sized(part.size)}" for part in self.moved]
        return "\n".join(lines)


def footprint(
    model: nn.Module,
    optimizer: Optimizer,
    knobs: Sequence[Knob],
    *,
    guard: Guard | None = DEFAULT_GUARD,
    tail: Tail | None = DEFAULT_TAIL,
    anchor: Place = "device",
    averages: Place = "device",
    replicas: int = 1,
    merge: Merge | None = None,
) -> Footprint:
    """What a search of knobs costs one process whose replicas stay alike; nothing is allocated and nothing changed.

    The model and its optimizer may lie on the meta device, where 70B parameters need no memory. Of sharded parameters a
    rank's part is counted.

    Args:
        model, optimizer: as training would begin with them.
        knobs: what is explored, such as those of `hdet.recipes.recommended.choose`.
        guard, tail, anchor, averages: as of `hdet.recommended`.
        replicas: N over all processes, of which each tells the others a few numbers.
        merge: as of `hdet.Engine`; of replicas that are alike a mean holds nothing, and `hdet.merges.Outer` steps.
            (What a merge of your own holds is not counted.)

    Raises:
        ConfigError: a knob's evidence is of replicas that come apart; a knob is the outer optimizer's, and the merge
            has none; an optimizer's state cannot be known before its first step.

    >>> import torch, hdet
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(4096, 4096, bias=False)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> found = footprint(model, optimizer, [hdet.LearningRate(), hdet.WeightDecay()])
    >>> found.bytes("device") / found.parameters  # the weights a window opened with, and their average over it
    2.0
    >>> round(found.bytes("host") / found.parameters, 3)  # the best point: weights and both moments
    3.0
    >>> round(found.bytes("host", late=True) / found.parameters, 3)  # and three means over the tail
    6.0
    """
    merge = merge if merge is not None else Mean()
    weights = _Weights.of(model, optimizer)
    declared = [complete(knob, None, diverge=False) for knob in knobs]
    for knob in declared:
        if knob.evidence is not None and knob.evidence.diverges:
            raise ConfigError(
                f"{knob.label}: its evidence {knob.evidence.kind!r} compares replicas that come apart, each a model "
                f"of its own; a footprint is that of a search in which nothing does: give it evidence=None"
            )
    state = _state_bytes(optimizer)
    light = isinstance(guard, Rewind) and all(type(each) in OF_GRADIENTS for each in chained(optimizer))
    held = [Held("the weights a window opened with", anchor, weights.size)]
    if not light:
        held.append(Held("the optimizer's state a window opened with", anchor, state))
    if weights.buffers:
        held.append(Held("the buffers a window opened with", anchor, weights.buffers))
    moved = [Moved("the window's first weights, copied", *_copied(weights.size, anchor), "window")]
    sources: dict[Evidence, list[Knob]] = {}
    for knob in declared:
        assert isinstance(knob.evidence, Evidence)
        if isinstance(knob.evidence, OuterLine):
            outer = merge.outer_optimizer()
            admission.has_outer_optimizer(knob, merge, [] if outer is None else [outer])
        sources.setdefault(knob.evidence, []).append(knob)
    lines = [source.line if isinstance(source, GroupLines) else source for source in sources]
    strides = [source.stride for source in lines if isinstance(source, (Line, Analytic))]
    for stride in dict.fromkeys(strides if not is_schedule_free(optimizer) else ()):
        named = f"the average weights{f', stride {stride}' if (stride or 1) > 1 else ''}"
        held.append(Held(named, averages, weights.wide))
        if averages == "host" and weights.elsewhere:
            held.append(Held("weights on their way to it, pinned", "host", weights.size))
        over: Link = "memory" if averages == "device" else "host link"
        size = weights.size + 2 * weights.wide if averages == "device" else weights.size
        moved.append(Moved(named, over, size // (stride or 1), "step"))
    for source, judged in sources.items():
        if not isinstance(source, OuterLine):
            held += _of_evidence(source, judged, weights, optimizer)
    explored = any(isinstance(source, OuterLine) for source in sources)
    held += held_by_merge(merge, model, optimizer, explored=explored)
    if isinstance(guard, Rewind):
        place: Place = guard.keep
        point = weights.size + weights.buffers
        held.append(Held("the best point: weights, buffers, optimizer", place, point + state))
        if guard.overshoot is not None:
            begun = sum(_bytes(own) for own in optimizer.state.values())
            held.append(Held("the first point", place, point + begun, "early"))
        held.append(Held("weights put aside while the guard looks", "device", point, END))
        moved.append(Moved("the best point, where it is bettered", *_copied(point + state, place), "window"))
    if isinstance(tail, TailAverage) and not is_schedule_free(optimizer):
        if not strides:
            held.append(Held("the average weights", averages, weights.wide))
        means = len(tail.starts) * weights.wide
        held.append(Held("means of the weights over the tail of the run", tail.keep, means, "late"))
        held.append(Held("weights put aside while they are compared", "device", weights.size, END))
        moved.append(Moved("the window's mean, into the tail's", *_copied(weights.wide, tail.keep), "window"))
    if replicas > 1:
        moved.append(Moved("losses and marks of the replicas", "network", 8 * NUMBERS * replicas, "window"))
    return Footprint(weights.size, tuple(held), tuple(moved))


def held_by_merge(merge: Merge, model: nn.Module, optimizer: Optimizer, *, explored: bool = False) -> list[Held]:
    """What a merge holds in each process, whether replicas come apart or not: nothing, if not `hdet.merges.Outer`.

    Args:
        model, optimizer: of one replica.
        explored: whether knobs of the merge's own optimizer are, by `hdet.evidence.OuterLine`.

    Raises:
        ConfigError: its optimizer's state cannot be known before its first step.

    >>> import torch, hdet
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(1024, 1024, bias=False)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> [(part.what, part.size >> 20) for part in held_by_merge(hdet.merges.Outer(), model, optimizer)]
    [("the outer optimizer's state", 4), ('the outer step, made', 16)]
    """
    if not isinstance(merge, Outer):
        return []
    weights = _Weights.of(model, optimizer)
    state = _state_bytes(merge.made(_displacements(model, optimizer)))
    held = held_by_merge(merge.merge, model, optimizer)
    if state:
        held.append(Held("the outer optimizer's state", "device", state))
    # What the window moved, the outer weights, their gradients, and what a step of several tensors at once takes.
    step = 4 * weights.wide
    held.append(Held("the outer step, made", "device", step, END))
    if explored:
        held.append(Held("the outer step, tried; weights put aside", "device", step + weights.size + state, END))
    return held


def _displacements(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters on the meta device as an outer optimizer has them."""
    moving = [tensors.local(parameter.detach()) for parameter in tensors.moving_parameters(model, optimizer)]
    blank = [torch.empty_like(value, dtype=tensors.wide_type(value.dtype), device="meta") for value in moving]
    return [nn.Parameter(value) for value in blank]


@dataclass(frozen=True)
class _Weights:
    """Bytes of the parameters that training can change, in their own dtype and in float32 at least, and of buffers.

    Attributes:
        trained, numbers: bytes of the parameters that also receive gradients, and how many numbers these are.
        elsewhere: whether they lie elsewhere than on the host.
    """

    size: int
    wide: int
    largest: int
    buffers: int
    trained: int
    numbers: int
    elsewhere: bool

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> _Weights:
        moving = [tensors.local(parameter.detach()) for parameter in tensors.moving_parameters(model, optimizer)]
        held = ids_of(optimizer)
        trained = [parameter for parameter in tensors.trained(model) if id(parameter) in held]
        wide = [t.numel() * tensors.wide_type(t.dtype).itemsize for t in moving]
        return cls(
            size=sum(t.nbytes for t in moving),
            wide=sum(wide),
            largest=max(wide, default=0),
            buffers=sum(tensors.local(buffer.detach()).nbytes for buffer in model.buffers()),
            trained=sum(tensors.local(parameter.detach()).nbytes for parameter in trained),
            numbers=sum(tensors.local(parameter.detach()).numel() for parameter in trained),
            elsewhere=any(t.device.type != "cpu" for t in moving),
        )


def _of_evidence(source: Evidence, knobs: Sequence[Knob], weights: _Weights, optimizer: Optimizer) -> list[Held]:
    """What one kind of evidence holds of its own."""
    # Of a large tensor a stretch at a time.
    passing = min(max(4 * tensors.PASSING, min(weights.largest, 4 * tensors.STRETCH)), weights.wide)
    if isinstance(source, (Line, GroupLines)):
        return [Held("weights put aside while lines are read", "device", weights.size + passing, END)]
    if isinstance(source, Analytic):
        return [Held("weights put aside while decay is judged", "device", weights.size + 2 * passing, END)]
    if isinstance(source, Recursion):
        vectors = sum(3 if isinstance(knob, ClipNorm) and not isinstance(optimizer, SGD) else 2 for knob in knobs)
        return [
            Held("what momentum, betas and clipping did to the weights", "device", vectors * weights.wide),
            Held("weights put aside while these are judged", "device", weights.size + 2 * passing, END),
        ]
    if isinstance(source, MixedDifference):
        return [Held("gradient, direction and weights put aside", "device", 2 * weights.wide + weights.size, END)]
    if isinstance(source, Contrast):
        numbers, signs = sizes(weights.numbers, source.sketch)
        kept = (source.groups + 1) * len(knobs) if source.horizon else 1
        return [
            Held("sketches of gradients, and their signs", "device", 4 * (kept * numbers + signs)),
            Held("the probe's gradient, and its sketch", "device", weights.trained + 2 * passing + 4 * numbers, END),
            Held("sketches that are read", "device", 4 * (source.groups * (len(knobs) - 1) + 1) * numbers, END),
        ]
    raise ConfigError(f"what evidence of kind {source.kind!r} holds is not known here")


def _copied(size: int, place: Place) -> tuple[Link, int]:
    """What a copy of so many bytes travels over, and how much of it does."""
    return ("memory", 2 * size) if place == "device" else ("host link", size)


def _state_bytes(optimizer: Optimizer) -> int:
    """Bytes of an optimizer's state, found by a step of another of its class on the meta device where it has none."""
    known = sum(_bytes(own) for own in optimizer.state.values())
    if known:
        return known
    plain = {"foreach": False, "fused": False, "capturable": False}  # elsewhere than on the meta device they may be
    groups: dict[type, list[dict[str, Any]]] = defaultdict(list)
    for group in optimizer.param_groups:
        twins = [nn.Parameter(torch.empty_like(tensors.local(p.detach()), device="meta")) for p in group["params"]]
        for twin, parameter in zip(twins, group["params"], strict=True):
            twin.grad = torch.empty_like(twin) if parameter.requires_grad else None
        settings = {name: plain.get(name, value) for name, value in group.items()}
        groups[type(steps_by(optimizer, group))].append({**settings, "params": twins})
    others: list[Optimizer] = []
    try:
        for make, own in groups.items():
            others.append(make(own))
            others[-1].step()
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"what {make.__name__} holds cannot be known before its first step ({error}); give an optimizer "
            f"that has made one"
        ) from None
    return sum(_bytes(own) for other in others for own in other.state.values())


def _bytes(state: Mapping[str, Any]) -> int:
    return sum(tensors.local(value).nbytes for value in state.values() if isinstance(value, Tensor))
