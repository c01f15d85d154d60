"""Which laws a declaration has to keep, and keeping it to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hdet.controllers import Controller, Rule, Veto
from hdet.controllers.estimators import Estimator
from hdet.errors import ConfigError
from hdet.evidence import Evidence
from hdet.hparams import Design, Knob, Schedule, Space, Spread
from hdet.merging import Merge
from hdet.spec import Spec
from hdet.testing import (
    controllers,
    declarations,
    designs,
    estimators,
    evidences,
    knobs,
    merges,
    parts,
    schedules,
    spaces,
    spreads,
    window_rules,
)
from hdet.testing.ground import Ground
from hdet.testing.law import Law, laws_of, same_generators
from hdet.windows import Windows

Test = Callable[[Any], None]

CALCULATORS: dict[type[Spec], Sequence[Test]] = {
    Space: laws_of(spaces),
    Spread: laws_of(spreads),
    Design: laws_of(designs),
    Schedule: laws_of(schedules),
    Windows: laws_of(window_rules),
    Estimator: laws_of(estimators),
    Controller: laws_of(controllers),
    Rule: parts.RULE_LAWS,
    Veto: parts.VETO_LAWS,
}
"""Families of pure functions."""


def laws(spec: Spec, *, ground: Ground | None = None, knob: Knob | None = None) -> list[Law]:
    """The laws that a declaration has to keep: those of every declaration, and its family's.

    Args:
        spec: any registered declaration. Its fields are kept, so check each variant that behaves differently.
        ground: for knobs, evidence and merges, the model they are tried on; by default a small built-in one.
        knob: for evidence, the knob it is asked about; by default the first built-in one that it accepts.

    Raises:
        ConfigError: what was given is no declaration.

    >>> import hdet.testing
    >>> [law.name for law in hdet.testing.laws(hdet.controllers.Hold())][:3]
    ['reads_back_equal', 'frozen', 'bad_fields_are_refused']
    """
    if not isinstance(spec, Spec):
        raise ConfigError(
            f"laws are for instances of Knob, Spread, Controller and the other families; got {spec!r}"
            + ("; make an instance of it" if isinstance(spec, type) else "")
        )
    found = [_law(spec, test) for test in laws_of(declarations)]
    for root, tests in CALCULATORS.items():
        if isinstance(spec, root):
            found += [_law(spec, test, pure=True) for test in tests]
    if isinstance(spec, Knob):
        found += [_law(spec, test, ground) for test in laws_of(knobs)]
    if isinstance(spec, Evidence):
        found += [_law(spec, test, ground, knob) for test in laws_of(evidences)]
    if isinstance(spec, Merge):
        found += [_law(spec, test, ground) for test in laws_of(merges)]
    return found


def check(spec: Spec, *, ground: Ground | None = None, knob: Knob | None = None) -> None:
    """Keep a declaration to all its laws; the arguments are those of `laws`.

    Raises:
        LawError: naming the first law that does not hold and the input that shows it.

    >>> import hdet.testing
    >>> hdet.testing.check(hdet.spreads.TwoLevel(0.5))
    """
    for law in laws(spec, ground=ground, knob=knob):
        law()


def _law(spec: Spec, test: Callable[..., None], *given: object, pure: bool = False) -> Law:
    run = partial(test, spec, *given)
    statement = (test.__doc__ or "").strip().split("\n")[0].rstrip(".")
    return Law(spec, test.__name__, statement, partial(_with_generators_left, run) if pure else run)


def _with_generators_left(run: Callable[[], None]) -> None:
    with same_generators("it"):
        run()
