"""The cells of a study: every combination of levels and seeds, resolved and matched by budget."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdet.app.run.config import RunConfig
from hdet.app.run.runner import NUMBERS
from hdet.app.study.declaration import OUT, PYTHON, SEED, VARIANT, Study
from hdet.document import placed
from hdet.errors import ConfigError

Timer = Callable[[RunConfig], float]

# A script and its configuration, yes; an interpreter or a data set, no.
LARGEST_HASHED = 2**20

# A path of a run's field may be a factor of a script too: {optimizer.lr}.
BRACES = re.compile(r"\{([\w.-][\w. -]*)\}")


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        levels: by factor, the name of its level.
        seed: of the run.
        config: the run, resolved; `None` for a script's.
        command: the script's command, its `{out}` not yet filled in; `None` for a run.
        files: hashes of the files that the command names, its script above all.
    """

    levels: Mapping[str, str]
    seed: int
    config: RunConfig | None = field(default=None, compare=False)
    command: tuple[str, ...] | None = None
    files: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name of its folder: a hash of what is run, so that equal cells share one and run once."""
        script = {"command": self.command, "files": self.files}
        content = self.config.to_dict() if self.config is not None else script
        return f"{content_key({**content, SEED: None})}-seed{self.seed}"

    @property
    def samples(self) -> int | None:
        """Examples trained on over all replicas; what probes and counterfactual evidence evaluate is not counted."""
        return None if self.config is None else self.config.steps * self.config.replicas * self.config.batch_size

    def __str__(self) -> str:
        return "  ".join([*(f"{name}={level}" for name, level in self.levels.items()), f"seed={self.seed}"])


def content_key(content: Any) -> str:
    """A name for what is run: equal content, plain numbers and strings, has one name.

    >>> content_key({"lr": 0.1, "steps": 5}) == content_key({"steps": 5, "lr": 0.1})
    True
    """
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=6).hexdigest()


def cells(study: Study, *, quick: bool = False, timer: Timer | None = None) -> list[Cell]:
    """All cells, the seeds innermost; combinations that come to the same run are cells of one folder.

    Args:
        timer: seconds a step takes; needed where wall time is held equal.

    Raises:
        ConfigError: a combination is no valid run (the message names it), or runs do not end with such a metric.
    """
    unknown = [name for name in study.metrics if name not in NUMBERS]
    if study.script is None and unknown:
        raise ConfigError(f"metrics: a run does not end with {unknown}; there are {list(NUMBERS)}")
    extra = study.quick.set if quick else {}
    declared = study.quickened() if quick else study
    found = []
    hashed: dict[str, str] = {}
    for levels, values in _combinations(declared):
        for seed in declared.seed_list:
            if declared.script is not None:
                command = _filled(declared.script, {**_flat(values), **extra, SEED: seed})
                found.append(Cell(levels, seed, command=command, files=_hashes(command, hashed)))
                continue
            try:
                config = _matched(_given(declared, values, extra, seed), declared, timer)
            except ConfigError as error:
                named = "  ".join(f"{name}={level}" for name, level in levels.items())
                raise ConfigError(f"cell {named or 'base'}: {error}") from None
            found.append(Cell(levels, seed, config=config))
    return found


def shard(everything: Sequence[Cell], part: str) -> list[Cell]:
    """The i-th of n parts, `part` being "i/n" with i from 1; together the parts are everything, none twice.

    Cells of one folder stay together.

    Raises:
        ConfigError: not "i/n" with 1 <= i <= n.
    """
    index, _, count = part.partition("/")
    if not re.fullmatch("[0-9]{1,9}/[0-9]{1,9}", part) or not 1 <= int(index) <= int(count):
        raise ConfigError(f"--shard takes i/n with 1 <= i <= n, such as 1/4; got {part!r}")
    keys = list(dict.fromkeys(cell.key for cell in everything))
    mine = set(keys[int(index) - 1 :: int(count)])
    return [cell for cell in everything if cell.key in mine]


def _combinations(study: Study) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    factors = study.factors
    for chosen in itertools.product(*(levels.items() for levels in factors.values())):
        names = {factor: name for factor, (name, _) in zip(factors, chosen, strict=True)}
        yield names, {factor: value for factor, (_, value) in zip(factors, chosen, strict=True)}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The grid's fields, and over them the variant's."""
    bundle = values.get(VARIANT, {})
    return {**{path: value for path, value in values.items() if path != VARIANT}, **bundle}


def _given(study: Study, values: Mapping[str, Any], extra: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The run as it is declared, before anything is filled in."""
    assert isinstance(study.base, dict)
    fields = {**_flat(values), **extra, SEED: seed}
    # A field of another must come after it: optimizer before optimizer.lr.
    given: dict[str, Any] = study.base
    for path, value in sorted(fields.items(), key=lambda item: item[0].count(".")):
        given = placed(given, path.strip().split("."), value, f"{path}={value}")
    return given


def _matched(given: Mapping[str, Any], study: Study, timer: Timer | None) -> RunConfig:
    """The run with as many steps as the budget allows it, which is the length of all that has none of its own."""
    config, budget = RunConfig.from_dict(given), study.budget
    if budget.total is None:
        return config
    if budget.hold == "steps":
        steps = int(budget.total)
    elif budget.hold == "samples":
        steps = int(budget.total // (config.replicas * config.batch_size))
    else:
        if timer is None:
            raise ConfigError("a budget of seconds needs the runs to be timed first")
        steps = int(budget.total / timer(config) + 1e-6)
    if steps < 1:
        raise ConfigError(f"the budget of {budget.total:g} {budget.hold} does not pay for a single step")
    return RunConfig.from_dict({**given, "steps": steps})


def _filled(words: Sequence[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """The command with its factors and the seed filled in, all at once: a value may hold braces of its own."""
    asked = {name for word in words for name in BRACES.findall(word)}
    unused = [name for name in values if name not in asked]
    if unused:
        raise ConfigError(f"the script's command does not use {unused}; write them in braces: --seed {{seed}}")
    if OUT not in asked:
        raise ConfigError("the script's command does not use {out}, the folder to write result.json to")
    unknown = sorted(asked - {*values, OUT, PYTHON})
    if unknown:
        raise ConfigError(f"the script's command asks for {unknown}, and there are {[*values, OUT, PYTHON]}")
    kept = {OUT: "{" + OUT + "}", PYTHON: "{" + PYTHON + "}"}
    known = {**{name: str(value) for name, value in values.items()}, **kept}
    return tuple(BRACES.sub(lambda found: known[found[1]], word) for word in words)


def _hashes(command: Sequence[str], known: dict[str, str]) -> tuple[str, ...]:
    """Of the small files among a command's words, so that an edited script is not taken for the one that was run."""
    for word in command:
        if word not in known and os.path.isfile(word) and os.path.getsize(word) <= LARGEST_HASHED:
            known[word] = hashlib.blake2b(Path(word).read_bytes(), digest_size=6).hexdigest()
    return tuple(known[word] for word in command if word in known)
