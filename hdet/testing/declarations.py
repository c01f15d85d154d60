"""The laws of every declaration."""

from __future__ import annotations

import io
import json
import math
from contextlib import suppress
from typing import Any

import torch

from hdet.errors import MissingExtraError
from hdet.spec import Spec
from hdet.testing.law import broken, refused, require


def reads_back_equal(spec: Spec) -> None:
    """Written as a mapping, as JSON, as YAML and in a checkpoint it reads back equal."""
    root = spec._root if spec.family else type(spec)
    plain = spec.to_dict()
    texts = [("to_dict", plain), ("JSON", json.loads(json.dumps(plain, allow_nan=False)))]
    checkpoint = io.BytesIO()
    torch.save(plain, checkpoint)
    checkpoint.seek(0)
    texts.append(("a checkpoint", torch.load(checkpoint, weights_only=True)))
    from hdet import document  # here, because the suite itself needs no YAML

    with suppress(MissingExtraError):  # JSON has shown nearly as much
        texts.append(("YAML", document.parse(document.dump(spec), name="the declaration")))
    for form, given in texts:
        again = root.from_dict(given)
        require(type(again) is type(spec) and again == spec, f"as {form} it became {again!r}")


def frozen(spec: Spec) -> None:
    """No field can be set, and equal ones hash alike, so that it can be shared and be a key."""
    require(hash(spec) == hash(spec.replace()), "an equal copy has another hash")
    for name in type(spec).model_fields:
        held = getattr(spec, name)
        try:
            setattr(spec, name, None if held is not None else 0)
        except Exception:
            continue
        broken(f"the field {name!r} was set from {held!r} to {getattr(spec, name)!r}")


def bad_fields_are_refused(spec: Spec) -> None:
    """An unknown field, an object that is no number, and a number that is none are each a ConfigError."""
    refused(lambda: spec.replace(no_such_field=1), "an unknown field")
    for name, field in type(spec).model_fields.items():
        if field.annotation is not Any:
            refused(lambda name=name: spec.replace(**{name: object()}), f"{name}=object()")  # type: ignore[misc]
        if isinstance(getattr(spec, name), float):
            refused(lambda name=name: spec.replace(**{name: math.nan}), f"{name}=nan")  # type: ignore[misc]
