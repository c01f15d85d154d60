"""Declarations: one object in Python, in YAML and in a checkpoint; families, plugins, errors that help."""

from __future__ import annotations

import importlib
import io
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
import yaml
from pydantic import Field

import hdet
import hdet.spec
from hdet.app.run.optimizer import Optimizer
from hdet.app.run.signal import Signal
from hdet.app.tasks.task import Task
from hdet.contrib import Adam, Antithetic, EvolutionStrategy, Gaussian, Geometric, Kalman, Marginal
from hdet.controllers import Calibrate, Gated, HeavyBall, Hold, Newton, Paper, Pooled, Regularize, Ruled, rules, vetoes
from hdet.designs import Design, Fixed, Hadamard, LatinHypercube, Permutation
from hdet.errors import ConfigError
from hdet.estimators import LeastSquares, Softmax
from hdet.hparams import schedule
from hdet.merges import Exploit, Grawa, Mean, Outer, Weighted
from hdet.schedules import WSD, Constant, Cosine, FromCallable, OneCycle, Replay
from hdet.spaces import Arcsine, Linear, Log, Logit, Relative, Space
from hdet.spec import Spec, lookup, members, register
from hdet.spreads import OneSided, Spread, Symmetric, TwoLevel

EXAMPLES: list[Spec] = [
    hdet.Rewind(patience=2.0),
    # estimators
    Marginal(),
    LeastSquares(curvature=True, replica_noise=True),
    Kalman(),
    Softmax(0.002),
    EvolutionStrategy(ranks=False),
    # controllers
    Hold(),
    Adam(0.1, beta2=0.9),
    Gated(0.06, gate=0.0, saturation=2.0, memory=0.7),
    Regularize(rate=0.4, memory=0.8, raise_after=0.3),
    HeavyBall(),
    Newton(),
    Paper(floor=1e-9),
    Calibrate(patience=3),
    Ruled(rules=(rules.Lower(), rules.Raise(limit=0.1)), vetoes=(vetoes.Fade(0.5),)),
    Pooled(memory=0.5),
    # their rules and vetoes
    rules.LookAhead(ceiling=0.0),
    rules.Lower(),
    rules.Stall(stall_windows=2),
    rules.WarmUp(),
    rules.Raise(),
    rules.Return(),
    rules.SlopeSum(memory=0.5),
    rules.Restore(silent_below=0.5),
    rules.Leap(min_effect=0.1),
    vetoes.AboveGiven(),
    vetoes.AgreesNow(),
    vetoes.Cap(headroom=2.0),
    vetoes.DoesHarm(),
    vetoes.Fade(0.5),
    vetoes.KeepsGap(),
    vetoes.NeedsGap(),
    vetoes.NotEarly(),
    vetoes.WithinSpan(),
    # designs
    Fixed(),
    Hadamard(),
    LatinHypercube(),
    Permutation(),
    # evidence
    hdet.Analytic(width=0.5),
    hdet.Contrast(refresh=5),
    hdet.Divergent(estimator=Kalman(), design=Hadamard(), tilt=0.5),
    hdet.Line(width=0.2),
    hdet.GroupLines(line=hdet.Line(width=0.2)),
    hdet.MixedDifference(every=2),
    hdet.evidence.Population(resample=0.5),
    hdet.Recursion(width=0.2),
    # schedules
    Constant(0.1),
    Cosine(1e-3, total_steps=100, warmup=0.1, floor=1e-5),
    schedule.LinearDecay(1e-3, total_steps=100),
    WSD(1e-3, total_steps=100),
    OneCycle(1e-3, total_steps=100, three_phase=True),
    Replay((0.1, 0.2)),
    FromCallable("math:sqrt", total_steps=9),
    # spaces
    Arcsine(),
    Linear(0.5),
    Log(),
    Logit(),
    Relative(),
    # spreads
    Gaussian(0.3),
    Antithetic(),
    Geometric(0.5, 3.0),
    OneSided(0.5, "down"),
    Symmetric(1 / 9),
    TwoLevel(0.3),
    # knobs
    hdet.LearningRate(groups=("a", 0), spread=Symmetric(0.1), schedule=Cosine(0.1, total_steps=10)),
    hdet.WeightDecay(evidence=hdet.Analytic()),
    hdet.Momentum(controller=Gated(0.1)),
    hdet.Beta1(),
    hdet.Beta2(),
    hdet.Dropout(pattern=("a", "b*"), evidence=hdet.Contrast()),
    hdet.AttentionTemperature(name="t"),
    hdet.LabelSmoothing(),
    hdet.Scalar("x", path="a.b", bounds=(0, 1)),
    # merges and windows
    Mean("reset"),
    Weighted(None, trim=0.25),
    Grawa(layers=True),
    Exploit("tournament"),
    Outer(0.1, optimizer="Adam", options={"betas": [0.9, 0.95]}, merge=Weighted(0.0)),
    hdet.FixedWindow(7),
    hdet.GrowingWindow(minimum=5, fraction=0.2),
]


def families() -> list[type[Spec]]:
    for module in pkgutil.walk_packages(hdet.__path__, "hdet."):
        if not module.name.startswith(("hdet.integrations", "hdet.app", "hdet.__main__")):
            importlib.import_module(module.name)

    def roots(cls: type[Spec]) -> Iterator[type[Spec]]:
        for child in cls.__subclasses__():
            if child.__dict__.get("_root") is child:
                yield child
            yield from roots(child)

    return list(roots(Spec))


@pytest.mark.parametrize("spec", EXAMPLES, ids=lambda spec: f"{spec.family}-{spec.kind}")
def test_yaml_and_a_checkpoint_give_back_an_equal_object(spec: Spec) -> None:
    root = type(spec)._root
    plain = spec.to_dict()
    through_yaml = root.from_dict(yaml.safe_load(yaml.safe_dump(plain)))
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    through_torch = root.from_dict(torch.load(file, weights_only=True))
    for again in (through_yaml, through_torch, root.from_dict(spec)):
        assert again == spec
        assert type(again) is type(spec)
        assert again.to_dict() == plain
        assert hash(again) == hash(spec)


def test_every_kind_of_the_core_is_among_the_examples() -> None:
    """The families of runs and tasks have examples of their own, where they live."""
    shown = {(spec.family, spec.kind) for spec in EXAMPLES}
    there = {
        (root.family, kind)
        for root in families()
        for kind, member in members(root).items()
        if member.__module__.startswith("hdet.") and not issubclass(member, (Optimizer, Signal, Task))
    }
    inner = {
        ("merge", "apart"),
        ("schedule", "held_one_cycle"),
    }  # of the paper's replay and the drop-in scheduler
    assert there - shown <= inner


@pytest.mark.parametrize("root", families(), ids=lambda root: root.family)
def test_kinds_that_need_nothing_can_be_named_alone(root: Any) -> None:
    for kind, member in members(root).items():
        if not any(field.is_required() for field in member.model_fields.values()):
            assert root.from_dict(kind) == root.from_dict({"kind": kind}) == member()


def test_positions_and_keywords() -> None:
    assert Geometric(0.5, 3.0) == Geometric(width=0.5, ratio=3.0) == Geometric(0.5, ratio=3.0)
    with pytest.raises(
        ConfigError, match=r"Geometric takes at most 2 positional arguments .*'width', 'ratio'.*, got 3"
    ):
        Geometric(0.5, 3.0, 1.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Geometric got 'width' twice"):
        Geometric(0.5, width=0.5)  # type: ignore[misc]


def test_replacing_validates_anew() -> None:
    spec = Cosine(1e-3, total_steps=100)
    assert spec.replace(peak=1e-2) == Cosine(1e-2, total_steps=100)
    with pytest.raises(ConfigError, match=r"cosine: peak: .*given: -1"):
        spec.replace(peak=-1)
    with pytest.raises(ConfigError, match="paek: no such field; there are"):
        spec.replace(paek=1)


ERRORS: dict[str, tuple[Any, str]] = {
    "unknown field inside": (
        lambda: hdet.Knob.from_dict({"kind": "beta1", "spread": {"kind": "two_level", "width": 1, "ratio": 2}}),
        r"^beta1: spread: two_level: ratio: no such field; there are \['width'\] \(given: 2\)$",
    ),
    "several at once": (
        lambda: hdet.GrowingWindow(minimum=0, fraction=2.0),
        r"^growing: minimum: .*1 \(given: 0\); fraction: .*1 \(given: 2.0\)$",
    ),
    "a missing field": (lambda: Spread.from_dict("two_level"), "^two_level: width: Field required$"),
    "no kind": (
        lambda: Space.from_dict({"scale": 2.0}),
        r"^a space is a Space, a mapping with a 'kind' key, or one of \['arcsine', .*; got \{'scale': 2.0\}$",
    ),
    "a number": (lambda: Space.from_dict(3), "or one of .*; got 3$"),
    "another family": (
        lambda: hdet.LearningRate(spread=Log()),
        r"learning_rate: spread: a spread is .*got Log\(\)",
    ),
    "an unknown kind": (
        lambda: Design.from_dict("sobol"),
        r"^no design is called 'sobol'; there are \['antithetic', 'fixed',",
    ),
    "another member": (
        lambda: hdet.LearningRate.from_dict({"kind": "beta1"}),
        "^the knob 'beta1' is a Beta1, no LearningRate$",
    ),
    "not a number": (lambda: TwoLevel(float("nan")), "two_level: width: .*finite number.*given: nan"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_once_what_was_given_and_what_there_is(case: str) -> None:
    build, message = ERRORS[case]
    with pytest.raises(ConfigError, match=message):
        build()


class Shape(Spec, family="shape"):
    """A family of its own."""


@register
class UnitSquare(Shape):
    side: float = Field(default=1.0, gt=0, kw_only=False)
    inner: Shape | None = None


class Box(Spec):
    """Of no family: a plain part of a file."""

    size: int = 1
    shape: Shape = UnitSquare()


def test_a_family_of_ones_own() -> None:
    assert UnitSquare.kind == "unit_square"
    assert UnitSquare(2.0, inner=UnitSquare()).to_dict() == {
        "kind": "unit_square",
        "side": 2.0,
        "inner": {"kind": "unit_square", "side": 1.0, "inner": None},
    }
    assert Box.from_dict({"shape": {"kind": "unit_square", "side": 3}}) == Box(shape=UnitSquare(3.0))
    assert Box(size=2).to_dict() == {"size": 2, "shape": UnitSquare().to_dict()}
    with pytest.raises(ConfigError, match=r"a Box is a mapping of \['shape', 'size'\]; got 'big'"):
        Box.from_dict("big")
    with pytest.raises(ConfigError, match="Box: colour: no such field"):
        Box.from_dict({"colour": 1})


def test_registering() -> None:
    with pytest.raises(ConfigError, match="Box belongs to no family; derive it from Knob"):
        register(Box)
    with pytest.raises(ConfigError, match=r"shape 'unit_square' is already .*UnitSquare; set another `kind` on .*Fake"):

        @register
        class Fake(Shape):
            kind = "unit_square"

    # A notebook's cell that is run again defines the same class anew.
    again = type("UnitSquare", (Shape,), {"__module__": __name__, "__qualname__": "UnitSquare", "kind": "unit_square"})
    try:
        register(again)
        assert lookup(Shape, "unit_square") is again
        UnitSquare().to_dict()
    finally:
        register(UnitSquare)


def test_what_was_never_registered_cannot_be_written_down() -> None:
    """Its kind would be its parent's, and reading it back would give that."""

    class Tilted(UnitSquare):
        pass

    with pytest.raises(
        ConfigError, match="Tilted cannot be written down: it is not registered as a shape; decorate it"
    ):
        Tilted().to_dict()


def test_plugins_are_found_by_their_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Triangle(Shape):
        kind = "triangle"

    class Point(EntryPoint):
        def load(self) -> Any:
            return Triangle

    def entry_points(*, group: str) -> list[EntryPoint]:
        asked.append(group)
        return [Point("triangle", "plugin:Triangle", group)] if group == "hdet.shapes" else []

    monkeypatch.setattr(hdet.spec, "entry_points", entry_points)
    try:
        assert isinstance(Shape.from_dict({"kind": "triangle"}), Triangle)
        assert "triangle" in members(Shape)
        assert set(asked) == {"hdet.shapes"}
        members(hdet.Knob)
        assert asked[-1] == "hdet.knobs"
    finally:
        Shape._members.pop("triangle", None)
