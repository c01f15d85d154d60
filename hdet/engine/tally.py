"""The tally of a window's training losses, kept on the device until the window ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet.errors import StepError
from hdet.record import MOST_REPLICAS
from hdet.replicas import Replicas, alike
from hdet.replicas.finite import PLACES, Finiteness
from hdet.replicas.replicas import present
from hdet.signals.probe import real

Losses = Tensor | float | Sequence[Tensor | float]


@dataclass(frozen=True)
class WindowLosses:
    """What a window's losses came to, the same on every process.

    Attributes:
        losses: [N] mean training losses; NaN where a replica is not valid or reported none.
        valid: [N] replicas that are there, and whose losses, parameters, optimizer state and buffers all stayed finite.
        faults: an entry for each that is not: absent, or where and at which step it became non-finite; of very many
            one for all but the first.
        apart: whether valid replicas that were to stay alike hold different weights.
        first: the mean over replicas of the first losses that the window was told; NaN where it was told none.
    """

    losses: NDArray[np.float64]
    valid: NDArray[np.bool_]
    faults: list[dict[str, Any]]
    apart: bool
    first: float


CHUNK = 64
"""Steps between two additions: to note a loss is one operator, to add it up are several."""


class Tally:
    """Notes each local replica's losses without waiting for the device, and adds them up now and then.

    The one loss of a model on the CPU is read at once: there is nothing to wait for, and that is cheaper than a copy.

    A non-finite loss is counted from then on in every step, which tells, at the window's end, when it came.

    Args:
        stay_alike: whether the replicas hold the same weights throughout a window that they opened alike, so that
            their marks are to be compared.
    """

    def __init__(self, replicas: Replicas, stay_alike: bool = False) -> None:
        self._replicas = replicas
        self._stay_alike = stay_alike and alike.compared(replicas)
        self._local = len(replicas.local)
        first = next(iter(replicas.hosts[0][0].parameters()), None)
        device = first.device if first is not None else torch.device("cpu")
        wide = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(self._local, dtype=wide, device=device)
        self.bad_steps = torch.zeros(self._local, dtype=wide, device=device)
        self.steps = 0
        self.heard = 0
        self.first = torch.zeros(self._local, dtype=torch.float32, device=device)
        self.noted = torch.zeros(CHUNK, self._local, dtype=torch.float32, device=device)
        self._rows = list(self.noted)
        self._dtype, self._device = self.noted.dtype, self.noted.device
        self._reads = self._local == 1 and device.type == "cpu"
        self._read: list[float] = []  # the last losses, which are still to be noted
        merged = replicas.diverge and replicas.size > 1
        self._finiteness = [Finiteness(model, optimizer, merged) for model, optimizer in replicas.hosts]
        self._opened = [alike.unmarked()] * len(replicas.hosts)

    def reset(self) -> None:
        """Start a window."""
        for finiteness in self._finiteness:
            finiteness.open()
        self._opened = [alike.unmarked()] * len(self._finiteness)
        self.sums.zero_()
        self.bad_steps.zero_()
        self.steps = 0
        self.heard = 0
        self._read.clear()

    def open_apart(self) -> None:
        """The replicas may not be alike at the window's opening, as after `hdet.perturb`: look whether they are."""
        if self._stay_alike:
            self._opened = self._marks()

    def _marks(self) -> list[Tensor]:
        if not self._stay_alike:
            return [alike.unmarked()] * len(self._finiteness)
        return [alike.mark(model, optimizer) for model, optimizer in self._replicas.hosts]

    def add(self, losses: Losses | None) -> None:
        """Take one step's losses, one for each local replica; `None` for a step whose losses are not told.

        Raises:
            StepError: another number of losses, or a loss that is not a scalar.
        """
        if losses is not None:
            loss = losses[0] if self._reads and type(losses) is list and len(losses) == 1 else None
            number = loss.item() if type(loss) is Tensor and loss.is_cpu and loss.ndim == 0 else None
            if type(number) is float:
                self._read.append(number)  # the way it mostly goes there, at every step
            else:
                self._note_what_was_read()
                self._note(self._rows[self.heard % CHUNK], losses)
            self.heard += 1
            if self.heard % CHUNK == 0:
                self.sums, self.bad_steps = self._totals(CHUNK)
            if self.heard == CHUNK:
                self.first.copy_(self.noted[0])
        self.steps += 1

    def _note_what_was_read(self) -> None:
        if self._read:
            stop = (self.heard - 1) % CHUNK + 1
            self.noted[stop - len(self._read) : stop, 0] = torch.tensor(self._read, dtype=self._dtype, device="cpu")
            self._read.clear()

    def _totals(self, rows: int) -> tuple[Tensor, Tensor]:
        """The sums and bad steps with those of the last rows noted."""
        self._note_what_was_read()
        noted = self.noted[:rows].to(self.sums.dtype)
        bad = (~noted.isfinite()).cumsum(0) + self.bad_steps > 0
        return self.sums + noted.sum(0), self.bad_steps + bad.sum(0)

    def _note(self, row: Tensor, losses: Losses) -> None:
        if type(losses) is list and len(losses) == self._local == 1:
            loss = losses[0]
            if type(loss) is Tensor and loss.dim() == 0 and loss.dtype == self._dtype and loss.device == self._device:
                row.copy_(loss.data)  # the way it mostly goes, at every step: one operator
                return
        if isinstance(losses, Tensor) and losses.dim() == 1 and losses.numel() == self._local:
            row.copy_(real(losses.detach(), "the loss of replicas"))
            return
        if isinstance(losses, Tensor) and losses.dim() > 0 and self._local > 1:
            raise StepError(
                f"engine.step was given a tensor of shape {tuple(losses.shape)}; it takes one scalar loss for each "
                f"replica this process hosts, a tensor of shape ({self._local},) or a list of 0-dim tensors"
            )
        if isinstance(losses, (Mapping, Set)):
            raise StepError(
                f"engine.step was given a {type(losses).__name__}, whose entries are in no order of the replicas; give "
                f"a list of 0-dim tensors, in the order of engine.replicas"
            )
        if isinstance(losses, Tensor) or not isinstance(losses, Iterable) or getattr(losses, "ndim", 1) == 0:
            given = [losses]
        else:
            given = list(losses)
        if len(given) != self._local:
            raise StepError(
                f"engine.step takes one loss for each replica this process hosts ({self._local}), got {len(given)}"
            )
        if all(map(self._is_ready, given)):
            torch.stack([loss.detach() for loss in given], out=row)  # type: ignore[union-attr]
            return
        rows = []
        for index, loss in zip((replica.index for replica in self._replicas.local), given, strict=True):
            if isinstance(loss, Tensor):
                if loss.numel() != 1:
                    raise StepError(
                        f"the loss of replica {index} has shape {tuple(loss.shape)}; a loss is a scalar: take its mean"
                    )
                rows.append(real(loss, f"the loss of replica {index}").detach().reshape(()))
            elif isinstance(loss, Real):
                rows.append(torch.tensor(float(loss), device="cpu"))
            else:
                raise StepError(f"the loss of replica {index} is a {type(loss).__name__}; give a 0-dim tensor")
        row.copy_(torch.stack([found.to(row.device, row.dtype) for found in rows]))

    def _is_ready(self, loss: object) -> TypeGuard[Tensor]:
        return type(loss) is Tensor and loss.dim() == 0 and loss.dtype == self._dtype and loss.device == self._device

    def read(self, step: int) -> WindowLosses:
        """The window's losses over all processes, after `step` steps of the run. Waits for the device."""
        table = self._replicas.gather(self.rows())
        loss, bad_steps, told = table[:, 0], table[:, 1], table[:, 2]
        ends = np.cumsum([len(PLACES), alike.MARKS, alike.MARKS])
        flags, opened, closed, first = np.split(table[:, 3:], ends, axis=1)
        finite = np.stack([np.isfinite(loss), *(flags.T == 1.0)])  # of thousands of replicas row by row is faster
        valid: NDArray[np.bool_] = np.logical_and.reduce(finite, axis=0)
        faults: list[dict[str, Any]] = []
        there = present(table)
        failed = np.flatnonzero(~valid)
        for index in failed[:MOST_REPLICAS].tolist():
            if not there[index]:
                faults.append({"kind": "absent", "replica": index, "step": step - 1})
                continue
            since = math.ceil(bad_steps[index])
            where = ("loss", *PLACES)[int(finite[:, index].argmin())]
            # A loss that stayed finite leaves the last update to blame.
            faults.append({"kind": "non_finite", "replica": index, "step": step - max(1, since), "where": where})
        if len(failed) > MOST_REPLICAS:
            more = failed[MOST_REPLICAS:]
            since = math.ceil(np.nan_to_num(bad_steps[more]).max())
            faults.append({"kind": "non_finite", "more_replicas": len(more), "step": step - max(1, since)})
        apart = _differ(closed[valid] if len(failed) else closed)
        apart = apart and not _differ(opened if there.all() else opened[there])
        heard = there & (told > 0)
        begun = float(first[heard].mean()) if heard.any() else math.nan
        return WindowLosses(np.where(valid & (told > 0), loss, np.nan), valid, faults, apart, begun)

    @torch.no_grad()
    def rows(self) -> Tensor:
        """[local, 11]: mean loss, steps since it became non-finite, losses told, 1 where a place is finite, marks, and
        the first loss.
        """
        flags = [finiteness.flags() for finiteness in self._finiteness]
        hosts = [
            torch.cat([part.to(self.sums.device, self.sums.dtype) for part in parts])
            for parts in zip(flags, self._opened, self._marks(), strict=True)
        ]
        sums, bad_steps = self._totals(self.heard % CHUNK)
        heard = torch.full_like(sums, self.heard)
        told = torch.stack([sums / max(1, self.heard), bad_steps, heard], dim=1)
        first = self.noted[0] if self.heard < CHUNK else self.first
        by_host = torch.stack([hosts[replica.host] for replica in self._replicas.local])
        return torch.cat([told, by_host, first.to(sums).unsqueeze(1)], dim=1)

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._rows = list(self.noted)  # views, which pickling has made tensors of their own

    def state_dict(self) -> dict[str, object]:
        self._note_what_was_read()
        held = {name: getattr(self, name).clone() for name in ("sums", "bad_steps", "noted", "first")}
        return {**held, "steps": self.steps, "heard": self.heard}

    def load_state_dict(self, state: dict[str, object]) -> None:
        for name in ("sums", "bad_steps", "noted", "first"):
            saved = state.get(name, torch.full_like(self.first, math.nan))  # older states have no first loss
            assert isinstance(saved, Tensor)
            getattr(self, name).copy_(saved)
        assert isinstance(state["steps"], int)
        assert isinstance(state["heard"], int)
        self.steps = state["steps"]
        self.heard = state["heard"]
        self._read.clear()


def _differ(marks: NDArray[np.float64]) -> bool:
    return any(bool((column != column[0]).any()) for column in marks.T if len(column))
