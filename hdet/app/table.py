"""Tables for a terminal."""

from __future__ import annotations

from rich.table import Column, Table


def whole_table(*headers: str, title: str | None = None) -> Table:
    """A table that a narrow terminal breaks within its cells and never cuts: a number's first digits alone mislead."""
    return Table(*(Column(header, overflow="fold") for header in headers), title=title)
