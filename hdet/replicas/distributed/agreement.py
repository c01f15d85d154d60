"""Whether all ranks declare the same run, asked once at the start."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from hdet.errors import ConfigError
from hdet.replicas.distributed.exchange import Exchange

SHOWN = 300


def agree(exchange: Exchange, declaration: Mapping[str, str]) -> None:
    """Compare a hash of every field over all ranks.

    Decisions are recomputed on every rank and never sent, so ranks that differ in seed, knobs or shapes would
    drift apart in silence, or hang in a collective of unequal sizes.

    Raises:
        ConfigError: on every rank, naming the fields that differ and what two of the ranks hold.
    """
    fields = sorted(declaration)
    hashes = [_number(",".join(fields)), *(_number(declaration[field]) for field in fields)]
    # The number of fields can differ only if the versions do; the first hash then does too.
    row = torch.tensor([len(hashes), hashes[0]], dtype=torch.int64)
    heads = exchange.gather(row).cpu()
    if not bool((heads == heads[0]).all()):
        raise ConfigError("the ranks run different versions of hdet; install the same everywhere")
    table = exchange.gather(torch.tensor(hashes, dtype=torch.int64)).cpu()
    differing = [field for i, field in enumerate(fields, start=1) if bool((table[:, i] != table[0, i]).any())]
    if not differing:
        return
    column = 1 + fields.index(differing[0])
    other = int((table[:, column] != table[0, column]).nonzero()[0])
    held: list[object] = [None] * table.shape[0]
    dist.all_gather_object(held, declaration[differing[0]][:SHOWN], group=exchange.layout.everyone())
    raise ConfigError(
        f"the ranks disagree on {', '.join(differing)}: {differing[0]} is {held[0]} on rank 0 and {held[other]} on "
        f"rank {other}; declare the same run on every rank"
    )


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
