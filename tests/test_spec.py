"""Declarations: one object in Python, in YAML and in a checkpoint; families, plugins, errors that help."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from pydantic import Field, model_validator

import hdet
import hdet.spec
from hdet.contrib import Geometric
from hdet.designs import Design
from hdet.errors import ConfigError
from hdet.schedules import Cosine
from hdet.spaces import Log, Space
from hdet.spec import Spec, lookup, members, register
from hdet.spreads import Spread, TwoLevel
from hdet.windows import GrowingWindow


def families() -> list[type[Spec]]:
    for module in pkgutil.walk_packages(hdet.__path__, "hdet."):
        if module.name.split(".")[1] not in {"integrations", *hdet._INTEGRATIONS, "app", "__main__"}:
            importlib.import_module(module.name)

    def roots(cls: type[Spec]) -> Iterator[type[Spec]]:
        for child in cls.__subclasses__():
            if child.__dict__.get("_root") is child:
                yield child
            yield from roots(child)

    return list(roots(Spec))


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
    with pytest.raises(ConfigError, match=r"GrowingWindow .*got 2; give the others by name: \['minimum', 'fraction'\]"):
        GrowingWindow(10, 0.15)  # type: ignore[call-arg]
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
        lambda: hdet.windows.GrowingWindow(minimum=0, fraction=2.0),
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
    with pytest.raises(ConfigError, match="Plain belongs to no family; derive it from Knob"):
        register(type("Plain", (), {}))
    with pytest.raises(ConfigError, match=r"register takes a class, got UnitSquare\("):
        register(UnitSquare())
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
    with pytest.raises(ConfigError, match="Tilted cannot be written down"):
        Box(shape=Tilted()).to_dict()


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


def test_what_there_is_is_listed_once_and_what_is_long_is_cut() -> None:
    class Lamp(Spec):
        colour: str = "red"
        wide: int = Field(default=1, lt=3)

        @model_validator(mode="after")
        def _is_lit(self) -> Lamp:
            if self.colour.startswith("black"):
                raise ValueError("a lamp is not black")
            return self

    there = r"there are \['colour', 'wide'\]"
    with pytest.raises(
        ConfigError, match=rf"^Lamp: hight: no such field; {there} \(given: 1\); deep: no such field \("
    ):
        Lamp(hight=1, deep=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"valid string.* \(given: \[0, 1, .{93}\.\.\.\)$"):
        Lamp(colour=list(range(1000)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^Lamp: a lamp is not black$"):
        Lamp(colour="black" * 100)
