"""A rank is killed, ranks start again as torchrun starts them, and the run goes on to the same end.

That torchrun itself does so is tested where `hdet run` is (`test_launching.py`).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import elastic_script
import torch
from launch import free_port, start
from training import difference, network, optimizer_of, train, weights

import hdet


def attempt(rank: int, ranks: int, number: int, port: int, folder: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RESTART_COUNT=str(number),
    )
    elastic_script.main(folder)


def codes(number: int, folder: Path) -> list[int]:
    """The exit codes of two ranks."""
    processes = start(attempt, 2, number, free_port(), folder)
    try:
        for process in processes:
            process.join(timeout=60)
        assert not any(process.is_alive() for process in processes)
    finally:
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes]


def test_a_kill_a_restart_and_the_same_result(tmp_path: Path) -> None:
    left, killed = codes(0, tmp_path)
    assert left in (1, -signal.SIGABRT)  # gloo was seen to abort a rank while its process ended, with no frame of hdet
    assert killed == -signal.SIGKILL
    ended = codes(1, tmp_path)
    if -signal.SIGABRT in ended:
        ended = codes(2, tmp_path)
    assert ended == [0, 0]
    # The kill came in step 6: the second attempt goes on from the opening of that window.
    attempts = (tmp_path / "attempts").read_text().splitlines()
    assert attempts[:2] == ["0 None", "1 4"]
    assert all(int(line.split()[1]) >= 4 for line in attempts[2:]), attempts

    torch.set_num_threads(1)
    model = network()
    engine = elastic_script.engine_of(hdet.replicate(model, optimizer_of(model), n=2))
    train(engine, elastic_script.STEPS)
    found = torch.load(tmp_path / "end.pt", weights_only=True)
    assert difference(found["weights"], weights(engine)[0]) == 0.0
    assert found["bases"] == engine.bases
    history = hdet.History(tmp_path / "history.jsonl")
    assert [record.losses for record in history] == [record.losses for record in engine.history]
