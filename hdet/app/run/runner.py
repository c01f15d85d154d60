"""A declared run from beginning to end: check everything, take the folder, train, compare, write results."""

from __future__ import annotations

import math
import platform
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from hdet.app.run.config import RunConfig
from hdet.app.run.folder import RunFolder
from hdet.app.run.launching import leads, led
from hdet.app.run.loop import Training, Watcher
from hdet.app.run.plain import train_plain
from hdet.digits import loss_digits
from hdet.errors import ConfigError, HdetError, MissingExtraError
from hdet.report import Verdict, overview, verdicts
from hdet.report.figures import write_figure
from hdet.user_warning import warn

NUMBERS = ("test_loss", "train_loss", "steps", "seconds", "faults")
"""What `result.json` holds of a run as numbers: a study's metrics are among these."""


@dataclass(frozen=True)
class Result:
    """What a run ended with; `result.json` holds the same.

    Attributes:
        test_loss: mean held-out loss of the final model.
        train_loss: mean training loss over the last window.
        steps, seconds: length of the run, comparison not counted.
        knobs: what moved each knob, on what evidence, and what is still asked for.
        facts: what data the task loaded.
        plain: the same run without hdet, `test_loss` and `seconds`, where it was asked for.
        comparing: whether that run is under way, or about to be.
        host: the machine that began it.
        faults: how many faults the history holds.
        ended: which weights it ended with, in words; nothing for the last ones.
        versions: of Python and of the packages the numbers depend on.
    """

    test_loss: float | None
    train_loss: float | None
    steps: int
    seconds: float
    knobs: list[Verdict]
    facts: dict[str, str]
    plain: dict[str, float | None] | None = None
    comparing: bool = False
    host: str = ""
    faults: int = 0
    ended: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and mappings; each knob's verdict also in words."""
        return {**asdict(self), "knobs": [knob.to_dict() for knob in self.knobs]}

    @classmethod
    def from_dict(cls, given: dict[str, Any], source: Path | str = "the result") -> Result:
        """The inverse of `to_dict`.

        Raises:
            HdetError: it is not what `to_dict` gave; `source` is what the message calls it.
        """
        try:
            return TypeAdapter(cls).validate_python(given)
        except ValueError as error:
            reason = " ".join(str(error).splitlines()[:2])
            raise HdetError(
                f"{source} is no result of a run ({reason}); remove it, and --resume writes it anew"
            ) from None


class Run:
    """One run in one folder. Making the object checks all there is to check and writes nothing.

    Args:
        force: replace a run that lies in the folder.
        resume: go on with it.

    Raises:
        HdetError: the declaration, the task, the model or the folder does not allow the run.
    """

    def __init__(self, config: RunConfig, out: Path | str, *, force: bool = False, resume: bool = False) -> None:
        if config.knobs != () and find_spec("matplotlib") is None:  # None: recommended ones
            raise MissingExtraError("matplotlib", "cli")  # now, and not after hours of training
        self.config = config
        self.folder = RunFolder(out)
        led(lambda: self.folder.check(config, force=force, resume=resume))
        self.workload = config.workload()
        self.training = Training(config, self.workload)
        self._force, self._resume = force, resume
        kept = led(self.folder.load_result) if resume else None
        self._finished = Result.from_dict(kept, self.folder.result) if kept is not None else None

    def __call__(self, *, compare: bool = False, watcher: Watcher | None = None) -> Result:
        """Train, and with `compare` train again without hdet; write the folder; return what came out.

        Raises:
            ConfigError: `resume` was said of a run that is over, or another process has the folder.
            DivergedError: every replica became non-finite again and again.
        """
        watcher = watcher if watcher is not None else Watcher()
        result = self._finished
        if result is not None and self.over(compare=compare):
            raise ConfigError(
                f"the run in {self.folder.path} is over (held-out loss {loss_digits(result.test_loss)}); "
                f"start anew by --force, or choose another --out"
            )
        with ExitStack() as stack:
            led(lambda: stack.enter_context(self.folder.held()))
            # Another process may have been at it since this object was made.
            led(lambda: self.folder.check(self.config, force=self._force, resume=self._resume))
            return self._run(result, watcher, compare=compare)

    def _run(self, result: Result | None, watcher: Watcher, *, compare: bool) -> Result:
        if result is None:
            if not self._resume:
                led(lambda: self.folder.begin(self.config))
            result = self._train(watcher, compare=compare)
        elif compare:
            marked = replace(result, comparing=True, host=platform.node())
            led(lambda: self.folder.save_result(marked.to_dict()))
        if compare and leads():
            began = time.perf_counter()
            try:
                model = train_plain(self.config, self.workload, watcher)
            except BaseException:
                with suppress(HdetError):  # which would hide why
                    self.folder.save_result(replace(result, comparing=False).to_dict())
                raise
            seconds = time.perf_counter() - began
            plain = {"test_loss": _finite(self.workload.test_loss(model)), "seconds": seconds}
            result = replace(result, plain=plain, comparing=False)
            self.folder.save_result(result.to_dict())
        return result

    def over(self, *, compare: bool = False) -> bool:
        """Whether the run that is to be resumed has nothing left to do."""
        return self._finished is not None and (not compare or self._finished.plain is not None)

    def _train(self, watcher: Watcher, *, compare: bool) -> Result:
        training, engine = self.training, self.training.engine
        training.run(self.folder, watcher)
        # Knob values such as an attention temperature are no part of a state dict, and the model needs them.
        led(lambda: self.folder.save_model({"model": training.model.state_dict(), "bases": engine.bases}))
        history = engine.history.windows
        result = Result(
            test_loss=_finite(self.workload.test_loss(training.model)),
            train_loss=_finite(history[-1].loss),
            steps=self.config.steps,
            seconds=training.seconds,
            knobs=verdicts(history),
            facts=dict(self.workload.facts),
            faults=sum(len(record.faults) for record in history),
            comparing=compare,
            host=platform.node() if compare else "",
            ended=history[-1].ending,
            versions={"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
        )
        led(lambda: self._keep(result))
        return result

    def _keep(self, result: Result) -> None:
        """Draw and write what the run ended with; the numbers last, since they mark it as trained."""
        if result.knobs:
            self._draw()
        self.folder.save_result(result.to_dict())

    def _draw(self) -> None:
        title = f"{self.config.task.kind}, {self.config.steps} steps"
        try:
            write_figure(overview(self.training.engine.history.windows, title=title), self.folder.picture, dpi=110)
        except Exception as error:  # whatever it is, it is not to cost what was trained
            warn(
                f"{self.folder.picture} could not be written ({error}), and all else is; make room, and draw it by "
                f"hdet report {self.folder.path} --figures plots"
            )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
