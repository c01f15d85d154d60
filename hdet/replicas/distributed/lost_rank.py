"""Lost ranks: what a broken collective means, said in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from hdet.errors import HdetError, LostRankError

SIGNS = ("gloo/", "pair closure", "nccl", "connection closed by peer", "connection reset by peer")
"""What the backends' messages hold (gloo's mostly begin with the file that raised; what comes after a timeout says that
it "caused pair closure"), and those of other libraries do not."""

LOST = "another rank is gone or did not answer within the group's timeout"


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn the backend's error about a peer that is gone or silent into one that says what to do.

    Raises:
        LostRankError: a collective broke inside the block.
    """
    try:
        yield
    except RuntimeError as error:
        translate(error, doing)
        raise


def translate(error: BaseException, doing: str) -> None:
    """Raise in the place of a backend's error about a peer that is gone or silent one that says what to do.

    Raises:
        LostRankError: it is one.
    """
    if isinstance(error, HdetError) or not isinstance(error, RuntimeError) or not dist.is_initialized():
        return
    told = str(error).lower()
    if isinstance(error, dist.DistError) or any(sign in told for sign in SIGNS):
        raise LostRankError(
            f"rank {dist.get_rank()}, {doing}: {LOST}. This run cannot go on without it: end this process, and resume "
            f"from the last checkpoint (torchrun --max-restarts does both). The backend said: "
            f"{str(error).splitlines()[0]}"
        ) from error
