"""What hdet takes of a script, counted in the loops of `benchmarks/trainers.py`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hdet

PARTS = Path(hdet.__file__).parent.parent / "benchmarks" / "trainers_parts"
LOOPS = {
    "one_process.py": ["loop", "lightning", "transformers", "accelerate"],
    "two_processes.py": ["_deepspeed", "_in_ddp", "_torchft"],
}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in LOOPS.items() for name in names])
def test_beside_the_probe_a_loop_calls_hdet_once(file: str, name: str) -> None:
    """Their models return the loss, so that nobody has to tell it."""
    tree = ast.parse((PARTS / file).read_text(encoding="utf-8"))
    (loop,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    calls = [ast.unparse(node.func) for node in ast.walk(loop) if isinstance(node, ast.Call)]
    of_hdet = [call for call in calls if call.startswith("hdet.") and call != "hdet.Probe"]
    assert len(of_hdet) == 1, of_hdet
    assert not [node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == "search"]
