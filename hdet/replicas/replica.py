"""A replica: one copy of the model with its optimizer, or one micro-batch's seat at a shared one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType

from torch import nn
from torch.optim import Optimizer

from hdet.errors import StepError


@dataclass(eq=False, repr=False)
class Replica:
    """What a training loop works on. Use it as a context manager around forward and backward.

    Attributes:
        model, optimizer: this replica's own, or shared by all seats of one model.
        index: its number among all N replicas of all processes, `0 <= index < N`.
        host: the number of its model among those this process holds.
        data_index: which part of a step's data it takes, `0 <= data_index < engine.data_shards`: `index`, unless
            replicas go in pairs that take the same (`Contrast(paired=True)`).
        random: gives the context in which the pass draws its random numbers; `None` for the loop's own.
        around: gives a context for each forward and backward, entered last and left first; `None` for none.
        on_error: told what a pass raised; it may raise another error in its place.
    """

    model: nn.Module
    optimizer: Optimizer
    index: int
    host: int
    on_enter: list[Callable[[Replica], None]] = field(default_factory=list)
    on_exit: list[Callable[[Replica], None]] = field(default_factory=list)
    random: Callable[[Replica], AbstractContextManager[object]] | None = None
    around: Callable[[], AbstractContextManager[object]] | None = None
    on_error: Callable[[BaseException], object] | None = None
    _active: bool = False
    _context: AbstractContextManager[object] | None = None

    def __post_init__(self) -> None:
        self.data_index = self.index

    def __repr__(self) -> str:
        return f"<Replica {self.index}: {type(self.model).__name__}, {type(self.optimizer).__name__}>"

    def __enter__(self) -> Replica:
        if self._active:
            raise StepError(f"replica {self.index} is already active; leave its `with` block first")
        for call in self.on_enter:
            call(self)
        if self.random is not None or self.around is not None:
            with ExitStack() as stack:
                if self.random is not None:
                    stack.enter_context(self.random(self))
                if self.around is not None:
                    stack.enter_context(self.around())
                self._context = stack.pop_all()
        self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active = False
        if self._context is not None:
            context, self._context = self._context, None
            context.__exit__(kind, error, trace)
        if error is not None and self.on_error is not None:
            self.on_error(error)
        if kind is None:
            for call in self.on_exit:
                call(self)
