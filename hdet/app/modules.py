"""A user's own modules, by the names that a declaration gives."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from hdet.errors import ConfigError


def imported(name: str, *, asked_by: str) -> ModuleType:
    """The module of a dotted name; messages call the field that names it `asked_by`."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{asked_by}: {name!r} is no name of a module; give one such as my_package.knobs")
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{asked_by}: there is no module {error.name!r}; start hdet in the folder that holds it, or install it"
        ) from None
    except Exception as error:  # a user's module can raise anything
        raise ConfigError(
            f"{asked_by}: importing {name!r} raised {type(error).__name__}: {error}; --debug shows where"
        ) from error
