"""Every registered member of every family keeps its laws, and what breaks one is caught."""

from __future__ import annotations

import importlib
import math
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from torch import nn
from torch.optim import Optimizer

import hdet
import hdet.testing
from hdet.app.study.controls import Apart
from hdet.contrib import EvolutionStrategy, Gaussian, Geometric, Grawa, Kalman, Marginal, Weighted
from hdet.controllers import Calibrate, Context, Controller, Estimate, Gated, Newton, Paper, Rule, Veto
from hdet.controllers.state import NoState
from hdet.designs import Design, Hadamard
from hdet.engine.guard import Guard
from hdet.errors import ConfigError
from hdet.estimators import Comparison, Estimator, LeastSquares
from hdet.evidence import Collector, Harvest, Scene
from hdet.hparams import schedule
from hdet.hparams.binding import Binding, ModelBinding
from hdet.hparams.bound_knob import BoundKnob
from hdet.hparams.knob import ActsOn
from hdet.hparams.schedule import HeldOneCycle
from hdet.merges import Exploit, Mean, Merge, Merger, Outer
from hdet.schedules import WSD, Constant, Cosine, FromCallable, LinearWarmup, OneCycle, Replay, Schedule
from hdet.spaces import Linear, Log, Logit, Space
from hdet.spec import Spec
from hdet.spreads import OneSided, Spread, TwoLevel
from hdet.testing import Ground, Law, LawError
from hdet.testing.ground import ADAMW

for found in pkgutil.walk_packages(hdet.__path__, "hdet."):
    if not found.name.endswith("__main__") and found.name.split(".")[1] not in {"integrations", *hdet._INTEGRATIONS}:
        importlib.import_module(found.name)  # so that what registers itself there is seen

FAMILIES: tuple[type[Spec], ...] = (
    hdet.Knob,
    Space,
    Spread,
    Design,
    Schedule,
    hdet.windows.Windows,
    Estimator,
    Controller,
    Rule,
    Veto,
    hdet.evidence.Evidence,
    Merge,
    Guard,
)
"""All families of the core; those of the command line (tasks, optimizers) have laws of declarations only."""

EXAMPLES: dict[type[Spec], list[Spec]] = {
    TwoLevel: [TwoLevel(0.3)],
    Geometric: [Geometric(0.4), Geometric(0.4, ratio=5.0)],
    Gaussian: [Gaussian(0.3)],
    EvolutionStrategy: [EvolutionStrategy(), EvolutionStrategy(ranks=False)],
    OneSided: [OneSided(0.3), OneSided(0.3, side="down")],
    Linear: [Linear(), Linear(10.0)],
    Hadamard: [Hadamard(), Hadamard(foldover=True)],
    Constant: [Constant(0.1)],
    OneCycle: [OneCycle(1.0, total_steps=50), OneCycle(1.0, total_steps=50, three_phase=True)],
    HeldOneCycle: [HeldOneCycle(1.0, total_steps=50, held_from=20)],
    Cosine: [Cosine(1.0, total_steps=50)],
    schedule.LinearDecay: [schedule.LinearDecay(1.0, total_steps=50)],
    WSD: [WSD(1.0, total_steps=50)],
    LinearWarmup: [LinearWarmup(Cosine(1.0, total_steps=50, warmup=0.1), 20)],
    Replay: [Replay((0.1, 0.3, 0.2))],
    FromCallable: [FromCallable("math:sqrt"), FromCallable("math:exp", total_steps=9)],
    hdet.windows.FixedWindow: [hdet.windows.FixedWindow(7)],
    Marginal: [Marginal(), Marginal(replica_noise=True)],
    LeastSquares: [LeastSquares(), LeastSquares(curvature=True), LeastSquares(replica_noise=True)],
    Kalman: [Kalman(), Kalman(replica_noise=True)],
    Gated: [Gated(), Gated(0.06, gate=0, saturation=2, memory=0.7, settle=0.2)],
    Newton: [Newton(), Newton(limit=0.5)],
    Paper: [Paper(0.01), Paper(0.01, warmup_steps=30)],
    hdet.LearningRate: [
        hdet.LearningRate(),
        hdet.LearningRate(schedule=OneCycle(0.02, total_steps=6)),
        hdet.LearningRate(groups="taught", controller=Calibrate()),
    ],
    hdet.Dropout: [hdet.Dropout(), hdet.Dropout(evidence=hdet.evidence.Contrast(refresh=3), spread=OneSided(0.1))],
    hdet.Scalar: [hdet.Scalar("margin", path="margin", bounds=(0.01, 10.0))],
    hdet.evidence.Divergent: [
        hdet.evidence.Divergent(),
        hdet.evidence.Divergent(tilt=0.5),
        hdet.evidence.Divergent(estimator=Kalman()),
    ],
    hdet.evidence.Contrast: [hdet.evidence.Contrast(refresh=3), hdet.evidence.Contrast(refresh=3, paired=True)],
    Mean: [Mean(), Mean("keep"), Mean("reset")],
    Weighted: [Weighted(), Weighted(0.0), Weighted(None, trim=0.25, optimizer="keep")],
    Grawa: [Grawa(), Grawa(layers=True, momentum=0.0, optimizer="keep")],
    Exploit: [Exploit(), Exploit("tournament")],
    Outer: [Outer(), Outer(1.0, options={}), Outer(0.1, optimizer="Adam", options={}, merge=Weighted())],
}
"""What is checked of a kind; of one that is not here, its instance by default."""

EXEMPT: dict[type[Spec], str] = {Apart: "a control of the ablations that is meant to break the laws; see below"}


def members(root: type[Spec]) -> list[type[Spec]]:
    """The family's members that hdet itself has; other tests register theirs."""
    return [member for member in hdet.spec.members(root).values() if member.__module__.startswith("hdet.")]


def examples(member: type[Spec]) -> list[Spec]:
    """Instances of a member to check."""
    if member in EXEMPT:
        return []
    if member in EXAMPLES:
        return EXAMPLES[member]
    needed = [name for name, field in member.model_fields.items() if field.is_required()]
    return [] if needed else [member()]


BUILT_IN = [
    law for root in FAMILIES for member in members(root) for spec in examples(member) for law in hdet.testing.laws(spec)
]


@pytest.mark.parametrize("law", BUILT_IN, ids=str)
def test_built_in(law: Law) -> None:
    law()


@pytest.mark.parametrize("root", FAMILIES, ids=lambda root: root.family)
def test_every_registered_kind_is_checked(root: type[Spec]) -> None:
    assert members(root)
    lacking = [member.__name__ for member in members(root) if not examples(member) and member not in EXEMPT]
    assert not lacking, f"give EXAMPLES an instance of {lacking}"


# -- a user's own, one of each family --------------------------------------------------------------

S = TypeVar("S", bound=type[Spec])


class Root(Space):
    """(sqrt v + s)^2, never below 0."""

    kind: ClassVar[str] = "conformance_root"
    domain: ClassVar[tuple[float, float]] = (0.0, float("inf"))

    def _apply(self, value: float, shift: float) -> float:
        return max(math.sqrt(value) + shift, 0.0) ** 2

    def _difference(self, value: float, origin: float) -> float:
        return math.sqrt(value) - math.sqrt(origin)


class CubeRoot(Root):
    """(v^(1/3) + s)^3, whose coordinate is in the thousands where rounding of the value no longer shows in it."""

    kind: ClassVar[str] = "conformance_cube_root"

    def _apply(self, value: float, shift: float) -> float:
        return float(max(value ** (1 / 3) + shift, 0.0) ** 3)

    def _difference(self, value: float, origin: float) -> float:
        return float(value ** (1 / 3) - origin ** (1 / 3))


class Thirds(Spread):
    """A third of the replicas on each side, the others at the base."""

    kind: ClassVar[str] = "conformance_thirds"

    def _levels(self, n: int) -> NDArray[np.float64]:
        side = max(1, n // 3)
        return np.repeat([-self.width, 0.0, self.width], [side, n - 2 * side, side])


class Turning(Design):
    """Level r + window + k for replica r."""

    kind: ClassVar[str] = "conformance_turning"

    def _assign(
        self, levels: Any, seed: int, window: int, names: Sequence[str], two_level: Sequence[bool]
    ) -> NDArray[np.float64]:
        return np.column_stack([np.roll(column, window + k) for k, column in enumerate(levels)])


class Halving(Schedule):
    """Half as much after every `every` steps."""

    kind: ClassVar[str] = "conformance_halving"
    start: float = Field(gt=0, kw_only=False)
    every: int = Field(default=10, ge=1)

    @property
    def total_steps(self) -> None:
        return None

    def __call__(self, t: int) -> float:
        return self.start * 0.5 ** (t // self.every)


class Doubling(hdet.windows.Windows):
    """As long as all windows before it."""

    kind: ClassVar[str] = "conformance_doubling"

    def length(self, step: int) -> int:
        return max(1, step)


class Signs(Estimator):
    """The loss of the upper half less that of the lower; errors from the scatter within the halves."""

    kind: ClassVar[str] = "conformance_signs"

    def start(self, knobs: int) -> NoState:
        return NoState()

    def estimate(self, state: NoState, comparison: Comparison) -> tuple[list[Estimate], NoState]:
        levels, losses = comparison.heard()
        found = []
        for k in range(comparison.knobs):
            column = levels[:, k]
            up, down = losses[column > 0].mean(axis=1), losses[column < 0].mean(axis=1)
            if len(up) < 2 or len(down) < 2:
                found.append(Estimate.nothing())
                continue
            apart = float(column[column > 0].mean() - column[column < 0].mean())
            error = np.sqrt(up.var(ddof=1) / len(up) + down.var(ddof=1) / len(down)) / apart
            found.append(Estimate(float(up.mean() - down.mean()) / apart, None, float(error)))
        return found, state


@dataclass(frozen=True)
class Steps:
    """How often it has moved."""

    made: int = 0


class Shrinking(Controller):
    """Steps against the slope's sign, each smaller than the last."""

    kind: ClassVar[str] = "conformance_shrinking"

    def start(self) -> Steps:
        return Steps()

    def step(self, state: Steps, estimate: Estimate, context: Context) -> tuple[float, Steps]:
        if not estimate.testable or estimate.slope == 0.0:
            return 0.0, state
        return -float(np.sign(estimate.slope)) / (1 + state.made), Steps(state.made + 1)


class Always(Rule):
    """A step against the slope, whatever its error."""

    kind: ClassVar[str] = "conformance_always"

    def propose(self, state: NoState, estimate: Estimate, context: Context) -> float:
        return -0.1 * float(np.sign(estimate.slope))


class Half(Veto):
    """Half of every move."""

    kind: ClassVar[str] = "conformance_half"

    def allow(self, move: float, state: NoState, estimate: Estimate, context: Context) -> float:
        return 0.5 * move


class Gain(hdet.Knob):
    """The scale of the tiny network's output."""

    kind: ClassVar[str] = "conformance_gain"
    bounds: tuple[float, float] = (0.1, 2.0)

    @property
    def acts_on(self) -> ActsOn:
        return "forward"

    @property
    def biases_loss(self) -> bool:
        return True

    @property
    def acts_in_eval(self) -> bool:
        return True

    def bind(self, model: nn.Module, optimizer: Optimizer) -> Binding:
        return ModelBinding([hdet.hparams.binding.Attribute(model, "margin")], self.bounds)


class EndsCollector(Collector):
    """Reads the losses of the replicas with the highest and the lowest level."""

    def open(self, window: hdet.evidence.Window) -> None:
        for knob in self.knobs:
            n = self.scene.replicas.size
            knob.spread(np.roll(knob.spec.spread.levels(n), window.index), 0.0)

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        found = {}
        for knob in self.knobs:
            up, down = harvest.losses[knob.levels > 0], harvest.losses[knob.levels < 0]
            width = float(np.ptp(knob.levels))
            error = np.sqrt((up.var(ddof=1) + down.var(ddof=1)) / len(up)) / width
            found[knob.name] = Estimate(float(up.mean() - down.mean()) / width, None, float(error))
        return found


class Ends(hdet.evidence.Evidence):
    """Two-level replicas, compared by their training losses."""

    kind: ClassVar[str] = "conformance_ends"
    diverges: ClassVar[bool] = True

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> EndsCollector:
        return EndsCollector(scene, knobs)


class Twice(Merge):
    """The mean, once more."""

    kind: ClassVar[str] = "conformance_twice"

    def at_work(self, scene: Scene) -> MeanTwice:
        return MeanTwice(scene)


class MeanTwice(Merger):
    """Takes the mean of the mean."""

    def merge(self, harvest: Harvest) -> None:
        for _ in range(2):
            self.scene.replicas.mean(harvest.valid.tolist(), "average")


OWN: list[Spec] = [
    Root(), Thirds(0.2), Turning(), Halving(0.1), Doubling(), Signs(), Shrinking(), Always(), Half(), Gain(), Ends(),
    Twice(),
]  # fmt: skip


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What these tests register is gone after each: other tests look at all that is there."""
    before = {root: dict(root._members) for root in FAMILIES}
    for spec in OWN:
        hdet.spec.register(type(spec))
    yield
    for root, members_before in before.items():
        root._members.clear()
        root._members.update(members_before)


@pytest.mark.parametrize("law", [law for spec in OWN for law in hdet.testing.laws(spec)], ids=str)
def test_a_users_own(law: Law) -> None:
    law()


def test_a_space_whose_coordinate_is_large_may_round_it() -> None:
    hdet.spec.register(CubeRoot)
    hdet.testing.check(CubeRoot())


def test_a_spread_may_bound_its_width_and_take_off_a_mean() -> None:
    hdet.spec.register(Narrow)
    hdet.testing.check(Narrow(0.04))
    hdet.testing.check(Narrow(0.0))


def test_there_is_one_of_a_users_own_for_every_family_that_users_extend() -> None:
    assert {spec.family for spec in OWN} == {root.family for root in FAMILIES if root is not Guard}


# -- what breaks a law ------------------------------------------------------------------------------


def breach(spec: Spec, law: str, shows: str = "", **given: Any) -> None:
    """`check` finds the law broken, and says by what."""
    hdet.spec.register(type(spec))
    with pytest.raises(LawError) as caught:
        hdet.testing.check(spec, **given)
    message = str(caught.value)
    assert f"breaks the law {law!r}" in message
    assert shows in message
    assert type(spec).__name__ in message


def unregistered(cls: S) -> S:
    """A kind of its own, registered while it is checked."""
    cls.kind = f"conformance_{cls.__name__.lower()}"
    return cls


@unregistered
class Narrow(Spread):
    """A width with an upper end, and levels whose mean was taken off: a little is left of it."""

    width: float = Field(ge=0, le=0.05, kw_only=False)

    def _levels(self, n: int) -> NDArray[np.float64]:
        drawn = 1.0 + self.width * np.linspace(0.0, 1.0, n) ** 2
        return drawn - drawn.mean()


@unregistered
class OffCentre(Spread):
    def _levels(self, n: int) -> NDArray[np.float64]:
        return np.linspace(-self.width, 1.1 * self.width, n)


@unregistered
class Descending(Spread):
    def _levels(self, n: int) -> NDArray[np.float64]:
        return np.linspace(self.width, -self.width, n)


@unregistered
class Unbounded(Logit):
    def _apply(self, value: float, shift: float) -> float:
        return value + shift


@unregistered
class Lossy(Log):
    def _difference(self, value: float, origin: float) -> float:
        return round(super()._difference(value, origin), 3)


@unregistered
class Repeating(Design):
    def _assign(self, levels: Any, seed: int, window: int, names: Any, two_level: Any) -> NDArray[np.float64]:
        return np.column_stack([np.repeat(column[:1], len(column)) for column in levels])


@unregistered
class Drawing(Design):
    def _assign(self, levels: Any, seed: int, window: int, names: Any, two_level: Any) -> NDArray[np.float64]:
        np.random.seed(window)
        return np.column_stack([np.random.permutation(column) for column in levels])


@unregistered
class Boundless(Schedule):
    def __call__(self, t: int) -> float:
        return 1.0


@unregistered
class Endless(Schedule):
    total_steps: int = 50

    def __call__(self, t: int) -> float:
        return 1.0 + t


@unregistered
class Restless(Controller):
    def start(self) -> NoState:
        return NoState()

    def step(self, state: NoState, estimate: Estimate, context: Context) -> tuple[float, NoState]:
        return (0.1 if np.isnan(estimate.slope) else 0.0), state


@unregistered
class Counting(Controller):
    def start(self) -> Steps:
        return Steps()

    def step(self, state: Steps, estimate: Estimate, context: Context) -> tuple[float, Steps]:
        return 0.0, replace(state, made=state.made + 1)


@unregistered
class Stranded(Shrinking):
    """It does not know how to go on after the run went back."""

    def retreat(self, state: Steps, context: Context, worked: float) -> tuple[float, Steps]:
        return math.log(worked) - math.inf, state


@unregistered
class Forgotten(Shrinking):
    def restart(self, state: Steps, context: Context) -> Any:
        return 0.0


@unregistered
class Averaged(Shrinking):
    """It takes for granted what not all evidence tells."""

    def step(self, state: Steps, estimate: Estimate, context: Context) -> tuple[float, Steps]:
        if not estimate.testable:
            return 0.0, state
        return super().step(state, estimate.averaged, context)  # type: ignore[arg-type]


@unregistered
class Farsighted(Rule):
    """A rule that is asked of estimates ahead of the base alone."""

    looks_ahead: ClassVar[bool] = True

    def propose(self, state: NoState, estimate: Estimate, context: Context) -> float:
        return math.nan


@unregistered
class Beginner(Always):
    def begin(self, state: NoState, estimate: Estimate) -> Any:
        return None


@unregistered
class Pushing(Veto):
    def allow(self, move: float, state: NoState, estimate: Estimate, context: Context) -> float:
        return 2.0 * move


@unregistered
class Reversing(Veto):
    def allow(self, move: float, state: NoState, estimate: Estimate, context: Context) -> float:
        return -0.1 * move


@unregistered
class Unbounding(Rule):
    def propose(self, state: NoState, estimate: Estimate, context: Context) -> float:
        return math.inf


@unregistered
class Exploding(Controller):
    def start(self) -> NoState:
        return NoState()

    def step(self, state: NoState, estimate: Estimate, context: Context) -> tuple[float, NoState]:
        return (-1e300 * estimate.slope if estimate.testable else 0.0), state


@unregistered
class Leaking(LeastSquares):
    def estimate(self, state: NoState, comparison: Comparison) -> tuple[list[Estimate], NoState]:
        finite = np.nan_to_num(comparison.losses, nan=0.0, posinf=0.0, neginf=0.0)
        heard = np.ones_like(comparison.valid)
        return super().estimate(state, replace(comparison, losses=finite, valid=heard))


@unregistered
class Plural(LeastSquares):
    """It wants two sub-batches where there are any."""

    def estimate(self, state: NoState, comparison: Comparison) -> tuple[list[Estimate], NoState]:
        if comparison.losses.ndim == 2 and comparison.losses.shape[1] < 2:
            raise ValueError("no scatter")
        return super().estimate(state, comparison)


@unregistered
class Several(LeastSquares):
    """Whether one knob costs is beyond it."""

    def estimate(self, state: NoState, comparison: Comparison) -> tuple[list[Estimate], NoState]:
        found, state = super().estimate(state, comparison)
        return (found if len(found) > 1 else [Estimate.nothing()]), state


@unregistered
class Boastful(LeastSquares):
    def estimate(self, state: NoState, comparison: Comparison) -> tuple[list[Estimate], NoState]:
        found, state = super().estimate(state, comparison)
        return [replace(e, stderr=e.stderr / 10) for e in found], state


@unregistered
class Lagging(hdet.windows.Windows):
    def length(self, step: int) -> int:
        return step // 2


class MeanOf(Merger):
    """The mean of those replicas that it is told, valid or not."""

    def __init__(self, scene: Scene, taking: Callable[[int], Sequence[bool]]) -> None:
        super().__init__(scene)
        self.taking = taking

    def merge(self, harvest: Harvest) -> None:
        self.scene.replicas.mean(self.taking(len(harvest.valid)), "average")


@unregistered
class First(Mean):
    def at_work(self, scene: Scene) -> Any:
        return MeanOf(scene, lambda n: [True] + [False] * (n - 1))


@unregistered
class Trusting(Mean):
    def at_work(self, scene: Scene) -> Any:
        return MeanOf(scene, lambda n: [True] * n)


@unregistered
class Remembering(Mean):
    """The mean in the first windows, the first replica from the third on; its count is not in its state."""

    def at_work(self, scene: Scene) -> Any:
        return Counted(scene)


class Counted(Merger):
    merged = 0

    def merge(self, harvest: Harvest) -> None:
        self.merged += 1
        flags = [number == 0 or self.merged < 3 for number in range(len(harvest.valid))]
        self.scene.replicas.mean((flags & harvest.valid).tolist(), "average")


@unregistered
class Labelled(Mean):
    """Its state holds what is no number."""

    def at_work(self, scene: Scene) -> Any:
        class Merging(MeanTwice):
            def state_dict(self) -> dict[str, Any]:
                return {"family": Labelled}

        return Merging(scene)


@unregistered
class Merged(Mean):
    def at_work(self, scene: Scene) -> Any:
        return None


@unregistered
class Silent(Gain):
    """It does not say that its value acts in evaluation too, where contrasts leave that out."""

    @property
    def acts_in_eval(self) -> bool:
        return False


@unregistered
class Unbiased(Gain):
    @property
    def biases_loss(self) -> bool:
        return False


@unregistered
class Unbound(Gain):
    def bind(self, model: nn.Module, optimizer: Optimizer) -> Any:
        super().bind(model, optimizer)


@unregistered
class Listed(Gain):
    def bind(self, model: nn.Module, optimizer: Optimizer) -> Any:
        class Own(ModelBinding):
            targets: ClassVar[Any] = [1]

        return Own([hdet.hparams.binding.Attribute(model, "margin")], self.bounds)


@unregistered
class Rolling(Gain):
    def bind(self, model: nn.Module, optimizer: Optimizer) -> Binding:
        torch.rand(1)
        return super().bind(model, optimizer)


@unregistered
class Suspicious(Gain):
    def bind(self, model: nn.Module, optimizer: Optimizer) -> Binding:
        class Own(ModelBinding):
            def overwritten(self, value: float) -> Any:
                return self.read()

        return Own([hdet.hparams.binding.Attribute(model, "margin")], self.bounds)


@unregistered
class Shared(Gain):
    """Its value lives in the class, so that all replicas have the same."""

    def bind(self, model: nn.Module, optimizer: Optimizer) -> Binding:
        return ModelBinding([hdet.hparams.binding.Attribute(COMMON, "value")], self.bounds)


COMMON = nn.Module()
COMMON.value = 0.5  # type: ignore[assignment]


@unregistered
class Overshooting(Gain):
    """Its float32 tensor holds the bound 0.1 as a little more than 0.1."""

    bounds: tuple[float, float] = (0.001, 0.1)

    def bind(self, model: nn.Module, optimizer: Optimizer) -> Binding:
        if not isinstance(model.get_parameter("inner.bias"), nn.Parameter):  # pragma: no cover
            raise AssertionError
        if not isinstance(model.margin, torch.Tensor):
            model.margin = torch.tensor(0.05)  # type: ignore[assignment]

        def write(model: Any, value: float) -> None:
            model.margin.fill_(value)

        return hdet.hparams.binding.FunctionBinding(model, "margin", lambda model: float(model.margin), write)


@unregistered
class Blind(Ends):
    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> EndsCollector:
        class Nothing(EndsCollector):
            def close(self, harvest: Harvest) -> dict[str, Estimate]:
                return {knob.name: Estimate.nothing() for knob in self.knobs}

        return Nothing(scene, knobs)


@unregistered
class Certain(Ends):
    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> EndsCollector:
        class Sure(EndsCollector):
            def close(self, harvest: Harvest) -> dict[str, Estimate]:
                return {name: replace(e, stderr=1e-6) for name, e in super().close(harvest).items()}

        return Sure(scene, knobs)


@unregistered
class Deaf(Ends):
    diverges: ClassVar[bool] = False
    sees: ClassVar[frozenset[str]] = frozenset()


@unregistered
class Forgetful(Ends):
    """What it has seen of the window under way is not in its state."""

    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> EndsCollector:
        class Counter(EndsCollector):
            steps = 0

            def after_update(self, window: hdet.evidence.Window, step: int) -> None:
                self.steps += 1

            def close(self, harvest: Harvest) -> dict[str, Estimate]:
                found = super().close(harvest)
                return {
                    name: replace(e, slope=e.slope * self.steps, stderr=e.stderr * self.steps)
                    for name, e in found.items()
                }

        return Counter(scene, knobs)


class Ending(hdet.evidence.Collector):
    """Tells something, and moves the weights at a window's end."""

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        with torch.no_grad():
            for model, _ in self.scene.replicas.hosts:
                next(model.parameters()).mul_(1.001)
        return {knob.name: Estimate(0.1, stderr=0.1) for knob in self.knobs}


class Entering(hdet.evidence.Collector):
    """Leaves the weights elsewhere before a pass."""

    def enter(self, replica: hdet.replicas.Replica, step: int) -> None:
        with torch.no_grad():
            next(replica.model.parameters()).mul_(1.001)

    def close(self, harvest: Harvest) -> dict[str, Estimate]:
        return {knob.name: Estimate(0.1, stderr=0.1) for knob in self.knobs}


@unregistered
class Straying(hdet.evidence.Evidence):
    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> Collector:
        return Ending(scene, knobs)


@unregistered
class Disturbing(hdet.evidence.Evidence):
    def collect(self, scene: Scene, knobs: Sequence[BoundKnob]) -> Collector:
        return Entering(scene, knobs)


BREACHES: list[tuple[Spec, str, str]] = [
    (Boundless(), "values_are_finite", "it has no total_steps"),
    (Stranded(), "going_back_is_taken", "retreat"),
    (Forgotten(), "going_back_is_taken", "restart returned 0.0, not (move, state)"),
    (Averaged(), "evidence_may_tell_less_or_more", "averaged=None"),
    (Farsighted(), "rules_keep_the_laws_of_controllers", "it moves by nan"),
    (Beginner(), "rules_keep_the_laws_of_controllers", "excess=0.9"),
    (Plural(), "any_number_is_taken", "1 sub-batches it raised ValueError (no scatter)"),
    (Several(), "any_number_is_taken", "of 12 replicas, 1 knobs and one loss"),
    (Remembering(), "a_resume_is_the_same_run", "at the end of the run that was taken up"),
    (Labelled(), "a_resume_is_the_same_run", "more than numbers and tensors: GLOBAL"),
    (Merged(), "identical_replicas_stay_as_they_are", "at_work returned None"),
    (Silent(), "what_it_changes_is_declared", "acts_in_eval is False"),
    (Unbiased(), "what_it_changes_is_declared", "biases_loss is False"),
    (Unbound(), "what_is_written_is_read", "bind returned None; it returns a binding"),
    (Listed(), "what_is_written_is_read", "its targets are [1], which is no frozenset"),
    (Rolling(), "what_is_written_is_read", "bind used or seeded torch's global generator"),
    (Suspicious(), "what_is_written_is_read", "nobody wrote after it"),
    (Straying(), "what_is_measured_is_put_back", "is not what training without it makes of it"),
    (Disturbing(), "what_is_measured_is_put_back", "is not what training without it makes of it"),
    (OffCentre(0.2), "levels_sum_to_zero", "_levels(2) gave [-0.2, 0.22"),
    (Descending(0.2), "levels_ascend", ""),
    (Unbounded(), "the_domain_is_never_left", "outside (0.0, 1.0)"),
    (Lossy(), "difference_inverts_apply", ""),
    (Repeating(), "columns_are_permutations_of_the_levels", "from the levels [-0.5, 0.5]"),
    (Drawing(), "columns_are_permutations_of_the_levels", "NumPy's global generator"),
    (Endless(), "the_end_is_held", "step 50"),
    (Restless(), "nothing_learnt_moves_nothing", "it moves by 0.1 after Estimate(slope=nan"),
    (Counting(), "nothing_learnt_moves_nothing", "{'made': 0} to {'made': 1}"),
    (Exploding(), "moves_are_finite", "slope=-1e+100"),
    (Pushing(), "a_veto_only_shrinks", "of a move of -3.0 it left -6.0"),
    (Reversing(), "a_veto_only_shrinks", "of a move of -3.0 it left 0.3"),
    (Unbounding(), "rules_keep_the_laws_of_controllers", "it moves by inf"),
    (Leaking(), "a_failed_replica_is_not_heard", "loss nan"),
    (Boastful(), "a_placebo_is_told_apart", "|t| above 4"),
    (Lagging(), "a_window_has_a_step", "length(0) is 0"),
    (First(), "the_order_of_replicas_does_not_matter", "weight"),
    (Trusting(), "a_failed_replica_takes_no_part", "weights nan"),
    (Apart(), "all_replicas_become_one", "replica 1"),
    (Shared(), "replicas_are_independent", "share the targets"),
    (Overshooting(), "what_is_written_is_read", "outside (0.001, 0.1)"),
    (Blind(), "every_window_gives_an_estimate", "taught nothing about learning_rate"),
    (Certain(), "a_placebo_is_told_apart", "without effect"),
    (Forgetful(), "a_resume_in_mid_window_is_the_same_run", "estimates"),
]


@pytest.mark.parametrize(("spec", "law", "shows"), BREACHES, ids=[type(spec).__name__ for spec, _, _ in BREACHES])
def test_what_breaks_a_law_is_caught(spec: Spec, law: str, shows: str) -> None:
    breach(spec, law, shows)


@unregistered
class Nudging(Gain):
    """To bind it is to change the model's value, so that training at spread 0 is another training."""

    def bind(self, model: nn.Module, optimizer: Optimizer) -> Binding:
        model.margin = 0.75  # type: ignore[assignment]
        return super().bind(model, optimizer)


def test_a_knob_that_changes_training_by_being_there_is_caught() -> None:
    breach(Nudging(), "with_spread_zero_it_changes_nothing", "is not what plain training makes of it")


def test_a_declaration_that_was_not_registered_cannot_be_read_back() -> None:
    class Homeless(Spread):
        def _levels(self, n: int) -> NDArray[np.float64]:
            return np.linspace(-self.width, self.width, n)

    with pytest.raises(LawError, match=r"'reads_back_equal'.*@hdet\.spec\.register"):
        hdet.testing.check(Homeless(0.1))


@unregistered
class Loose(Spread):
    width: float = Field(ge=0, kw_only=False, allow_inf_nan=True)
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=False)

    def _levels(self, n: int) -> NDArray[np.float64]:
        return np.linspace(-self.width, self.width, n)


def test_a_declaration_that_can_be_changed_is_caught() -> None:
    breach(Loose(0.1), "frozen")


# -- the face ----------------------------------------------------------------------------------------


def test_a_ground_of_ones_own() -> None:
    """A tensor learning rate, whose float32 must not pass the bounds, in groups that keep a ratio."""

    def make(capturable: Callable[[float], Any]) -> tuple[nn.Module, Optimizer]:
        model, _ = ADAMW.make()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "lr": capturable(0.01)}, {"params": vectors, "lr": capturable(0.005)}]
        return model, torch.optim.AdamW(groups, lr=capturable(0.01), foreach=False)

    ground = Ground(partial(make, torch.tensor), ADAMW.loss)
    hdet.testing.check(hdet.LearningRate(bounds=(1e-6, 0.1)), ground=ground)


def test_a_knob_that_binds_to_nothing_says_what_to_give() -> None:
    with pytest.raises(LawError, match=r"name a model that has it: ground="):
        hdet.testing.check(hdet.Scalar("absent", path="absent", bounds=(0.1, 1.0)))


def test_evidence_that_accepts_no_knob_says_what_to_give() -> None:
    breach(Deaf(), "every_window_gives_an_estimate", "name a knob= that it can judge")


def test_laws_are_for_instances() -> None:
    with pytest.raises(ConfigError, match="make an instance of it"):
        hdet.testing.laws(TwoLevel)  # type: ignore[arg-type]


def test_laws_have_names_that_tell_them_apart() -> None:
    for spec in OWN:
        names = [str(law) for law in hdet.testing.laws(spec)]
        assert len(set(names)) == len(names) > 3
        assert all(law.statement for law in hdet.testing.laws(spec))


def test_the_suite_needs_neither_pytest_nor_yaml() -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('pytest', '_pytest', 'hypothesis', 'yaml'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import hdet, hdet.testing\n"
        "hdet.testing.check(hdet.spreads.TwoLevel(0.1))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
