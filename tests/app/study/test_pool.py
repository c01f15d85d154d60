"""Work for several processes."""

from __future__ import annotations

import operator
import os
import signal
import threading
import time
from typing import Any

import pytest

from hdet.app.study.pool import several


@pytest.mark.parametrize("_try", range(3))
def test_an_interrupt_beside_work_that_waits_leaves_no_thread_with_an_error(
    _try: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the executor's own thread, which ends what the workers leave behind; one error would come every other time."""
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    results = several(time.sleep, [(0.0,), *[(60.0,)] * 8], jobs=2)
    assert next(results) == (0, None)
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt)  # type: ignore[attr-defined]
    assert not seen


def test_a_worker_that_is_killed_takes_nothing_but_its_own_piece_with_it() -> None:
    work = [(divmod, 7, 2), (signal.raise_signal, signal.SIGKILL), *[(divmod, 9, i) for i in range(4)]]
    results = dict(several(operator.call, work, jobs=2))
    assert [results[place] for place in (0, 3, 4, 5)] == [(3, 1), (9, 0), (4, 1), (3, 0)]
    assert str(results[1]) == "its process died, as one that the system kills for memory"
    assert isinstance(results[2], ZeroDivisionError)


def test_a_worker_that_dies_between_two_pieces_is_replaced() -> None:
    results = several(os.getpid, [()] * 3, jobs=2)
    seen = []
    for _, process in results:
        seen.append(process)
        if len(seen) == 1:
            assert isinstance(process, int)
            os.kill(process, signal.SIGKILL)
            time.sleep(0.5)  # its pool notices
    assert len(seen) == 3
    assert all(isinstance(process, int) for process in seen)
