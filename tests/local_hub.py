"""A hub on this machine: tests say what it answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LocalHub(BaseHTTPRequestHandler):
    """Answers GET and HEAD alike, as the hub does; `reply` says with what."""

    def reply(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for `self.path`."""
        raise NotImplementedError

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        status, headers, body = self.reply()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served(hub: type[LocalHub]) -> Iterator[str]:
    """Serves a hub for the length of a block; gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
