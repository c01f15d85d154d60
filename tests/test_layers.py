"""Who may import whom, read off the source: arrows point down, and the control plane is NumPy's alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import hdet
from hdet import contrib

ROOT = Path(hdet.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in ROOT.rglob("*.py")}


def imported(name: str, *, also_later: bool = True) -> set[str]:
    """What a module imports: hdet's modules by their full name, others by their package.

    What is imported for typing alone counts; what only a running function imports, with `also_later`.
    """
    found: set[str] = set()
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not also_later:
            return
        if isinstance(node, ast.Import):
            found.update(_resolved(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found.update(_resolved(f"{base}.{alias.name}") for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(FILES[name].read_text()))
    return found - {name}


def _resolved(dotted: str) -> str:
    """The longest part of a dotted name that is a module of hdet; else the first."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in FILES:
            return ".".join(parts[:length])
    return parts[0]


def reached(name: str) -> dict[str, str]:
    """Everything a module imports, however indirectly, each with the module that imports it."""
    seen: dict[str, str] = {}
    ahead = [name]
    while ahead:
        current = ahead.pop()
        for target in sorted(imported(current)):
            if target not in seen:
                seen[target] = current
                if target in FILES:
                    ahead.append(target)
    return seen


def path_to(target: str, seen: dict[str, str], start: str) -> str:
    chain = [target]
    while chain[-1] != start:
        chain.append(seen[chain[-1]])
    return " <- ".join(chain)


def under(*rooms: str) -> list[str]:
    return sorted(name for name in FILES if any(name == room or name.startswith(room + ".") for room in rooms))


CONTROL_PLANE = under(
    "hdet.controllers",
    "hdet.hparams.space",
    "hdet.hparams.spread",
    "hdet.hparams.design",
    "hdet.hparams.hadamard",
    "hdet.hparams.schedule",
    "hdet.spec",
    "hdet.errors",
    "hdet.windows",
    "hdet.history",
    "hdet.record",
)


CONTRIBUTED = {
    member.__module__: member._root.__module__ for member in vars(contrib).values() if isinstance(member, type)
}
"""By module of a contributed member, that of its family's root, whose rule it keeps: a merge may import torch."""


def test_every_module_of_contrib_has_a_member() -> None:
    assert {"hdet.contrib", *CONTRIBUTED} == set(under("hdet.contrib"))


@pytest.mark.parametrize("name", [*CONTROL_PLANE, *(own for own, root in CONTRIBUTED.items() if root in CONTROL_PLANE)])
def test_the_control_plane_never_imports_torch(name: str) -> None:
    """Neither itself nor through what it imports: another array framework could use it."""
    seen = reached(name)
    assert "torch" not in seen, path_to("torch", seen, name)


FLOORS = (
    {"hdet.digits", "hdet.errors", "hdet.nested", "hdet.sub_batches", "hdet.user_warning"},
    {"hdet.spec", "hdet.record", "hdet.files"},
    {"hdet.report"},
    {"hdet.controllers", "hdet.nn", "hdet.history", "hdet.windows", "hdet.document"},
    {"hdet.hparams"},
    {"hdet.replicas"},
    {"hdet.signals"},
    {"hdet.evidence"},
    {"hdet.merging"},
    {"hdet.engine"},
    {"hdet.checkpoints", "hdet.recipes"},
    {"hdet.overlay"},
    {"hdet.trials"},
    {"hdet.integrations"},
    {"hdet.deepspeed", "hdet.fabric", "hdet.lightning", "hdet.loggers", "hdet.torchft", "hdet.transformers"},
    {"hdet.testing"},
    {"hdet.contrib", "hdet.spaces", "hdet.spreads", "hdet.designs", "hdet.schedules", "hdet.estimators", "hdet.merges"},
    {"hdet.app"},
)
"""Rooms from the ground up. A room knows itself and the floors below, not its neighbours."""


def room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(name) in rooms)


def test_every_room_has_a_floor() -> None:
    assert {room(name) for name in FILES} - {"hdet", "hdet.__main__"} == set().union(*FLOORS)


@pytest.mark.parametrize("name", [name for name in sorted(FILES) if room(name) not in ("hdet", "hdet.__main__")])
def test_arrows_point_down(name: str) -> None:
    for target in sorted(imported(name)):
        if target in FILES and room(target) != "hdet":
            assert room(target) == room(name) or floor(target) < floor(name), f"{name} imports {target}"


CORE = under(*set().union(*FLOORS[:10]))


def test_the_core_needs_its_three_packages_only() -> None:
    """Everything else is an extra, imported when it is asked for."""
    allowed = {"torch", "pydantic", "pydantic_core", "numpy", "hdet"}
    for name in [*CORE, "hdet"]:
        others = {target for target in imported(name, also_later=False) if target not in FILES}
        assert others - allowed <= set(sys.stdlib_module_names), name


def test_imports_do_not_go_round() -> None:
    """When modules load or types are checked; what is imported inside a function may."""
    state: dict[str, int] = {}

    def visit(name: str, trail: list[str]) -> None:
        if state.get(name) == 2 or name not in FILES or FILES[name].name == "__init__.py":
            return
        assert state.get(name) != 1, " -> ".join([*trail, name])
        state[name] = 1
        for target in sorted(imported(name, also_later=False)):
            visit(target, [*trail, name])
        state[name] = 2

    for name in FILES:
        visit(name, [])


def test_the_graph_sees_what_it_should() -> None:
    """A reader that found nothing would pass everything."""
    assert "torch" in reached("hdet.engine.engine")
    assert "hdet.engine.engine" in imported("hdet")
    assert "torch" in imported("hdet.hparams.binding")
    assert "hdet.engine.cycle" in imported("hdet.engine.snapshot")
    assert imported("hdet.hparams.design") >= {"numpy", "hdet.hparams.hadamard", "hdet.spec"}


def test_one_name_is_one_class() -> None:
    """But for layers, which are called as torch's, and for what is `Search` to each trainer."""
    homes: dict[str, list[str]] = {}
    for name, path in FILES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    several = {name for name, places in homes.items() if len(places) > 1}
    assert several == {"Dropout", "Search"}


@pytest.mark.parametrize("name", ["hdet.app.run.loop", "hdet.app.run.plain"])
def test_hdet_run_trains_with_what_users_have(name: str) -> None:
    """Its loop is one that anybody could write: it imports what is shown, and asks an engine what the pages tell of."""
    shown = {
        member
        for module in (hdet, hdet.replicas, *(getattr(hdet, own) for own in dir(hdet)))
        for member in getattr(module, "__all__", ())
    }
    asked = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and room(node.module) not in ("hdet.app", "hdet.errors"):
            hidden = {alias.name for alias in node.names} - shown
            assert not node.module.startswith("hdet.") or not hidden, f"{name}: {node.module} has {hidden}"
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("engine", "self.engine"):
            asked.add(node.attr)
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT.parent / "docs").glob("*.md"))
    assert {one for one in asked if f"engine.{one}" not in pages} == set()
