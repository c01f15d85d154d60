"""YAML in and out, and overrides."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdet.app.run.optimizer import AdamW, Optimizer, TorchOptimizer
from hdet.document import dump, override, parse, read
from hdet.errors import ConfigError, MissingExtraError

numbers = st.floats(allow_nan=False, allow_infinity=False)


@given(number=numbers)
def test_a_number_survives_yaml_whatever_python_calls_it(number: float) -> None:
    """YAML 1.1 reads `1e-05`, which is how Python writes 0.00001, as a string."""
    found = parse(f"value: {number!r}", name="test")["value"]
    assert isinstance(found, float)
    assert found == number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3E4", 3e4),
        ("-.5e2", -50.0),
        ("7", 7),
        ("[1, 2]", [1, 2]),
        ("1e", "1e"),
        ("e3", "e3"),
        ("010", 10),
        ("007", 7),
        ("0x1F", 31),
        ("0", 0),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
    ],
)
def test_values(text: str, value: object) -> None:
    found = parse(text, name="test")
    assert found == value
    assert type(found) is type(value)


@given(lr=st.floats(1e-300, 1e300), decay=st.floats(0, 1e300), beta=st.floats(0, 1, exclude_max=True))
def test_a_declaration_survives_yaml(lr: float, decay: float, beta: float) -> None:
    spec = AdamW(lr, weight_decay=decay, betas=(beta, 0.5))
    assert Optimizer.from_dict(parse(dump(spec), name="test")) == spec


@pytest.mark.parametrize("text", ["1e-3", "12e5", ".5E2", "1:30", "010", "1_000", "no", "null", "2020-01-01", "<<"])
def test_a_text_that_looks_like_a_number_survives_yaml_as_text(text: str) -> None:
    """A commit's hash may be 12e5, and a run that read it back as a number could not be resumed."""
    spec = TorchOptimizer(name="NAdam", options={"tag": text, text: 1})
    assert Optimizer.from_dict(parse(dump(spec), name="test")) == spec


def test_a_mapping_is_merged_into_others() -> None:
    """One that is merged itself, and overridden there, is still no key given twice."""
    text = "a: &a {x: 1, y: 2}\nin: {b: &b {<<: *a, y: 3}}\nc: {<<: [*b, {z: 4}], x: 5}\n"
    found = parse(text, name="test")
    assert found == {"a": {"x": 1, "y": 2}, "in": {"b": {"x": 1, "y": 3}}, "c": {"x": 5, "y": 3, "z": 4}}
    with pytest.raises(ConfigError, match="the key 'x' is there twice"):
        parse("a: &a {x: 1}\nb: {<<: *a, x: 2, x: 3}\n", name="test")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"run\.yaml is not valid YAML: the key 'a' is there twice in line 3, column 1: "),
        ("a: [1, 2\n", "not valid YAML"),
        ("- 1\n- 2\n", "expected a mapping of the run's fields, got list"),
        ("", "got nothing: the file declares none"),
        ("# steps: 100\n", "got nothing: the file declares none"),
        ("a: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("a: 2020-13-45\n", "not valid YAML: month must be in"),
        ("a: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
        ('a: "\\uD800"\n', "half of a character"),
        ('{"\\uD800": 1}\n', "half of a character"),
        ('a: !!set {"\\uD800"}\n', "half of a character"),
        ("a: \x1b[2J\n", "not valid YAML: unacceptable character"),
    ],
)
def test_a_file_that_cannot_be_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path / "run.yaml")
    assert "run.yaml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.yaml"):
        read(tmp_path / "absent.yaml")


GIVEN: dict[str, Any] = {
    "steps": 10,
    "task": "text",
    "knobs": [{"kind": "dropout"}, {"kind": "learning_rate", "spread": {"width": 0.1}}],
}


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("steps=20", ["steps"], 20),
        ("task.width=8", ["task"], {"kind": "text", "width": 8}),
        ("knobs.1.spread.width=1e-2", ["knobs", 1, "spread", "width"], 0.01),
        ("knobs.0=attention_temperature", ["knobs", 0], "attention_temperature"),
        ("knobs=[]", ["knobs"], []),
        ("optimizer.lr=1e-3", ["optimizer"], {"lr": 0.001}),
        ("clip=null", ["clip"], None),
        ("device=a=b", ["device"], "a=b"),
    ],
)
def test_an_override_sets_one_entry_and_leaves_the_original(assignment: str, path: list[Any], value: object) -> None:
    before = repr(GIVEN)
    result: Any = override(GIVEN, [assignment])
    assert repr(GIVEN) == before
    for key in path:
        result = result[key]
    assert result == value


def test_later_overrides_win_and_build_on_earlier_ones() -> None:
    assert override({}, ["a.b=1", "a.c=2", "a.b=3"]) == {"a": {"b": 3, "c": 2}}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("steps", "takes path=value.*got 'steps'"),
        ("=3", "takes path=value"),
        ("knobs.2.kind=dropout", "the list has 2 entries, to be named 0 to 1, not '2'"),
        ("knobs.dropout.kind=x", "not 'dropout'"),
        ("steps.deep=3", "10 has no field 'deep'"),
        ("a" + ".b" * 101 + "=1", "no field lies deeper than 100 dots"),
        ("steps=[1", "the value of --set .* is not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_is_named(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(GIVEN, [assignment])


def test_without_yaml_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"pyyaml.*hdet\[cli\]"):
        parse("a: 1", name="test")
    with pytest.raises(MissingExtraError, match=r"pyyaml.*hdet\[cli\]"):
        dump(AdamW())
