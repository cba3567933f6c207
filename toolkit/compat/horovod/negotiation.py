"""Matching of operations by name, so that ranks may call them in different orders.

Rank 0 collects what each rank has called. An operation is done once all ranks of its process set have called it; the order in
which operations are done is one for all ranks and all process sets. Ranks that disagree about an operation get the same error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from toolkit.compat.horovod.messages import ReduceOp, Request, Response, TensorSpec
from toolkit.errors import Problem
from toolkit.topology.table import name_ranks

# Kinds whose tensors may differ in the first dimension.
_RAGGED = ("allgather", "alltoall")
_FUSED = ("allreduce", "broadcast")


@dataclass(slots=True)
class _Waiting:
    """An operation that some ranks have called."""

    since: float
    told: bool = False
    requests: dict[int, Request] = field(default_factory=dict)


class Negotiation:
    """The operations that are waiting for ranks, and those that can be done.

    Args:
        size: Number of ranks.
        fusion_bytes: Allreduces and broadcasts of one type are joined up to so many bytes.
        clock: Seconds, of any origin.
    """

    def __init__(self, size: int, *, fusion_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self._fusion_bytes = fusion_bytes
        self._clock = clock
        self._waiting: dict[tuple[int, str], _Waiting] = {}
        self._ready: list[Response] = []
        self._joined: list[int] = []
        self._left: set[int] = set()
        self._next_set = 1

    def submit(self, rank: int, request: Request) -> None:
        """Note that a rank has called an operation."""
        if request.kind == "join":
            self._join(rank, request)
            return
        key = (request.set_id, request.name)
        waiting = self._waiting.setdefault(key, _Waiting(since=self._clock()))
        waiting.requests[rank] = request
        self._settle(key)

    def leave(self, rank: int) -> None:
        """Note that a rank has ended or shut down: what needs it fails on the others."""
        self._left.add(rank)
        for key in list(self._waiting):
            self._settle(key)
        if self._joined:
            join = Request(kind="join", name="join")
            self._ready.append(self._failed(join, tuple(self._joined), _left_problem(join, self._left)))
            self._joined.clear()

    @property
    def all_left(self) -> bool:
        """Whether no rank remains."""
        return len(self._left) == len(self._sets[0])

    def take_ready(self) -> list[tuple[tuple[int, ...], Response]]:
        """Return the operations that can be done and forget them: for each, the ranks that do it, and what they do."""
        ready, self._ready = self._ready, []
        return [
            (tuple(rank for rank in response.ranks if rank not in self._left), response)
            for response in _fused(ready, self._fusion_bytes)
        ]

    def stalled(self, *, warn_seconds: float, fail_seconds: float) -> Iterator[str]:
        """Yield a line for each operation that has waited long for some rank, once; fail those that have waited too long.

        Args:
            warn_seconds: An operation is named after so long; 0 for never.
            fail_seconds: It fails after so long; 0 for never.
        """
        now = self._clock()
        for key, waiting in list(self._waiting.items()):
            waited = now - waiting.since
            request = next(iter(waiting.requests.values()))
            who = self._who(key, waiting)
            if fail_seconds and waited > fail_seconds:
                problem = Problem(
                    code="HOROVOD_STALLED",
                    message=f"{request.kind} {request.name!r} has waited for {waited:.0f} s: {who}",
                    fix="Call it on all ranks of its process set, or raise HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
                )
                self._ready.append(self._failed(request, tuple(waiting.requests), problem))
                del self._waiting[key]
            elif warn_seconds and waited > warn_seconds and not waiting.told:
                waiting.told = True
                yield f"horovod: {request.kind} {request.name!r} has waited for {waited:.0f} s: {who}"

    def _who(self, key: tuple[int, str], waiting: _Waiting) -> str:
        missing = [rank for rank in self._members(key[0]) if rank not in waiting.requests and rank not in self._joined]
        return f"called by {name_ranks(sorted(waiting.requests))}, not by {name_ranks(missing)}"

    def _members(self, set_id: int) -> tuple[int, ...]:
        return self._sets.get(set_id, ())

    def _join(self, rank: int, request: Request) -> None:
        self._joined.append(rank)
        everyone = self._sets[0]
        if self._left:
            self._ready.append(self._failed(request, tuple(self._joined), _left_problem(request, self._left)))
            self._joined.clear()
            return
        if len(self._joined) == len(everyone):
            self._ready.append(Response(requests=(request,), ranks=everyone, number=rank))
            self._joined.clear()
            return
        for key in list(self._waiting):
            self._settle(key)

    def _settle(self, key: tuple[int, str]) -> None:
        """Move an operation to those that can be done, or that fail, if all its ranks have called it, joined or left."""
        waiting = self._waiting[key]
        if not self._left and len(waiting.requests) + len(self._joined) < len(self._members(key[0])):
            return  # the usual case, at once
        first = waiting.requests[min(waiting.requests)]
        members = self._sets[0] if first.kind in ("add_process_set", "remove_process_set") else self._members(key[0])
        called = tuple(rank for rank in members if rank in waiting.requests)
        problem = None
        if not members:
            called, problem = tuple(waiting.requests), _removed_problem(first)
        elif gone := self._left.intersection(members):
            problem = _left_problem(first, gone)
        elif any(rank not in waiting.requests and rank not in self._joined for rank in members):
            return
        else:
            joined = [rank for rank in members if rank not in waiting.requests]
            problem = _disagreement(waiting.requests) or _join_problem(first, joined)
        del self._waiting[key]
        if problem is not None:
            self._ready.append(self._failed(first, called, problem))
        else:
            self._ready.append(self._agreed(first, members, waiting.requests))

    def _agreed(self, first: Request, members: tuple[int, ...], requests: dict[int, Request]) -> Response:
        response = Response(requests=(first,), ranks=members)
        if first.kind == "allgather":
            of_ranks = [[spec.shape[0] for spec in requests[rank].specs] for rank in members]
            return replace(response, rows=tuple(zip(*of_ranks, strict=True)))
        if first.kind == "alltoall":
            return replace(response, splits=tuple(requests[rank].splits for rank in members))
        if first.kind == "add_process_set":
            number, self._next_set = self._next_set, self._next_set + 1
            self._sets[number] = first.ranks
            return replace(response, number=number)
        if first.kind == "remove_process_set":
            self._sets.pop(first.root, None)
        return response

    @staticmethod
    def _failed(request: Request, ranks: tuple[int, ...], problem: Problem) -> Response:
        return Response(requests=(request,), ranks=ranks, problem=problem)


def _fused(ready: list[Response], limit_bytes: int) -> Iterator[Response]:
    """Join allreduces, and broadcasts, that one collective can do, in the order of the first of each."""
    open_ones: dict[object, list[Response]] = {}
    order: list[list[Response]] = []
    for response in ready:
        first = response.requests[0]
        kinds = {(spec.dtype, spec.device) for spec in first.specs}
        if response.problem is not None or first.kind not in _FUSED or len(kinds) != 1:
            order.append([response])
            continue
        key = (first.kind, first.set_id, *kinds, first.op, first.prescale, first.postscale, first.root)
        group = open_ones.get(key)
        if group and sum(one.requests[0].num_bytes for one in group) + first.num_bytes <= limit_bytes:
            group.append(response)
        else:
            open_ones[key] = [response]
            order.append(open_ones[key])
    for group in order:
        yield replace(group[0], requests=tuple(one.requests[0] for one in group))


def _disagreement(requests: dict[int, Request]) -> Problem | None:
    """Return how the ranks' calls of one operation differ, if they do."""
    first_rank = min(requests)
    first = requests[first_rank]
    for rank in sorted(requests):
        other = requests[rank]
        if other is first or other == first:
            continue
        for what, ours, theirs in _compared(first, other):
            if ours != theirs and not (_is_nan(ours) and _is_nan(theirs)):
                return Problem(
                    code="HOROVOD_MISMATCH",
                    key=first.name,
                    message=f"{first.kind} {first.name!r}: {what} is {ours} on rank {first_rank} and {theirs} on rank {rank}",
                    fix="Call it with the same on all ranks, or give different operations different names",
                )
    return None


def _compared(first: Request, other: Request) -> Iterator[tuple[str, object, object]]:
    yield "the operation", first.kind, other.kind
    yield "the number of tensors", len(first.specs), len(other.specs)
    for ours, theirs in zip(first.specs, other.specs, strict=False):
        if first.kind in _RAGGED:
            ours, theirs = _without_rows(ours), _without_rows(theirs)
            what = "the tensor but for its first dimension"
        else:
            what = "the tensor"
        yield what, str(ours), str(theirs)
    yield "the reduction", first.op.name.capitalize(), other.op.name.capitalize()
    yield "prescale_factor", first.prescale, other.prescale
    yield "postscale_factor", first.postscale, other.postscale
    yield "root_rank", first.root, other.root
    yield "the list of ranks", first.ranks, other.ranks


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _without_rows(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=spec.shape[1:])


def _join_problem(request: Request, joined: list[int]) -> Problem | None:
    """Return why an operation cannot be done for ranks that have joined: they can only contribute zeros to a sum."""
    if not joined or request.kind == "barrier":
        return None
    if request.kind == "allreduce" and request.op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return None
    what = f"{request.kind} with {request.op.name.capitalize()}" if request.kind == "allreduce" else request.kind
    return Problem(
        code="HOROVOD_JOINED",
        key=request.name,
        message=f"{what} {request.name!r} after join() on {name_ranks(joined)}: a rank that has joined contributes zeros to sums and "
        "averages, and nothing to other operations",
        fix="Call join() on all ranks first",
    )


def _left_problem(request: Request, left: set[int]) -> Problem:
    return Problem(
        code="HOROVOD_RANK_LEFT",
        key=request.name,
        message=f"{request.kind} {request.name!r} needs {name_ranks(sorted(left))}, which ended or called shutdown()",
        fix="Look at the output of that rank; call each operation as often on all ranks, or join() where batches are uneven",
    )


def _removed_problem(request: Request) -> Problem:
    return Problem(
        code="HOROVOD_ARGUMENT",
        key="process_set",
        message=f"{request.kind} {request.name!r} is called with process set {request.set_id}, which was removed",
        fix="Add it again by add_process_set",
    )
