"""A study's numbers for one metric as text, CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hdet.app.study.statistics import Levels, NamedDifference, PairedDifference, Row

LATEX = {
    **{character: "\\" + character for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "|": r"\textbar{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
}


@dataclass(frozen=True)
class Table:
    """What is shown of one metric.

    Attributes:
        metric: its name.
        rows: a line each.
        contrasts: what the study tests; empty where the comparisons with the baseline are tested.
        level: 1 - level is the confidence of the intervals.
        remarks: sentences to stand below.
    """

    metric: str
    rows: Sequence[Row]
    contrasts: Sequence[NamedDifference] = ()
    level: float = 0.05
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class _Part:
    """Lines of words under a header; the first `left` columns are aligned to the left."""

    header: list[str]
    body: list[list[str]]
    left: int


def as_csv(shown: Sequence[Row] | Sequence[NamedDifference]) -> str:
    """Every number of every row, or contrast, in full precision."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for one in shown:
        numbers = vars(one)
        if isinstance(one, Row):
            numbers = {**numbers, **vars(one.versus), "seeds": one.seeds}
        names = [name for name in numbers if name not in ("levels", "versus")]
        if one is shown[0]:
            writer.writerow([*_factors(one.levels), *names])
        writer.writerow([*_levels(one), *(numbers[name] for name in names)])
    return out.getvalue()


def as_text(table: Table) -> str:
    """Aligned columns; what the numbers mean stands below them."""
    blocks = []
    for part in _parts(table):
        lines = [[cell.replace("±", "+-") for cell in line] for line in [part.header, *part.body]]
        widths = [max(len(line[column]) for line in lines) for column in range(len(part.header))]
        shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        rule = "  ".join("-" * width for width in widths)
        blocks.append("\n".join([shown[0].rstrip(), rule, *(line.rstrip() for line in shown[1:])]))
    return "\n\n".join([*blocks, _note(table)]) + "\n"


def as_markdown(table: Table) -> str:
    """Pipe tables; what the numbers mean stands below them."""
    blocks = ["\n".join(pipe_table(part.header, part.body)) for part in _parts(table)]
    return "\n\n".join([*blocks, _note(table)]) + "\n"


def pipe_table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table.

    >>> pipe_table(["a"], [["1"], ["x|y"]])
    ['| a |', '| --- |', '| 1 |', '| x\\\\|y |']
    """
    lines = [header, ["---"] * len(header), *body]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def as_latex(table: Table) -> str:
    """Tabulars for the package booktabs, their note as a comment."""
    blocks = ["\n".join(f"% {line}" for line in _note(table).splitlines())]
    for part in _parts(table):
        columns = "l" * part.left + "r" * (len(part.header) - part.left)
        header, *body = (" & ".join(_escaped(cell) for cell in line) + r" \\" for line in [part.header, *part.body])
        ruled = [r"\toprule", header, r"\midrule", *body, r"\bottomrule"]
        blocks.append("\n".join([rf"\begin{{tabular}}{{{columns}}}", *ruled, r"\end{tabular}"]))
    return "\n".join(blocks) + "\n"


def _parts(table: Table) -> list[_Part]:
    """The rows, and below them the contrasts where there are any."""
    rows, found = table.rows, []
    if rows:
        any_compared = any(row.is_baseline or row.versus.seeds for row in rows)
        timed = any(not math.isnan(row.seconds) for row in rows)
        factors = _factors(rows[0].levels)
        columns = ["difference", "pairs", *(["p", "p (Holm)"] if not table.contrasts else [])] if any_compared else []
        body = []
        for row in rows:
            line = [*_levels(row), _counted(row.count, row.seeds, row.failed), _measured(row.mean, row.stderr)]
            line += [_measured(row.seconds, math.nan, ".1f")] if timed else []
            compared = ["baseline"] if row.is_baseline else _compared(row.versus) if row.versus.seeds else []
            line += [*compared, "", "", "", ""][: len(columns)]
            body.append(line)
        header = [*factors, "seeds", table.metric, *(["seconds"] if timed else []), *columns]
        found.append(_Part(header, body, left=len(factors)))
    if table.contrasts:
        factors = _factors(table.contrasts[0].levels)
        header = [*factors, "contrast", f"difference in {table.metric}", "pairs", "p", "p (Holm)"]
        body = [[*_levels(one), f"{one.first} - {one.second}", *_compared(one)] for one in table.contrasts]
        found.append(_Part(header, body, left=len(factors) + 1))
    return found


def _compared(one: PairedDifference) -> list[str]:
    difference = _measured(one.difference, one.interval, "+.4f")
    return [difference, _counted(one.pairs, one.seeds, one.diverged), _p(one.p), _p(one.adjusted)]


def _counted(count: int, of: int, diverged: int) -> str:
    text = str(count) if count == of else f"{count} of {of}"
    return f"{text} ({diverged} diverged)" if diverged else text


def _measured(mean: float, error: float, form: str = ".4f") -> str:
    """A mean, with its error where that is known.

    >>> _measured(1.5, math.nan), _measured(-1.5, 0.25, "+.4f"), _measured(math.nan, math.nan)
    ('1.5000', '-1.5000 ± 0.2500', '-')
    """
    shown = "-" if math.isnan(mean) else f"{mean:{form}}"
    return shown if math.isnan(error) else f"{shown} ± {error:.4f}"


def _p(value: float) -> str:
    return "<0.0001" if value < 1e-4 else _measured(value, math.nan)


def _note(table: Table) -> str:
    sentences = ["Mean and standard error over the seeds that did not diverge."]
    compared: Sequence[PairedDifference] = table.contrasts or [row.versus for row in table.rows if row.versus.seeds]
    if compared:
        many = "s" if len(compared) > 1 else ""
        what = f"named contrast{many}" if table.contrasts else f"comparison{many} with the baseline"
        sentences.append(
            f"Differences are paired by seed, with a {100 * (1 - table.level):g} % confidence interval each, not "
            f"corrected."
        )
        if any(not math.isnan(one.p) for one in compared):
            sentences.append(f"p of a paired t-test, and after Holm's correction for the {len(compared)} {what}.")
    if any(math.isnan(one.p) and one.seeds > 1 for one in compared):
        sentences.append(
            "No test where a pair diverged or is missing (the seeds left were selected by the outcome), or where all "
            "pairs differ by the same amount."
        )
    lines = [" ".join(sentences)]
    unfinished = sum(row.seeds - row.count - row.failed for row in table.rows)
    if unfinished:
        lines.append(
            f"Incomplete: {unfinished} of {sum(row.seeds for row in table.rows)} cells have no {table.metric} yet."
        )
    return "\n".join([*lines, *table.remarks])


def _factors(levels: Levels) -> list[str]:
    return [factor for factor, _ in levels]


def _levels(shown: Row | NamedDifference) -> list[str]:
    return [level for _, level in shown.levels]


def _escaped(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)
