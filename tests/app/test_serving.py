"""`hdet watch --serve`: one page, on loopback by default, with a token elsewhere."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hdet.app.main import main
from hdet.app.serving import PageServer
from hdet.errors import HdetError
from hdet.history import History
from hdet.record import WindowRecord

Answer = tuple[int, dict[str, str], str]


@contextmanager
def serving(host: str = "127.0.0.1", page: str = "<p>page", changing: bool = True) -> Iterator[PageServer]:
    with PageServer(lambda: (page, changing), host=host, port=0, every=3.0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, path: str = "/", *, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_on_loopback_the_page_is_there_and_refreshes_itself_while_it_may_change() -> None:
    with serving() as server:
        status, headers, body = ask(server.server_port)
        assert (status, body, headers["Refresh"]) == (200, "<p>page", "3")
        assert headers["Cache-Control"] == "no-store"
        assert server.token is None
    with serving(changing=False) as server:
        assert "Refresh" not in ask(server.server_port)[1]


@pytest.mark.parametrize("path", ["/../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd", "/history.jsonl", "/a"])
def test_nothing_else_has_an_address(path: str) -> None:
    with serving() as server:
        assert ask(server.server_port, path)[0] == 404


def test_a_name_that_is_not_this_machines_is_not_answered() -> None:
    """A site that points its own name here would have a browser read the page for it."""
    with serving() as server:
        assert ask(server.server_port, Host="evil.example")[0] == 421
        assert ask(server.server_port, Host=f"localhost:{server.server_port}")[0] == 200


def test_what_is_no_address_is_answered_and_told_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert ask(server.server_port, Host="[x")[0] == 421
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
            connection.sendall(b"GET http://[x HTTP/1.0\r\n\r\n")
            assert connection.recv(64).startswith(b"HTTP/1.0 400 ")
    assert capfd.readouterr().err == ""


def test_other_methods_are_refused() -> None:
    with serving() as server:
        assert ask(server.server_port, method="POST")[0] == 501
        assert ask(server.server_port, method="HEAD")[2] == ""


def test_elsewhere_a_token_opens_it_and_becomes_a_cookie() -> None:
    with serving("0.0.0.0") as server:
        port, token = server.server_port, server.token
        assert token is not None
        assert server.url == f"http://{socket.gethostname()}:{port}/?token={token}", "others can open it"
        for path in ("/", "/?token=wrong", "/?token="):
            status, _, body = ask(port, path)
            assert status == 401
            assert token not in body
        status, headers, _ = ask(port, f"/?token={token}")
        assert (status, headers["Location"]) == (303, "/")
        assert "HttpOnly" in headers["Set-Cookie"]
        assert "SameSite=Strict" in headers["Set-Cookie"]
        assert ask(port, Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200
        assert ask(port, Cookie="hdet_token=wrong")[0] == 401
        assert ask(port, Cookie="hdet_token=\udce9".encode("latin-1", "replace").decode())[0] == 401


@pytest.mark.parametrize("kind", [HdetError, PermissionError])
def test_what_cannot_be_read_is_said_and_does_not_end_it(kind: type[Exception]) -> None:
    def broken() -> tuple[str, bool]:
        raise kind("line 1 of <script> is\nno record")

    with PageServer(broken, host="127.0.0.1", port=0, every=1.0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for _ in range(2):
            status, _, body = ask(server.server_port)
            assert status == 500
            assert "line 1 of &lt;script&gt; is no record" in body
        server.shutdown()
        thread.join()


def record(w: int) -> WindowRecord:
    return WindowRecord(w, 5 * w, 5 * w + 5, {"rate": 0.1}, {}, [1.0 + w], {}, {"rate": 0.0}, False)


def test_the_command_serves_a_run_in_progress(tmp_path: Path) -> None:
    """Before its first window, then the page, then the page of more windows; Ctrl-C ends it."""
    command = [sys.executable, "-m", "hdet", "watch", str(tmp_path), "--serve", "--every", "0.5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        try:
            assert running.stdout is not None
            found = re.match(r"http://127\.0\.0\.1:(\d+)/ ", running.stdout.readline())
            assert found is not None
            port = int(found[1])
            assert "no window has closed yet" in ask(port)[2]
            history = History(tmp_path / "history.jsonl")
            for w in range(2):
                history.append(record(w))
                assert f"{5 * w + 5} steps, {w + 1} window" in ask(port)[2]
            (tmp_path / "result.json").write_text('{"test_loss": 0.5}')
            _, headers, body = ask(port)
            assert "0.5000" in body
            assert "Refresh" not in headers
        finally:
            running.send_signal(signal.SIGINT)
        assert running.wait(timeout=60) == 0


def test_an_address_that_cannot_be_listened_at_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server, pytest.raises(SystemExit) as stopped:
        main(["watch", str(tmp_path), "--serve", "--port", str(server.server_port)])
    assert stopped.value.code == 2
    assert "nothing can listen at 127.0.0.1" in capsys.readouterr().err
