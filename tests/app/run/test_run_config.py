"""The declaration of a run: what it fills in, what it refuses, and that YAML gives it back equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hdet
from hdet.app.run import SGD, AdamW, RunConfig, TorchOptimizer
from hdet.app.run.signal import DeclaredProbe, DeclaredTrainingLoss
from hdet.app.tasks import Digits, Text
from hdet.contrib import Kalman
from hdet.controllers import Hold
from hdet.document import dump, parse
from hdet.errors import ConfigError
from hdet.hparams.schedule import LinearDecay
from hdet.merges import Mean
from hdet.schedules import Constant, Cosine, LinearWarmup, OneCycle
from hdet.spreads import OneSided

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
SMALL: dict[str, Any] = {"task": "digits", "steps": 40, "knobs": []}


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(task=Text(), steps=10),
        RunConfig(
            task=Digits(label_noise=0.2),
            steps=10,
            optimizer=SGD(0.1, nesterov=True),
            schedule=OneCycle(0.1, total_steps=10),
            knobs=(hdet.LearningRate(), hdet.Dropout(spread=OneSided(0.2), controller=Hold())),
            window=hdet.windows.GrowingWindow(minimum=3),
            signal=DeclaredTrainingLoss(),
            evidence=hdet.evidence.Divergent(estimator=Kalman()),
            merge=Mean(optimizer="reset"),
            gradients="local",
            clip=1.0,
        ),
        RunConfig.load(QUICKSTART),
    ],
)
def test_yaml_gives_an_equal_declaration(config: RunConfig) -> None:
    assert RunConfig.from_dict(parse(dump(config), name="test")) == config


def test_the_quickstart_declares_what_it_promises() -> None:
    config = RunConfig.load(QUICKSTART)
    assert not config.copies, "plain data parallel: nothing diverges"
    assert config.knobs is not None
    assert [knob.kind for knob in config.knobs] == ["learning_rate", "weight_decay", "dropout", "attention_temperature"]


def explored(config: RunConfig) -> list[hdet.Knob]:
    model = torch.nn.Linear(2, 1)
    groups = [{"name": "decay", "params": [model.weight]}, {"name": "no_decay", "params": [model.bias]}]
    return config.explored(model, config.optimizer.build(groups))


@pytest.mark.parametrize("knobs", [{}, {"knobs": None}, {"knobs": "recommended"}])
def test_without_knobs_the_recipe_chooses(knobs: dict[str, Any]) -> None:
    config = RunConfig.from_dict({"task": "digits", "steps": 40, "optimizer": {"lr": 0.02}, **knobs})
    assert config.schedule == LinearDecay(peak=0.02, total_steps=40, warmup=0.3)
    assert [knob.label for knob in explored(config)] == ["learning_rate", "weight_decay"]
    assert not config.copies


def test_divergent_evidence_and_local_gradients_take_copies() -> None:
    knob = {"kind": "learning_rate", "evidence": "line"}
    assert not RunConfig.from_dict({**SMALL, "knobs": [knob]}).copies
    assert RunConfig.from_dict({**SMALL, "knobs": [knob], "gradients": "local"}).copies
    assert RunConfig.from_dict({**SMALL, "knobs": ["learning_rate"]}).copies


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", Cosine(0.02, total_steps=40)),
        ({"kind": "cosine", "warmup": 0.1}, Cosine(0.02, total_steps=40, warmup=0.1)),
        ({"kind": "cosine", "peak": 0.5}, Cosine(0.5, total_steps=40)),
        ({"kind": "cosine", "total_steps": 80}, Cosine(0.02, total_steps=80)),
        ("one_cycle", OneCycle(0.02, total_steps=40)),
        ("constant", Constant(0.02)),
        (Cosine(1.0, total_steps=50), Cosine(1.0, total_steps=50)),
        (
            {"kind": "linear_warmup", "steps": 9, "schedule": "cosine"},
            LinearWarmup(Cosine(0.02, total_steps=40), 9),
        ),
        (None, None),
    ],
)
def test_a_schedule_takes_its_peak_and_length_from_the_run(schedule: object, expected: object) -> None:
    config = RunConfig.from_dict({**SMALL, "optimizer": {"lr": 0.02}, "schedule": schedule})
    assert config.schedule == expected


def test_a_kind_that_goes_without_saying_is_the_default() -> None:
    config = RunConfig.from_dict({**SMALL, "optimizer": {"lr": 0.5}, "window": 7, "signal": {"at": "average"}})
    assert config.optimizer == AdamW(0.5)
    assert config.window == hdet.windows.FixedWindow(7)
    assert config.signal == DeclaredProbe(at="average")


def test_the_runs_schedule_moves_with_learning_rates_that_have_none() -> None:
    own = Constant(0.1)
    config = RunConfig(
        task="digits",
        steps=40,
        schedule="cosine",
        knobs=(
            hdet.LearningRate(groups="decay"),
            hdet.LearningRate(groups="no_decay", schedule=own),
            hdet.WeightDecay(),
        ),
    )
    schedules = [knob.schedule for knob in explored(config)]
    assert schedules == [config.schedule, own, None]


@pytest.mark.parametrize(("steps", "expected"), [(None, 12), (20, 20), (0, 0)])
def test_the_recommended_rate_is_warmed_up(steps: int | None, expected: int) -> None:
    own = {**SMALL, "knobs": None, "schedule": {"kind": "cosine", "warmup": 0.0}, "warmup_steps": steps}
    config = RunConfig.from_dict(own)
    (rate,) = (knob for knob in explored(config) if isinstance(knob, hdet.LearningRate))
    assert config.schedule is not None
    assert rate.schedule == config.schedule.with_warmup(expected)


def test_a_warm_up_beside_listed_knobs_is_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_steps is of the recommended learning rate, and knobs are listed"):
        RunConfig.from_dict({**SMALL, "warmup_steps": 20})


def test_overrides_and_seed_come_last(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("task: digits\nsteps: 40\nschedule: cosine\nseed: 1\nknobs: [dropout]\n")
    config = RunConfig.load(path, ["steps=8", "knobs.0.accept_bias=true", "seed=2"], seed=3)
    assert (config.steps, config.seed) == (8, 3)
    assert config.schedule is not None
    assert config.schedule.total_steps == 8, "the schedule must follow the overridden steps"
    assert config.knobs == (hdet.Dropout(accept_bias=True),)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stepz": 3}, r"stepz: no such field; there are \[.*'steps'"),
        ({"task": "txet"}, r"no task is called 'txet'; there are \['digits', 'imported', 'text'"),
        ({"task": {"kind": "text", "widht": 3}}, "widht: no such field"),
        ({"optimizer": {"kind": "adamw", "lr": -1}}, "lr: .*greater than 0"),
        ({"optimizer": "adamx"}, "no optimizer is called 'adamx'"),
        ({"schedule": {"warmup": 0.1}}, "a schedule is .*'kind' key"),
        ({"schedule": {"kind": "cosine", "total_steps": 39}}, "ends after 39 steps and the run has 40; lower steps"),
        ({"steps": 0}, "steps: .*greater than or equal to 1"),
        ({"steps": "many"}, "steps: .*integer"),
        ({"window": 0}, "window: .*greater than or equal to 1"),
        ({"gradients": "none"}, "gradients: .*'shared' or 'local'"),
        ({"knobs": ["learning_rat"]}, r"knobs\.0: no knob is called 'learning_rat'"),
        ({"knobs": [{"kind": "dropout", "bounds": [0.5, 0.1]}]}, r"knobs\.0: .*low < high; got \(0.5, 0.1\)"),
        (
            {
                "knobs": [
                    "dropout",
                    {"kind": "weight_decay", "schedule": {"kind": "linear", "peak": 1, "total_steps": 9}},
                ]
            },
            r"the schedule of knobs\.1 \(weight_decay\) ends after 9 steps",
        ),
        ({"device": "warp_drive"}, "device: torch cannot use this device"),
        ({"device": "meta"}, "device: torch cannot use this device"),
        ({"optimizer": {"kind": "adamw", "betas": [0.9, 1.0]}}, r"betas\.1: .*less than 1"),
        ({"optimizer": {"kind": "sgd", "momentum": 0, "nesterov": True}}, "nesterov is a kind of momentum"),
        ({"steps": True}, "steps: it takes a number, no true or false"),
        ({"window": True}, "window: fixed: steps: it takes a number, no true or false"),
        ({"knobs": [{"kind": "dropout", "spread": {"kind": "two_level", "width": True}}]}, "width: it takes a number"),
        ({"imports": ["no_such_module"]}, "no module 'no_such_module'"),
        ({"seed": -1}, "seed: .*greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_dict({**SMALL, **changed})


@pytest.mark.parametrize("changed", [{"optimizer": {"lr": 0}}, {"optimizer": "adamx"}, {"steps": "ten"}, {"steps": 0}])
@pytest.mark.parametrize("schedule", ["cosine", "one_cycle", {"kind": "linear_warmup", "schedule": "wsd", "steps": 3}])
def test_a_schedule_is_not_blamed_for_what_the_run_does_not_give(changed: dict[str, Any], schedule: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_dict({**SMALL, "schedule": schedule, **changed})
    assert "schedule" not in str(refused.value)
    assert next(iter(changed)) in str(refused.value)
    with pytest.raises(ConfigError, match=r"optimizer: .*schedule: cosine: warmup"):  # and its own mistakes are told
        RunConfig.from_dict({**SMALL, "schedule": {"kind": "cosine", "warmup": 2}, "optimizer": "adamx"})


def test_a_run_has_a_task_and_steps() -> None:
    with pytest.raises(ConfigError, match=r"task: Field required.*steps: Field required"):
        RunConfig.from_dict({})


def test_imports_register_the_users_own_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_running_knobs.py").write_text(
        "import hdet\n@hdet.spec.register\nclass DecayOfMyOwn(hdet.WeightDecay):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = RunConfig.from_dict({**SMALL, "imports": ["my_running_knobs"], "knobs": ["decay_of_my_own"]})
    assert type(config.knobs[0]).__name__ == "DecayOfMyOwn"


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (AdamW(0.1, weight_decay=0.2, betas=(0.5, 0.6)), {"lr": 0.1, "weight_decay": 0.2, "betas": (0.5, 0.6)}),
        (SGD(0.1, momentum=0.5, nesterov=True), {"lr": 0.1, "momentum": 0.5, "nesterov": True, "weight_decay": 0}),
        (TorchOptimizer(name="RMSprop", lr=0.1, options={"alpha": 0.5}), {"lr": 0.1, "alpha": 0.5}),
    ],
)
def test_an_optimizer_is_built_as_declared_and_a_group_keeps_its_own(
    optimizer: Any, expected: dict[str, object]
) -> None:
    groups = [
        {"name": "own", "params": [torch.nn.Parameter(torch.zeros(2))], "weight_decay": 0.75},
        {"name": "none", "params": [torch.nn.Parameter(torch.zeros(2))]},
    ]
    built = optimizer.build(groups)
    assert {name: built.param_groups[1][name] for name in expected} == expected
    assert built.param_groups[0]["weight_decay"] == 0.75


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (TorchOptimizer(name="AdamZ"), "no optimizer 'AdamZ'"),
        (TorchOptimizer(name="Optimizer", options={"defaults": 3, "foo": 1}), "torch.optim.Optimizer: "),
        (TorchOptimizer(name="NAdam", options={"epz": 1}), "NAdam: .*'epz'"),
        (TorchOptimizer(name="NAdam", options={"eps": -1.0}), "NAdam: .*-1.0"),
    ],
)
def test_an_optimizer_that_cannot_be_is_named(optimizer: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer.build([{"params": [torch.nn.Parameter(torch.zeros(2))]}])
