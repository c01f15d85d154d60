"""For the site's build: examples in docstrings become fenced code, which Markdown would take for quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)", re.MULTILINE)


class DoctestBlocks(griffe.Extension):
    """Fences each example: a line that begins with >>>, and what follows up to an empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)
