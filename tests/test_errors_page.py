"""docs/errors.md: each error has its line, and each message it quotes is made by the code and asked for by a test."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import hdet
from hdet.errors import HdetError

ROOT = Path(hdet.__file__).parent.parent
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
COMPUTED = "\0"
"""Stands in a message for what is filled in when it is raised."""

RUN = 4
"""Words on end by which a test's string asks for a message, if no other message has them."""

SHORT = 3
"""Words that will do where the string has no more."""


def test_every_error_is_explained() -> None:
    for name, value in vars(hdet.errors).items():
        if isinstance(value, type) and issubclass(value, HdetError):
            assert f"`{name}`" in PAGE, name


def test_quoted_messages_are_those_of_the_code() -> None:
    """What the page quotes stands in one string of the source, in these words and in this order."""
    quoted = quotations()
    assert len(quoted) > 190
    assert [message for message in quoted if not made_by(message)] == []


def test_every_mistake_of_a_loop_is_on_the_page() -> None:
    """Each `StepError` that is raised, and each warning; not where a function is handed the message."""
    said = messages()[1]
    assert len(said) > 50
    assert said - set().union(*map(made_by, quotations())) == set()


def test_each_quoted_message_is_asked_for_by_a_test() -> None:
    """A test that passes and asks for words which one message alone holds has had that message made.

    It asks in a string: in `match=`, in what it compares an error's text with, or in a table that these are taken from.
    """
    asked = {
        run
        for path in (ROOT / "tests").rglob("*.py")
        for text in strings(ast.parse(path.read_text(encoding="utf-8")))
        for words in parts(re.sub(r"\\(\W)", r"\1", text))  # a backslash takes a character as it is
        for run in runs(words, max(SHORT, min(RUN, len(words))))
    }
    holders = defaultdict(set)
    for message in messages()[0]:
        for words in parts(message):
            for run in {*runs(words, SHORT), *runs(words, RUN)} & asked:
                holders[run].add(message)
    makers = {quoted: made_by(quoted) for quoted in quotations()}
    assert [quoted for quoted, own in makers.items() if not any(held <= own for held in holders.values())] == []


def quotations() -> list[str]:
    """What stands between backticks in the first column of the page's tables of messages."""
    tables = re.findall(r"^\| message \(in part\).*\n\|[-| ]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [quoted for table in tables for row in table.splitlines() for quoted in row.split("|")[1].split("`")[1::2]]


@cache
def messages() -> tuple[set[str], set[str]]:
    """The package's strings that have words, docstrings apart; and what it warns of, or raises as a `StepError`."""
    texts, said = set(), set()
    for path in (ROOT / "hdet").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts |= {text for text in strings(tree) if " " in text}
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
            if name == ("StepError" if isinstance(node, ast.Raise) else "warn"):
                said |= {text for text in map(literal, call.args) if text is not None}
    return texts, said


@cache
def made_by(quoted: str) -> set[str]:
    """The strings of the package that have all parts of a quotation, in their order."""
    parts = [part.strip() for part in quoted.split("...") if part.strip()]
    pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return {message for message in messages()[0] if parts[0] in message and pattern.search(message)}


def parts(text: str) -> Iterator[list[str]]:
    """The words of a text between what is computed, or matches anything."""
    for part in re.split(rf"{COMPUTED}|\.\*|\.\+", text):
        yield [word for word in (word.strip(".,:;'\"") for word in part.split()) if word]


def runs(words: Sequence[str], length: int) -> Iterator[str]:
    """So many words on end, from each place."""
    for first in range(len(words) - length + 1):
        yield " ".join(words[first : first + length])


def literal(node: ast.AST) -> str | None:
    """A string as it is written; `COMPUTED` stands for what an f-string fills in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else COMPUTED for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def strings(tree: ast.Module) -> Iterator[str]:
    """The strings of a file, docstrings apart."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        text = literal(node)
        if text is not None:
            yield text
        if isinstance(node, ast.JoinedStr):
            waiting += [part for part in node.values if not isinstance(part, ast.Constant)]
        elif text is None:
            waiting += ast.iter_child_nodes(node)
