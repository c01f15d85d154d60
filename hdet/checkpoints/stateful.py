"""An engine's converged point for torch.distributed.checkpoint: sharded over ranks, loadable by any number of them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.checkpoints.leader import led
from hdet.checkpoints.named_state import model_by_name, optimizer_by_name, optimizer_state
from hdet.engine import snapshot
from hdet.engine.engine import Engine
from hdet.engine.saved_layout import Strict, require_layout
from hdet.errors import CheckpointError
from hdet.nested import flat, mapped
from hdet.replicas import tensors
from hdet.replicas.distributed import Ranks
from hdet.replicas.distributed.fingerprint import fingerprint
from hdet.replicas.distributed.lost_rank import translated
from hdet.spec import briefly, some
from hdet.user_warning import warn


class ReplicaControlPart(Strict):
    """The plain numbers of a replica that is stored by itself."""

    groups: list[dict[str, Any]]
    stateless: list[str]


class MergeControlPart(Strict):
    """What a merge remembers: its declaration, plain numbers, and how its tensors lie."""

    declared: dict[str, Any]
    plain: dict[str, Any]
    tensors: dict[str, dict[str, Any]]


class ControlPart(ReplicaControlPart):
    """The plain numbers of a point."""

    run: str | None
    size: int
    window: int
    met: bool | None = None
    finished: bool
    restores: int
    step: int
    knobs: dict[str, Any]
    collectors: list[Any]
    sizes: list[int]
    named: list[str] | None = None
    replicas: list[str]
    merge: MergeControlPart | None = None
    noise_scale: dict[str, float | None] | None = None


class Stateful:
    """What `torch.distributed.checkpoint` saves and loads of an engine: always the last converged point.

        dcp.save({"hdet": hdet.checkpoints.Stateful(engine)}, checkpoint_id="checkpoints/step_1000")
        dcp.load({"hdet": hdet.checkpoints.Stateful(engine)}, checkpoint_id="checkpoints/step_1000")

    Sharded tensors are stored as shards, each once, and are cut anew for the ranks that load them; the number of
    ranks, of shards and of replicas may differ. A window under way is run again from its opening.

    Replicas may differ even there: in their optimizers' state under `Mean("keep")`, in their weights before the first
    merge after `hdet.perturb`. The point is then that of the first place (torch.distributed.checkpoint takes what
    several ranks hold under one name for identical, and would store a mix). `hdet.checkpoints.CheckpointFolder` stores
    each replica's beside it.

    The structure is fixed, whatever the moment: it is the template that loading fills.

    - `model`: parameters and buffers by name, as in the model's own state dict.
    - `optimizer`: by parameter name, its state's tensors.
    - `control`: bytes by `torch.save` of plain numbers: window, step, bases, controllers, parameter groups.

    So parameters have to be trained at the load that were at the save. Else the state of some is left out, which is
    warned of, or torch.distributed.checkpoint misses what was never saved. `CheckpointFolder` reads first whose it is.

    What a guard would go back to is not in it: after a load it looks for the best point anew, and has no first one. Nor
    are the means of a tail, which begins anew, nor tensors that a merge remembers: an outer optimizer has none before
    its first step, so a new engine could be no template for them. `CheckpointFolder` stores the merge's too.

    Raises:
        CheckpointError: the engine is that of `hdet.attach`, which is saved with its search.
    """

    def __init__(self, engine: Engine) -> None:
        snapshot.refuse_of_a_search(engine.cycle)
        self.engine = engine

    def state_dict(self) -> dict[str, Any]:
        """A copy of the point, so that loading into it changes no engine. All ranks of the run call it together."""
        return _copied(self.point())  # type: ignore[no-any-return]

    def point(self, *, each: bool = False, wanted: Collection[str] | None = None) -> dict[str, Any]:
        """References to the point, valid until the next window closes. All ranks of the run call it together.

        Args:
            each: with `replicas`, by index the optimizer and where they differ the models of this process's
                replicas, if those of the run are not alike. (Of several in one process they are known only while no
                step of the window has been made.) And with `merge`, by path the tensors that the merge remembers.
            wanted: the parameters whose optimizer state it has; by default those that have one or are trained.
        """
        engine = self.engine
        engine.home.settle()
        starts = self._starts()
        first = starts[0]
        with translated("comparing replicas before a checkpoint"):
            models_alike, optimizers_alike = self._alike(starts)
            apart = not (models_alike and optimizers_alike)
            found = first.named(wanted)
            differing = ["optimizer", *(["model"] if not models_alike else [])] if each and apart else []
            whole = len(starts) == len(engine.hosts) and not engine.finished
            remembered = _tensors(engine.cycle.merger.state_dict())
            control = self._control(first, found.pop("stateless"), list(found["optimizer"]), differing if whole else [])
            control["merge"] = self._merge(first) if each or not remembered else None
            found["control"] = led(everyone(engine), lambda: _packed(control))
            if each and remembered:
                found["merge"] = remembered
            if apart:
                found = _copied(found)
                if isinstance(engine.home, Ranks):
                    held = _tensors([found["model"], found["optimizer"]]).values()
                    engine.home.exchange.broadcast([tensors.local(tensor) for tensor in held], 0)
        if differing and whole:
            found["replicas"] = {str(start.index): start.packed(differing) for start in starts}
        return found

    def template(self, control: Mapping[str, Any]) -> dict[str, Any]:
        """What a checkpoint of this control is loaded into: a copy, with this process's replicas if it has all."""
        # Other parameters may be trained than when it was saved.
        found = dict(_copied(self.point(wanted=control.get("named"))))
        if control.get("merge") and control["merge"]["tensors"]:
            model = _tensors(found["model"])
            found["merge"] = {
                name: _blank(layout, model.get(layout["like"])) for name, layout in control["merge"]["tensors"].items()
            }
        if control["replicas"] and control["size"] == self.engine.size and self.engine.home.diverge:
            found["replicas"] = {
                str(first.index): {"control": b"", **{key: _copied(found[key]) for key in control["replicas"]}}
                for first in self.engine.home.first_of_hosts
            }
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from the point.

        Raises:
            CheckpointError: it is another engine's, which is left as it was.
        """
        control = unpacked(state["control"])
        self.check(control)
        merge, held = control.get("merge"), state.get("merge", {})
        if merge is not None and not set(merge["tensors"]) <= set(held):
            merge = None
        if merge is None and _tensors(self.engine.cycle.merger.state_dict()):
            warnings.warn(
                "this checkpoint is of a bare hdet.checkpoints.Stateful, which leaves out what a merge remembers: the "
                "outer optimizer begins anew; save by hdet.checkpoints.CheckpointFolder to go on with its state",
                stacklevel=2,
            )
        left_out = sorted({*(control.get("named") or ())} - {*control["stateless"], *state["optimizer"]})
        if left_out:
            warn(
                f"the optimizer state of {some(left_out)} is in this checkpoint and was not asked for, since a bare "
                f"hdet.checkpoints.Stateful asks for that of the parameters that are trained as it is loaded: thaw "
                f"before it those that were trained at the save, or save by hdet.checkpoints.CheckpointFolder"
            )
        model, optimizer = self.engine.hosts[0]
        shared = {"model": state["model"], "optimizer": optimizer_state(model, optimizer, state["optimizer"], control)}
        opening = {}
        for index, own in state.get("replicas", {}).items():
            numbers = unpacked(own["control"])
            require_layout(ReplicaControlPart, numbers, "replicas", "control")
            named = optimizer_state(model, optimizer, own["optimizer"], numbers)
            opening[index] = {"model": own.get("model", state["model"]), "optimizer": named}
        snapshot.load_state_dict(
            self.engine.cycle,
            {
                **{key: control[key] for key in ("format", "config", "size", "window", "finished", "restores")},
                "met": control.get("met"),
                "noise_scale": control.get("noise_scale"),
                "knobs": control["knobs"],
                "collectors": control["collectors"],
                "watch": {"held": None, "first": None} if self.engine.cycle.watch is not None else None,
                "open": None,
                "opening": opening or None,
                "converged": {"step": control["step"], **shared},
                "merge": None if merge is None else _merge_of(merge, held),
            },
        )
        self.engine.cycle.run = control["run"]

    def check(self, control: Mapping[str, Any]) -> None:
        """Whether a checkpoint's control is of this engine's declaration.

        Raises:
            CheckpointError: it is not.
        """
        snapshot.check(self.engine.cycle, control)
        require_layout(ControlPart, control, "control")
        groups = [len(group["params"]) for group in self.engine.hosts[0][1].param_groups]
        if groups != control["sizes"]:
            raise CheckpointError(
                f"the checkpoint's optimizer has parameter groups of {briefly(control['sizes'], groups)} parameters, "
                f"this one of {briefly(groups, control['sizes'])}; make the optimizer alike to resume"
            )

    def _starts(self) -> list[Start]:
        """This process's replicas as the window found them, as far as that is known; the first always is."""
        engine = self.engine
        indices = [replica.index for replica in engine.home.first_of_hosts]
        fresh = engine.cycle.tally.steps == 0
        if not (engine.finished or (fresh and not engine.home.in_flight and len(engine.hosts) > 1)):
            anchor = engine.cycle.anchor
            if not fresh:
                engine.cycle.keep_optimizer_state()  # who saves within windows will do so again
            return [Start(indices[0], *engine.hosts[0], anchor.held, anchor.optimizer_state(fresh=fresh))]
        found = []
        for index, (model, optimizer) in zip(indices, engine.hosts, strict=True):
            tensors.reshard(model)
            held = [tensors.local(t.detach()) for t in (*model.parameters(), *model.buffers())]
            found.append(Start(index, model, optimizer, held, optimizer.state_dict()))
        return found

    def _alike(self, starts: Sequence[Start]) -> tuple[bool, bool]:
        """Whether all replicas of the run hold the same weights and buffers, and the same optimizer state."""
        marks = torch.stack([start.marks() for start in starts])  # [local, 4]
        home = self.engine.home
        if isinstance(home, Ranks):
            rows = home.exchange.gather(marks.flatten()).cpu()
            table = rows.view(len(rows), len(starts), -1)[torch.from_numpy(home.layout.table)]
            marks = table.transpose(1, 2).flatten(0, 1)  # [replicas, parts, 4]
        same = (marks == marks[0]).flatten(0, -2).all(dim=0)
        return bool(same[:2].all()), bool(same[2:].all())

    def _control(self, first: Start, stateless: list[str], named: list[str], replicas: list[str]) -> dict[str, Any]:
        engine = self.engine
        return {
            "format": snapshot.FORMAT,
            "config": snapshot.config(engine.cycle),
            "run": engine.cycle.run,
            "size": engine.size,
            "window": engine.cycle.window.index,
            "met": engine.cycle.met,
            "finished": engine.finished,
            "restores": engine.cycle.restores,
            "step": step_of(engine),
            "noise_scale": snapshot.noise_scale_of(engine.cycle),
            "knobs": {knob.name: knob.state_dict() for knob in engine.knobs},
            # Tensors in there belong to the window under way, which is run again.
            "collectors": [_without_tensors(collector.state_dict()) for collector in engine.cycle.collectors],
            "sizes": [len(group["params"]) for group in first.state["param_groups"]],
            "groups": first.groups(),
            "stateless": stateless,
            "named": named,
            "replicas": replicas,
        }

    def _merge(self, first: Start) -> dict[str, Any]:
        """What the merge remembers: its plain part, and how its tensors lie, like which of the model's."""
        state = self.engine.cycle.merger.state_dict()
        model = _tensors(model_by_name(first.model, first.held))
        return {
            "declared": self.engine.cycle.plan.merge.to_dict(),
            "plain": _without_tensors(state),
            "tensors": {
                name: {
                    "like": next((other for other, own in model.items() if _lie_alike(own, tensor)), None),
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                }
                for name, tensor in _tensors(state).items()
            },
        }


def everyone(engine: Engine) -> dist.ProcessGroup | None:
    """All ranks of the engine's run, where it has several."""
    return engine.home.layout.everyone() if isinstance(engine.home, Ranks) else None


def step_of(engine: Engine) -> int:
    """The step that the last converged point was reached at."""
    return engine.step_count if engine.finished else engine.cycle.anchor.step


@dataclass(frozen=True)
class Start:
    """One replica as a window found it.

    Attributes:
        held: its parameters and buffers, in the model's order; of sharded ones this rank's part.
        state: its optimizer's state dict.
    """

    index: int
    model: nn.Module
    optimizer: Optimizer
    held: list[Tensor]
    state: Mapping[str, Any]

    def marks(self) -> Tensor:
        """[4] fingerprints, of the held tensors that are stored and of the optimizer's."""
        device = torch.device("cpu")
        stored = [tensors.local(held) for held in _tensors(model_by_name(self.model, self.held)).values()]
        numbers = [i for group in self.state["param_groups"] for i in group["params"]]
        states = [tensors.local(t) for i in numbers for t in _tensors(self.state["state"].get(i, {})).values()]
        return torch.cat([fingerprint(stored, device), fingerprint(states, device)])

    def named(self, wanted: Collection[str] | None = None) -> dict[str, Any]:
        """Model and optimizer by names, and the names of the parameters that have no state yet."""
        named, stateless = optimizer_by_name(self.model, self.optimizer, self.state, wanted)
        return {"model": model_by_name(self.model, self.held), "optimizer": named, "stateless": stateless}

    def groups(self) -> list[dict[str, Any]]:
        """The entries of the optimizer's groups, NumPy's numbers among them as Python's."""
        own = [{key: value for key, value in group.items() if key != "params"} for group in self.state["param_groups"]]
        return mapped(own, lambda one: one.item() if isinstance(one, np.generic) else one)  # type: ignore[no-any-return]

    def packed(self, keys: Sequence[str]) -> dict[str, Any]:
        """What is stored of a replica that is not like the others."""
        found = self.named()
        control = {"groups": self.groups(), "stateless": found["stateless"]}
        return {"control": _packed(control), **{key: found[key] for key in keys}}


def unpacked(control: bytes) -> dict[str, Any]:
    """The plain numbers of a `control`.

    Raises:
        CheckpointError: they are not there.
    """
    try:
        found = torch.load(io.BytesIO(control), map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can raise anything
        raise CheckpointError(f"the checkpoint's control cannot be read ({type(error).__name__}: {error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"the checkpoint's control is a {type(found).__name__}, no mapping")
    return found


def _packed(control: dict[str, Any]) -> bytes:
    """What `unpacked` reads.

    Raises:
        CheckpointError: an entry of a parameter group is no plain data.
    """
    if _unreadable(control["groups"]) is not None:
        for number, group in enumerate(control["groups"]):
            for key, value in group.items():
                if (error := _unreadable(value)) is not None:
                    raise CheckpointError(
                        f"the optimizer's parameter group {number} holds {key!r}, a {type(value).__name__}, which no "
                        f"resume could read, since it reads plain data alone ({type(error).__name__}); make it a "
                        f"number, a text or a tensor, or keep it elsewhere"
                    )
    held = io.BytesIO()
    torch.save(control, held)
    return held.getvalue()


def _unreadable(value: object) -> Exception | None:
    """What says that it cannot be saved and read again as plain data."""
    held = io.BytesIO()
    try:
        torch.save(value, held)
        torch.load(io.BytesIO(held.getvalue()), weights_only=True)
    except Exception as error:  # what cannot be pickled can raise anything
        return error
    return None


def _blank(layout: Mapping[str, Any], like: Tensor | None) -> Tensor:
    """Zeros of a shape and dtype, sharded as another tensor of that shape is."""
    dtype = getattr(torch, layout["dtype"])
    return torch.zeros(layout["shape"], dtype=dtype) if like is None else torch.zeros_like(like, dtype=dtype)


def _nested(plain: Any, tensors_by_path: Mapping[str, Tensor], prefix: str = "") -> Any:
    """What `_without_tensors` and `_tensors` took apart."""
    if prefix in tensors_by_path:
        return tensors_by_path[prefix]
    path = f"{prefix}/" if prefix else ""
    if isinstance(plain, dict):
        return {key: _nested(item, tensors_by_path, f"{path}{key}") for key, item in plain.items()}
    if type(plain) in (list, tuple):
        return type(plain)(_nested(item, tensors_by_path, f"{path}{number}") for number, item in enumerate(plain))
    return plain


def _merge_of(control: Mapping[str, Any], held: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a merge remembers, as an engine's state has it."""
    return {"declared": control["declared"], "state": _nested(control["plain"], held)}


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape, and are sharded in one way."""
    return one.shape == other.shape and getattr(one, "placements", None) == getattr(other, "placements", None)


def _copied(value: Any) -> Any:
    return mapped(value, lambda one: one.detach().clone() if isinstance(one, Tensor) else one)


def _without_tensors(value: Any) -> Any:
    return mapped(value, lambda one: None if isinstance(one, Tensor) else one)


def _tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of nested dictionaries and lists, by their path."""
    return {path: one for path, one in flat(value, "/").items() if isinstance(one, Tensor)}
