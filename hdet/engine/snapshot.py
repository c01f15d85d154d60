"""The engine's state as plain numbers and tensors: a converged point, and replicas by name if a window is open.

Layout (format 2)::

    format, config             what wrote it
    converged                  step, model, optimizer: the last merged point, never a replica in mid-window
    opening                    each replica's model and optimizer there, where they differ (`Mean("keep")`, `perturb`)
    window, start, shifts      the window that opened there; every knob's shift and controller state
    watch                      what the guard knows, the point it would go back to included
    open                       the window under way: step, tally, evidence, and each replica's model and optimizer
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.errors import CheckpointError
from hdet.replicas import tensors
from hdet.replicas.distributed.fingerprint import fingerprint

if TYPE_CHECKING:
    from hdet.engine.engine import Engine
    from hdet.replicas import Replica

FORMAT = 2


def state_dict(engine: Engine) -> dict[str, Any]:
    """See the module's layout. With the window just opened, `open` holds no replicas: all are the converged one."""
    # A replica that a merge has still to reach is no state to go on from.
    fresh = engine.tally.steps == 0 or engine.in_flight
    apart = fresh and not (engine.in_flight or engine.finished or _alike(engine))
    return {
        "format": FORMAT,
        "config": config(engine),
        "size": engine.size,
        "window": engine.window.index,
        "finished": engine.finished,
        "restores": engine.restores,
        "converged": _finished_point(engine) if engine.finished else engine.anchor.state_dict(),
        "opening": _replicas(engine) if apart else None,
        "watch": engine.watch.state_dict() if engine.watch is not None else None,
        "knobs": {knob.name: knob.state_dict() for knob in engine.knobs},
        "collectors": [collector.state_dict() for collector in engine.collectors],
        "open": None
        if fresh or engine.finished
        else {
            "step": engine.step_count,
            "exploring": _exploring(engine),
            "tally": engine.tally.state_dict(),
            "averages": engine.averages.state_dict(),
            "replicas": _replicas(engine),
        },
    }


def load_state_dict(engine: Engine, state: dict[str, Any]) -> None:
    """Resume in mid-window where N, spreads and window are the same, else from the converged point.

    Raises:
        CheckpointError: another format, other knobs, or a model that does not fit. The engine is as it was.
    """
    check(engine, state)
    point = state["converged"]
    _check_fit(engine, point)
    before = [knob.state_dict() for knob in engine.knobs]
    try:
        for knob in engine.knobs:
            knob.load_state_dict(state["knobs"][knob.name])
    except CheckpointError:
        for knob, own_state in zip(engine.knobs, before, strict=True):
            knob.load_state_dict(own_state)
        raise
    opening = state["opening"]
    firsts = _one_a_host(engine)
    known = opening is None or (state["size"] == engine.size and all(str(r.index) in opening for r in firsts))
    own_starts = engine.all_agree(known) and opening is not None
    for replica in firsts:
        model, optimizer = engine.hosts[replica.host]
        start = opening[str(replica.index)] if own_starts else point
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(copy.deepcopy(start["optimizer"]))
    if engine.watch is not None:
        engine.watch.load_state_dict(state["watch"])
    engine.restores = state["restores"]
    engine.step_count = point["step"]
    engine.history.truncate(state["window"] + (1 if state["finished"] else 0))
    engine.resume(state["window"], state["finished"])
    if engine.finished:
        return
    under_way = state["open"]
    same = engine.all_agree(
        under_way is not None
        and under_way["exploring"] == _exploring(engine)
        and all(str(replica.index) in under_way["replicas"] for replica in _one_a_host(engine))
    )
    for collector, own_state in zip(engine.collectors, state["collectors"], strict=True):
        collector.load_state_dict(own_state, engine.window if same else None)
    if not same:
        engine.reapply()  # what outlives windows may decide who explores in this one
        return
    engine.step_count = under_way["step"]
    engine.tally.load_state_dict(under_way["tally"])
    engine.averages.load_state_dict(under_way["averages"])
    for replica in _one_a_host(engine):
        own_state = under_way["replicas"][str(replica.index)]
        engine.hosts[replica.host][0].load_state_dict(own_state["model"])
        replica.optimizer.load_state_dict(copy.deepcopy(own_state["optimizer"]))
    engine.reapply()


def check(engine: Engine, state: Mapping[str, Any]) -> None:
    """Whether a state's format and declaration are this engine's.

    Raises:
        CheckpointError: they are not.
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


def config(engine: Engine) -> dict[str, Any]:
    """What must be declared alike for a state to be this engine's (N may differ)."""
    return {
        "knobs": [knob.name for knob in engine.knobs],
        "evidence": [source.to_dict() for source in engine.evidence],
        "seed": engine.seed,
        "gradients": engine.gradients,
        "total_steps": engine.total_steps,
        "guard": engine.watch.spec.to_dict() if engine.watch is not None else None,
    }


def _one_a_host(engine: Engine) -> list[Replica]:
    """The first replica of each model this process holds; seats at one model share all there is to save."""
    return list({replica.host: replica for replica in reversed(engine.replicas)}.values())


def _replicas(engine: Engine) -> dict[str, Any]:
    return {
        str(replica.index): {
            "model": copy.deepcopy(engine.hosts[replica.host][0].state_dict()),
            "optimizer": copy.deepcopy(replica.optimizer.state_dict()),
        }
        for replica in _one_a_host(engine)
    }


def _alike(engine: Engine) -> bool:
    """Whether all models of this process hold the same bits, and their optimizers the same state."""
    marks = [
        fingerprint([*tensors.parameters(model), *model.buffers(), *_state_tensors(optimizer)], torch.device("cpu"))
        for model, optimizer in (engine.hosts if len(engine.hosts) > 1 else ())
    ]
    return all(bool((mark == marks[0]).all()) for mark in marks)


def _state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor):
                    yield value


def _exploring(engine: Engine) -> dict[str, Any]:
    """What a window under way must have been opened with for it to be gone on with."""
    return {
        "size": engine.size,
        "windows": engine.windows.to_dict(),
        "spreads": [knob.spec.spread.to_dict() for knob in engine.knobs],
    }


def _check_fit(engine: Engine, point: dict[str, Any]) -> None:
    """The converged point is of this model and optimizer."""
    model, optimizer = engine.hosts[0]
    own, saved = _shapes(model.state_dict()), _shapes(point["model"])
    odd = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
    if odd:
        raise CheckpointError(
            f"the checkpoint's model does not fit: {odd[0]!r} has shape {saved.get(odd[0], 'none')} there and "
            f"{own.get(odd[0], 'none')} here (and {len(odd) - 1} more differ); build the model as it was"
        )
    groups = [len(group["params"]) for group in optimizer.param_groups]
    written = [len(group["params"]) for group in point["optimizer"]["param_groups"]]
    if groups != written:
        raise CheckpointError(
            f"the checkpoint's optimizer has parameter groups of {written} parameters, this one of {groups}; "
            f"build the optimizer as it was"
        )


def _shapes(model: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    return {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in model.items()}


def _finished_point(engine: Engine) -> dict[str, Any]:
    model, optimizer = engine.hosts[0]
    return {
        "step": engine.step_count,
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
    }
