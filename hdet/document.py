"""YAML in and out, and the `a.b.0.c=value` overrides of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hdet.errors import ConfigError, MissingExtraError
from hdet.nested import flat
from hdet.spec import Spec

NUMBER = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
"""One with an exponent, in which YAML 1.1 demands a point and a sign."""

DEEPEST = 100
"""Dots in the path of an assignment."""


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    As in YAML 1.2 `1e-3` is a number, `010` is ten, and `1:30` a text; and a key given twice is an error.

    Raises:
        ConfigError: no such file, not YAML, not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    given = parse(text, name=str(path))
    if not isinstance(given, dict):
        found = "nothing: the file declares none" if given is None else type(given).__name__
        raise ConfigError(f"{path}: expected a mapping of the run's fields, got {found}")
    return given


def parse(text: str, *, name: str) -> Any:
    """The value a YAML text stands for; `name` is what errors call it.

    >>> parse("{lr: 3e-4, steps: 100}", name="example")
    {'lr': 0.0003, 'steps': 100}
    """
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingExtraError("pyyaml", "cli") from None

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            keys = [
                key.value if key.tag == "tag:yaml.org,2002:merge" else self.construct_object(key, deep=True)
                for key, _ in node.value
            ]
            twice = [key for index, key in enumerate(keys) if key in keys[:index]]
            if twice:
                again = [key for key, _ in node.value][len(keys) - 1 - keys[::-1].index(twice[0])]
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {twice[0]!r} is there twice", again.start_mark
                )
            return node

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            digits = str(self.construct_scalar(node)).replace("_", "")
            octal = re.fullmatch("([-+]?)0+([0-9]+)", digits)
            return int("".join(octal.groups())) if octal else int(super().construct_yaml_int(node))

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.yaml_implicit_resolvers = {  # before those of YAML 1.1, for which 1:30 is ninety
        first: [("tag:yaml.org,2002:str", re.compile(r"^[-+]?[0-9_]+(:[0-9_]+)+(\.[0-9_]*)?$")), *rest]
        for first, rest in Loader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
    try:
        value = yaml.load(text, Loader=Loader)
        for place, part in flat(value, ".").items():
            for text in part if isinstance(part, set) else (part,):
                f"{place}: {text}".encode()
        return value
    except UnicodeEncodeError:
        raise ConfigError(f"{name} holds half of a character (a lone surrogate), which no file can hold") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a declaration") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a date such as 2020-13-45 is a ValueError
        said = " ".join(str(error).split()).replace('"<unicode string>", ', "")  # the file's name comes first
        raise ConfigError(f"{name} is not valid YAML: {said}") from None


def dump(spec: Spec) -> str:
    """A declaration as YAML, which `parse` and `from_dict` turn into an equal one."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingExtraError("pyyaml", "cli") from None

    class Dumper(yaml.SafeDumper):
        """Quotes a text that `parse` would take for a number."""

    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
    return yaml.dump(spec.to_dict(), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def override(given: Mapping[str, Any], assignments: Iterable[str]) -> dict[str, Any]:
    """A copy of a mapping with some entries set, each as `path=value`: dots descend, numbers index lists.

    The value is read as YAML. Whether the fields exist is for the declaration to say.

    >>> override({"steps": 9, "knobs": [{"kind": "dropout"}]}, ["steps=5", "knobs.0.spread.width=0.2"])
    {'steps': 5, 'knobs': [{'kind': 'dropout', 'spread': {'width': 0.2}}]}

    Raises:
        ConfigError: no `=`, an index the list does not have, a path through a number.
    """
    result: Any = dict(given)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set takes path=value, such as optimizer.lr=1e-3; got {assignment!r}")
        value = parse(text, name=f"the value of --set {assignment}")
        result = placed(result, path.strip().split("."), value, assignment)
    return result  # type: ignore[no-any-return]


def placed(here: Any, path: list[str], value: Any, assignment: str) -> Any:
    """`here` with `value` at `path`; containers on the way are copied, missing mappings made.

    Args:
        assignment: what errors call it.

    Raises:
        ConfigError: an index the list does not have, a path through a number, or one that is too long.
    """
    if len(path) > DEEPEST + 1:
        raise ConfigError(f"--set {assignment[:40]}...: no field lies deeper than {DEEPEST} dots")
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(here, list):
        if not re.fullmatch("[0-9]{1,9}", key) or int(key) >= len(here):
            raise ConfigError(
                f"--set {assignment}: the list has {len(here)} entries, to be named 0 to {len(here) - 1}, not {key!r}"
            )
        index = int(key)
        return [*here[:index], placed(here[index], rest, value, assignment), *here[index + 1 :]]
    if here is None:
        here = {}
    if isinstance(here, str):
        here = {"kind": here}
    if not isinstance(here, Mapping):
        raise ConfigError(f"--set {assignment}: {here!r} has no field {key!r}")
    return {**here, key: placed(here.get(key), rest, value, assignment)}
