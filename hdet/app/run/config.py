"""The declaration of a whole run: what `hdet run` reads from YAML and writes back as resolved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import nn

from hdet.app.modules import imported
from hdet.app.run.optimizer import AdamW, Optimizer
from hdet.app.run.signal import DeclaredProbe, Signal
from hdet.app.tasks import Task, Workload
from hdet.app.tasks.task import whole
from hdet.document import override, read
from hdet.engine.guard import Guard, Rewind
from hdet.engine.tail import Tail, TailAverage
from hdet.errors import ConfigError
from hdet.evidence import Divergent, Evidence
from hdet.hparams import Knob, LearningRate, Schedule
from hdet.hparams.schedule import LinearDecay
from hdet.merging import Mean, Merge
from hdet.recipes.recommended import WARMUP, Choice, choose
from hdet.spec import Spec, lookup
from hdet.windows import GrowingWindow, Windows

PEAKS = ("peak", "max_lr", "value")
ANY_STEPS = 1000
"""The length of a schedule in a run that is refused for its own."""


class RunConfig(Spec):
    """One training run with the engine.

    A field with a default may leave out its `kind`: `optimizer: {lr: 3e-4}` is AdamW, `window: 50` is fixed.

    Attributes:
        task: what is trained.
        steps: optimizer steps.
        batch_size: examples a replica sees in a step.
        replicas: N: micro-batches of one model, or copies of it side by side where the evidence has them diverge.
        gradients: whether the replicas apply the mean gradient or each its own.
        optimizer: with the learning rate at the schedule's peak.
        schedule: of the learning rate; `None` holds it. Its peak and length, where not given, are the
            optimizer's `lr` and `steps`. A `LearningRate` knob without a schedule of its own moves this one.
        knobs: what is explored; `None`, or "recommended", lets `hdet.recommended` choose.
        window: steps between two converges, or a rule for them.
        signal: what the replicas are compared by.
        evidence: where comparisons come from, for knobs that do not say.
        merge: how the replicas become one.
        guard: goes back where training went wrong; `rewind` where the knobs are recommended ones.
        tail: which weights the run ends with; `tail_average` where the knobs are recommended ones, else the last.
        clip: the largest norm of a replica's gradient; `None` leaves gradients as they are.
        warmup_steps: of the recommended learning rate, at least, as of `hdet.recommended`; 0 leaves the schedule alone.
        start: the path of a checkpoint, such as another run's `model.pt`, whose model the run sets out from.
            `{task}` and `{seed}` in it stand for the task's kind and the run's seed.
        noise: of a warm noisy start, relative to the weights' norms; see `hdet.perturb`.
        seed: decides initial weights, batches, designs and the random numbers of dropout.
        device: where the replicas live, as torch names it.
        imports: modules to import first, in which knobs, controllers or tasks of your own are registered.

    >>> config = RunConfig(task="text", steps=100, schedule="cosine", optimizer=AdamW(3e-4))
    >>> config.schedule(30)
    0.0003
    >>> RunConfig.from_dict(config.to_dict()) == config
    True
    """

    task: Task
    steps: int = Field(ge=1)
    batch_size: int = Field(default=16, ge=1)
    replicas: int = Field(default=8, ge=1)
    gradients: Literal["shared", "local"] = "shared"
    optimizer: Optimizer = AdamW()
    schedule: Schedule | None = None
    knobs: tuple[Knob, ...] | None = None
    window: Windows = GrowingWindow()
    signal: Signal = DeclaredProbe()
    evidence: Evidence = Divergent()
    merge: Merge = Mean()
    guard: Guard | None = None
    tail: Tail | None = None
    clip: float | None = Field(default=None, gt=0.0)
    warmup_steps: int | None = Field(default=None, ge=0)
    start: str | None = None
    noise: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: str = "cpu"
    imports: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, given: Any) -> Any:
        """Import what registers, add the kinds that go without saying and complete the schedule."""
        if not isinstance(given, Mapping):
            return given
        resolved = dict(given)
        modules = resolved.get("imports") or ()
        if not isinstance(modules, (list, tuple)) or not all(isinstance(module, str) for module in modules):
            raise ValueError(f"imports: a list of modules is expected, such as [my_knobs], got {modules!r}")
        for module in modules:
            imported(module, asked_by="imports")
        if isinstance(resolved.get("window"), int):
            resolved["window"] = {"kind": "fixed", "steps": resolved["window"]}
        if resolved.get("knobs") in (None, "recommended"):
            resolved["knobs"] = None
            resolved.setdefault("guard", Rewind.kind)
            resolved.setdefault("tail", TailAverage.kind)
            resolved["schedule"] = resolved.get("schedule") or {"kind": LinearDecay.kind, "warmup": WARMUP}
        for name, field in cls.model_fields.items():
            value = resolved.get(name)
            if isinstance(field.default, Spec) and isinstance(value, Mapping) and "kind" not in value:
                resolved[name] = {"kind": field.default.kind, **value}
        if isinstance(resolved.get("schedule"), (str, Mapping)):
            resolved["schedule"] = _completed(resolved["schedule"], resolved)
        return resolved

    @field_validator("device")
    @classmethod
    def _device_exists(cls, device: str) -> str:
        try:
            torch.zeros((), device=device).item()
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"torch cannot use this device: {str(error).splitlines()[0]}") from None
        return device

    @model_validator(mode="after")
    def _warms_up_the_recommended(self) -> RunConfig:
        if self.warmup_steps is not None and self.knobs is not None:
            raise ValueError(
                "warmup_steps is of the recommended learning rate, and knobs are listed; give the run's schedule a "
                "warm-up, or {kind: linear_warmup, steps: ..., schedule: ...}"
            )
        return self

    @model_validator(mode="after")
    def _schedules_suffice(self) -> RunConfig:
        declared = [("schedule", self.schedule)]
        for index, knob in enumerate(self.knobs or ()):
            declared.append((f"the schedule of knobs.{index} ({knob.label})", knob.schedule))
        for name, schedule in declared:
            if schedule is not None and schedule.total_steps is not None and schedule.total_steps < self.steps:
                raise ValueError(
                    f"{name} ends after {schedule.total_steps} steps and the run has {self.steps}; "
                    f"lower steps, or raise total_steps (leave it out of the run's schedule and it is steps)"
                )
        return self

    @property
    def start_path(self) -> str | None:
        """`start` with its placeholders filled in."""
        if self.start is None:
            return None
        return self.start.replace("{task}", self.task.kind).replace("{seed}", str(self.seed))

    @property
    def copies(self) -> bool:
        """Whether each replica is a copy of the model that may come apart from the others."""
        if self.gradients == "local" or self.noise > 0.0:  # a warm noisy start sets replicas apart by itself
            return True
        listed = [knob for knob in self.knobs or () if knob.acts_on != "merge"]  # all replicas make that step together
        return any((knob.evidence or self.evidence).diverges for knob in listed)

    def workload(self) -> Workload:
        """The task's data and models, loaded."""
        built = self.task.build(seed=self.seed, batch_size=self.batch_size, device=self.device)
        return whole(built, f"task {self.task.kind!r}")

    def choices(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, warmup_steps: int | None = None
    ) -> list[Choice]:
        """What the recipe explores, where no knobs are listed."""
        steps = self.warmup_steps if warmup_steps is None else warmup_steps
        return choose(model, optimizer, self.steps, self.schedule, warmup_steps=steps)

    def explored(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, warmup_steps: int | None = None
    ) -> list[Knob]:
        """The knobs, recommended ones chosen; learning rates without a schedule of their own given the run's."""
        if self.knobs is None:
            choices = self.choices(model, optimizer, warmup_steps)
            return [choice.knob for choice in choices if choice.knob is not None]
        return [
            knob.replace(schedule=self.schedule)
            if isinstance(knob, LearningRate) and knob.schedule is None and self.schedule is not None
            else knob
            for knob in self.knobs
        ]

    @classmethod
    def load(cls, path: Path | str, assignments: Iterable[str] = (), *, seed: int | None = None) -> RunConfig:
        """Read YAML, apply `path=value` overrides, then the seed, and validate.

        Raises:
            ConfigError: naming the field, the value and what is allowed.
        """
        given = override(read(Path(path)), assignments)
        if "task" not in given and {"base", "script"} & set(given):
            raise ConfigError(f"{path} declares a study, which hdet ablate runs; here one run is expected")
        if seed is not None:
            given["seed"] = seed
        try:
            return cls.from_dict(given)
        except ConfigError as error:
            said = str(error).removeprefix(f"{cls.__name__}: ")  # the file's reader knows no classes
            raise ConfigError(f"{path}: {said}") from error.__cause__


def _completed(schedule: str | Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule with its peak and length taken from the run where it does not give them.

    What the run cannot give is reported at its own field, and any value stands for it here.
    """
    fields: dict[str, Any] = {"kind": schedule} if isinstance(schedule, str) else dict(schedule)
    if "kind" not in fields:
        return fields  # the family's own message says what is missing
    known = lookup(Schedule, str(fields["kind"])).model_fields
    try:
        steps = max(1, int(run["steps"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        steps = ANY_STEPS
    try:
        optimizer = Optimizer.from_dict(run.get("optimizer", AdamW()))
    except ConfigError:
        optimizer = AdamW()
    if "total_steps" in known:
        fields.setdefault("total_steps", steps)
    for name in PEAKS:
        if name in known:
            fields.setdefault(name, optimizer.lr)
    if isinstance(fields.get("schedule"), (str, Mapping)):
        fields["schedule"] = _completed(fields["schedule"], run)
    return fields
