"""What a contrast keeps of the gradients it saw: one number a step, or traces that reach over windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hdet.controllers import Estimate
from hdet.replicas import Replica, Replicas, tensors

FEWEST_BLOCKS = 8
LARGEST_GAIN = 1e3

Signs = NDArray[np.float64]  # [N, K], 0 for a knob that rests
Widths = NDArray[np.float64]  # [K]


class Memory:
    """One contrast's memory. K knobs; the design comes in blocks of `block_steps` steps, each balanced in all signs."""

    def __init__(self, replicas: Replicas, knobs: int, block_steps: int) -> None:
        self.replicas = replicas
        self.knobs = knobs
        self.block_steps = block_steps


class Dots(Memory):
    """One dot product a replica and step, along a v that is computed at the window's opening (and now and then).

    Memory: the sketch of v. Sees one step ahead: what a level did in a step to the loss after that step.
    """

    def __init__(self, replicas: Replicas, knobs: int, block_steps: int, refresh: int) -> None:
        super().__init__(replicas, knobs, block_steps)
        self.refresh = -(-refresh // block_steps) * block_steps
        self.forget()

    def forget(self) -> None:
        """Start anew."""
        self.saved: list[list[float]] = [[] for _ in range(self.knobs)]  # slopes that no estimate has used yet
        self._clear()

    def _clear(self) -> None:
        self._aim: Callable[[], Tensor | None] | None = None  # of a window in which some knob explores
        self.direction: Tensor | None = None
        self.steps = 0
        self.drawn: list[Signs] = []  # of each step that explored
        self.measured: list[Tensor] = []  # [local] <v, g_r> of the same steps
        self.shares: dict[int, Tensor] = {}
        self.outdated = False  # the direction is one of other parameters

    @property
    def ready(self) -> bool:
        """Whether steps that explore now would teach anything."""
        return self.direction is not None

    def renew(self) -> None:
        """Other parameters are trained from now on.

        What was measured stays. Until there is a new direction nothing is, and such blocks are left out.
        """
        self.outdated = True

    def open(self, aim: Callable[[], Tensor | None]) -> None:
        """A window opens in which some knob explores; `aim` gives the sketch of v at the weights as they are."""
        self._clear()
        self._aim = aim
        self.direction = aim()

    def add(self, replica: Replica, gradient: Tensor, signs: Signs, widths: Widths) -> None:
        """The sketch [m] of a replica's own gradient of this step, not shared yet."""
        assert self.direction is not None
        along = self.direction if not self.outdated else torch.full_like(gradient, math.nan)
        share = torch.dot(gradient.to(along.dtype), along)
        self.shares[replica.index] = self.shares.get(replica.index, 0.0) + share

    def reject(self, replica: Replica) -> None:
        """A replica's gradient of this step is not known: its block tells nothing."""
        assert self.direction is not None
        self.shares[replica.index] = torch.full((), math.nan, device=self.direction.device)

    def end_step(self, step: int, signs: Signs | None, last: bool) -> None:
        """A step is done, the window's `last` or not; `signs` if it explored."""
        if signs is not None:
            self.measured.append(torch.stack([self.shares[r.index] for r in self.replicas.local]))
            self.drawn.append(signs)
        self.shares = {}
        self.steps += 1
        if self._aim is not None and (self.steps % self.refresh == 0 or self.outdated) and not last:
            self.direction, self.outdated = self._aim(), False

    def close(self, heard: Sequence[int], widths: Widths, aim: Callable[[], Tensor | None]) -> dict[int, Estimate]:
        """The estimates there are at a window's end, of knobs that explored in it and are listened to."""
        blocks = len(self.measured) // self.block_steps
        if blocks:
            self._save(blocks, widths)
        self._clear()
        found = {}
        for k, slopes in enumerate(self.saved):
            if len(slopes) >= FEWEST_BLOCKS:
                if any(slopes):  # else v was 0, as before the first step of Adagrad
                    told = Estimate.of_sub_batches(np.array(slopes))
                    found[k] = replace(told, slopes=(), freedom=len(slopes) - 1)  # blocks have no numbers
                self.saved[k] = []
        return found

    def _save(self, blocks: int, widths: Widths) -> None:
        """Work out each block's slope for each knob that explored in it."""
        used = blocks * self.block_steps
        along = self.replicas.gather(torch.stack(self.measured[:used], dim=1))  # [N, steps]
        signs = np.stack(self.drawn[:used])  # [steps, N, K]
        products = (signs * along.T[:, :, None]).sum(axis=1).reshape(blocks, self.block_steps, -1).sum(axis=1)
        squares = (signs**2).sum(axis=1).reshape(blocks, self.block_steps, -1).sum(axis=1)  # [blocks, K]
        for k, width in enumerate(widths):
            heard = (squares[:, k] > 0.0) & np.isfinite(products[:, k])
            if width > 0.0:
                self.saved[k] += (-products[heard, k] / squares[heard, k] / width).tolist()

    def state_dict(self) -> dict[str, Any]:
        return {
            "saved": [list(slopes) for slopes in self.saved],
            "steps": self.steps,
            "direction": None if self.direction is None else self.direction.clone(),
            "measured": tensors.clones(self.measured),
            "drawn": [signs.tolist() for signs in self.drawn],
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device, size: int, same_window: bool) -> None:
        """Restore what was kept of sketches of a size; where the window was opened anew, only what outlives windows."""
        self.saved = [list(slopes) for slopes in state["saved"]]
        if not same_window:
            return
        direction = state["direction"]
        self.direction = None if direction is None else direction.to(device, copy=True)
        self.steps = state["steps"]
        self.measured = [row.to(device, copy=True) for row in state["measured"]]
        self.drawn = [np.asarray(signs, dtype=np.float64) for signs in state["drawn"]]


class Traces(Memory):
    """The contrasted gradients themselves, summed with weights that fade over `horizon` steps, in J groups of blocks.

    Z_j = sum_t exp(-age_t / horizon) lr_t (1/N) sum_r s_rt g_rt / d over the blocks of group j, lr_t each weight's own
    learning rate; at a window's end -<(P / lr) g_p, Z_j> / weights_j is a slope, and the J groups, which have no block
    in common, give its standard error. So a level of long ago is judged by the held-out loss of now: what a regulariser
    is good for shows late.

    A block with a gradient that was not finite (a GradScaler makes some by design) is left out, with its weight, by
    each process for itself: no process knows of another's before the window ends.

    Memory: (J + 1) K sketches, taken when a knob first explores. Gradients come multiplied by their rates. Successive
    estimates share what they remember.
    """

    def __init__(self, replicas: Replicas, knobs: int, block_steps: int, horizon: int, groups: int) -> None:
        super().__init__(replicas, knobs, block_steps)
        self.horizon = horizon
        self.groups = groups
        self.forget()

    def forget(self) -> None:
        self.traces: Tensor | None = None  # [J, K, m], in units of `gain`
        self.block: Tensor | None = None  # [K, m], of the block under way
        self.weights: Tensor | None = None  # [J, K], of this process's blocks that were finite
        self.pending = np.zeros(self.knobs)  # weights of the block under way
        self.rejected = False  # a replica gave nothing to the block under way
        self.blocks = np.zeros((self.groups, self.knobs))
        self.gain = 1.0
        self.explored = 0  # steps

    @property
    def ready(self) -> bool:
        return True

    def renew(self) -> None:
        within = self.explored % self.block_steps
        self.forget()
        self.explored = within  # blocks go on as they were
        self.rejected = within > 0  # of this one a part is gone

    def open(self, aim: Callable[[], Tensor | None]) -> None:
        """Nothing to prepare."""

    @property
    def group(self) -> int:
        """Which group the present block belongs to."""
        return self.explored // self.block_steps % self.groups

    def add(self, replica: Replica, gradient: Tensor, signs: Signs, widths: Widths) -> None:
        block = self._take(gradient.numel(), gradient.device)
        # Newer contrasts weigh more instead of older ones less: the buffers are only ever added to.
        for k in np.flatnonzero(signs[replica.index]).tolist():
            factor = signs[replica.index, k] / widths[k] * self.gain / self.replicas.size
            block[k].add_(gradient, alpha=float(factor))

    def reject(self, replica: Replica) -> None:
        self.rejected = True

    def _take(self, size: int, device: torch.device) -> Tensor:
        if self.block is None:
            self.traces = torch.zeros((self.groups, self.knobs, size), dtype=torch.float32, device=device)
            self.block = torch.zeros_like(self.traces[0])
            wide = torch.float32 if device.type == "mps" else torch.float64
            self.weights = torch.zeros((self.groups, self.knobs), dtype=wide, device=device)
        return self.block

    def end_step(self, step: int, signs: Signs | None, last: bool) -> None:
        if signs is not None:
            drawn = signs.any(axis=0)
            self.pending[drawn] += self.gain
            if (self.explored + 1) % self.block_steps == 0:
                self.blocks[self.group, drawn] += 1.0
                self._end_block()
            self.explored += 1
        self.gain *= math.exp(1.0 / self.horizon)
        if self.gain > LARGEST_GAIN:
            self._fade()

    def _end_block(self) -> None:
        """Take the block into its group where it is finite, on the device."""
        if self.block is not None:
            assert self.traces is not None
            assert self.weights is not None
            if self.rejected:
                self.block.fill_(math.nan)
            finite = torch.linalg.vector_norm(self.block, math.inf, dim=1).isfinite()
            self.traces[self.group].add_(self.block.masked_fill_(~finite[:, None], 0.0))
            # As arguments of operators: a copy from the host would wait.
            for k in np.flatnonzero(self.pending).tolist():
                self.weights[self.group, k].add_(finite[k], alpha=float(self.pending[k]))
            self.block.zero_()
        self.pending[:] = 0.0
        self.rejected = False

    def _fade(self) -> None:
        self.pending /= self.gain
        for held in (self.traces, self.block, self.weights):
            if held is not None:
                held.div_(self.gain)
        self.gain = 1.0

    def close(self, heard: Sequence[int], widths: Widths, aim: Callable[[], Tensor | None]) -> dict[int, Estimate]:
        sure = [k for k in heard if self.blocks[:, k].sum() >= FEWEST_BLOCKS and self.blocks[:, k].min() >= 1.0]
        direction = aim() if sure else None
        if direction is None:
            return {}
        # A process whose passes were all left out has nothing to add, and is waited for all the same.
        self._take(direction.numel(), direction.device)
        assert self.traces is not None
        assert self.weights is not None
        self._fade()
        local = len(self.replicas.local)
        rows = torch.zeros(local, 2, self.groups * len(sure), dtype=self.weights.dtype, device=direction.device)
        # The sum over this process's replicas stands in its first row.
        read = self.traces if len(sure) == self.knobs else self.traces[:, sure]  # a copy only where it has to be
        rows[0, 0] = -(read.to(direction.device) @ direction).flatten()
        rows[:, 1] = self.weights[:, sure].to(direction.device).flatten() / self.replicas.size
        table = self.replicas.gather(rows.flatten(start_dim=1)).sum(axis=0).reshape(2, self.groups, len(sure))
        found = {}
        for place, k in enumerate(sure):
            products, weights = table[:, :, place]
            if weights.min() > 0.0 and products.any() and np.isfinite(products).all():
                # A group's sum goes on from window to window: what adds up over windows is kept apart by group.
                found[k] = Estimate.of_sub_batches(products / weights)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "replicas": [replica.index for replica in self.replicas.local],
            "taken": self.block is not None,
            **{name: None if held is None else held.clone() for name, held in self._held().items()},
            "pending": self.pending.tolist(),
            "rejected": self.rejected,
            "blocks": self.blocks.tolist(),
            "gain": self.gain,
            "explored": self.explored,
        }

    def _held(self) -> dict[str, Tensor | None]:
        return {"traces": self.traces, "block": self.block, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any], device: torch.device, size: int, same_window: bool) -> None:
        self.forget()
        # A process holds its own replicas' part of the sums; unless every one has its own back, all start anew. So they
        # do where a checkpoint has left the tensors out: counts without their sums would pass for evidence.
        own = state["replicas"] == [replica.index for replica in self.replicas.local]
        taken = state.get("taken", state["explored"] > 0)  # a step may have given nothing, and taken no memory
        own = own and (not taken or (state["traces"] is not None and state["traces"].shape[-1] == size))
        known = self.replicas.gather(torch.full((len(self.replicas.local), 1), float(own), device=device))
        if not (known == 1.0).all():
            return
        if state["traces"] is not None:
            self.traces, self.block, self.weights = (state[name].to(device, copy=True) for name in self._held())
        self.pending, self.blocks = np.asarray(state["pending"]), np.asarray(state["blocks"])
        self.gain, self.explored, self.rejected = state["gain"], state["explored"], state["rejected"]


Record = Dots | Traces
