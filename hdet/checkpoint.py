"""The engine's state as plain numbers and tensors: a converged point, and replicas by name if a window is open.

Layout (format 1)::

    format, config             what wrote it
    converged                  step, model, optimizer: the last merged point, never a replica in mid-window
    window, start, shifts      the window that opened there; every knob's shift and controller state
    open                       the window under way: step, tally, evidence, and each replica's model and optimizer
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hdet.errors import CheckpointError

if TYPE_CHECKING:
    from hdet.engine import Engine

FORMAT = 1


def state_dict(engine: Engine) -> dict[str, Any]:
    """See the module's layout. With the window just opened, `open` holds no replicas: all are the converged one."""
    fresh = engine.tally.steps == 0
    return {
        "format": FORMAT,
        "config": config(engine),
        "size": engine.size,
        "window": engine.window.index,
        "finished": engine.finished,
        "restores": engine.restores,
        "converged": _finished_point(engine) if engine.finished else engine.anchor.state_dict(),
        "knobs": {knob.name: knob.state_dict() for knob in engine.knobs},
        "collectors": [collector.state_dict() for collector in engine.collectors],
        "open": None
        if fresh or engine.finished
        else {
            "step": engine.step_count,
            "tally": engine.tally.state_dict(),
            "averages": engine.averages.state_dict(),
            "replicas": {
                str(replica.index): {
                    "model": copy.deepcopy(replica.model.state_dict()),
                    "optimizer": copy.deepcopy(replica.optimizer.state_dict()),
                }
                for replica in {replica.host: replica for replica in reversed(engine.replicas)}.values()
            },
        },
    }


def load_state_dict(engine: Engine, state: dict[str, Any]) -> None:
    """Resume in mid-window where N is the same, else from the converged point with the window opened anew.

    Raises:
        CheckpointError: another format, other knobs, or a model that does not fit.
    """
    if state.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint format {state.get('format')!r}; this version reads format {FORMAT}")
    saved, own = state["config"], config(engine)
    for field in own:
        if saved.get(field) != own[field]:
            raise CheckpointError(
                f"the checkpoint was written with {field}={saved.get(field)!r}, this engine has {own[field]!r}; "
                f"declare the same to resume"
            )
    point = state["converged"]
    for model, optimizer in engine.hosts:
        try:
            model.load_state_dict(point["model"])
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint's model does not fit: {error}") from None
        optimizer.load_state_dict(copy.deepcopy(point["optimizer"]))
    for knob in engine.knobs:
        knob.load_state_dict(state["knobs"][knob.name])
    engine.restores = state["restores"]
    engine.step_count = point["step"]
    engine.history.truncate(state["window"] + (1 if state["finished"] else 0))
    engine.finished = state["finished"]
    if engine.finished:
        engine.reapply()
        return
    engine.open_window(state["window"])
    under_way = state["open"]
    same = state["size"] == engine.size and len(state["collectors"]) == len(engine.collectors)
    for collector, own_state in zip(engine.collectors, state["collectors"], strict=True):
        collector.load_state_dict(own_state, engine.window if same and under_way is not None else None)
    if under_way is None or not same:
        return
    engine.step_count = under_way["step"]
    engine.tally.load_state_dict(under_way["tally"])
    engine.averages.load_state_dict(under_way["averages"])
    for replica in {replica.host: replica for replica in reversed(engine.replicas)}.values():
        own_state = under_way["replicas"][str(replica.index)]
        replica.model.load_state_dict(own_state["model"])
        replica.optimizer.load_state_dict(copy.deepcopy(own_state["optimizer"]))
    engine.reapply()


def config(engine: Engine) -> dict[str, Any]:
    """What must be declared alike for a state to be this engine's (N may differ)."""
    return {
        "knobs": sorted(knob.name for knob in engine.knobs),
        "seed": engine.seed,
        "gradients": engine.gradients,
        "total_steps": engine.total_steps,
    }


def _finished_point(engine: Engine) -> dict[str, Any]:
    model, optimizer = engine.hosts[0]
    return {
        "step": engine.step_count,
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
    }
