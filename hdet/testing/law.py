"""A law: one property that every member of a family has, as something that can be called."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isfunction
from types import ModuleType
from typing import NoReturn

import numpy as np
import torch
from torch import nn

from hdet.errors import ConfigError, HdetError
from hdet.spec import Spec


class LawError(HdetError, AssertionError):
    """A declaration does not keep a law of its family; the message has both, and the input that shows it."""


@dataclass(frozen=True)
class Law:
    """One law, for one declaration. Call it to put it to the test; `str` of it is a test's id.

    Attributes:
        spec: the declaration.
        name: of the law.
        statement: the law in a sentence.
        test: raises where it is broken.

    >>> import hdet.testing
    >>> law = hdet.testing.laws(hdet.spreads.TwoLevel(0.1))[-1]
    >>> print(law)
    two_level-a_wider_spread_is_the_same_spread_scaled
    """

    spec: Spec
    name: str
    statement: str
    test: Callable[[], None]

    def __call__(self) -> None:
        """Put the law to the test.

        Raises:
            LawError: it does not hold, or the test could not be finished.
        """
        try:
            self.test()
        except Exception as error:
            detail = str(error) if isinstance(error, BreachError) else f"{type(error).__name__}: {error}"
            raise LawError(f"{self.spec!r} breaks the law {self.name!r} ({self.statement}): {detail}") from error

    def __str__(self) -> str:
        return f"{self.spec.kind or type(self.spec).__name__}-{self.name}"


def laws_of(module: ModuleType) -> list[Callable[..., None]]:
    """The laws of a family: the public functions of its module, in their order."""
    own = [value for name, value in vars(module).items() if isfunction(value) and not name.startswith("_")]
    return [function for function in own if function.__module__ == module.__name__]


class BreachError(Exception):
    """What shows that a law is broken: the input, what came out, what should have."""


def broken(detail: str) -> NoReturn:
    """The law under test does not hold."""
    raise BreachError(detail)


def require(holds: bool | np.bool_, detail: str) -> None:
    """Go on if it holds; `detail` has the input and what came of it."""
    if not holds:
        broken(detail)


def refused(attempt: Callable[[], object], detail: str) -> None:
    """Go on if the attempt raises a `ConfigError`."""
    try:
        attempt()
    except ConfigError:
        return
    except Exception as error:
        broken(f"{detail} raised {type(error).__name__} ({error}), which is no ConfigError")
    broken(f"{detail} was accepted")


def differing(one: nn.Module, other: nn.Module) -> str | None:
    """The first parameter or buffer in which two models differ by a bit."""
    held = other.state_dict()
    return next((name for name, value in one.state_dict().items() if not torch.equal(value, held[name])), None)


def require_same_model(one: nn.Module, other: nn.Module, when: str) -> None:
    """Go on if two models hold the same parameters and buffers, bit for bit."""
    name = differing(one, other)
    require(name is None, f"{name} {when}")


@contextmanager
def same_generators(what: str) -> Iterator[None]:
    """The global generators of Python, NumPy and torch stand after the block where they stood before."""
    before = (random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state())
    yield
    after = (random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state())
    require(before[0] == after[0], f"{what} used or seeded Python's global generator")
    require(pickle.dumps(before[1]) == pickle.dumps(after[1]), f"{what} used or seeded NumPy's global generator")
    require(torch.equal(before[2], after[2]), f"{what} used or seeded torch's global generator")
