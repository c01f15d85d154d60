"""A study's rows as text, CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import astuple, fields

from hdet.study.statistics import Row


def as_csv(rows: Sequence[Row]) -> str:
    """Every number of every row, in full precision."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [field.name for field in fields(Row)][1:]
    writer.writerow([*(factor for factor, _ in rows[0].levels), *names] if rows else names)
    for row in rows:
        writer.writerow([*(level for _, level in row.levels), *astuple(row)[1:]])
    return out.getvalue()


def as_text(rows: Sequence[Row], metric: str) -> str:
    """Aligned columns; what the numbers mean stands below them."""
    header, body = _cells(rows, metric, plus_minus="+-")
    widths = [max(len(line[column]) for line in [header, *body]) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *body]]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0].rstrip(), rule, *(line.rstrip() for line in lines[1:]), "", _note(rows)]) + "\n"


def as_markdown(rows: Sequence[Row], metric: str) -> str:
    """A pipe table; what the numbers mean stands below it."""
    header, body = _cells(rows, metric, plus_minus="±")
    lines = [header, ["---"] * len(header), *body]
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{table}\n\n{_note(rows)}\n"


def as_latex(rows: Sequence[Row], metric: str) -> str:
    """A tabular for the package booktabs, its note as a comment."""
    header, body = _cells(rows, metric, plus_minus=r"$\pm$")
    factors = len(rows[0].levels) if rows else 0
    columns = "l" * factors + "r" * (len(header) - factors)
    lines = [[cell if r"$\pm$" in cell else _escaped(cell) for cell in line] for line in [header, *body]]
    inner = [" & ".join(line) + r" \\" for line in lines]
    return "\n".join(
        [
            *(f"% {line}" for line in _note(rows).splitlines()),
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            inner[0],
            r"\midrule",
            *inner[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _cells(rows: Sequence[Row], metric: str, plus_minus: str) -> tuple[list[str], list[list[str]]]:
    factors = [factor for factor, _ in rows[0].levels] if rows else []
    compared = any(row.is_baseline or row.pairs for row in rows)
    header = [*factors, "seeds", metric, *(["difference", "p", "p (Holm)"] if compared else [])]
    body = []
    for row in rows:
        seeds = f"{row.count}" if not row.failed else f"{row.count} (+{row.failed} diverged)"
        mean = "-" if math.isnan(row.mean) else f"{row.mean:.4f}"
        if not math.isnan(row.stderr):
            mean += f" {plus_minus} {row.stderr:.4f}"
        line = [*(level for _, level in row.levels), seeds, mean]
        if compared:
            line += _comparison(row, plus_minus)
        body.append(line)
    return header, body


def _comparison(row: Row, plus_minus: str) -> list[str]:
    if row.is_baseline:
        return ["baseline", "", ""]
    if math.isnan(row.difference):
        return ["", "", ""]
    difference = f"{row.difference:+.4f}"
    if math.isnan(row.interval):
        return [difference, "", ""]
    return [f"{difference} {plus_minus} {row.interval:.4f}", _p(row.p), _p(row.adjusted)]


def _p(value: float) -> str:
    return "<0.0001" if value < 1e-4 else f"{value:.4f}"


def _note(rows: Sequence[Row]) -> str:
    note = "Mean and standard error over seeds."
    tests = sum(not math.isnan(row.p) for row in rows)
    if tests:
        note += (
            f" Differences are paired by seed with their confidence interval; p of a paired t-test, and "
            f"after Holm's correction for the {tests} comparisons here."
        )
    return note


def _escaped(text: str) -> str:
    for character in "&%$#_{}":
        text = text.replace(character, "\\" + character)
    return text.replace("<", "$<$").replace("+-", r"$\pm$")
