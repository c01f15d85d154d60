"""These tests need the frameworks; without one, its file is not collected."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))  # real processes: launch.py

NEEDS = {
    "test_fabric.py": "lightning",
    "test_lightning.py": "lightning",
    "test_transformers.py": "transformers",
    "test_transformers_ranks.py": "transformers",
    "test_transformers_deepspeed.py": "transformers",
    "test_peft.py": "peft",
    "test_finetune_example.py": "peft",
    "test_sentence_transformers.py": "sentence_transformers",
    "test_timm.py": "timm",
    "test_trl.py": "trl",
}

collect_ignore = [name for name, package in NEEDS.items() if find_spec(package) is None]
