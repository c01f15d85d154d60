"""A run of the command line's digits that takes a second, and a call of `hdet` as from a shell."""

from __future__ import annotations

from typing import Any

from hdet.app.main import main

DIGITS: dict[str, Any] = {
    "task": {"kind": "digits", "width": 16, "dropout": 0.3, "probe_examples": 8},
    "steps": 24,
    "batch_size": 8,
    "replicas": 4,
    "gradients": "local",
    "schedule": "cosine",
    "window": 6,
    "knobs": ["learning_rate", {"kind": "dropout", "controller": "hold"}],
}


def call(*arguments: object) -> int:
    """The exit code."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as left:
        return int(left.code or 0)
    return 0
