"""`LabServer`: the lab in a browser, by the server of the standard library.

GET  /?token=T          the page
POST /answer?token=T    one message in, one out
GET  /events?token=T    proofs, as server-sent events

It listens on 127.0.0.1. Another page in the same browser knows neither the token of the address nor
may it name this host: see Note [Who may post].
"""

from __future__ import annotations

import json
import queue
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fshard.laboratory.engine import Engine, Message
from fshard.laboratory.page import html

LARGEST_MESSAGE = 1 << 20
"""The bytes of a message at most: states have some hundreds."""

HEARTBEAT = 15.0
"""Seconds after which an event stream without events sends a comment, to notice a closed page."""

_WAY_IN = ": open the address that `fshard lab` printed, with its token."

# Note [Who may post]
# ~~~~~~~~~~~~~~~~~~~
# Any page that a browser shows may send requests to 127.0.0.1. Each request must have the token,
# which only the address that the command prints has; so another page cannot make one. Its host must
# be this server's: a page whose own name is made to resolve to 127.0.0.1 (DNS rebinding) could read
# replies, and has another host. A message of a page with another origin is refused too.


class LabServer(ThreadingHTTPServer):
    """A server of one lab.

    Args:
        engine: that answers.
        port: 0 takes a free one.
    """

    daemon_threads = True
    block_on_close = False  # an event stream ends with the process

    def __init__(self, engine: Engine, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), LabRequest)
        self.engine = engine
        self.token = secrets.token_urlsafe(16)
        self.streams: list[queue.Queue[Message]] = []
        engine.send = self.publish

    @property
    def address(self) -> str:
        """The address of the page, with its token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    @property
    def hosts(self) -> tuple[str, str]:
        """The hosts that requests may name."""
        return f"127.0.0.1:{self.server_port}", f"localhost:{self.server_port}"

    def server_close(self) -> None:
        """Close the port, and abandon proofs."""
        super().server_close()
        self.engine.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error of a request, unless its page was closed meanwhile."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def publish(self, message: Message) -> None:
        """Send a message to all open event streams."""
        for stream in [*self.streams]:
            stream.put(message)


class LabRequest(BaseHTTPRequestHandler):
    """One request of the page."""

    server: LabServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the command prints the address alone."""

    def do_GET(self) -> None:
        """Send the page, or the events."""
        path = self._permitted_path()
        if path == "/":
            self._send(HTTPStatus.OK, html(self.server.token).encode(), "text/html; charset=utf-8")
        elif path == "/events":
            self._send_events()
        elif path is not None:
            self._refuse(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        """Answer a message."""
        path = self._permitted_path()
        if path is None:
            return
        if path != "/answer":
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        message = self._message()
        if message is None:
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        content = json.dumps(self.server.engine.reply(message), separators=(",", ":"))
        self._send(HTTPStatus.OK, content.encode(), "application/json")

    def _permitted_path(self) -> str | None:
        """Return the path of a request; None after a refusal. See Note [Who may post]."""
        address = urlsplit(self.path)
        (token, *_) = parse_qs(address.query).get("token", [""])
        has_token = secrets.compare_digest(token.encode(), self.server.token.encode())
        has_host = self.headers.get("Host", "") in self.server.hosts
        origin = self.headers.get("Origin")
        is_same_origin = origin is None or origin.removeprefix("http://") in self.server.hosts
        if has_token and has_host and is_same_origin:
            return address.path
        self._refuse(HTTPStatus.FORBIDDEN, _WAY_IN)
        return None

    def _message(self) -> Message | None:
        """Return the message of a request; None if it is none."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > LARGEST_MESSAGE:
            return None
        try:
            content = json.loads(self.rfile.read(int(length)))
        except ValueError:
            return None
        is_message = isinstance(content, dict) and type(content.get("id", 0)) is int
        return content if is_message else None

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")  # the address has the token
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, way_out: str = "") -> None:
        self.close_connection = True  # the body of the request is not read
        self._send(status, f"{status.phrase}{way_out}".encode(), "text/plain")

    def _send_events(self) -> None:
        """Send messages until the page is closed."""
        stream: queue.Queue[Message] = queue.Queue()
        self.server.streams.append(stream)
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        try:
            while True:
                self.wfile.write(_event(stream))
                self.wfile.flush()
        except OSError:  # the page is closed
            pass
        finally:
            self.server.streams.remove(stream)


def _event(stream: queue.Queue[Message]) -> bytes:
    """Return the next event of a stream, or a comment after a while."""
    try:
        message = stream.get(timeout=HEARTBEAT)
    except queue.Empty:
        return b":\n\n"
    return f"data: {json.dumps(message, separators=(',', ':'))}\n\n".encode()
