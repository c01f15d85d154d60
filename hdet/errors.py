"""The errors of hdet: each names what was given, why it cannot be, and what to do instead."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DivergedError",
    "HdetError",
    "IdentifiabilityError",
    "LostRankError",
    "MatchError",
    "MissingExtraError",
    "StepError",
]


class HdetError(Exception):
    """Base of every error that hdet raises on purpose."""


class ConfigError(HdetError, ValueError):
    """A declaration that cannot be: a misspelt key, a reversed bound, two knobs on one scalar."""


class MatchError(ConfigError):
    """A knob selects no parameter group, module or attribute of the model it was given."""


class IdentifiabilityError(ConfigError):
    """A knob cannot be told apart by the evidence it was given (see docs/knobs.md)."""


class StepError(HdetError, RuntimeError):
    """The training loop did something the engine cannot follow: a non-scalar loss, a step too many."""


class DivergedError(HdetError, RuntimeError):
    """Nothing that trains is left: every replica became non-finite again and again, or every trial diverged."""


class CheckpointError(HdetError, RuntimeError):
    """A checkpoint does not belong to this engine."""


class LostRankError(HdetError, RuntimeError):
    """Another rank of a distributed run is gone, or was silent for longer than the group's timeout."""


class MissingExtraError(HdetError, ImportError):
    """An optional dependency is needed; the message names the extra that installs it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'hdet[{extra}]'")
