"""One state for all ranks, for trainers that keep rank 0's only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from hdet.nested import mapped
from hdet.replicas.distributed.lost_rank import translated

State = dict[str, Any]


class Stated(Protocol):
    """What has a state to be saved."""

    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...


class AllRanks:
    """A search's state of all ranks that train together in one, which every one of them can load.

    What the window under way has been told of its micro-batches is each rank's own. It is gathered; what all ranks have
    alike, such as the weights that the window opened at, is stored once. Of a sharded model each rank holds a part of
    all weights, so all is gathered.

    Args:
        search: this rank's.
        group: of the ranks that train together; None for one process.
        sharded: whether ranks hold parts of the model.
    """

    def __init__(self, search: Stated, group: dist.ProcessGroup | None, *, sharded: bool = False) -> None:
        self._search = search
        self._group = group
        self._sharded = sharded

    def state_dict(self) -> State:
        """Every rank's state, plain numbers and tensors. All ranks call it together.

        Raises:
            LostRankError: another rank is gone, or was silent for longer than the group's timeout.
        """
        state = self._search.state_dict()
        if self._group is None:
            return state
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        own = {"whole": state} if self._sharded else _own(state)
        # To processes that have other devices.
        sent = mapped(own, lambda value: value.cpu() if hasattr(value, "cpu") else value)
        with translated("gathering a search's state"), _foreign_meshes():
            dist.all_gather_object(gathered, sent, group=self._group)
        return {**({} if self._sharded else state), "ranks": gathered}

    def load_state_dict(self, state: State) -> None:
        """Restore this rank's part. With another number of ranks it is rank 0's, and the window begins anew.

        Raises:
            CheckpointError: the state is another search's; or it is of a sharded model, over another number of ranks.
        """
        self._search.load_state_dict(self._of_this_rank(state))

    def _of_this_rank(self, state: State) -> State:
        ranks = state.get("ranks", ())
        alike = self._group is not None and len(ranks) == dist.get_world_size(self._group)
        mine = ranks[dist.get_rank(self._group) if alike else 0] if ranks else {}
        if "whole" in mine:
            whole: State = mine["whole"]
            return whole
        return _with(state, mine) if alike else state


@contextmanager
def _foreign_meshes() -> Iterator[None]:
    """Sharded tensors of other ranks name groups that are not here, of which torch warns for each.

    Nobody asks for these groups: a load puts what is this rank's into the model's own mesh.
    """

    def others(record: logging.LogRecord) -> bool:
        return "pickling/unpickling of the DeviceMesh" not in record.getMessage()

    logger = logging.getLogger("torch.distributed.device_mesh")
    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)


def _own(state: State) -> State:
    """What no other rank has."""
    under_way = state["engine"]["open"]
    return {
        "losses": state.get("losses"),
        "collectors": state["engine"]["collectors"],
        "tally": under_way["tally"] if under_way is not None else None,
        "replicas": list(under_way["replicas"]) if under_way is not None else None,
    }


def _with(state: State, own: State) -> State:
    """A state with what is one rank's own."""
    engine = {**state["engine"], "collectors": own["collectors"]}
    if engine["open"] is not None:
        held = engine["open"]["replicas"].values()
        engine["open"] = {
            **engine["open"],
            "tally": own["tally"],
            "replicas": dict(zip(own["replicas"], held, strict=True)),
        }
    return {**state, "engine": engine, **({"losses": own["losses"]} if own["losses"] is not None else {})}
