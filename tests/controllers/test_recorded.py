"""`Calibrate` and `Regularize` move as they did when these moves were written down, bit for bit.

Who means to change a rule or a veto writes them down anew. `recorded/windows.jsonl` has the windows of four runs of the
quickstart's task: a rate ten times too low, one thirty times too high, few data, and a wrecked run.
`recorded/generated.jsonl` has moves in runs that `generated.py` makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from generated import moves_of_a_run

from hdet.controllers import Calibrate, Context, Controller, Estimate, Regularize

RECORDED = Path(__file__).parent / "recorded"

CONTROLLERS: dict[str, Controller] = {
    "calibrate": Calibrate(),
    "calibrate_other": Calibrate(
        significance=1.0,
        lower_significance=1.5,
        limit=0.3,
        early_limit=0.2,
        ceiling=0.5,
        trusted_from=0.5,
        until=1.0,
        retreat_factor=2.0,
        stall_ratio=1.2,
        return_step=0.1,
    ),
    "regularize": Regularize(),
    "regularize_other": Regularize(
        rate=0.1,
        gate=0.5,
        lower_gate=0.5,
        early_until=0.0,
        saturation=2.0,
        memory=0.95,
        window_steps=None,
        max_scale=2.0,
        raise_after=0.0,
        until=1.0,
        max_gap=0.1,
        min_gap=0.1,
        max_extrapolation=1.0,
        min_harm=0.1,
        min_effect=0.2,
    ),
}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("recorded", lines("generated.jsonl"), ids=lambda one: f"{one['controller']}-{one['seed']}")
def test_moves_on_generated_estimates(recorded: dict[str, Any]) -> None:
    name = recorded["controller"]
    looks_ahead = name.startswith("calibrate")
    assert moves_of_a_run(CONTROLLERS[name], recorded["seed"], looks_ahead=looks_ahead) == recorded["moves"]


@pytest.mark.parametrize("recorded", lines("windows.jsonl"), ids=lambda one: f"{one['run']}-{one['knob']}")
def test_moves_on_estimates_of_real_runs(recorded: dict[str, Any]) -> None:
    controller = CONTROLLERS["calibrate" if recorded["knob"] == "learning_rate" else "regularize"]
    state = controller.start()
    for window in recorded["windows"]:
        context = Context(**window["context"])
        if window["call"] == "step":
            move, state = controller.step(state, estimate(window["estimate"]), context)
        elif window["call"] == "retreat":
            move, state = controller.retreat(state, context, window["worked"])
        else:
            move, state = controller.restart(state, context)
        assert move == window["move"], f"window {context.window}"


def estimate(given: dict[str, Any]) -> Estimate:
    averaged = Estimate(**given["averaged"]) if "averaged" in given else None
    return Estimate(**{**given, "averaged": averaged, "slopes": tuple(given.get("slopes", ()))})
