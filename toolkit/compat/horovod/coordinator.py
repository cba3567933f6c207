"""The thread of rank 0 that negotiates, and the connections of the ranks to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from toolkit.compat.horovod.messages import Response
from toolkit.compat.horovod.negotiation import Negotiation
from toolkit.compat.horovod.variables import Pace
from toolkit.compat.horovod.wire import LEAVE, Book, Lost
from toolkit.errors import Problem, first_line

# How often rank 0 looks for operations that wait.
_LOOK_SECONDS = 1.0
# How long ranks have to connect, and a connection to say who it is.
_JOIN_SECONDS = 300.0
_ANSWER_SECONDS = 10


class Coordinator:
    """Negotiates for all ranks in a thread of rank 0.

    Args:
        size: Number of ranks.
        pace: How operations are gathered.
        on_this_host: Whether all ranks run here, so that no other machine need reach the port.
    """

    def __init__(self, size: int, *, pace: Pace, on_this_host: bool) -> None:
        self._negotiation = Negotiation(size, fusion_bytes=pace.fusion_bytes)
        self._pace = pace
        self._book = Book()
        self._key = secrets.token_bytes(32)
        self._own, near = Pipe()
        self._ranks: dict[int, Connection] = {0: near}
        self._size = size
        self._next_look = 0.0
        self._leaving: list[int] = []
        self._server = None if size == 1 else _listen(on_this_host=on_this_host)
        self._thread = threading.Thread(target=self._run, name="horovod-coordinator", daemon=True)

    @property
    def address(self) -> tuple[int, bytes]:
        """The port at which ranks connect, and the key that they need."""
        return (0 if self._server is None else self._server.getsockname()[1]), self._key

    def start(self) -> Connection:
        """Accept the other ranks in the background, negotiate, and return the connection of rank 0."""
        self._thread.start()
        return self._own

    def join(self, seconds: float) -> None:
        """Wait until all ranks have left, at most so long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._negotiate()
        except Exception as error:  # whatever it is, no rank may wait for an answer that will not come
            self._tell(
                Problem(
                    code="HOROVOD_NEGOTIATION",
                    message=f"rank 0 cannot negotiate any more: {type(error).__name__}: {first_line(error)}",
                    fix="Start the ranks again; the same Python, torch and toolkit must run on all of them",
                )
            )
        finally:
            for connection in self._ranks.values():
                connection.close()

    def _tell(self, news: Problem | Lost) -> None:
        """Send all ranks why their operations fail, or which rank has ended."""
        for connection in self._ranks.values():
            with contextlib.suppress(OSError):
                connection.send(news)

    def _negotiate(self) -> None:
        if self._server is not None:
            self._accept_all(self._server)
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._ranks.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            last = 0.0
            while not self._negotiation.all_left:
                self._receive(selector, timeout=_LOOK_SECONDS)
                ready = self._negotiation.take_ready()
                if ready and (early := self._pace.cycle_seconds - (time.monotonic() - last)) > 0:
                    time.sleep(early)
                    # What has come meanwhile joins this round.
                    while self._receive(selector, timeout=0):
                        pass
                    ready += self._negotiation.take_ready()
                if ready:
                    self._send(ready)
                    last = time.monotonic()
                self._let_leave(selector)
                self._look_for_stalls()

    def _accept_all(self, server: socket.socket) -> None:
        """Accept the ranks; those that do not come in time have left."""
        server.settimeout(_JOIN_SECONDS)
        with server, contextlib.suppress(TimeoutError):
            while len(self._ranks) < self._size:
                link = server.accept()[0]
                _limit_reads(link, _ANSWER_SECONDS)
                connection = _framed(link)
                try:
                    deliver_challenge(connection, self._key)
                    answer_challenge(connection, self._key)
                    self._ranks[connection.recv()] = connection
                except Exception:  # a stranger's connection
                    connection.close()
        for rank in range(self._size):
            if rank not in self._ranks:
                self._negotiation.leave(rank)
            elif rank:
                link = socket.socket(fileno=os.dup(self._ranks[rank].fileno()))
                with link:
                    _limit_reads(link, 0)

    def _receive(self, selector: selectors.BaseSelector, *, timeout: float) -> bool:
        """Read one message of each rank that has sent some; return whether any has.

        A rank that leaves is let go only after what all ranks have agreed on is sent: the others need it there.
        """
        events = selector.select(timeout)
        for key, _ in events:
            rank = key.data
            connection = self._ranks[rank]
            try:
                request = self._book.unpack_request(connection.recv_bytes())
            except (OSError, EOFError):
                self._remove(rank, selector)
                self._tell(Lost(rank))
                continue
            if request is None:
                self._leaving.append(rank)
            else:
                self._negotiation.submit(rank, request)
        return bool(events)

    def _let_leave(self, selector: selectors.BaseSelector) -> None:
        """Let ranks go that have asked to leave, and send the others what fails without them."""
        leaving, self._leaving = self._leaving, []
        for rank in leaving:
            if rank in self._ranks:
                with contextlib.suppress(OSError):
                    self._ranks[rank].send(LEAVE)
                self._remove(rank, selector)
        if leaving:
            self._send(self._negotiation.take_ready())

    def _remove(self, rank: int, selector: selectors.BaseSelector) -> None:
        connection = self._ranks.pop(rank)
        selector.unregister(connection)
        connection.close()
        self._negotiation.leave(rank)

    def _send(self, ready: list[tuple[tuple[int, ...], Response]]) -> None:
        for ranks, response in ready:
            message = self._book.pack_response(response)
            for rank in ranks:
                if rank in self._ranks:
                    with contextlib.suppress(OSError):  # its end is noticed where it is read
                        self._ranks[rank].send_bytes(message)

    def _look_for_stalls(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        for line in self._negotiation.stalled(
            warn_seconds=self._pace.warn_seconds, fail_seconds=self._pace.fail_seconds
        ):
            with contextlib.suppress(OSError, ValueError):  # a script may have closed its standard error
                print(line, file=sys.stderr, flush=True)


def connect(host: str, address: tuple[int, bytes], rank: int) -> Connection:
    """Connect a rank other than 0 to the coordinator."""
    port, key = address
    connection = _framed(socket.create_connection((host, port), timeout=60))
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    connection.send(rank)
    return connection


def _listen(*, on_this_host: bool) -> socket.socket:
    if on_this_host:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _framed(link: socket.socket) -> Connection:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setblocking(True)
    return Connection(link.detach())


def _limit_reads(link: socket.socket, seconds: int) -> None:
    """Let reads of a connection fail after so long; 0 for never."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
