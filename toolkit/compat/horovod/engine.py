"""The threads of a rank that do operations in the order that the coordinator says, and the handles that wait for them."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, final

import torch
import torch.distributed as dist

from toolkit.compat.horovod import collectives
from toolkit.compat.horovod.collectives import Place
from toolkit.compat.horovod.errors import HorovodInternalError, HorovodOrderError
from toolkit.compat.horovod.messages import Request, Response
from toolkit.compat.horovod.wire import LEAVE, Book, Lost
from toolkit.errors import Problem, first_line

ENGINE_THREAD = "horovod"
# A rank that leaves does what all have agreed on, and waits no longer once no operation has ended for so long.
_LEAVE_SECONDS = 30.0
# An operation that a rank has ended in is given up after so long: what it has sent may still arrive. Gloo tells its neighbours alone
# that it has ended, and NCCL none.
_LOST_SECONDS = 10.0
# The coordinator's notice of an end and torch's error about it come by different ways; one of them may be so much later.
_NOTICE_SECONDS = 1.0
_LOOK_SECONDS = 0.2


@final
class Handle:
    """An operation that has been called; `synchronize` waits for it and returns its result."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._ended = threading.Event()
        self._result: Any = None
        self._error: Problem | None = None
        self._on_card: torch.cuda.Event | None = None

    def finish(self, result: Any, on_card: torch.cuda.Event | None = None) -> None:
        """Note the result, and the event after which it may be used on a card."""
        self._result, self._on_card = result, on_card
        self._ended.set()

    def fail(self, problem: Problem) -> None:
        """Note why there is no result."""
        self._error = problem
        self._ended.set()

    def poll(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._ended.is_set() and (self._on_card is None or self._on_card.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Any:
        """Wait for the operation and return its result; on a card, the current stream waits.

        Raises:
            HorovodInternalError: HOROVOD_MISMATCH, HOROVOD_JOINED, HOROVOD_RANK_LEFT, HOROVOD_STALLED, HOROVOD_COLLECTIVE,
                HOROVOD_NEGOTIATION.
        """
        self._ended.wait()
        if self._error is not None:
            raise HorovodInternalError(self._error)
        if self._on_card is not None:
            for tensor in self._result if isinstance(self._result, list | tuple) else [self._result]:
                if tensor.is_cuda:
                    stream = torch.cuda.current_stream(tensor.device)
                    stream.wait_event(self._on_card)
                    tensor.record_stream(stream)
        return self._result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    """What this rank has given to an operation: tensors, where the results go, and when a card has the tensors ready."""

    handle: Handle
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    single: bool
    ready: torch.cuda.Event | None


@final
class Engine:
    """A rank's side of the negotiation.

    Args:
        rank: Global rank.
        size: Number of ranks.
        connection: Connection to the coordinator.
        group: Process group of all ranks.
        device: Card of this rank, or None.
    """

    def __init__(
        self, *, rank: int, size: int, connection: Connection, group: dist.ProcessGroup, device: torch.device | None
    ) -> None:
        self.rank = rank
        self._connection = connection
        self._book = Book()
        self._places = {0: Place(group=group, ranks=tuple(range(size)), rank=rank)}
        self._device = device
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._pending: dict[tuple[int, str], _Pending] = {}
        self._closed: Problem | None = None
        self._num_done = 0
        self._counters: dict[str, itertools.count[int]] = {}
        self._told: queue.SimpleQueue[Response | Exception | None] = queue.SimpleQueue()
        self._doing: list[_Pending | None] = []
        self._lost: Problem | None = None
        self._is_lost = threading.Event()
        self._has_given_up = False
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        self._thread.start()
        threading.Thread(target=self._read, name=f"{ENGINE_THREAD}-reader", daemon=True).start()

    def next_name(self, kind: str) -> str:
        """Return a name for an operation that was given none: the n-th of its kind on every rank."""
        with self._lock:
            return f"{kind}.noname.{next(self._counters.setdefault(kind, itertools.count()))}"

    def submit(
        self,
        request: Request,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        *,
        single: bool = True,
    ) -> Handle:
        """Tell the coordinator that this rank has called an operation.

        Args:
            request: The operation.
            inputs: This rank's tensors.
            outputs: Tensors that take the results of an allreduce or broadcast.
            single: Whether the result is one tensor rather than a list.

        Raises:
            HorovodOrderError: HOROVOD_NAME, if an operation of this name has not ended.
            HorovodInternalError: HOROVOD_RANK_LEFT or HOROVOD_NEGOTIATION, if the coordinator has gone.
        """
        handle = Handle(request.name)
        on_card = next((tensor.device for tensor in inputs if tensor.is_cuda), None)
        ready = None if on_card is None else torch.cuda.current_stream(on_card).record_event()
        entry = _Pending(handle=handle, inputs=tuple(inputs), outputs=tuple(outputs), single=single, ready=ready)
        key = (request.set_id, request.name)
        with self._lock:
            if self._closed is not None:
                raise HorovodInternalError(self._closed)
            if key in self._pending:
                raise HorovodOrderError.of(
                    code="HOROVOD_NAME",
                    key=request.name,
                    message=f"{request.kind} {request.name!r} is called while an operation of that name has not ended",
                    fix="Wait for it by synchronize(handle), or give each of them a name of its own",
                )
            self._pending[key] = entry
        try:
            # Not under the other lock: where the coordinator is slow to read, this rank must still take what it sends.
            with self._sending:
                self._connection.send_bytes(self._book.pack_request(request))
        except OSError:
            with self._lock:
                self._pending.pop(key, None)
            raise HorovodInternalError(self._closed or _gone()) from None
        return handle

    def leave(self) -> bool:
        """Tell the others that this rank calls nothing more, and do what all ranks have agreed on until then.

        Returns:
            Whether all of it has ended, so that nothing uses the process groups any more.
        """
        with self._lock:
            self._closed = self._closed or Problem(
                code="HOROVOD_NOT_INITIALIZED", message="shutdown() has been called", fix="Call init() again"
            )
        with contextlib.suppress(OSError), self._sending:
            self._connection.send(LEAVE)
        self._wait_for_progress(_LEAVE_SECONDS)
        return not self._thread.is_alive()

    def _wait_for_progress(self, seconds: float) -> None:
        """Wait until this rank's thread ends, is given up, or has done nothing for so long."""
        num_done, since = -1, 0.0
        while self._thread.is_alive() and not self._has_given_up:
            if num_done != self._num_done:
                num_done, since = self._num_done, time.monotonic()
            elif time.monotonic() - since > seconds:
                return
            self._thread.join(min(seconds, _LOOK_SECONDS))

    def _read(self) -> None:
        """Take what the coordinator sends, also while an operation waits for a rank that has ended."""
        try:
            while True:
                told = self._book.unpack_response(self._connection.recv_bytes())
                if isinstance(told, Lost):
                    self._note_lost(_ended(told.rank))
                    continue
                self._told.put(told)
                if told is None:
                    return
        except Exception as error:
            if isinstance(error, OSError | EOFError):
                self._note_lost(_gone())
            self._told.put(error)

    def _note_lost(self, problem: Problem) -> None:
        if self._lost is None:
            self._lost = problem
            self._is_lost.set()
            threading.Thread(
                target=self._give_up_what_waits, args=(problem,), name=f"{ENGINE_THREAD}-watch", daemon=True
            ).start()

    def _give_up_what_waits(self, problem: Problem) -> None:
        """Fail all handles if the operation that is being done does not end; its thread cannot be freed."""
        while self._thread.is_alive():
            self._wait_for_progress(_LOST_SECONDS)
            with self._lock:
                doing = [entry for entry in self._doing if entry is not None]
                if not self._doing or not self._thread.is_alive():
                    continue
                self._closed, self._has_given_up = self._closed or problem, True
                pending, self._pending = self._pending, {}
            for entry in (*doing, *pending.values()):
                entry.handle.fail(problem)
            _hang_up(self._connection)
            return

    def _run(self) -> None:
        problem = _gone()
        try:
            self._follow()
        except (OSError, EOFError):
            pass
        except HorovodInternalError as error:
            problem = error.problems[0]
        except Exception as error:  # whatever it is, nobody may wait for a handle that nothing will end
            problem = Problem(
                code="HOROVOD_NEGOTIATION",
                message=f"rank {self.rank} cannot read what rank 0 has sent: {type(error).__name__}: {first_line(error)}",
                fix="Start the ranks again; the same Python, torch and toolkit must run on all of them",
            )
        finally:
            with self._lock:
                self._closed = problem = self._closed or problem
                pending, self._pending = self._pending, {}
            for entry in pending.values():
                entry.handle.fail(problem)
            _hang_up(self._connection)

    def _follow(self) -> None:
        """Do what the coordinator says until it has noted that this rank leaves."""
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while (told := self._told.get()) is not None:
            if isinstance(told, Exception):
                raise told
            self._do(told)
            self._num_done += 1

    def _do(self, response: Response) -> None:
        entries = self._take(response)
        try:
            if response.problem is not None:
                raise HorovodInternalError(response.problem)
            self._perform(response, entries)
        except HorovodInternalError as error:
            self._fail(entries, error.problems[0])
        except Exception as error:
            if self._is_lost.wait(_NOTICE_SECONDS) and self._lost is not None:
                self._fail(entries, self._lost)
                return
            names = [request.name for request in response.requests]
            which = repr(names[0]) + (f" and {len(names) - 1} with it" if len(names) > 1 else "")
            self._fail(
                entries,
                Problem(
                    code="HOROVOD_COLLECTIVE",
                    key=names[0],
                    message=f"{response.kind} {which} failed: {first_line(error)}",
                    fix="Look at the output of the other ranks: one of them may have ended",
                    source="torch.distributed",
                ),
            )
        finally:
            with self._lock:
                self._doing = []

    def _take(self, response: Response) -> list[_Pending | None]:
        with self._lock:
            if response.kind == "join":
                self._counters.clear()  # ranks with fewer batches have called fewer operations
            self._doing = [self._pending.pop((request.set_id, request.name), None) for request in response.requests]
            return self._doing

    @staticmethod
    def _fail(entries: list[_Pending | None], problem: Problem) -> None:
        for entry in entries:
            if entry is not None:
                entry.handle.fail(problem)

    def _perform(self, response: Response, entries: list[_Pending | None]) -> None:
        if response.kind in ("barrier", "join", "add_process_set", "remove_process_set"):
            self._change_sets(response)
            for entry in entries:
                if entry is not None:
                    entry.handle.finish(response.number)
            return
        if not any(spec.device == "cuda" for request in response.requests for spec in request.specs):
            self._compute(response, entries, None)
            return
        with torch.cuda.stream(self._stream(entries)):
            stream = torch.cuda.current_stream()
            for entry in entries:
                if entry is not None and entry.ready is not None:
                    stream.wait_event(entry.ready)
                    for tensor in (*entry.inputs, *entry.outputs):
                        if tensor.is_cuda:
                            tensor.record_stream(stream)
            self._compute(response, entries, torch.cuda.Event())  # type: ignore[no-untyped-call]

    def _stream(self, entries: list[_Pending | None]) -> torch.cuda.Stream:
        """Return the stream for operations on the card that holds this rank's tensors."""
        given = (tensor.device for entry in entries if entry is not None for tensor in entry.inputs if tensor.is_cuda)
        device = next(given, self._device)
        assert device is not None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _compute(self, response: Response, entries: list[_Pending | None], event: torch.cuda.Event | None) -> None:
        inputs: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        for entry, request in zip(entries, response.requests, strict=True):
            given = entry.inputs if entry is not None else tuple(map(collectives.zeros, request.specs))
            inputs += given
            outputs += entry.outputs if entry is not None else given
        place = self._places[response.requests[0].set_id]
        results: Any = [list(entry.outputs) if entry is not None else None for entry in entries]
        match response.kind:
            case "allreduce":
                collectives.allreduce(response, inputs, outputs, place=place)
            case "broadcast":
                collectives.broadcast(response, inputs, outputs, place=place)
            case "allgather":
                results = [collectives.allgather(response, inputs, place=place)]
            case "alltoall":
                results = [[collectives.alltoall(response, inputs, place=place)]]
            case _:
                results = [collectives.reducescatter(response, inputs, place=place)]
        if event is not None:
            event.record()
        for entry, result in zip(entries, results, strict=True):
            if entry is not None:
                entry.handle.finish(result[0] if entry.single else result, event)

    def _change_sets(self, response: Response) -> None:
        request = response.requests[0]
        if request.kind == "add_process_set":
            backend = dist.get_backend_config(self._places[0].group)  # the script's own world may have another
            group = dist.new_group(list(request.ranks), backend=backend)
            if self.rank in request.ranks:
                self._places[response.number] = Place(group=group, ranks=request.ranks, rank=self.rank)
        elif request.kind == "remove_process_set" and request.root in self._places:
            dist.destroy_process_group(self._places.pop(request.root).group)


def _ended(rank: int) -> Problem:
    return Problem(
        code="HOROVOD_RANK_LEFT",
        key=f"rank {rank}",
        message=f"rank {rank} has ended without shutdown(), and the others wait for its part of an operation",
        fix=f"Look at the output of rank {rank}; then start the ranks again",
    )


def _gone() -> Problem:
    return Problem(
        code="HOROVOD_RANK_LEFT",
        message="rank 0, which negotiates, has ended or called shutdown()",
        fix="Look at the output of rank 0",
    )


def _hang_up(connection: Connection) -> None:
    """End a connection that another thread may be writing to: that fails there, and the coordinator sees that the rank has left."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as link:
        link.shutdown(socket.SHUT_RDWR)
