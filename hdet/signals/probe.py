"""The probe: a held-out loss, paired over replicas, in sub-batches that yield its standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from hdet.errors import ConfigError, StepError
from hdet.replicas.batch_norm import by_each_batch, copies_lent, following
from hdet.replicas.generators import numbers_lent
from hdet.replicas.random_numbers import accelerators_in_use
from hdet.replicas.tensors import evaluating
from hdet.replicas.written_buffers import Folding
from hdet.signals.batches import drawn_batches, number_of, require_batches, shown
from hdet.user_warning import warn

LOOKS = (2, 4, 8, 16, 32)
"""Windows in which the loss by each batch's statistics is compared with that by the kept ones."""


@dataclass(frozen=True, repr=False)
class Probe:
    """Evaluates every replica on the same held-out batches at a window's end, in eval mode, without gradients.

    BatchNorm layers in training mode normalise by each batch, as they do in training: the statistics that they keep lag
    behind the weights. One that sees fewer than 8 values a channel has those that it keeps, as have layers that the
    loop has in eval mode.

    What batches, and the model in evaluation, draw from the global generators of torch, Python and NumPy follows from
    the window's number. These generators, and those that modules, a DataLoader, its samplers and its data sets hold,
    are left as they were, so that training draws what it would without a probe.

    Args:
        loss: `loss(model, batch)`, the mean loss of one sub-batch as a 0-dim tensor, or several sub-batches' at
            once as a 1-dim tensor (one forward pass for all is the cheapest). It must be the loss you care
            about, differentiable and the lower the better: no accuracy, no label smoothing, no auxiliary terms.
        batches: a list, or a DataLoader, of batches that make up J >= 2 sub-batches, or a function from the window's
            number to them (fresh ones each window; it must return the same on every process, and when asked again,
            of earlier windows too). Data the model does not train on. Eight sub-batches do well; their scatter gives
            the standard errors. They are of equal size, since each counts alike: a last batch that is smaller than all
            others is warned of (`drop_last=True`). All of them are evaluated, some five times a window: of a large
            loader give a part.
        at: judge the `last` weights of a window or their `average` over it.
        stride: with `average`, take every stride-th step's weights; by default as many as leave at least 128 in the
            window.

    Raises:
        ConfigError: one of these is of another type, or there are no batches, or they can be gone through only once.

    >>> probe = Probe(lambda model, x: model(x).square().mean(), [torch.ones(4, 2), torch.zeros(4, 2)])
    >>> probe.measure(torch.nn.Linear(2, 1, bias=False).requires_grad_(False), window=0).shape
    torch.Size([2])
    """

    loss: Callable[[Any, Any], Tensor]
    batches: Sequence[Any] | DataLoader[Any] | Callable[[int], Iterable[Any]]
    at: Literal["last", "average"] = "last"
    stride: int | None = None
    _sizes: list[Any] = field(default_factory=list, init=False, compare=False)
    _told: set[str] = field(default_factory=set, init=False, compare=False)
    _looks: dict[int | str, Tensor] = field(default_factory=dict, init=False, compare=False)
    _ahead: dict[int, list[Any]] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise ConfigError(f"loss must be callable as loss(model, batch), got {type(self.loss).__name__}")
        require_batches(self.batches, "a probe's")
        if number_of(self.batches) == 0:
            raise ConfigError("a probe needs batches; got none")
        if self.at not in ("last", "average"):
            raise ConfigError(f"at must be 'last' or 'average', got {self.at!r}")
        counts = isinstance(self.stride, (int, np.integer)) and not isinstance(self.stride, bool)
        if self.stride is not None and (not counts or self.stride < 1):
            raise ConfigError(f"stride is a number of steps, at least 1; got {self.stride!r}")

    def __repr__(self) -> str:
        return shown(self, self.loss, self.batches, ", at the average weights" if self.at == "average" else "")

    def draw(self, window: int, *, ahead: bool = False) -> list[Any]:
        """The batches of a window, the same in every call; a function may hold a generator of its own.

        Args:
            ahead: keep them for the next call, which gives these without asking for others.
        """
        drawn = self._ahead.pop(window, None) or drawn_batches(self.batches, window, f"hdet.probe:{window}")
        self._ahead.clear()
        if ahead:
            self._ahead[window] = drawn
        if not self._sizes:
            self._sizes.extend(leading_sizes(drawn))
            self._notice_smaller()
        return drawn

    def _notice_smaller(self) -> None:
        """Say where only the last batch is smaller; where all differ, sizes may mean something else (nodes)."""
        if len(self._sizes) < 2 or None in self._sizes:
            return
        *others, last = self._sizes
        if last < min(others) == max(others):
            warn(
                f"the probe's last batch is smaller than the others ({last} and {others[0]} along the first dimension)"
                f", and each sub-batch counts alike, so that its examples weigh more; leave it out, as "
                f"DataLoader(..., drop_last=True) does, or make batches of equal size"
            )

    @contextmanager
    def evaluated(
        self, model: nn.Module, window: int, optimizer: Optimizer | None = None, *, kept_statistics: bool = False
    ) -> Iterator[None]:
        """The model evaluates inside the block, with the same random numbers in all blocks of a window.

        Args:
            kept_statistics: of BatchNorm layers, in place of each batch's (`by_each_batch`).
        """
        normalising = nullcontext() if kept_statistics else by_each_batch(model)
        text = f"hdet.probe.loss:{window}"
        with (
            normalising,
            evaluating(model, optimizer),
            numbers_lent(text, accelerators_in_use(), *model.modules()),
        ):
            folding = None if "folds" in self._told else Folding(model)
            yield
            if folding is not None and (found := folding.found()):
                self._told.add("folds")
                weight, flag = found
                warn(
                    f"the forward pass in eval mode writes over the trained weight {weight} and notes it in {flag}: if "
                    f"the next pass that trains takes it back, as RWKV does, it takes back what was never written, "
                    f"since hdet puts weights of its own there in between; turn that off while it trains "
                    f"(rescale_every=0 in the config of RWKV)"
                )

    @torch.no_grad()
    def measure(
        self,
        model: nn.Module,
        window: int,
        optimizer: Optimizer | None = None,
        batches: Sequence[Any] | None = None,
        *,
        kept_statistics: bool = False,
    ) -> Tensor:
        """[J] losses of the model as it is, float64, on the model's device.

        Args:
            batches: those of the window, if they are drawn.
            kept_statistics: of BatchNorm layers in training mode, in place of each batch's.

        Raises:
            StepError: the loss is neither 0- nor 1-dimensional, or there are fewer than 2 sub-batches.
        """
        batches = self.draw(window) if batches is None else batches
        found = self._measured(model, window, optimizer, batches, kept_statistics)
        if not kept_statistics and following(model):
            if window < LOOKS[0]:
                self._looks.setdefault("first", found)
            # Resumed, it is not known what was learned. Once told, too: sharded, all ranks have to evaluate.
            elif "first" in self._looks and window in LOOKS and window not in self._looks:
                with copies_lent(model):
                    self._looks[window] = self._measured(model, window, optimizer, batches, True)
                self._notice_unlike(found, self._looks[window])
        return found

    def _measured(
        self, model: nn.Module, window: int, optimizer: Optimizer | None, batches: Sequence[Any], kept_statistics: bool
    ) -> Tensor:
        """[J] losses, as `measure` gives them."""
        versions = _versions(batches)
        with self.evaluated(model, window, optimizer, kept_statistics=kept_statistics):
            try:
                # Detached: a loss that takes gradients itself would keep the graphs of all batches.
                losses = [_detached(self.loss(model, batch)) for batch in batches]
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                raise StepError(
                    f"the probe's loss asks for gradients itself, as of a residual or of an inner loop, and is "
                    f"evaluated without: have it work them out inside `with torch.enable_grad():`, of what requires "
                    f"them there ({error})"
                ) from error
        if _versions(batches) != versions:
            self._notice_written()
        return torch.cat(checked(losses)).double()

    def _notice_unlike(self, by_batch: Tensor, kept: Tensor) -> None:
        """Say it once where normalising by its batches costs more than half of what was learned, and of the loss."""
        above = by_batch - kept
        usual = torch.stack([kept.mean(), self._looks["first"].mean() - kept.mean()]).abs().max()
        proven = above.mean() > 3.0 * above.std() / len(above) ** 0.5
        if proven and above.mean() > usual / 2 and "unlike" not in self._told:
            self._told.add("unlike")
            warn(
                f"the probe's loss is {float(by_batch.mean()):.3g} with BatchNorm's statistics of each of its batches, "
                f"by which it is judged, and {float(kept.mean()):.3g} with those that training keeps: where its "
                f"batches are sorted, as by class, or much smaller than those of training, shuffle them once, or make "
                f"them larger (under the Transformers Trainer by sub_batch_size=); where training's are as small (some "
                f"ten examples), it is to be expected"
            )

    def _notice_written(self) -> None:
        """Say it once where an evaluation writes into batches: those of a list are the same in all windows."""
        if isinstance(self.batches, (list, tuple)) and "written" not in self._told:
            self._told.add("written")
            warn(
                "the model or the probe's loss writes into the probe's batches in place, so that the next evaluation "
                "has other data: the points that are compared differ in them too; work on a clone of what a batch holds"
            )


def _detached(loss: Any) -> Any:
    return loss.detach() if isinstance(loss, Tensor) else loss


def _versions(batches: Sequence[Any]) -> list[int]:
    """How often torch has seen each of the batches' tensors written."""
    leaves = (leaf for leaf in tree_leaves(batches) if isinstance(leaf, Tensor))
    return [0 if leaf.is_inference() else leaf._version for leaf in leaves]


def leading_sizes(batches: Sequence[Any]) -> list[int | None]:
    """By batch the length of the first dimension of its first tensor with dimensions; None without one."""
    return [
        next((leaf.size(0) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), None)
        for batch in batches
    ]


def checked(losses: Sequence[Tensor]) -> list[Tensor]:
    """The probe's losses, each as a 1-dim tensor; at least 2 numbers in all."""
    found = [flat(value) for value in losses]
    count = sum(value.numel() for value in found)
    if not count:
        raise StepError("the probe has no batch in this window; its function of the window's number has to give some")
    if count < 2:
        raise StepError(
            "the probe has 1 sub-batch and needs at least 2 to know its standard error; split its batch, say in 8"
        )
    return found


def differentiable(loss: Tensor) -> Tensor:
    """The same; it can be differentiated.

    Raises:
        StepError: it cannot.
    """
    if not loss.requires_grad:
        raise StepError(
            "the probe's loss has no gradient, which the evidence of a knob needs: give hdet.Probe a differentiable "
            "loss, the lower the better, and no metric such as accuracy"
        )
    return loss


def flat(value: Tensor) -> Tensor:
    """What the probe's loss returned, one loss or several, as a 1-dim tensor."""
    if not isinstance(value, Tensor) or value.dim() > 1:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise StepError(f"the probe's loss must return one loss, or a 1-dim tensor of losses; got {shape}")
    return real(value, "the probe's loss").reshape(-1)


def real(loss: Tensor, whose: str) -> Tensor:
    """The loss as it is.

    Raises:
        StepError: it is complex, and its imaginary part would be lost.
    """
    if loss.is_complex():
        raise StepError(f"{whose} is complex, and losses are compared by one real number: give its real part or abs()")
    return loss
