"""The tally of a window's training losses, kept on the device until the window ends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet.errors import StepError
from hdet.replicas import Replicas, tensors

Losses = Tensor | float | Sequence[Tensor | float]


class Tally:
    """Sums each local replica's losses without waiting for the device.

    A non-finite loss makes the sum non-finite for good, so counting the steps since then tells, at the window's
    end, when it came.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._local = len(replicas.local)
        first = next(iter(replicas.hosts[0][0].parameters()), None)
        device = first.device if first is not None else torch.device("cpu")
        self.sums = torch.zeros(self._local, dtype=torch.float32, device=device)
        self.bad_steps = torch.zeros(self._local, dtype=torch.float32, device=device)
        self.steps = 0
        self.heard = 0

    def reset(self) -> None:
        """Start a window."""
        self.sums.zero_()
        self.bad_steps.zero_()
        self.steps = 0
        self.heard = 0

    @torch.no_grad()
    def add(self, losses: Losses | None) -> None:
        """Take one step's losses, one for each local replica; `None` for a step whose losses are not told.

        Raises:
            StepError: another number of losses, or a loss that is not a scalar.
        """
        if losses is not None:
            self.sums.add_(self._row(losses))
            # 0 for a finite sum, else NaN, of which only the latter differs from 0; `isfinite` is four operators.
            self.bad_steps.add_((self.sums - self.sums).ne_(0.0))
            self.heard += 1
        self.steps += 1

    def _row(self, losses: Losses) -> Tensor:
        if isinstance(losses, Tensor) and losses.dim() == 1 and losses.numel() == self._local:
            return losses.detach()
        if isinstance(losses, Tensor) and losses.dim() > 0 and self._local > 1:
            raise StepError(
                f"engine.step was given a tensor of shape {tuple(losses.shape)}; it takes one scalar loss for each "
                f"replica this process hosts, a tensor of shape ({self._local},) or a list of 0-dim tensors"
            )
        given = [losses] if isinstance(losses, (Tensor, float, int)) else list(losses)
        if len(given) != self._local:
            raise StepError(
                f"engine.step takes one loss for each replica this process hosts ({self._local}), got {len(given)}"
            )
        if all(isinstance(loss, Tensor) and self._ready(loss) for loss in given):
            # The way it mostly goes, at every step. (No gradient is recorded here: nothing needs detaching.)
            return given[0] if self._local == 1 else torch.stack(given)  # type: ignore[arg-type, return-value]
        rows = []
        for index, loss in zip((replica.index for replica in self._replicas.local), given, strict=True):
            if isinstance(loss, Tensor):
                if loss.numel() != 1:
                    raise StepError(
                        f"the loss of replica {index} has shape {tuple(loss.shape)}; a loss is a scalar: take its mean"
                    )
                rows.append(loss.detach().reshape(()))
            elif isinstance(loss, (int, float)):
                rows.append(torch.tensor(float(loss)))
            else:
                raise StepError(f"the loss of replica {index} is a {type(loss).__name__}; give a 0-dim tensor")
        return torch.stack([row.to(self.sums.device, torch.float32) for row in rows])

    def _ready(self, loss: Tensor) -> bool:
        return loss.dim() == 0 and loss.dtype == self.sums.dtype and loss.device == self.sums.device

    @torch.no_grad()
    def rows(self) -> Tensor:
        """[local, 4]: mean loss, steps since it became non-finite, 1 where all parameters are finite, losses told."""
        sound = {
            host: tensors.all_finite(tensors.parameters(model)).to(self.sums.device, torch.float32)
            for host, (model, _) in enumerate(self._replicas.hosts)
        }
        finite = torch.stack([sound[replica.host] for replica in self._replicas.local])
        heard = torch.full_like(self.sums, self.heard)
        return torch.stack([self.sums / max(1, self.heard), self.bad_steps, finite, heard], dim=1)

    def state_dict(self) -> dict[str, object]:
        sums, bad_steps = self.sums.clone(), self.bad_steps.clone()
        return {"sums": sums, "bad_steps": bad_steps, "steps": self.steps, "heard": self.heard}

    def load_state_dict(self, state: dict[str, object]) -> None:
        for name in ("sums", "bad_steps"):
            saved = state[name]
            assert isinstance(saved, Tensor)
            getattr(self, name).copy_(saved)
        assert isinstance(state["steps"], int)
        assert isinstance(state["heard"], int)
        self.steps = state["steps"]
        self.heard = state["heard"]
