"""Declarations: frozen pydantic models that are the same object in Python, in YAML and in a checkpoint.

A *family* is an abstract root such as `Space` or `Controller`; its members are concrete classes entered by
`@register`. A field typed with the root accepts a member, a mapping with a `kind` key, or the bare kind:

>>> from hdet.hparams import TwoLevel, Spread
>>> Spread.from_dict({"kind": "two_level", "width": 0.2}) == TwoLevel(0.2)
True

Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from inspect import isabstract
from typing import Any, ClassVar, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticSerializationError, core_schema

from hdet.errors import ConfigError

__all__ = ["Spec", "register"]

MOST_NAMED = 8
"""Names in a message."""

MOST_SHOWN = 100
"""Characters of what was given that a message repeats; a whole declaration that has more is left out."""

S = TypeVar("S", bound="Spec")
C = TypeVar("C", bound="type[Spec]")


class Spec(BaseModel):
    """A frozen declaration. Fields are bounded, unknown keys refused, errors are `ConfigError`.

    Subclass with `family="..."` to found a family (the name is used in messages and as the entry point group
    `hdet.<family>s`). A field declared with `Field(kw_only=False)` may also be given by position.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    kind: ClassVar[str] = ""
    family: ClassVar[str] = ""
    _root: ClassVar[type[Spec]]
    _members: ClassVar[dict[str, type[Spec]]]

    def __init_subclass__(cls, *, family: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if family is not None:
            cls.family = family
            cls._root = cls
            cls._members = {}

    def __init__(self, *args: Any, **fields: Any) -> None:
        positional = [name for name, field in type(self).model_fields.items() if field.kw_only is False]
        if len(args) > len(positional):
            others = [name for name in type(self).model_fields if name not in positional]
            by_name = f"; give the others by name: {others}" if others else ""
            raise ConfigError(
                f"{type(self).__name__} takes at most {len(positional)} positional arguments {positional}, "
                f"got {len(args)}{by_name}"
            )
        for name, value in zip(positional, args, strict=False):
            if name in fields:
                raise ConfigError(f"{type(self).__name__} got {name!r} twice")
            fields[name] = value
        for name, value in fields.items():
            if isinstance(value, bool) and name in type(self).model_fields:
                _refuse_bool(type(self), name, value)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from _cause(error)

    def __str__(self) -> str:
        return repr(self)  # pydantic's own leaves out what it is

    @classmethod
    def from_dict(cls: type[S], given: object) -> S:
        """Build from a mapping with a `kind` key, a bare kind, or an instance (returned as it is).

        Raises:
            ConfigError: naming the field, the value and what is allowed.
        """
        if isinstance(given, cls):
            return given
        if not cls.family:
            fields = given
            member: type[Spec] = cls
        else:
            if isinstance(given, str):
                given = {"kind": given}
            if not isinstance(given, Mapping) or "kind" not in given:
                raise ConfigError(
                    f"a {cls.family} is a {cls.__name__}, a mapping with a 'kind' key, or one of "
                    f"{sorted(members(cls))}; got {given!r}"
                )
            member = lookup(cls, str(given["kind"]))
            if not issubclass(member, cls):
                raise ConfigError(f"the {cls.family} {given['kind']!r} is a {member.__name__}, no {cls.__name__}")
            fields = {key: value for key, value in given.items() if key != "kind"}
        if not isinstance(fields, Mapping):
            raise ConfigError(f"a {member.__name__} is a mapping of {sorted(member.model_fields)}; got {fields!r}")
        return cast(S, member(**{str(key): value for key, value in fields.items()}))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and mappings, from which `from_dict` builds an equal object.

        Raises:
            ConfigError: the class was never registered, so that no one could read it back.
        """
        if self.family and not _same(self._members.get(self.kind), type(self)):
            raise ConfigError(
                f"{type(self).__qualname__} cannot be written down: it is not registered as a {self.family}; decorate "
                f"it with @hdet.spec.register"
            )
        try:
            fields = self.model_dump(mode="json")
        except PydanticSerializationError as error:
            raise _refused_within(error) from None
        return {"kind": self.kind, **fields} if self.family else fields

    def replace(self: S, **fields: Any) -> S:
        """A copy with some fields changed, validated anew."""
        own = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**own, **fields})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls.__dict__.get("_root") is not cls and not isabstract(cls):
            return handler(source)
        return core_schema.no_info_plain_validator_function(
            cls.from_dict, serialization=core_schema.plain_serializer_function_ser_schema(lambda spec: spec.to_dict())
        )


def register(cls: C) -> C:
    """Enter a concrete class into its family, under `kind` or the class's name in snake case.

    Raises:
        ConfigError: the class founds no family, or another class has the name.
    """
    if not isinstance(cls, type):
        raise ConfigError(f"register takes a class, got {cls!r}")
    if not (issubclass(cls, Spec) and cls.family):
        raise ConfigError(f"{cls.__name__} belongs to no family; derive it from Knob, Spread, Controller, ...")
    if "kind" not in cls.__dict__:
        cls.kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
    holder = cls._members.get(cls.kind)
    if holder is not None and not _same(holder, cls):
        raise ConfigError(
            f"{cls.family} {cls.kind!r} is already {holder.__module__}.{holder.__qualname__}; "
            f"set another `kind` on {cls.__qualname__}"
        )
    cls._members[cls.kind] = cls
    return cls


def _same(one: type | None, other: type) -> bool:
    """Whether both are the class of one place in the source; a notebook's cell defines it anew at each run."""
    return one is not None and (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def members(root: type[Spec]) -> dict[str, type[Spec]]:
    """The members of a family by kind, plugins (entry point group `hdet.<family>s`) included."""
    for point in entry_points(group=f"hdet.{root.family.replace(' ', '_')}s"):
        if point.name not in root._members:
            register(point.load())
    return dict(root._members)


def lookup(root: type[Spec], kind: str) -> type[Spec]:
    """The member of a family named `kind`.

    Raises:
        ConfigError: listing the kinds there are.
    """
    known = root._members if kind in root._members else members(root)
    if kind not in known:
        raise ConfigError(f"no {root.family} is called {kind!r}; there are {sorted(known)}{meant(kind, known)}")
    return known[kind]


def meant(name: str, known: Iterable[str]) -> str:
    """What a message says of a name that is not known: the one that comes near it, if one does.

    >>> meant("learning_rat", ["dropout", "learning_rate"])
    "; did you mean 'learning_rate'?"
    >>> meant("colour", ["dropout"])
    ''
    """
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def some(names: Sequence[str]) -> str:
    """What a message says of names that may be many: the first of them, and how many more there are.

    >>> some(["dropout", "learning_rate"])
    "'dropout', 'learning_rate'"
    >>> some("abcdefghij")
    "'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h' and 2 more"
    """
    shown = ", ".join(map(repr, names[:MOST_NAMED]))
    return shown + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def briefly(value: object, beside: object = None) -> str:
    """What a message shows of a plain value in which lists may be long: the first of each, and how many more there are.

    Args:
        beside: what it is compared with; of a list that differs from that further on, what it has from there.

    >>> briefly({"kind": "replay", "values": [0.5] * 100})
    "{'kind': 'replay', 'values': [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5 and 92 more]}"
    >>> briefly([0.5] * 98 + [0.25, 0.0], [0.5] * 100)
    '[98 alike, 0.25, 0.0]'
    """
    if isinstance(value, Mapping):
        others = beside if isinstance(beside, Mapping) else {}
        return "{" + ", ".join(f"{key!r}: {briefly(own, others.get(key))}" for key, own in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        pairs: Iterable[Any] = zip(value, beside, strict=False) if isinstance(beside, (list, tuple)) else ()
        differ = next((number for number, (own, other) in enumerate(pairs) if own != other), 0)
        start = differ if differ >= MOST_NAMED else 0
        before = f"{start} alike, " if start else ""
        left = len(value) - start - MOST_NAMED
        more = f" and {left} more" if left > 0 else ""
        return f"[{before}{', '.join(map(briefly, value[start : start + MOST_NAMED]))}{more}]"
    return repr(value)


def _refuse_bool(spec: type[Spec], name: str, value: bool) -> None:
    """YAML reads `yes` and `on` as true, which Python would take for 1."""
    held = _types_in(spec.model_fields[name].annotation)
    if held & {int, float} and not held & {bool, Any, object}:
        raise ConfigError(f"{spec.kind or spec.__name__}: {name}: it takes a number, no true or false (given: {value})")


def _types_in(annotation: Any) -> set[Any]:
    """What an annotation is made of."""
    return {annotation}.union(*map(_types_in, get_args(annotation)))


def _explain(spec: type[Spec], error: ValidationError) -> str:
    lines, listed = [], False
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            near = meant(str(item["loc"][-1]), spec.model_fields)
            there = f"no such field; there are {sorted(spec.model_fields)}"
            message, listed = f"{'no such field' if listed else there}{near}", True
        told = item["type"] == "missing" or isinstance(item.get("ctx", {}).get("error"), ConfigError)
        given = repr(item["input"])
        if len(given) > MOST_SHOWN:
            told, given = told or not item["loc"], f"{given[:MOST_SHOWN]}..."
        lines.append(f"{where + ': ' if where else ''}{message}{'' if told else f' (given: {given})'}")
    return f"{spec.kind or spec.__name__}: " + "; ".join(lines)


def _refused_within(error: PydanticSerializationError) -> Exception:
    """What a declaration within this one said as it was to be written down."""
    return error.__cause__ if isinstance(error.__cause__, ConfigError) else error


def _cause(error: ValidationError) -> BaseException | None:
    """What a validator's own error came from, such as the failure of a user's module."""
    raised = (item.get("ctx", {}).get("error") for item in error.errors(include_url=False))
    return next((one.__cause__ for one in raised if isinstance(one, Exception)), None)
