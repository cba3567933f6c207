"""How messages are packed: reductions and broadcasts that recur, as those of gradients do, are sent by number.

The coordinator numbers one when all ranks of its process set have agreed about it, and tells them the number with the first
response. A number takes a tenth of the time of the whole.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import final

from toolkit.compat.horovod.errors import HorovodInternalError
from toolkit.compat.horovod.messages import Request, Response
from toolkit.errors import Problem

LEAVE = "leave"
_NUMBERED = ("allreduce", "broadcast")
# Names without end, such as one of each step, must not fill the memory.
_MOST = 8192


@dataclass(frozen=True, slots=True)
class Lost:
    """Notice that a rank has ended without leaving: it may owe the others its part of what all have agreed on."""

    rank: int


@final
class Book:
    """The operations that have a number."""

    def __init__(self) -> None:
        self._numbers: dict[Request, int] = {}
        self._requests: list[Request] = []

    def pack_request(self, request: Request) -> bytes:
        """Return a rank's message that it has called an operation."""
        return pickle.dumps(self._numbers.get(request, request))

    def unpack_request(self, message: bytes) -> Request | None:
        """Return what a rank has called, or None if it leaves."""
        told = pickle.loads(message)
        if isinstance(told, int):
            return self._requests[told]
        return None if told == LEAVE else told

    def pack_response(self, response: Response) -> bytes:
        """Return the message to the ranks of a set, and number its operations."""
        if response.problem is not None or response.kind not in _NUMBERED:
            return pickle.dumps(response)
        new = [request for request in response.requests if request not in self._numbers]
        if len(self._requests) + len(new) > _MOST:
            return pickle.dumps(response)
        told = [(self._add(request), request) for request in new]
        return pickle.dumps(([self._numbers[request] for request in response.requests], told))

    def unpack_response(self, message: bytes) -> Response | Lost | None:
        """Return what to do, or which rank has ended, or None if the coordinator has noted that this rank leaves.

        Raises:
            HorovodInternalError: HOROVOD_NEGOTIATION, as the coordinator has sent it.
        """
        told = pickle.loads(message)
        if isinstance(told, Problem):
            raise HorovodInternalError(told)
        if isinstance(told, Response | Lost):
            return told
        if told == LEAVE:
            return None
        numbers, new = told
        for number, request in new:
            self._note(number, request)
        return Response(requests=tuple(self._requests[number] for number in numbers))

    def _add(self, request: Request) -> int:
        self._note(len(self._requests), request)
        return self._numbers[request]

    def _note(self, number: int, request: Request) -> None:
        # A rank is not told the numbers of process sets that it is not in: their places stay empty.
        self._requests += [request] * (number + 1 - len(self._requests))
        self._requests[number] = request
        self._numbers[request] = number
