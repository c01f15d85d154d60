"""The page of a run in progress, served to browsers: to this machine's alone, or to those that have a token."""

from __future__ import annotations

import html
import ipaddress
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hdet.app.text import one_line
from hdet.errors import ConfigError, HdetError

COOKIE = "hdet_token"
EVERY_ADDRESS = ("0.0.0.0", "::", "")
PATIENCE_SECONDS = 10.0
"""For a browser that begins a request and does not end it."""

Draw = Callable[[], tuple[str, bool]]
"""Gives the page, and whether it may still change."""


class PageServer(ThreadingHTTPServer):
    """Serves one page and nothing else: no file of the machine has an address here.

    On a loopback address it answers requests for that address only, so that no other site can have a browser read it
    under a name of its own (DNS rebinding). Elsewhere a request needs the token: as `?token=` once, which becomes a
    cookie. Over plain HTTP a token can be read on the way; on a network that is not trusted, take a tunnel.

    Args:
        draw: makes the page; called for every request, by one thread at a time.
        host: the address to listen at.
        port: 0 takes a free one.
        every: seconds after which a browser asks again, while the page may change.

    Raises:
        ConfigError: the address cannot be listened at.
    """

    daemon_threads = True

    def __init__(self, draw: Draw, *, host: str, port: int, every: float) -> None:
        self.every = every
        self._draw = draw
        self._drawing = threading.Lock()
        self.local = _is_loopback(host)
        self.token = None if self.local else secrets.token_urlsafe(32)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Request)
        except OSError as error:
            raise ConfigError(f"nothing can listen at {host}, port {port}: {error}; choose another") from None
        named = socket.gethostname() if host in EVERY_ADDRESS else host  # browsers elsewhere cannot open 0.0.0.0
        self.host = f"[{named}]" if ":" in named else named

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away before it has the page is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """What to open in a browser; it holds the token, where there is one."""
        address = f"http://{self.host}:{self.server_address[1]}/"
        return address if self.token is None else f"{address}?token={self.token}"

    def page(self) -> tuple[HTTPStatus, str, bool]:
        """Status, page, and whether to ask again."""
        with self._drawing:
            try:
                return HTTPStatus.OK, *self._draw()
            except (HdetError, OSError) as error:
                text = html.escape(one_line(str(error)))
                return HTTPStatus.INTERNAL_SERVER_ERROR, f"<!DOCTYPE html><title>hdet</title><p>{text}", True


class _Request(BaseHTTPRequestHandler):
    server: PageServer
    timeout = PATIENCE_SECONDS
    server_version = "hdet"
    sys_version = ""

    def do_GET(self) -> None:
        try:
            address = urlsplit(self.path)
        except ValueError:
            return self.send_error(HTTPStatus.BAD_REQUEST)
        if address.path != "/":
            return self.send_error(HTTPStatus.NOT_FOUND)
        if self.server.local and not _is_loopback(_name(self.headers.get("Host", ""))):
            return self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
        if self.server.token is not None:
            asked = parse_qs(address.query).get("token", [""])[0]
            if asked and self._opens(asked):
                cookie = f"{self._cookie_name()}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
                return self._answer(HTTPStatus.SEE_OTHER, "", {"Location": "/", "Set-Cookie": cookie})
            if not self._opens(self._kept()):
                return self.send_error(HTTPStatus.UNAUTHORIZED, explain="Open the address that hdet watch printed.")
        status, text, changing = self.server.page()
        return self._answer(status, text, {"Refresh": f"{self.server.every:g}"} if changing else {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _opens(self, given: str) -> bool:
        assert self.server.token is not None
        return secrets.compare_digest(given.encode(), self.server.token.encode())

    def _cookie_name(self) -> str:
        """Browsers do not tell cookies apart by port, and two runs may be watched on one machine."""
        return f"{COOKIE}_{self.server.server_address[1]}"

    def _kept(self) -> str:
        try:
            kept = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie_name())
        except CookieError:
            return ""
        return kept.value if kept is not None else ""

    def _answer(self, status: HTTPStatus, text: str, headers: dict[str, str]) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self) -> None:
        for name, value in (
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
        ):
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: addresses hold the token."""


def _name(host: str) -> str:
    """Of a Host header, without its port; nothing where it cannot be read."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
