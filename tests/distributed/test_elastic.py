"""torchrun restarts a run after a rank was killed, and it goes on to the same end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import elastic_script
import pytest
import torch
from launch import free_port
from training import difference, network, optimizer_of, train, weights

import hdet


@pytest.mark.timeout(400)  # seconds, but five starts of Python and torch on a machine that may be busy
def test_a_kill_a_restart_and_the_same_result(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3"),
            *("--monitor-interval=0.2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d"),
            *(elastic_script.__file__, str(tmp_path)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    # The kill came in step 6: the second attempt goes on from the opening of that window.
    attempts = (tmp_path / "attempts").read_text().splitlines()
    assert attempts[:2] == ["0 None", "1 4"], ended.stderr[-6000:]
    # gloo was seen to abort a rank while its process ended (SIGABRT, without an hdet frame), which torchrun answers by
    # one more attempt. That one has to resume as well.
    assert all(int(attempt.split()[1]) >= 4 for attempt in attempts[2:]), attempts

    torch.set_num_threads(1)
    model = network()
    engine = elastic_script.engine_of(hdet.replicate(model, optimizer_of(model), n=2))
    train(engine, elastic_script.STEPS)
    found = torch.load(tmp_path / "end.pt", weights_only=True)
    assert difference(found["weights"], weights(engine)[0]) == 0.0
    assert found["bases"] == engine.bases
    history = hdet.History(tmp_path / "history.jsonl")
    assert [record.losses for record in history] == [record.losses for record in engine.history]
