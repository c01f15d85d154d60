"""Lost ranks: what a broken collective means, said in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hdet.errors import HdetError, LostRankError

SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "timeout")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn the backend's error about a peer that is gone or silent into one that says what to do.

    Raises:
        LostRankError: a collective broke inside the block.
    """
    try:
        yield
    except HdetError:
        raise
    except RuntimeError as error:
        told = str(error).lower()
        if not (isinstance(error, dist.DistError) or any(sign in told for sign in SIGNS)):
            raise
        rank = dist.get_rank() if dist.is_initialized() else "?"
        raise LostRankError(
            f"rank {rank}, {doing}: another rank is gone or did not answer within the group's timeout. This run "
            f"cannot go on without it: end this process, and resume from the last checkpoint (torchrun "
            f"--max-restarts does both). The backend said: {str(error).splitlines()[0]}"
        ) from error
