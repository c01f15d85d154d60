"""Text for a terminal."""

from __future__ import annotations


def one_line(text: str) -> str:
    """A text that a terminal shows on one line and does not obey.

    >>> one_line("no knob\\n  'a\\x1b[2J'")
    "no knob 'a\\\\x1b[2J'"
    """
    words = " ".join(text.split())
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in words)
