"""The anchor: the last converged point, to measure a window's update from and to fall back on."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet.errors import StepError
from hdet.hparams.param_groups import ids_of, parameters_of
from hdet.replicas import finite, host_memory, tensors
from hdet.replicas.deep_copies import memo_of_sparse
from hdet.replicas.dense import can_be_written, has_arithmetic, unwritten
from hdet.replicas.held_optimizer import HeldOptimizer, refilled
from hdet.replicas.walk import Walk


class Anchor:
    """A copy of one model's parameters and buffers, and of its optimizer's state, at a window's opening.

    Copies lie in memory that persists from one window to the next. Frozen parameters are not copied, unless the
    optimizer holds them or somebody writes them all the same (a teacher that follows by moving averages; noticed when
    it has been written for the first time, and through `.data`, which leaves no mark, if that is so when the run's
    first steps end). The optimizer's state may be that of an earlier anchor. What is held of the model belongs to its
    parameters and modules themselves, so it goes back to these also where others have come before them since; what has
    been replaced has its place.

    Args:
        model, optimizer: the pair it is taken from.
        device: where the copy lies; `None` beside the original, "cpu" to spare device memory.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: str | None = None) -> None:
        self._model = model
        self._walk = Walk(model)
        self._optimizer = optimizer
        self._device = device
        self._state = HeldOptimizer(optimizer, device)
        self._order: list[nn.Parameter] = []  # the model's, by the numbers that the next go by
        self._parameters: dict[int, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._homes: dict[str, tuple[nn.Module, str]] = {}  # of buffers: the module, and what it calls them
        self._versions: dict[int, int] = {}
        self._norms: dict[int, float] | None = None  # of frozen parameters; none once they were compared
        self.step = 0

    @torch.no_grad()
    def take(self, step: int, lent: Anchor | None = None) -> None:
        """Copy the point as it is now.

        Args:
            step: the number of updates it has had.
            lent: an earlier point, whose optimizer state will do; memory for that is not taken.
        """
        self.step = step
        if step == 0:
            self.loaded()  # nobody has trained yet
        live = self._moving()
        self._order = list(self._walk.every())
        self._homes = _homes(self._model)
        held: list[dict[Any, Tensor]] = [self._parameters, self._buffers]
        self._parameters, self._buffers = refilled(held, [live, _buffers(self._model)], self._device)
        self._state.take(None if lent is None else lent._state)
        if self._device is not None:
            host_memory.wait(list(live.values()))  # once, for all that was copied

    def loaded(self) -> None:
        """Weights were loaded into the model, which is no sign that somebody writes those that are frozen."""
        self._versions.clear()
        self._norms = None

    def release(self) -> None:
        """Hold nothing that training changes until `take` is called again: the run is over.

        Frozen parameters that somebody writes stay: by these a state that is saved tells that they are to be in it.
        """
        frozen = [number for number in self._parameters if not self._order[number].requires_grad]
        self._parameters, self._buffers = {number: self._parameters[number] for number in frozen}, {}
        self._state.release()

    def keep_optimizer_state(self) -> None:
        """Hold the optimizer's state itself, and no earlier anchor's; no step has been made since `take`."""
        self._state.keep()

    def _moving(self) -> dict[int, Tensor]:
        """The parameters that training can change, by their number in the model."""
        moving, still = {}, {}
        for number, (parameter, moves) in enumerate(tensors.can_move(self._walk, self._optimizer)):
            if not moves and number not in self._parameters:
                version = _version(parameter)
                if self._versions.setdefault(number, version) == version:
                    still[number] = tensors.local(parameter)
                    continue
            moving[number] = tensors.local(parameter)  # `detach` of thousands takes longer than the copies
        return moving | {number: still[number] for number in self._written_unseen(still)}

    def _written_unseen(self, still: Mapping[int, Tensor]) -> list[int]:
        """Which of the frozen parameters were written through `.data`. Looked for once; waits for the device then."""
        if self._norms == {}:
            return []
        norms = _norms(still)
        before, self._norms = self._norms, norms if self._norms is None else {}
        return [] if self._norms else [number for number in norms if (before or {}).get(number) != norms[number]]

    @torch.no_grad()
    def written(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Which of some of the model's frozen parameters somebody has written, before this was taken or since."""
        place = {id(own): number for number, own in enumerate(self._order)}
        numbers = [place.get(id(parameter), -1) for parameter in parameters]
        told, still = set(self._parameters), {}
        for number, parameter in zip(numbers, parameters, strict=True):
            version = _version(parameter)
            if self._versions.get(number, version) != version:
                told.add(number)
            elif number not in told:
                still[number] = tensors.local(parameter)
        if self._norms:
            told.update(n for n, norm in _norms(still).items() if self._norms.get(n, norm) != norm)
        return [number in told for number in numbers]

    def values(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The anchored values of some of the model's parameters; those that nothing changes are the model's own.

        Raises:
            StepError: the model does not hold one of them any more, or had not when this was made, or has it with
                another shape.
        """
        place = {id(parameter): number for number, parameter in enumerate(self._order)}
        there = {id(parameter) for parameter in self._walk.every()}
        held = [self._parameters.get(place.get(id(parameter), -1)) for parameter in parameters]
        pairs = list(zip(held, parameters, strict=True))
        grown = [p for own, p in pairs if own is not None and own.shape != tensors.local(p).shape]
        refuse_gone({*(id(p) for p in parameters if id(p) not in there), *map(id, grown)})
        return [tensors.local(parameter.detach()) if own is None else own for own, parameter in pairs]

    def origin(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Where the weights that the optimizer evaluates would be now, had it stood still since.

        These are `values`, unless it is Schedule-Free: its average goes on towards where it is.
        """
        return self._state.averaged(parameters, self.values(parameters), now=True)

    @property
    def held(self) -> list[Tensor]:
        """The anchored values of all parameters and buffers, in the model's order; of sharded ones this rank's part.

        What is not copied, because nothing changes it, is the model's own.
        """
        buffers = [self._buffers.get(n, tensors.local(b.detach())) for n, b in self._model.named_buffers()]
        return [*self.values(self._walk.every()), *buffers]

    def optimizer_state(self, *, fresh: bool = False) -> dict[str, Any]:
        """The optimizer's state dict as it was; held tensors, not copies.

        Args:
            fresh: no step has been made since, so what is not held is the optimizer's own.
        """
        return self._state.state_dict(live=fresh and self._state.lends)

    def _nearest_state(self, fresh: bool) -> dict[str, Any]:
        """The same for whoever goes on from it: of what is lent, the optimizer's own moments are nearer in time.

        They are at most a window ahead of the weights, where the lent ones may be of any earlier window. Not finite,
        they are no state to go on from.
        """
        nearest = self.optimizer_state(fresh=fresh or self._state.lends)
        sound = fresh or tensors.all_finite(self._with_mean(nearest))
        return nearest if sound else self.optimizer_state()

    def is_finite(self) -> bool:
        """Whether all that is held has finite values, buffers aside. Waits for the device."""
        moments = self._with_mean(self.optimizer_state())
        return bool(tensors.all_finite([*self._parameters.values(), *moments]))

    def _with_mean(self, state: Mapping[str, Any]) -> list[Tensor]:
        numbered = dict(enumerate(parameters_of(self._optimizer)))
        states = ((numbered.get(number), own) for number, own in state["state"].items() if isinstance(own, Mapping))
        return finite.with_mean(states)  # what is of no parameter may be a number

    def restore(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Put the point back into a model and its optimizer, in the memory that they have.

        Of the optimizer's parameter groups only what it keeps there as state is written: learning rates and the like
        are the user's, a scheduler's or a knob's.
        """
        pairs = self._pairs(model)
        tensors.copy_([live for live, _ in pairs], [held for _, held in pairs])
        self._state.put_back(optimizer)

    @torch.no_grad()
    def _pairs(self, model: nn.Module, only: Collection[int] | None = None) -> list[tuple[Tensor, Tensor]]:
        """The model's tensors with what is held for them. A buffer that has come since, or has grown, is let be.

        Args:
            only: ids of parameters; no others, and no buffers.

        Raises:
            StepError: it is a copy of the model in which layers have come or gone since.
        """
        tensors.reshard(model)
        own = self._present() if model is self._model else list(model.parameters())
        if len(own) != len(self._order):
            raise StepError(
                f"a copy of the model has {len(own)} parameters, and had {len(self._order)} at step {self.step}, to "
                f"which the run goes back: layers cannot come or go within a window of several copies"
            )
        pairs = [(own[number], held) for number, held in self._parameters.items()]
        if only is not None:
            return [(tensors.local(p), held) for p, held in pairs if p is not None and id(p) in only]
        found = [(tensors.local(parameter), held) for parameter, held in pairs if parameter is not None]
        buffers = self._live_buffers() if model is self._model else _buffers(model)
        fits = [name for name, held in self._buffers.items() if name in buffers and buffers[name].shape == held.shape]
        return found + [(buffers[name], self._buffers[name]) for name in fits]

    def _present(self) -> list[nn.Parameter | None]:
        """The model's parameters by their numbers then; for one that is gone that in its place, None where none is."""
        every = self._walk.every()
        there = set(map(id, every))
        replaced = every if len(every) == len(self._order) else [None] * len(self._order)
        pairs = zip(self._order, replaced, strict=True)
        return [own if id(own) in there else new for own, new in pairs]

    def _live_buffers(self) -> dict[str, Tensor]:
        """The model's own, by the names that they had then; where a module is gone, those that have its name."""
        found, there = _buffers(self._model), set(map(id, self._model.modules()))
        for name, (module, own) in self._homes.items():
            buffer = module._buffers[own] if id(module) in there and own in module._buffers else None
            if buffer is not None:
                found[name] = tensors.local(buffer.detach())
        return found

    def others_written(self) -> bool:
        """Whether somebody writes parameters that the optimizer does not step, as a teacher's that follows."""
        stepped = ids_of(self._optimizer)
        return any(self.written([parameter for parameter in self._walk.every() if id(parameter) not in stepped]))

    @contextmanager
    def substituted(self, *, stepped_alone: bool = False) -> Iterator[None]:
        """The anchored parameters and buffers in place of the model's, inside a block.

        Args:
            stepped_alone: the parameters that the optimizer steps; all else stays as it is now.
        """
        pairs = self._pairs(self._model, ids_of(self._optimizer) if stepped_alone else None)
        with tensors.substituted([live for live, _ in pairs], [held for _, held in pairs]):
            yield

    @contextmanager
    def evaluated(self, *, stepped_alone: bool = False) -> Iterator[None]:
        """`substituted`, as the optimizer then would evaluate the model: in eval mode, if it has modes."""
        with ExitStack() as stack:
            stack.enter_context(tensors.evaluated_weights(self._model, self._optimizer))
            stack.enter_context(self.substituted(stepped_alone=stepped_alone))
            if self._state.averages:
                stepped = ids_of(self._optimizer)
                parameters = tensors.moving_parameters(self._model, self._optimizer)
                parameters = [own for own in parameters if not stepped_alone or id(own) in stepped]
                own = [tensors.local(parameter.detach()) for parameter in parameters]
                held = self._state.averaged(parameters, self.values(parameters))
                stack.enter_context(tensors.substituted(own, held))
            yield

    def state_dict(self, *, fresh: bool = False, leave_out: Collection[str] = ()) -> dict[str, Any]:
        """The point as a model's and an optimizer's state dict; `fresh` as of `optimizer_state`.

        Of an optimizer whose state is lent and that has made steps since, the moments are those it has now.

        Args:
            leave_out: names of the model's entries that are not copied and not there.
        """
        with unwritten([live for live, _ in self._pairs(self._model)]), self.substituted():
            model = copied_state(self._model, leave_out)
        return {"step": self.step, "model": model, "optimizer": copy.deepcopy(self._nearest_state(fresh))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold the point of a `state_dict`. Buffers that it does not name (not persistent) are held as they are now."""
        self.take(state["step"])
        with self.substituted():
            self._model.load_state_dict(state["model"])
            pairs = self._pairs(self._model)
            tensors.copy_([held for _, held in pairs], [live for live, _ in pairs])
        self._state.load_state_dict(state["optimizer"])


def refuse_gone(gone: Collection[Any]) -> None:
    """Go on where no parameter is another one, or has another shape, than as the window opened.

    Raises:
        StepError: some have.
    """
    if gone:
        raise StepError(
            f"{len(gone)} of the parameters that were trained as this window opened are the model's no more, as where "
            f"a layer was replaced, or a parameter by one of another size; replace them before the engine is made, or "
            f"hdet attached, or call search.detach() before it and hdet.attach after it"
        )


def copied_state(model: nn.Module, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """A copy of a model's state dict, but for some entries."""
    state = model.state_dict()
    for name in leave_out:
        state.pop(name, None)
    return copy.deepcopy(state, memo_of_sparse(state.values()))


def _version(parameter: nn.Parameter) -> int:
    """How often it was written, as far as torch has seen it."""
    return 0 if parameter.is_inference() else parameter._version


def _norms(of: Mapping[int, Tensor]) -> dict[int, float]:
    """Of those that have any. Waits for the device."""
    own = {number: value for number, value in of.items() if has_arithmetic(value) and value.numel()}
    return dict(zip(own, tensors.norms(list(own.values())), strict=True))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that can be written over; others, as sparse or expanded ones, a model does not write in place."""
    every = ((name, tensors.local(buffer.detach())) for name, buffer in model.named_buffers())
    return {name: buffer for name, buffer in every if can_be_written(buffer)}


def _homes(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    return {
        f"{within}.{own}" if within else own: (module, own)
        for within, module in model.named_modules()
        for own, _ in module._buffers.items()  # TorchScript's can be gone through in this way alone
    }
