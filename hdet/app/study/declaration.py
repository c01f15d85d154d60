"""The declaration of a study: what is varied around one run, over which seeds, and what is held equal."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hdet.document import read
from hdet.errors import ConfigError
from hdet.spec import Spec

VARIANT = "variant"
SEED = "seed"
OUT = "out"
PYTHON = "python"

# To some file system, at least.
NOT_IN_FILE_NAMES = re.compile(r'[\x00-\x1f<>:"/\\|?*]')


class Budget(Spec):
    """What every cell of a study may spend, so that cells are compared at equal cost.

    Attributes:
        hold: "steps", the optimizer steps; "samples", the examples trained on over all replicas (those that only
            probes and counterfactual evidence evaluate are not counted); "seconds", wall time, by steps timed
            before the cell is run.
        total: how much of it; for steps, `None` takes the run's own.
    """

    hold: Literal["steps", "samples", "seconds"] = "steps"
    total: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _says_how_much(self) -> Budget:
        if self.total is None and self.hold != "steps":
            raise ValueError(f"a budget of {self.hold} needs total, how many {self.hold} a cell may take")
        return self


class Quick(Spec):
    """What `--quick` changes, to see a study through in minutes: fewer seeds, and fields of every run.

    Attributes:
        seeds: how many of the study's seeds.
        set: fields by path. They come last, over the grid and the variants.
        budget: in place of the study's.
    """

    seeds: int = Field(default=2, ge=1)
    set: dict[str, Any] = Field(default_factory=dict)
    budget: Budget | None = None


class Prepare(Spec):
    """The runs whose models the cells set out from (`start:` in a run), made where these are missing.

    Attributes:
        run: the YAML file of such a run, relative to the study's; `{task}` in it stands for the kind of a cell's task.
        seed: added to a cell's seed, it is the seed of the run that the cell sets out from.
    """

    run: str
    seed: int = Field(default=0, ge=0)


class Study(Spec):
    """A grid over any fields of a run, times seeds.

    Attributes:
        name: of the study and, by default, of its folder.
        base: the run every cell starts from: a mapping of `RunConfig`'s fields, or a YAML file's path
            (relative to the study's).
        script: instead of `base`, a user's own command as a list of words; `{seed}`, `{out}` and each
            factor's name in braces are filled in. It writes `{out}/result.json`: `{"test_loss": 1.5, ...}`.
            Paths in it are relative to the folder that hdet is started in.
        prepare: the runs that make the checkpoints of `start:` in `base`; without it these must be there.
        grid: for each path of a run's field (or name of a script's factor), its values; as a mapping, the
            values by the names they go by in tables.
        variants: named bundles of fields, one more factor called "variant"; laid over the grid's.
        seeds: as a number, 0 to seeds - 1.
        budget: what is held equal over cells.
        baseline: the levels that others are compared with, for some factors; by default none are compared.
        contrasts: pairs of levels of one factor, such as `[[full, control], ...]`: the questions the study asks,
            each put within every combination of the other factors. They are then all that is tested.
        metrics: numbers of `result.json`, checked beforehand for runs; tables and plots of factors take them in
            this order, smaller is better.
        level: 1 - level is the confidence of each interval by itself; nothing corrects it for how many there are.
        quick: what `--quick` changes.

    >>> study = Study(name="width", base={"task": "digits", "steps": 10}, grid={"optimizer.lr": [0.1, 0.2]})
    >>> study.factors
    {'optimizer.lr': {'0.1': 0.1, '0.2': 0.2}}
    """

    name: str = Field(pattern=r"^[\w.-]+$")
    base: dict[str, Any] | str | None = None
    script: tuple[str, ...] | None = None
    prepare: Prepare | None = None
    grid: dict[str, list[Any] | dict[str, Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seeds: int | tuple[int, ...] = 5
    budget: Budget = Budget()
    baseline: dict[str, Any] = Field(default_factory=dict)
    contrasts: tuple[tuple[Any, Any], ...] = ()
    metrics: tuple[str, ...] = Field(default=("test_loss",), min_length=1)
    level: float = Field(default=0.05, gt=0, lt=1)
    quick: Quick = Quick()

    @field_validator("grid", "variants", mode="before")
    @classmethod
    def _names_are_words(cls, given: Any) -> Any:
        """YAML reads the name in `{1: ...}` as a number."""
        if not isinstance(given, Mapping):
            return given
        return {label(name): _named(levels) for name, levels in given.items()}

    @field_validator("seeds")
    @classmethod
    def _some_seeds(cls, seeds: int | tuple[int, ...]) -> int | tuple[int, ...]:
        given = (seeds,) if isinstance(seeds, int) else seeds
        if not given or min(given) < (1 if isinstance(seeds, int) else 0) or len(set(given)) < len(given):
            raise ValueError("seeds are a number of them, at least 1, or a list without repeats")
        return seeds

    @model_validator(mode="after")
    def _coherent(self) -> Study:
        if (self.base is None) == (self.script is None):
            raise ValueError("give either base (a run) or script (a command)")
        if VARIANT in self.grid or SEED in self.grid:
            raise ValueError("'variant' and 'seed' are factors already; use variants: and seeds:")
        for name, fields in {**self.variants, "quick.set": self.quick.set}.items():
            if SEED in fields:
                raise ValueError(f"{name} sets the seed, which is a factor already; use seeds:")
        if self.script is not None:
            taken = {OUT, PYTHON} & {*self.grid, *self.quick.set, *itertools.chain(*self.variants.values())}
            if taken:
                raise ValueError(f"a script's factor cannot be called {sorted(taken)}: hdet fills these in itself")
        for factor, levels in self.grid.items():
            if not levels:
                raise ValueError(f"grid: {factor} has no values")
            if isinstance(levels, list) and len({label(value) for value in levels}) < len(levels):
                raise ValueError(f"grid: {factor} has a value twice, or two of one name; name them: {{a: ..., b: ...}}")
        if self.script is not None and (self.budget != Budget() or self.quick.budget is not None):
            raise ValueError("a script's budget is its own affair; hand it over as a factor")
        by_file: dict[str, str] = {}
        for metric in self.metrics:
            other = by_file.setdefault(file_name(metric), metric)
            if other != metric:
                raise ValueError(
                    f"metrics: {other!r} and {metric!r} would both be table_{file_name(metric)}; have the script call "
                    f"one of them something else"
                )
        factors = self.factors
        for factor, level in self.baseline.items():
            if factor not in factors:
                raise ValueError(f"baseline: no factor is called {factor!r}; there are {sorted(factors)}")
            if label(level) not in factors[factor]:
                raise ValueError(f"baseline: {factor} has no level {level!r}; there are {list(factors[factor])}")
        if len({frozenset(contrast) for contrast in self.pairs}) < len(self.pairs):
            raise ValueError("contrasts: a pair is there twice; each is one test of the family")
        return self

    @property
    def factors(self) -> dict[str, dict[str, Any]]:
        """By factor, its levels: the name each goes by, and the value (for a variant its bundle)."""
        found = {
            path: dict(levels) if isinstance(levels, dict) else {label(value): value for value in levels}
            for path, levels in self.grid.items()
        }
        if self.variants:
            found[VARIANT] = dict(self.variants)
        return found

    @property
    def pairs(self) -> list[tuple[str, str, str]]:
        """The contrasts, each as a factor and the names of two of its levels."""
        found = []
        for first, second in ((label(one), label(other)) for one, other in self.contrasts):
            holders = [name for name, levels in self.factors.items() if first in levels and second in levels]
            if first == second or len(holders) != 1:
                raise ValueError(
                    f"contrasts: [{first}, {second}] must be two levels of one factor, and of one only; there are "
                    f"{ {name: list(levels) for name, levels in self.factors.items()} }"
                )
            found.append((holders[0], first, second))
        return found

    @property
    def seed_list(self) -> tuple[int, ...]:
        """The seeds, one by one."""
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    def quickened(self) -> Study:
        """The study that `--quick` runs, under a name of its own.

        Raises:
            ConfigError: it would be the study as it is.
        """
        if self.quick.seeds >= len(self.seed_list) and not self.quick.set and self.quick.budget is None:
            raise ConfigError(
                "--quick would change nothing of this study; give it quick: {set: {steps: ...}}, or fewer seeds"
            )
        return self.replace(
            name=f"{self.name}-quick",
            seeds=self.seed_list[: self.quick.seeds],
            budget=self.quick.budget if self.quick.budget is not None else self.budget,
        )

    @classmethod
    def load(cls, path: Path | str) -> Study:
        """Read a study from YAML; a `base` given as a path is read too.

        Raises:
            ConfigError: naming the field, the value and what is allowed.
        """
        given = read(Path(path))
        if "task" in given and not {"base", "script"} & set(given):
            raise ConfigError(f"{path} declares one run, which hdet run trains; a study names it: base: FILE")
        if isinstance(given.get("base"), str):
            given["base"] = read(Path(path).parent / given["base"])
        prepare = given.get("prepare")
        if isinstance(prepare, dict) and isinstance(prepare.get("run"), str):
            given["prepare"] = {**prepare, "run": str(Path(path).parent / prepare["run"])}
        given.setdefault("name", Path(path).stem)
        try:
            return cls.from_dict(given)
        except ConfigError as error:
            said = str(error).removeprefix(f"{cls.__name__}: ")
            raise ConfigError(f"{path}: {said}") from error.__cause__


def label(value: Any) -> str:
    """The name of a level that was given none: text and numbers as they are, a mapping by its kind.

    >>> label(0.1), label({"kind": "two_level", "width": 0.2}), label(None)
    ('0.1', 'two_level(width=0.2)', 'none')
    """
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and "kind" in value:
        rest = ", ".join(f"{key}={label(item)}" for key, item in value.items() if key != "kind")
        return f"{value['kind']}({rest})" if rest else str(value["kind"])
    return json.dumps(value, default=str)


def file_name(name: str) -> str:
    """What a metric or a factor is called in the names of files.

    >>> file_name("val/loss")
    'val_loss'
    """
    return NOT_IN_FILE_NAMES.sub("_", name)


def _named(levels: Any) -> Any:
    return {label(name): value for name, value in levels.items()} if isinstance(levels, Mapping) else levels
