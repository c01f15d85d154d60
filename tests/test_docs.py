"""What the documentation shows runs, what it refers to exists, and its tables say what the code does.

A page's Python blocks are run from top to bottom in one namespace, in an empty folder: as a reader pastes them. Three
comments, which the rendered page does not show, steer this; each begins a line:

    <!-- run                  code until a line -->, run in its place: a check of the block above
    <!-- sketch: why -->      right before a block that cannot run here, as one that needs several processes
    <!-- needs: package -->   right before a block, shown or not, that runs only where the package is installed

A check sees what the blocks have defined, and what it defines itself is not there for them: a page shows its set-up.
"""

from __future__ import annotations

import doctest
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hdet
from hdet.app.run.config import RunConfig
from hdet.document import parse
from hdet.errors import ConfigError
from hdet.evidence import Evidence
from hdet.hparams.bound_knob import BoundKnob
from hdet.spec import Spec, members

ROOT = Path(hdet.__file__).parent.parent
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]

BLOCK = re.compile(
    r"(?P<sketch><!-- sketch: [^\n]*\S -->\n)?(?:<!-- needs: (?P<needs>\w+) -->\n)?"
    r"(?:^```(?P<language>\w+)\n(?P<shown>.*?)^```$|^<!-- run\n(?P<hidden>.*?)^-->$)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block, or a hidden one; `line` is where its text begins on the page.

    It is left out where it is a sketch, or needs a package that is not installed.
    """

    language: str
    text: str
    line: int
    hidden: bool
    left_out: bool


def blocks(page: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(page):
        group = "hidden" if match["hidden"] is not None else "shown"
        line = page.count("\n", 0, match.start(group)) + 1
        lacking = match["needs"] is not None and importlib.util.find_spec(match["needs"]) is None
        left_out = match["sketch"] is not None or lacking
        found.append(Block(match["language"] or "python", match[group], line, group == "hidden", left_out))
    return found


def run(path: Path, name: str) -> dict[str, Any]:
    """Run a page's Python; a failure's traceback names the page and its line."""
    module = ModuleType(name)
    checks: dict[str, Any] = {}
    sys.modules[name] = module
    try:
        for block in blocks(path.read_text(encoding="utf-8")):
            if block.language == "python" and not block.left_out:
                code = "\n" * (block.line - 1) + block.text
                checks.update(vars(module))
                exec(compile(code, str(path), "exec"), checks if block.hidden else vars(module))
    finally:
        del sys.modules[name]
    return vars(module)


def families(root: type[Spec] = Spec) -> Iterator[type[Spec]]:
    for cls in root.__subclasses__():
        if "_members" in cls.__dict__:
            yield cls
        yield from families(cls)


@pytest.fixture
def traceless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a page registers, imports, writes and draws stays its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    loaded = set(sys.modules)
    registered = {family: dict(family._members) for family in families()}
    with torch.random.fork_rng(devices=[]):
        yield
    for family in list(families()):
        family._members = registered.get(family, {})
    for name in set(sys.modules) - loaded:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.usefixtures("traceless")
@pytest.mark.parametrize("name", NAMES)
def test_every_python_block_runs(name: str) -> None:
    run(ROOT / name, "page_" + re.sub(r"\W", "_", name))


@pytest.mark.parametrize("name", NAMES)
def test_every_run_declared_in_yaml_is_valid(name: str) -> None:
    for block in blocks((ROOT / name).read_text(encoding="utf-8")):
        if block.language == "yaml":
            declared = parse(block.text, name=f"{name}, line {block.line}")
            if isinstance(declared, dict) and {"task", "steps"} <= declared.keys() and "imports" not in declared:
                config = RunConfig.from_dict(declared)
                assert RunConfig.from_dict(config.to_dict()) == config


def test_a_page_that_fails_says_where(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nnumber = 0\n```\n\n```python\none = 1\none / number\n```\n")
    with pytest.raises(ZeroDivisionError) as raised:
        run(page, "page")
    last = raised.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(page), 9)


def test_what_a_check_defines_is_there_for_checks_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\none = 1\n```\n\n<!-- run\ntwo = one + 1\n-->\n\n"
        "<!-- run\nassert two == 2\n-->\n\n```python\ntwo\n```\n"
    )
    with pytest.raises(NameError) as raised:
        run(page, "page")
    assert raised.traceback[-1].lineno + 1 == 14


def test_a_sketch_is_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- sketch: it cannot be run -->\n```python\n1 / 0\n```\n\n```yaml\na: 1\n```\n\n```python\none = 1\n```\n"
    )
    assert run(page, "page")["one"] == 1


def test_a_block_that_needs_what_is_not_installed_is_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- needs: no_such_package -->\n```python\n1 / 0\n```\n\n"
        "<!-- needs: no_such_package -->\n<!-- run\n1 / 0\n-->\n"
        "\n<!-- needs: torch -->\n```python\none = 1\n```\n"
    )
    assert run(page, "page")["one"] == 1


LINK = re.compile(r"\]\((?!https?://|mailto:|#)(?P<target>[^)#\s]+)(?:#(?P<part>[^)\s]+))?\)")
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)(?:::(?P<test>test_\w+))?`")
SOURCE = re.compile(r"`(?P<path>(?:hdet|tests|benchmarks|examples|studies)/[\w/.]+\.(?:py|yaml))`")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_linked_or_named_exists(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    for link in LINK.finditer(page):
        target = (ROOT / name).parent / link["target"]
        assert target.exists(), f"{name} links to {link['target']}"
        if link["part"]:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            assert link["part"] in anchors, f"{name} links to {link['target']}#{link['part']}; there are {anchors}"
    for source in SOURCE.finditer(page):
        assert (ROOT / source["path"]).exists(), f"{name} names {source['path']}"
    for named in TEST.finditer(page):
        text = (ROOT / named["file"]).read_text(encoding="utf-8")
        assert named["test"] is None or f"def {named['test']}(" in text, f"{name} names {named['test']}"


DOTTED = re.compile(r"(?<![\w./-])hdet(?:\.[A-Za-z_]\w*)+(?!\.?[\w-])")


@pytest.mark.parametrize("name", NAMES)
def test_every_dotted_name_is_there(name: str) -> None:
    """A module, what it holds, a field of a declaration, or a group of entry points."""
    groups = {f"hdet.{family.family.replace(' ', '_')}s" for family in families()}
    named = set(DOTTED.findall((ROOT / name).read_text(encoding="utf-8")))
    odd = sorted(dotted for dotted in named - groups if not resolves(dotted))
    assert not odd, f"{name} names {odd}"


def resolves(dotted: str) -> bool:
    found: Any = hdet
    here = "hdet"
    for part in dotted.split(".")[1:]:
        here = f"{here}.{part}"
        try:
            if hasattr(found, part):
                found = getattr(found, part)
            elif here in MODULES:
                found = importlib.import_module(here)
            else:
                return part in getattr(found, "model_fields", {})
        except hdet.errors.MissingExtraError:
            return is_in_source(part, dotted.removeprefix(here).split(".")[1:2])
    return True


def is_in_source(integration: str, names: list[str]) -> bool:
    """Whether an integration defines a name, where its framework is not installed to ask it."""
    source = (ROOT / "hdet" / "integrations" / f"{integration}.py").read_text(encoding="utf-8")
    return all(re.search(rf"^(class|def) {name}\b", source, re.MULTILINE) for name in names)


@pytest.mark.usefixtures("traceless")
@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md", "docs/attach.md"])
def test_the_first_example_of_a_page_runs_by_itself(name: str) -> None:
    """As a reader copies it, without what a comment hides."""
    text = (ROOT / name).read_text(encoding="utf-8")
    first = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert first is not None
    exec(compile(first[1], name, "exec"), {"__name__": "pasted"})


MODULES = sorted(
    module.name for module in pkgutil.walk_packages(hdet.__path__, "hdet.") if not module.name.endswith("__main__")
)


@pytest.mark.parametrize("name", ["hdet", *MODULES])
def test_docstring_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if not name.startswith("hdet.integrations") and not isinstance(error, hdet.errors.MissingExtraError):
            raise
        pytest.skip(f"{name} needs a package that is not installed: {error}")
    with torch.random.fork_rng(devices=[]):
        outcome = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert outcome.failed == 0, "the output above shows where"


def test_docstring_examples_are_found() -> None:
    """A finder that found nothing would pass everything."""
    found = doctest.DocTestFinder().find(importlib.import_module("hdet.hparams.space"))
    assert sum(len(test.examples) for test in found) > 5


KNOBS = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
REFERENCED = [
    name
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for name in re.findall("^::: (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
REFERENCE = {*REFERENCED, *(name.rpartition(".")[2] for name in REFERENCED)}
"""What the reference has an entry of, by its full name and its last part."""
LISTED = [
    "knob",
    "space",
    "spread",
    "design",
    "schedule",
    "evidence",
    "controller",
    "rule",
    "veto",
    "estimator",
    "window",
    "merge",
]


@pytest.mark.parametrize("family", LISTED)
def test_every_built_in_member_of_a_family_is_listed(family: str) -> None:
    root = next(cls for cls in families() if cls.family == family)
    for kind, member in members(root).items():
        # What studies control with is theirs, and known only once they are imported.
        if member.__module__.startswith("hdet.") and not member.__module__.startswith("hdet.app.study."):
            assert re.search(rf"`{member.__name__}[`(]", KNOBS), f"docs/knobs.md does not list the {family} {kind}"
            package = member.__module__.rpartition(".")[0]
            assert {member.__name__, package} & REFERENCE, f"docs/reference has no {member.__name__}"


def test_every_error_is_explained() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for name, value in vars(hdet.errors).items():
        if isinstance(value, type) and issubclass(value, hdet.errors.HdetError):
            assert f"`{name}`" in page, name


def test_quoted_messages_are_those_of_the_code() -> None:
    """What docs/errors.md quotes, between its ellipses, stands in the source in these words."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "hdet").rglob("*.py"))
    joined = re.sub(r"[\"']\s*\n\s*f?[\"']", "", source)
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    quoted = [row["message (in part)"].split("`")[1::2] for row in tables(page) if "message (in part)" in row]
    pieces = [piece.strip() for row in quoted for message in row for piece in message.split("...")]
    assert len(pieces) > 30
    assert [piece for piece in pieces if piece not in joined] == []


def test_each_row_of_what_is_tried_names_its_test_or_says_that_nobody_has_looked() -> None:
    """That the tests are there is seen to with the names of all pages."""
    rows = table_after((ROOT / "docs" / "integrations.md").read_text(encoding="utf-8"), "## What is tried")
    assert len(rows) > 20
    before = ""
    for row in rows:
        shown = row["shown by"]
        is_answer = TEST.search(shown) or shown.startswith(("not tried", "refused"))
        assert is_answer or (shown == "the same" and TEST.search(before)), row
        before = shown if shown != "the same" else before


def tables(page: str) -> list[dict[str, str]]:
    """The rows of all tables."""
    return [
        row for start in re.finditer(r"^(?<!\|\n)\|", page, re.MULTILINE) for row in first_table(page[start.start() :])
    ]


def table_after(page: str, heading: str) -> list[dict[str, str]]:
    """The first table below a heading."""
    return first_table(page[page.index(heading) :])


def first_table(text: str) -> list[dict[str, str]]:
    """The rows of the first table in a text, each by the headings of its columns."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


class Judged(nn.Module):
    """A model on which every knob finds something."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.dropout = hdet.nn.Dropout(0.1)
        self.temperature = hdet.nn.Temperature(1.0)
        self.criterion = hdet.nn.CrossEntropyLoss(label_smoothing=0.1)
        self.margin = 0.5


EVIDENCE: dict[str, tuple[Evidence, str]] = {
    "`Line`": (hdet.evidence.Line(), "shared"),
    "`Analytic`": (hdet.evidence.Analytic(), "shared"),
    "`Recursion`": (hdet.evidence.Recursion(), "shared"),
    "`Contrast`": (hdet.evidence.Contrast(), "shared"),
    "`MixedDifference`": (hdet.evidence.MixedDifference(), "shared"),
    "`Divergent`, shared gradients": (hdet.evidence.Divergent(), "shared"),
    "`Divergent`, local gradients": (hdet.evidence.Divergent(), "local"),
}
KNOB: dict[str, Callable[[], hdet.Knob]] = {
    "`LearningRate`": lambda: hdet.LearningRate(),
    "`WeightDecay`": lambda: hdet.WeightDecay(),
    "`Momentum`": lambda: hdet.Momentum(),
    "`Beta1`": lambda: hdet.Beta1(),
    "`Beta2`": lambda: hdet.Beta2(),
    "`ClipNorm`": lambda: hdet.ClipNorm(),
    "`Dropout`": lambda: hdet.Dropout(),
    "`AttentionTemperature`": lambda: hdet.AttentionTemperature(),
    "`LabelSmoothing`": lambda: hdet.LabelSmoothing(),
    '`Scalar(effect="update")`': lambda: hdet.Scalar("margin", path="margin", bounds=(0.1, 1), effect="update"),
    '`Scalar(effect="forward")`': lambda: hdet.Scalar("margin", path="margin", bounds=(0.1, 1)),
}


@pytest.mark.filterwarnings("ignore")
def test_which_evidence_judges_which_knob_is_as_the_table_says() -> None:
    rows = table_after(KNOBS, "## Which evidence can judge which knob")
    assert {row["knob"] for row in rows} == set(KNOB)
    for row in rows:
        for column, (evidence, gradients) in EVIDENCE.items():
            model = Judged()
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
            if row["knob"] == "`Momentum`":
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            hdet.clip_gradients(optimizer, norm=1.0)
            probe = hdet.Probe(lambda model, batch: model.body(batch).square().mean(1), [torch.ones(2, 3)])
            try:
                hdet.Engine(
                    hdet.replicate(model, optimizer, n=4),
                    [KNOB[row["knob"]]()],
                    signal=probe,
                    objective=hdet.Objective(lambda model, batch: model.body(batch).sum(), [torch.ones(2, 3)] * 2),
                    evidence=evidence,
                    gradients=gradients,  # type: ignore[arg-type]
                )
                answer, reason = "yes", "it is accepted"
            except ConfigError as error:
                answer, reason = "no", str(error)
            assert row[column] == answer, f"{row['knob']} by {column}: {reason}"


def test_built_in_knobs_are_as_the_table_says() -> None:
    """Space, bounds, spread and authority, read off the classes."""
    rows = {row["knob"]: row for row in table_after(KNOBS, "## The built-in knobs")}
    for kind, member in members(hdet.Knob).items():
        if not member.__module__.startswith("hdet.") or kind == "scalar":
            continue
        fields = {name: field.default for name, field in member.model_fields.items()}
        row = rows[f"`{member.__name__}`"]
        low, high = fields["bounds"]
        assert row["space"] == f"`{type(fields['space']).__name__}`", kind
        assert row["bounds"] == f"{low:g} to {high:g}", kind
        assert row["spread"] == f"`{type(fields['spread']).__name__}({fields['spread'].width:g})`", kind
        assert row["authority"] == f"{fields['authority']:g}", kind


def test_the_value_of_a_replica_is_as_the_page_says() -> None:
    """`BoundKnob` is where docs/knobs.md takes its formula from."""
    assert "clip(apply(base(t), centre + levels[r]))" in (BoundKnob.__doc__ or "")
    assert "clip(apply(base(t), centre + levels[r]))" in KNOBS


@pytest.mark.parametrize("source", sorted((ROOT / "docs" / "pictures").glob("*.mmd")), ids=lambda path: path.stem)
def test_a_drawing_is_of_its_source(source: Path) -> None:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    assert digest in source.with_suffix(".svg").read_text(encoding="utf-8"), "make diagrams"


def test_the_site_asks_no_other_server_for_anything() -> None:
    """Material loads mermaid from a server of others where a page holds such a block."""
    for name in NAMES:
        assert "```mermaid" not in (ROOT / name).read_text(encoding="utf-8"), f"{name}: draw it by make diagrams"
    assert "font: false" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_windows_of_runs_are_as_many_as_the_pages_say() -> None:
    for page, pattern in (
        ("README.md", r"a run of (600) steps has (\d+) windows, one of (10,000) has (\d+)"),
        (
            "docs/quickstart.md",
            r"a run of (150) steps has (\d+), one of (1000) has (\d+) and one of (10,000) has (\d+)",
        ),
    ):
        found = re.search(pattern, (ROOT / page).read_text(encoding="utf-8"))
        assert found is not None
        numbers = [int(number.replace(",", "")) for number in found.groups()]
        for steps, windows in zip(numbers[::2], numbers[1::2], strict=True):
            assert hdet.windows.GrowingWindow().count(0, steps) == windows, page
