"""The engine's state as plain numbers and tensors: a converged point, and replicas by name if a window is open.

Layout (format 3)::

    format, config             what wrote it
    converged                  step, model, optimizer: the last merged point, never a replica in mid-window
    opening                    each replica's model and optimizer there, where they differ (`Mean("keep")`, `perturb`)
    met                        whether the replicas had been made one by then; states without it: after window 0
    window, start, shifts      the window that opened there; every knob's shift and controller state
    watch                      what the guard knows, the point it would go back to included
    tail                       means of the weights over parts of the run, as far as it has come
    merge                      its declaration, and what it remembers between windows
    noise_scale                that of the last window that has one
    open                       the window under way: step, tally, evidence, and each replica's model and optimizer
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from hdet.engine.cycle import Cycle
from hdet.engine.declaration import plain
from hdet.engine.noise_scale import NoiseScale
from hdet.engine.saved_layout import require_fit
from hdet.errors import CheckpointError, HdetError
from hdet.hparams import LearningRate
from hdet.replicas import held_optimizer, tensors
from hdet.replicas.anchor import copied_state
from hdet.replicas.distributed.fingerprint import fingerprint
from hdet.replicas.distributed.optimizer_mean import mark
from hdet.spec import briefly, some

FORMAT = 3
ANOTHER_LENGTH = (
    "a run of another length is another search, which can begin at the values that this one had found (search.shifts)"
)
ROUNDING = 1e-5
"""Part by which the lengths of equal weights may differ."""


def state_dict(cycle: Cycle, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """See the module's layout. With the window just opened, `open` holds no replicas: all are the converged one.

    Args:
        leave_out: names of the model's entries that no point and no replica in it has, and that are not copied.
    """
    cycle.home.settle()
    # A replica that a merge has still to reach is no state to go on from.
    fresh = cycle.tally.steps == 0 or cycle.home.in_flight
    apart = fresh and not (cycle.home.in_flight or cycle.finished or _alike(cycle))
    return {
        "format": FORMAT,
        "config": config(cycle),
        "size": cycle.home.size,
        "window": cycle.window.index,
        "met": cycle.met,
        "finished": cycle.finished,
        "restores": cycle.restores,
        "converged": {"step": cycle.step_count, **_point(cycle, 0, leave_out)}
        if cycle.finished
        else cycle.anchor.state_dict(fresh=fresh, leave_out=leave_out),
        "opening": _replicas(cycle, leave_out) if apart else None,
        "watch": cycle.watch.state_dict(leave_out) if cycle.watch is not None else None,
        "tail": cycle.tail.state_dict() if cycle.tail is not None else None,
        "knobs": {knob.name: knob.state_dict() for knob in cycle.knobs},
        "collectors": [collector.state_dict() for collector in cycle.collectors],
        "merge": {"declared": cycle.plan.merge.to_dict(), "state": cycle.merger.state_dict()},
        "noise_scale": noise_scale_of(cycle),
        "open": None
        if fresh or cycle.finished
        else {
            "step": cycle.step_count,
            "exploring": _exploring(cycle),
            "tally": cycle.tally.state_dict(),
            "averages": cycle.averages.state_dict(),
            "noise": cycle.noise.state_dict() if cycle.noise is not None else None,
            "replicas": _replicas(cycle, leave_out),
        },
    }


def load_state_dict(cycle: Cycle, state: dict[str, Any], going_back: Callable[[], None] = lambda: None) -> None:
    """Resume in mid-window where N, spreads and window are the same and all processes load one step's state, else from
    the converged point.

    Names, shapes and types of all that is loaded are checked before anything changes. What only the parts themselves
    can tell is found out while they load; for that the engine's own state is held until all has been loaded.

    A collective: all processes load, and where one of them cannot, all go back. They hear of each other after the
    checks, after knobs, models and optimizers, and at the end. Between the last two the window opens, and evidence may
    meet there.

    Args:
        going_back: called before the engine goes back, for what knobs are bound to.

    Raises:
        CheckpointError: another format, other knobs, or a model that does not fit; or another process cannot load its
            state, or loads one of another run or moment. The engine is as it was.
    """
    refuse_unless_all(cycle, attempted(lambda: require(cycle, state)))
    together = _in_one_step(cycle, state)
    before, how = state_dict(cycle), _continuation(cycle, state, together)
    failure = attempted(lambda: _load_point(cycle, state, how))
    if all_agree(cycle, failure is None):
        failure = attempted(lambda: _take_up(cycle, state, how))
        if all_agree(cycle, failure is None):
            cycle.history.truncate(_windows(state))
            return
    going_back()
    back = _continuation(cycle, before, together=True)
    _load_point(cycle, before, back)
    _take_up(cycle, before, back)
    refuse_unless_all(cycle, failure)


def noise_scale_of(cycle: Cycle) -> dict[str, float | None] | None:
    """That of the last window that has one, as plain numbers."""
    return asdict(cycle.noise_scale) if cycle.noise_scale is not None else None


def refuse_of_a_search(cycle: Cycle, *, loads: bool = False) -> None:
    """A search keeps more beside its engine, and cuts the optimizer's groups for a step only.

    Args:
        loads: a state is to be loaded, and not saved.

    Raises:
        CheckpointError: the engine is a search's.
    """
    if not cycle.home.left_to_loop:
        return
    if loads:
        raise CheckpointError(
            "the engine of hdet.attach takes no state by itself, since the search keeps more beside it: load what "
            "search.state_dict() returned by search.load_state_dict(), or that of search.all_ranks by its own"
        )
    raise CheckpointError(
        "this is the engine of hdet.attach, from which alone the run could not go on as it was: save and load "
        "search.state_dict(), or search.all_ranks.state_dict() on all ranks together"
    )


def refuse_unless_all(cycle: Cycle, problem: HdetError | None, kept: str = "engine") -> None:
    """Raise this process's problem, or say that another has one, and what is as it was. A collective."""
    if not all_agree(cycle, problem is None):
        raise problem or CheckpointError(f"another process cannot load its state; this one's {kept} is as it was")


def attempted(load: Callable[[], None]) -> HdetError | None:
    """Load, and return what went wrong."""
    try:
        load()
    except HdetError as error:
        return error
    except Exception as error:
        failure = CheckpointError(
            f"the checkpoint cannot be loaded ({type(error).__name__}: {error}); the engine is as it was"
        )
        failure.__cause__ = error
        return failure
    return None


def require(cycle: Cycle, state: Mapping[str, Any]) -> None:
    """Whether a state can be loaded, as far as that shows beforehand: all that is read of it before it is loaded.

    Raises:
        HdetError: it cannot.
    """
    check(cycle, state)
    require_fit(cycle, state)
    cycle.history.require(_windows(state), state["converged"]["step"])
    _moment(cycle, state)
    _known_and_same(cycle, state)


def _windows(state: Mapping[str, Any]) -> int:
    """How many windows lie before the converged point."""
    return int(state["window"]) + (1 if state["finished"] else 0)


def _length(cycle: Cycle, state: Mapping[str, Any]) -> float:
    """Of the trained weights at the converged point; 0 where replicas may lie apart there, and it tells nothing."""
    if not (cycle.plan.merge.makes_alike and _met(state)):
        return 0.0
    trained = {name for name, parameter in cycle.hosts[0][0].named_parameters() if parameter.requires_grad}
    held = [tensors.local(value) for name, value in state["converged"]["model"].items() if name in trained]
    parts = list(map(tensors.as_real, held))
    device = cycle.tally.sums.device
    # Gathered there first: the host waits once.
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64).to(device) for part in parts]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _met(state: Mapping[str, Any]) -> bool:
    """Whether the window opened with all replicas made one."""
    met = state.get("met")
    return bool(state["window"] > 0 if met is None else met)


@dataclass(frozen=True)
class Continuation:
    """How a state is taken up, the same in all processes.

    Attributes:
        own_starts: each replica opens the window at a point of its own.
        same_window: the window under way is gone on with.
    """

    own_starts: bool
    same_window: bool


def _in_one_step(cycle: Cycle, state: Mapping[str, Any]) -> bool:
    """Whether all processes load the state of one step, or just of one window.

    Raises:
        CheckpointError: their last converged points are not one.
    """
    if len(cycle.home.local) == cycle.home.size:
        return True
    step, facts = _moment(cycle, state)
    row = torch.tensor([[step, _length(cycle, state), *facts.values()]], dtype=torch.float64)
    table = cycle.home.gather(row.to(cycle.tally.sums.device).expand(len(cycle.home.local), -1))
    columns = dict(zip(facts, table[:, 2:].T, strict=True))
    differing = {said: values for said, values in columns.items() if (values != values[0]).any()}
    lengths = table[:, 1]
    if not (differing or np.allclose(lengths, lengths[0], rtol=ROUNDING, equal_nan=True)):
        differing = {"weights have the lengths": lengths}
    if differing:
        told = " and ".join(
            f"their {said} [{', '.join(f'{value:.12g}' for value in values)}]" for said, values in differing.items()
        )
        raise CheckpointError(
            f"the processes load states of different runs or moments: {told}; these must be the same, so load what was "
            f"saved together"
        )
    return bool((table[:, 0] == table[0, 0]).all())


def _moment(cycle: Cycle, state: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """The step of a state, and what is one for all processes in its window."""
    point, under_way = state["converged"], state["open"]
    facts = {
        "last converged points are those of the steps": point["step"],
        "windows are": state["window"],
        "replicas had been made one (1) or not (0):": int(_met(state)),
        **{f"bases of {knob.name!r} have moved by": state["knobs"][knob.name]["shift"] for knob in cycle.knobs},
    }
    return (under_way["step"] if under_way is not None else point["step"]), facts


def _continuation(cycle: Cycle, state: Mapping[str, Any], together: bool) -> Continuation:
    known, same = _known_and_same(cycle, state)
    return Continuation(all_agree(cycle, known) and state["opening"] is not None, all_agree(cycle, together and same))


def _known_and_same(cycle: Cycle, state: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether this process's replicas find the points they set out from, and those of the same window under way."""
    opening, under_way, firsts = state["opening"], state["open"], cycle.home.first_of_hosts
    known = opening is None or (state["size"] == cycle.home.size and all(str(r.index) in opening for r in firsts))
    same = (
        under_way is not None
        and under_way["exploring"] == _exploring(cycle)
        and all(str(replica.index) in under_way["replicas"] for replica in firsts)
    )
    return known, same


def _load_point(cycle: Cycle, state: Mapping[str, Any], how: Continuation) -> None:
    """Knobs, models, optimizers and guard as they were when the window opened. No collective."""
    for knob in cycle.knobs:
        knob.load_state_dict(state["knobs"][knob.name])
    for replica in cycle.home.first_of_hosts:
        model, optimizer = cycle.hosts[replica.host]
        start = state["opening"][str(replica.index)] if how.own_starts else state["converged"]
        model.load_state_dict(start["model"])
        held_optimizer.load(optimizer, start["optimizer"])
    if cycle.watch is not None:
        cycle.watch.load_state_dict(state["watch"])
    if cycle.tail is not None:
        cycle.moving.open()  # what may be trained may have changed since the engine was made
        cycle.tail.load_state_dict(state.get("tail") or {"layers": [], "parts": []})
    cycle.loaded()
    cycle.restores = state["restores"]
    cycle.step_count = state["converged"]["step"]


def _take_up(cycle: Cycle, state: Mapping[str, Any], how: Continuation) -> None:
    """Open the window, and go on in it where it is the same."""
    cycle.resume(state["window"], state["finished"], _met(state))
    told = state.get("noise_scale")  # states of older versions lack it
    cycle.noise_scale = NoiseScale(**told) if told and cycle.noise is not None else None
    cycle.merger.forget()
    merge = state.get("merge") or {}
    if merge.get("state"):
        cycle.merger.load_state_dict(merge["state"])
    for collector, own_state in zip(cycle.collectors, state["collectors"], strict=True):
        collector.load_state_dict(own_state, cycle.window if how.same_window else None)
    if cycle.finished:
        return
    if not (how.same_window or how.own_starts):
        for collector in cycle.collectors:
            collector.opened_from_first()
    if not how.same_window:
        if not cycle.met:  # one file may hold what is of each process
            cycle.merger.open_apart()
        cycle.reapply()  # what outlives windows may decide who explores in this one
        return
    under_way = state["open"]
    cycle.step_count = under_way["step"]
    cycle.tally.load_state_dict(under_way["tally"])
    cycle.averages.load_state_dict(under_way["averages"])
    noise = under_way.get("noise")
    if cycle.noise is not None and noise is not None:
        cycle.noise.load_state_dict(noise)
    for replica in cycle.home.first_of_hosts:
        own_state = under_way["replicas"][str(replica.index)]
        cycle.hosts[replica.host][0].load_state_dict(own_state["model"])
        held_optimizer.load(replica.optimizer, own_state["optimizer"])
    cycle.loaded()
    cycle.reapply()


def check(cycle: Cycle, state: Mapping[str, Any]) -> None:
    """Whether a state's format and declaration are this engine's.

    Raises:
        CheckpointError: they are not.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"a state is a mapping, not a {type(state).__name__}; give what state_dict() returned")
    if state.get("format") != FORMAT:
        raise CheckpointError(f"checkpoint format {state.get('format')!r}; this version reads format {FORMAT}")
    if not isinstance(state.get("config"), Mapping):
        raise CheckpointError("the checkpoint does not say what engine wrote it; give what state_dict() returned")
    merge, declared = state.get("merge") or {}, cycle.plan.merge.to_dict()
    if merge.get("state") and merge["declared"] != declared:
        raise CheckpointError(
            f"the checkpoint was written with merge={merge['declared']}, which remembers, and this engine has "
            f"{declared}; declare the same to resume"
        )
    saved, own = state["config"], config(cycle)
    for field in own:
        if saved.get(field) != own[field]:
            if field == "knobs":
                _refuse_knobs(saved.get(field), own[field])
            if field == "schedules":
                _refuse_schedules(saved.get(field), own[field])
            way_out = f"; {ANOTHER_LENGTH}" if field == "total_steps" else ""
            raise CheckpointError(
                f"the checkpoint was written with {field}={briefly(saved.get(field), own[field])}, this engine has "
                f"{briefly(own[field], saved.get(field))}; declare the same to resume{way_out}"
            )


def config(cycle: Cycle) -> dict[str, Any]:
    """What must be declared alike for a state to be this engine's (N may differ)."""
    return {
        "knobs": [knob.name for knob in cycle.knobs],
        "schedules": {knob.name: plain(knob.spec.schedule) for knob in cycle.knobs},
        "evidence": [source.to_dict() for source in cycle.plan.evidence],
        "seed": cycle.plan.seed,
        "gradients": cycle.plan.gradients,
        "total_steps": cycle.plan.total_steps,
        "guard": cycle.watch.spec.to_dict() if cycle.watch is not None else None,
    }


def _refuse_knobs(saved: object, own: list[str]) -> None:
    """Name those that are not on both sides, of many some."""
    if not isinstance(saved, list) or not all(isinstance(name, str) for name in saved) or not set(saved) ^ set(own):
        return
    sides = {"missing": set(saved) - set(own), "new": set(own) - set(saved)}
    told = [f"{side} here: {some(sorted(names))}" for side, names in sides.items() if names]
    kind = LearningRate.kind
    apart = any(name.startswith(f"{kind}[") for name in (*saved, *own)) and (kind in saved) != (kind in own)
    hint = (
        '; rates="together" is one learning rate, "matrices" one for each matrix, "optimizers" one for each kind of '
        "optimizer in a chain"
        if apart
        else ""
    )
    raise CheckpointError(
        f"the checkpoint was written with other knobs ({'; '.join(told)}); declare the same to resume{hint}"
    )


def _refuse_schedules(saved: object, own: dict[str, Any]) -> None:
    name = next((n for n in own if not isinstance(saved, Mapping) or saved.get(n) != own[n]), "")
    told = saved.get(name) if isinstance(saved, Mapping) else None
    raise CheckpointError(
        f"the checkpoint was written with the schedule {briefly(told, own[name])} of {name!r}, this engine has "
        f"{briefly(own[name], told)}; declare the same to resume. Where the peak is read off the optimizer, make "
        f"the engine before the optimizer's own state is loaded, which holds the rate of that moment, or give "
        f"schedule=; where only the warm-up is other, give warmup_steps=; {ANOTHER_LENGTH}"
    )


def all_agree(cycle: Cycle, fact: bool) -> bool:
    """Whether a fact holds in every process; each asks at the same time."""
    row = torch.full((len(cycle.home.local), 1), float(fact), device=cycle.tally.sums.device)
    return bool((cycle.home.gather(row) == 1.0).all())


def _replicas(cycle: Cycle, leave_out: Collection[str]) -> dict[str, Any]:
    return {str(replica.index): _point(cycle, replica.host, leave_out) for replica in cycle.home.first_of_hosts}


def _point(cycle: Cycle, host: int, leave_out: Collection[str]) -> dict[str, Any]:
    """Where a model and its optimizer are now."""
    model, optimizer = cycle.hosts[host]
    return {"model": copied_state(model, leave_out), "optimizer": copy.deepcopy(held_optimizer.unwrapped(optimizer))}


def _alike(cycle: Cycle) -> bool:
    """Whether all models of this process hold the same bits, and their optimizers the same state."""
    device = torch.device("cpu")
    marks = [
        torch.cat([fingerprint([*tensors.parameters(model), *model.buffers()], device), mark(optimizer, device)])
        for model, optimizer in (cycle.hosts if len(cycle.hosts) > 1 else ())
    ]
    return all(torch.equal(own, marks[0]) for own in marks)


def _exploring(cycle: Cycle) -> dict[str, Any]:
    """What a window under way must have been opened with for it to be gone on with."""
    return {
        "size": cycle.home.size,
        "windows": cycle.plan.windows.to_dict(),
        "spreads": [knob.spec.spread.to_dict() for knob in cycle.knobs],
    }
