"""A replica group under torchft, which may be killed: started by test_torchft.py as a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import hdet

sys.path.insert(0, str(Path(hdet.__file__).parent.parent / "examples"))

import torchft_replicas

STEPS, GROUPS = 60, 3


def die(*_: Any) -> None:
    """As a machine does that is switched off."""
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(hdet.torchft.ManagedEngine):
    """Dies in a window, or while the groups meet at its end, when their losses are gathered.

    Attributes:
        dies: the step at which the window ends, and where in it.
        thrown_away: the steps at which windows ended that were thrown away.
    """

    dies = (0, "")

    def __init__(self, engine: hdet.Engine) -> None:
        self.thrown_away: list[int] = []
        super().__init__(engine)

    def step(self, losses: Any = None) -> Any:
        stop, made = self.engine.cycle.window.stop, self.engine.step_count + 1
        if self.dies == (stop, "window") and made == stop - 5:
            die()
        if self.dies == (stop, "meeting"):
            self.engine.home.mean = die  # type: ignore[method-assign, assignment]
        record = super().step(losses)
        if made == stop and record is None:
            self.thrown_away.append(stop)
        return record


def main(group: int, folder: Path, stop: int, where: str) -> None:
    """Train, and save what came of it."""
    Mortal.dies = (stop, where)
    hdet.torchft.ManagedEngine = Mortal
    run = torchft_replicas.train(group, GROUPS, STEPS, folder / f"history{group}.jsonl")
    assert isinstance(run, Mortal)
    model, optimizer = run.engine.hosts[0]
    torch.save(
        {
            "bases": run.engine.bases,
            "learned": run.engine.learned["learning_rate"].value,
            "weights": list(model.state_dict().values()),
            "moments": [value for state in optimizer.state.values() for value in state.values()],
            "windows": [record.to_json() for record in run.engine.history],
            "thrown_away": run.thrown_away,
        },
        folder / f"group{group}.pt",
    )


if __name__ == "__main__":
    stop, where = sys.argv[3:] or ("0", "nowhere")
    main(int(sys.argv[1]), Path(sys.argv[2]), int(stop), where)
