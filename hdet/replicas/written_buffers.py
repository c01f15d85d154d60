"""What a model's evaluation writes, undone: buffers, attributes, frozen parameters, rows that embeddings scale down."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from hdet.nn.names import named_modules
from hdet.replicas.dense import can_be_written, has_arithmetic, resized, unwritten

LARGE = 2**22
"""Bytes of a buffer that is copied for one evaluation only if another one has written it."""

PLAIN = (int, float, str, type(None), Tensor)
"""Attributes that go with buffers, such as the length that a cache was made for."""

_seen: MutableMapping[nn.Module, set[str]] = WeakIdKeyDictionary()
"""By module that was evaluated, which of its buffers an evaluation has written.

By the module itself: one that compares like a number, as tensordict's do, is no key of another dict.
"""

_seen_frozen: MutableMapping[nn.Module, set[str]] = WeakIdKeyDictionary()
"""The same of its frozen parameters."""


@contextmanager
def buffers_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Buffers that are written inside the block, or replaced, are after it the tensors that they were, of their values.

    The first block copies all but large ones, and compares them by value: torch does not count the writes of batch
    statistics in train mode, nor those through `.data`. Later blocks copy what an earlier one has written, which most
    models have none of, and always what modules hold that observe ranges for quantization. Of a module whose buffers
    were written plain attributes are put back, too. Not undone is the first write into a buffer that was not copied.
    """
    held = [_Held(module) for module in modules if module._buffers]
    as_before = unwritten([tensor for own in held for tensor in own.copied])
    try:
        yield
    finally:
        lost = [own.look() for own in held]  # at all before any is written: they may share memory
        with torch.no_grad(), nullcontext() if any(lost) else as_before:
            for own in held:
                own.put_back()
    for own in held:
        _seen.setdefault(own.module, set()).update(own.written)


@contextmanager
def frozen_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Frozen parameters that are written inside the block, as a teacher that a forward pass moves, are what they were.

    One that is given other `.data` has its own again. One that is written in place has its values again, but for the
    first time: only then is it known that a copy is needed. Not seen are writes into `.data`.
    """
    held = [
        _Frozen(module, name, parameter)
        for module in modules
        if vars(module).get("max_norm") is None  # see `rows_kept`
        for name, parameter in module._parameters.items()
        if parameter is not None
        and not parameter.requires_grad
        and not parameter.is_inference()
        and _is_plain(parameter)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for own in held:
                own.put_back()


@contextmanager
def attributes_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Tensors that a module keeps as plain attributes and that the block replaces, alone or in a tuple, are put back.

    As the state of a recurrent model that goes on from batch to batch. That module's numbers, texts and tensors are
    then all what they were, since a flag or a length may go with such a tensor; one that is new is taken away. Not seen
    are writes into one, or into a list or dict.
    """
    held = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, before in held:
            now = vars(module)
            if not _holds_the_same(now, before) and (_differ(now, before) or _differ(before, now)):
                for name in [name for name in now if name not in before and _goes_back(now[name])]:
                    del now[name]
                now.update({name: own for name, own in before.items() if _goes_back(own)})


@contextmanager
def rows_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Rows that `nn.Embedding(max_norm=)` scales down as they are looked up are after the block what they were."""
    own = [module for module in modules if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    weights = [module.weight for module in own if module.max_norm is not None]
    held = [(weight, weight._version, _part(weight).detach().clone()) for weight in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, version, value in held:
                if weight._version != version:
                    _part(weight).copy_(value)


class Folding:
    """Notices a forward pass that writes over trained weights and sets a flag with it, to undo both in another mode.

    Weights alone, as of a layer that normalises them in each pass, and flags alone are no such thing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, modules = model, list(model.modules())
        self._flags = [
            (module, name, own)
            for module in modules
            for name, own in vars(module).items()
            if (own is True or own is False) and name != "training"
        ]
        self._weights = [
            (module, name, parameter, _writes(parameter))
            for module in modules
            if vars(module).get("max_norm") is None  # see `rows_kept`
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad and not is_lazy(parameter)
        ]

    def found(self) -> tuple[str, str] | None:
        """The first such weight and the first such flag by name, if the model has been written so."""
        flags = [(module, name) for module, name, own in self._flags if vars(module).get(name, own) is not own]
        if not flags:
            return None
        weights = [(module, name) for module, name, own, writes in self._weights if _writes(own) != writes]
        return (self._name(*weights[0]), self._name(*flags[0])) if weights else None

    def _name(self, module: nn.Module, name: str) -> str:
        prefix = next(told for told, own in named_modules(self._model) if own is module)
        return f"{prefix}.{name}" if prefix else name


class _Frozen:
    """A frozen parameter as it is."""

    def __init__(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        self._module, self._name, self._parameter = module, name, parameter
        self._data, self._writes = parameter.data, _writes(parameter)
        seen = name in _seen_frozen.get(module, ())
        self._value = _part(parameter).detach().clone() if seen else None

    def put_back(self) -> None:
        parameter = self._parameter
        if self._module._parameters.get(self._name) is not parameter:  # as of a sharded module that is gathered
            return
        written = _writes(parameter) != self._writes
        if _part(parameter).data_ptr() != _part(self._data).data_ptr():
            parameter.data = self._data
        if written:
            _seen_frozen.setdefault(self._module, set()).add(self._name)
            if self._value is not None:
                _part(parameter).copy_(self._value)


class _Held:
    """One module's buffers as they are."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.written: list[str] = []
        self._buffers = dict(module._buffers)
        self._attributes = dict(vars(module))
        self._writes = {name: _writes(buffer) for name, buffer in self._buffers.items()}
        self._observes = any(kind.__module__.startswith("torch.ao.quantization") for kind in type(module).__mro__)
        seen = None if self._observes else _seen.get(module)
        self._first = seen is None
        self._values = {
            name: _part(buffer).detach().clone()
            for name, buffer in self._buffers.items()
            if buffer is not None
            and can_be_written(_part(buffer))
            and (name in seen if seen is not None else _part(buffer).nbytes <= LARGE)
        }

    @property
    def copied(self) -> list[Tensor]:
        """The buffers whose values can be put back, and the parts of them that are written."""
        own = [buffer for name, buffer in self._buffers.items() if name in self._values and buffer is not None]
        return [*own, *map(_part, own)]

    def look(self) -> bool:
        """Find what was `written`, and whether a value that was written over is lost."""
        now = self.module._buffers
        self.written = [
            name
            for name, buffer in self._buffers.items()
            if self._observes
            or now.get(name) is not buffer
            or _writes(buffer) != self._writes[name]
            or (name in self._values and (not self._first or _differs(buffer, self._values[name])))
        ]
        return any(
            name not in self._values and _writes(self._buffers[name]) != self._writes[name] for name in self.written
        )

    def put_back(self) -> None:
        """What was written has its values again, and what was replaced its place."""
        if not self.written:
            return
        now = dict(self.module._buffers)
        for name in self.written:
            buffer = self._buffers[name]
            if now.get(name) is not buffer:
                self.module._buffers[name] = buffer
            if name in self._values and buffer is not None:
                value = self._values[name]
                resized(_part(buffer), value.shape).copy_(value)
        if any(now.get(name) is self._buffers[name] and name not in self._values for name in self.written):
            return  # what was written is lost, and what goes with it stays with it
        vars(self.module).update({name: own for name, own in self._attributes.items() if isinstance(own, PLAIN)})


def _holds_the_same(now: Mapping[str, object], before: Mapping[str, object]) -> bool:
    """Whether a module has the very objects that it had, as most have: told without a look at each."""
    return list(now) == list(before) and all(map(operator.is_, now.values(), before.values()))


def _differ(some: Mapping[str, object], others: Mapping[str, object]) -> bool:
    """Whether a tensor of some attributes, or tuple of tensors, is none of the others."""
    return any(_has_tensors(own) and others.get(name) is not own for name, own in some.items())


def _has_tensors(own: object) -> bool:
    return isinstance(own, Tensor) or (isinstance(own, tuple) and any(map(_has_tensors, own)))


def _goes_back(own: object) -> bool:
    return isinstance(own, PLAIN) or (isinstance(own, tuple) and all(map(_goes_back, own)))


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether its memory can be asked for: not of sparse or quantized weights and other subclasses."""
    return type(_part(parameter)) in (Tensor, nn.Parameter) and parameter.layout is torch.strided


def _part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded one."""
    return tensor if type(tensor) is Tensor else getattr(tensor, "_local_tensor", tensor)


def _differs(buffer: Tensor | None, value: Tensor) -> bool:
    """Whether it holds another value, which waits for the device; not of floats that torch cannot compare."""
    inexact = value.is_floating_point() or value.is_complex()
    if buffer is None or (inexact and not has_arithmetic(value)) or torch.equal(_part(buffer), value):
        return False
    return not (inexact and torch.allclose(_part(buffer), value, rtol=0.0, atol=0.0, equal_nan=True))


def _writes(buffer: Tensor | None) -> int:
    """How often torch has seen it written, as a whole or in part."""
    if buffer is None or buffer.is_inference():  # which cannot be written outside of inference mode
        return 0
    return buffer._version + _part(buffer)._version
