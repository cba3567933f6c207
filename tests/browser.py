"""A page in a headless browser of this machine, driven by the DevTools protocol over a socket."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """The path of a Chromium of this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """An open page. Events of the browser are kept in `events`."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=30)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = (f"GET {parts.path} HTTP/1.1", f"Host: {parts.netloc}", "Upgrade: websocket", "Connection: Upgrade",
                 f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", "")  # fmt: skip
        self._socket.sendall("\r\n".join(lines).encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self._socket.recv(1)
        assert b" 101 " in head.split(b"\r\n")[0], head
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self._number += 1
        self._send(json.dumps({"id": self._number, "method": method, "params": params}).encode())
        while True:
            message = json.loads(self._receive())
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def run(self, script: str) -> Any:
        """Evaluates a script as if the user had just clicked, awaits it, and returns its value."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def _send(self, payload: bytes) -> None:
        mask = os.urandom(4)
        size = len(payload)
        length = struct.pack("!B", 0x80 | size) if size < 126 else struct.pack("!BH", 0x80 | 126, size)
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
        self._socket.sendall(b"\x81" + length + mask + masked)

    def _receive(self) -> bytes:
        content = b""
        while True:
            first, second = self._exactly(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack("!H", self._exactly(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._exactly(8))
            content += self._exactly(size)
            if first & 0x80:
                return content

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            piece = self._socket.recv(size - len(found))
            assert piece, "the browser closed the connection"
            found += piece
        return found


@contextmanager
def open_page(file: Path, folder: Path, *, width: int = 1280, dark: bool = False) -> Iterator[Page]:
    """Opens a file in a browser of its own, which ends with the context."""
    browser = find_browser()
    assert browser is not None
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        told = folder / "DevToolsActivePort"
        until = time.monotonic() + 60
        while not told.exists() or not told.read_text().strip():
            assert time.monotonic() < until, "the browser did not start"
            time.sleep(0.05)
        port = told.read_text().split()[0]
        with urlopen(Request(f"http://127.0.0.1:{port}/json/new?about:blank", method="PUT"), timeout=30) as answer:
            address = json.load(answer)["webSocketDebuggerUrl"]
        page = Page(address)
        for domain in ("Runtime", "Log", "Page", "Network"):
            page.call(f"{domain}.enable")
        page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=file.as_uri())
        page.run(
            "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', () => done()))"
        )
        yield page
    finally:
        process.terminate()
        process.wait(timeout=30)
