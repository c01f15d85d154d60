"""The torch hooks by which a search rides on a training loop that knows nothing of it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from threading import get_ident
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hdet.errors import StepError
from hdet.hparams.clipping import clipping_of
from hdet.hparams.param_groups import first_trained

Closure = Callable[[], Any]
_WRAPPERS = getattr(getattr(Optimizer, "profile_hook_step", None), "__code__", None)
"""Of torch's own function, which holds that of what it wraps every step in."""
UNTRACED = (
    "hdet.attach follows the loop by hooks, which no graph can hold: compile the model alone, with fullgraph=True if "
    "you like, and give hdet.attach what torch.compile returned, or leave out fullgraph=True around what calls the "
    "model or the optimizer; for torch.export.export(strict=True) call search.detach() first"
)
"""What torch says where a graph is to hold a hook."""
Output = TypeVar("Output")


class Rider(Protocol):
    """What the hooks speak to."""

    def before_forward(self) -> None: ...
    def after_forward(self, output: Any) -> None: ...
    def forward_failed(self) -> None: ...
    def before_step(self) -> None: ...
    def after_step(self) -> None: ...
    def before_saving(self) -> None: ...
    def after_saving(self) -> None: ...


class Hook:
    """One hook, never traced. A copy of the model or of the optimizer, as for averaged weights, has an idle one."""

    def __init__(self, act: Callable[..., Any]) -> None:
        _keep_untraced()
        self._act = act

    def __call__(self, *arguments: Any) -> Any:
        return self._act(*arguments)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _idle_hook, ()


@functools.cache
def _keep_untraced() -> None:
    """Let compiled models and steps break their graph at a hook, not fail on what it does or on what it is handed.

    With the first hook, and not as a decorator: torch then imports its compiler, which takes seconds.
    """
    Hook.__call__ = torch.compiler.disable(Hook.__call__, reason=UNTRACED)  # type: ignore[method-assign]


def _idle(*arguments: Any) -> None:
    """The hook of a copy: does nothing."""


def _idle_hook() -> Callable[..., None]:
    return _idle


class Hooks:
    """Forward pre-hook and hook of the root module; step pre-hook and post-hook of the optimizer, saving and loading.

    A forward pass counts where the root module trains and gradients are enabled. What autograd runs again in backward
    (activation checkpointing) does not, nor does evaluation, nor a call that the model makes of itself.
    """

    def __init__(self, rider: Rider, root: nn.Module, optimizer: Optimizer) -> None:
        self._rider: Any = rider  # None once they are idle
        self._optimizer = optimizer
        self._in_closure = False
        self._in_pass: int | None = None  # the thread that makes one: others may call the model at the same time
        self._within = False
        self._trained: nn.Parameter | None = None
        self._handled: BaseException | None = None  # the exception that the loop was handling as the forward began
        self._handles = [
            # Before fully_shard's own, which gathers the parameters: what is copied here are the shards.
            root.register_forward_pre_hook(Hook(self._before_forward), prepend=True),
            root.register_forward_hook(Hook(self._after_forward), always_call=True),
            optimizer.register_step_pre_hook(Hook(self._before_step)),
            first_after_step(optimizer, Hook(self._after_step)),
            optimizer.register_state_dict_pre_hook(Hook(self._before_saving)),
            optimizer.register_state_dict_post_hook(Hook(self._after_saving)),
            optimizer.register_load_state_dict_pre_hook(Hook(self._before_saving)),
        ]
        if (clipping := clipping_of(optimizer)) is not None:
            clipping.come_last()

    def within(self, run: Callable[[], Output]) -> Output:
        """Run what is one pass as a whole: the root module may be called in it once, several times or never."""
        if self._within:
            return run()
        self._within = True
        try:
            self._rider.before_forward()
            output = run()
        except BaseException:
            if self._rider is not None:  # what is run may have detached the search
                self._rider.forward_failed()
            raise
        finally:
            self._within = False
        if self._rider is not None:
            self._rider.after_forward(output)
        return output

    def remove(self) -> None:
        """Leave the model and the optimizer as they were, but for hooks that are idle and go with the next forward.

        So it is within an optimizer's step, but for its closure: torch may be going through its hooks, and none may go.
        """
        self._rider = None  # and with it the engine
        if self._in_closure or not step_is_under_way(self._optimizer):
            for handle in self._handles:
                handle.remove()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        if self._rider is None:
            self.remove()
            return
        if _calls_itself(module):
            return
        passing = module.training and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if passing and not self._within and self._trains():
            self._in_pass, self._handled = get_ident(), sys.exc_info()[1]
            self._rider.before_forward()
        elif self._in_pass == get_ident():
            self._in_pass = None

    def _trains(self) -> bool:
        """Whether any parameter is not frozen; the one found last is looked at first."""
        if self._trained is None or not self._trained.requires_grad:
            self._trained = first_trained(self._optimizer)
        return self._trained is not None

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._rider is None or self._in_pass != get_ident() or _calls_itself(module):
            return
        self._in_pass = None
        if sys.exc_info()[1] is not self._handled:
            self._rider.forward_failed()
        else:
            self._rider.after_forward(output)

    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if self._rider is None:
            return None
        # The optimizer itself is the first of the arguments.
        by_name = "closure" in keywords
        closure = keywords["closure"] if by_name else arguments[1] if len(arguments) > 1 else None
        if not callable(closure):  # there is none, or the optimizer wants something else, as the loss
            self._rider.before_step()
            return None
        closure = self._closed(closure)
        return (
            (arguments, {**keywords, "closure": closure})
            if by_name
            else ((arguments[0], closure, *arguments[2:]), keywords)
        )

    def _after_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if self._rider is not None:
            self._rider.after_step()

    def _before_saving(self, optimizer: Optimizer, *state: Any) -> None:
        if self._rider is not None:
            self._rider.before_saving()

    def _after_saving(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if self._rider is None or not step_is_under_way(optimizer):
            return
        for group in state["param_groups"]:  # whose tensors are the optimizer's own
            group.update({key: entry.clone() for key, entry in group.items() if isinstance(entry, Tensor)})
        self._rider.after_saving()

    def _closed(self, closure: Closure) -> Closure:
        """The user's closure, and then what comes before a step: it runs forward and backward inside the step."""

        called = False
        before_step = Hook(self._rider.before_step)

        def closed() -> Any:
            nonlocal called
            if called:
                raise StepError(
                    "the optimizer called its closure twice in one step; hdet follows optimizers that look at the loss "
                    "once a step, not line searches such as L-BFGS; where it steps another optimizer inside, as SAM "
                    "does, give hdet.attach that one"
                )
            called = True
            self._in_closure = True
            try:
                loss = closure()
            finally:
                self._in_closure = False
            if self._rider is not None:  # the closure may have detached the search
                before_step()
            return loss

        return closed


def first_after_step(optimizer: Optimizer, act: Hook) -> RemovableHandle:
    """A step post-hook before those that the optimizer has: one of them may step a scheduler."""
    handle = optimizer.register_step_post_hook(act)
    hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
    hooks.move_to_end(handle.id, last=False)
    return handle


def _callers() -> list[FrameType]:
    """Who called the function that asks, from the inside out."""
    frame: FrameType | None = sys._getframe(2)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def scaler_of_step() -> GradScaler | None:
    """The GradScaler that makes the optimizer's step which is under way, if one does and is enabled."""
    for frame in _callers():
        if frame.f_code is GradScaler.step.__code__:
            scaler: GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
    return None


def step_is_under_way(optimizer: Optimizer) -> bool:
    """Whether the optimizer is between the first hook of a step and the last."""
    wrappers = getattr(_WRAPPERS, "co_consts", ())
    return any(frame.f_code in wrappers and frame.f_locals.get("self") is optimizer for frame in _callers())


def _calls_itself(module: nn.Module) -> bool:
    """Whether the call of a module that is under way was made by another call of it."""
    calls = (
        frame
        for frame in _callers()
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
    )
    return next(calls, None) is not None and next(calls, None) is not None


def loss_in(output: Any) -> Tensor | None:
    """The training loss in what a model returned: itself, `.loss`, `["loss"]`, or the only scalar of a tuple."""
    if _is_loss(output):
        found: Tensor = output
        return found
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if _is_loss(named):
        return named
    if isinstance(output, (tuple, list)):
        scalars = [part for part in output if _is_loss(part)]
        return scalars[0] if len(scalars) == 1 else None
    return None


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point() and value.grad_fn is not None


def requiring_grad(output: Any) -> list[Tensor]:
    """The tensors in what a model returned through which backward can come.

    In tuples, lists, dictionaries and attributes; where none is there, in what these hold, as dataclasses or mappings
    inside others. A parameter that it returned as it is belongs to no pass: it outlives them all.
    """
    found = list(_tensors(output))
    return found or list(_tensors(output, within=set()))


def _tensors(output: Any, within: set[int] | None = None) -> Iterator[Tensor]:
    """Those in an output; `within` are objects that are being looked through, None looks at an object's own alone."""
    if isinstance(output, Tensor):
        if output.grad_fn is not None:
            yield output
        return
    if within is not None:
        if id(output) in within:
            return
        within.add(id(output))
    if isinstance(output, (tuple, list)):
        parts: Iterable[Any] = output
    elif isinstance(output, dict):
        parts = output.values()
    elif within is None:
        parts = (part for part in _held(output) if isinstance(part, Tensor))
    else:
        parts = _held(output)
    for part in parts:
        yield from _tensors(part, within)


def _held(output: Any) -> list[Any]:
    """What an object holds: a mapping its values, others their attributes and fields, a module nothing."""
    if isinstance(output, nn.Module):
        return []
    if isinstance(output, Mapping):
        return list(output.values())
    held = dict(getattr(output, "__dict__", {}))
    if is_dataclass(output) and not isinstance(output, type):
        held |= {field.name: getattr(output, field.name, None) for field in fields(output)}
    return list(held.values())
