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
    held = [""] * table.shape[0]
    dist.all_gather_object(held, declaration[differing[0]], group=exchange.layout.everyone())
    mine, theirs = _excerpts(held[0], held[other])
    raise ConfigError(
        f"the ranks disagree on {', '.join(differing)}: {differing[0]} is {mine} on rank 0 and {theirs} on "
        f"rank {other}; declare the same run on every rank"
    )


def _excerpts(first: str, second: str) -> list[str]:
    """`SHOWN` characters of each text, those around the first place at which they differ."""
    apart = (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    start = max(0, next(apart, min(len(first), len(second))) - SHOWN // 2)
    return [("..." if start else "") + text[start : start + SHOWN] for text in (first, second)]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
