"""What to set next time, as YAML and as Python to copy."""

from __future__ import annotations

import json

from hdet.digits import four_digits
from hdet.report.verdict import NO_PROGRESS, Verdict

TRUSTED = ("clear", "partly clear")


def advised(verdict: Verdict) -> tuple[float | None, str]:
    """The value to set next time, and why: the learned one where the evidence is clear, else the one that was set.

    What windows asked for after the last move is said too, if it is clear: the learned value is not where that ends.

    >>> from hdet.report.verdict import Moves
    >>> up = Moves(3, 10, 30, 1.5, {"averaged weights": 6.0})
    >>> advised(Verdict("learning_rate", 1e-3, 4.5e-3, up, None, 1.0, 0.2, 5, 90, 100))
    (0.0045, 'learned; it was set to 0.001')
    >>> advised(Verdict("learning_rate", 1e-3, 4.5e-3, up, None, 1.0, 3.0, 5, 90, 100))
    (0.0045, 'learned; it was set to 0.001, and windows after the last move ask for less')
    >>> advised(Verdict("learning_rate", 1e-3, 5e-4, up, None, 1.0, 0.2, 5, 90, 100))
    (0.001, 'as it was set; it was entered further down, and went up from there')
    """
    if verdict.start is None or verdict.end is None:
        return None, "not recorded in this history"
    if verdict.trust == "not moved":
        return verdict.start, "as it was set; nothing moved it"
    if verdict.trust == "by the guard":
        return verdict.start, f"as it was set; {'; '.join(retreat.words for retreat in verdict.retreats)}"
    if verdict.trust in TRUSTED and verdict.entered_beyond:
        entered, went = ("down", "up") if verdict.end < verdict.start else ("up", "down")
        return verdict.start, f"as it was set; it was entered further {entered}, and went {went} from there"
    if verdict.trust in TRUSTED:
        still = f", and windows after the last move ask for {verdict.wanted}" if verdict.wanted else ""
        return verdict.end, f"learned; it was set to {four_digits(verdict.start)}{still}"
    if verdict.trust == "no progress":
        return verdict.start, f"as it was set, which says nothing for it: {NO_PROGRESS}"
    return verdict.start, f"as it was set; the move to {four_digits(verdict.end)} is {verdict.trust}"


def as_yaml(verdicts: list[Verdict]) -> str:
    """A mapping from knob to value; a value with a schedule is its peak."""
    return "".join(f"{json.dumps(knob)}: {value}  # {why}\n" for knob, value, why in _advised(verdicts))


def as_python(verdicts: list[Verdict]) -> str:
    """The same as a dictionary."""
    lines = [f"    {json.dumps(knob)}: {value},  # {why}" for knob, value, why in _advised(verdicts)]
    return "\n".join(["settings = {", *lines, "}"]) + "\n"


def _advised(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    """Knob, value in few digits, and why."""
    found = [(one.knob, *advised(one)) for one in verdicts]
    return [(knob, yaml_number(four_digits(value)), why) for knob, value, why in found if value is not None]


def yaml_number(digits: str) -> str:
    """A number as YAML 1.1 reads it: `1e-05` would be a string there.

    >>> [yaml_number(digits) for digits in ("0.008191", "1e-05", "0")]
    ['0.008191', '1.0e-05', '0.0']
    """
    mantissa, e, exponent = digits.partition("e")
    return (mantissa if "." in mantissa else f"{mantissa}.0") + e + exponent
