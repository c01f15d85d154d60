"""User tasks by `module:function`, and what is said of those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdet.app.run.config import RunConfig
from hdet.app.tasks import Digits, Imported, Task
from hdet.errors import ConfigError


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text(
        "from hdet.app.tasks import Digits\n"
        "def digits(seed, batch_size, device, width=8):\n"
        "    return Digits(width=width).build(seed=seed, batch_size=batch_size, device=device)\n"
        "def nothing(seed, batch_size, device):\n"
        "    return object()\n"
        "def broken(seed, batch_size, device):\n"
        "    return 1 + 'one'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_the_function_gets_seed_batch_size_device_and_options() -> None:
    built = Imported("my_tasks:digits", options={"width": 24}).build(seed=4, batch_size=5)
    expected = Digits(width=24).build(seed=4, batch_size=5)
    assert built.batch(1, 0)[0].equal(expected.batch(1, 0)[0])
    assert built.model().layers[0].out_features == 24  # type: ignore[union-attr, index]


def test_it_is_declared_in_yaml_like_any_task() -> None:
    given = {"kind": "imported", "path": "my_tasks:digits", "options": {"width": 24}}
    assert Task.from_dict(given) == Imported("my_tasks:digits", options={"width": 24})
    assert Task.from_dict(given).to_dict() == given


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("no_such_module:f", {}, "no module 'no_such_module'.*folder that holds it"),
        ("my_tasks:missing", {}, "'my_tasks' has no 'missing'"),
        ("my_tasks:digits", {"hight": 3}, "unexpected keyword argument 'hight'"),
        ("my_tasks:nothing", {}, "object without facts, model, groups, batch, loss, probe, test_loss"),
    ],
)
def test_what_is_wrong_is_named(path: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Imported(path, options=options).build(seed=0, batch_size=1)


def test_an_error_inside_the_users_function_stays_what_it_is() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        Imported("my_tasks:broken").build(seed=0, batch_size=1)


@pytest.mark.parametrize("path", ["my_tasks", "my_tasks.digits", "a:b:c", ""])
def test_a_path_has_a_module_and_a_function(path: str) -> None:
    with pytest.raises(ConfigError, match="path"):
        Imported(path)


class Unbuilt(Task):
    """A task that forgets to return its workload."""

    def build(self, **given: Any) -> Any:
        pass


def test_a_task_of_ones_own_that_returns_no_workload_is_named() -> None:
    config = RunConfig.from_dict({"task": Unbuilt(), "steps": 4})
    with pytest.raises(ConfigError, match="returned a NoneType without facts, model, groups"):
        config.workload()
