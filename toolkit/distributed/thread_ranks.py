"""Ranks that are threads of this process: their collectives compute, so that small models are compared without other processes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

T = TypeVar("T")

_names = itertools.count()
# How long a rank waits for the others: those of a small twin compute for milliseconds between two collectives.
_PATIENCE_SECONDS = 120.0
# What each operation makes of tensors that are stacked by rank.
_REDUCTIONS: tuple[tuple[dist.ReduceOp.RedOpType, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (dist.ReduceOp.SUM, lambda stacked: stacked.sum(0, dtype=stacked.dtype)),
    (dist.ReduceOp.AVG, lambda stacked: stacked.mean(0)),
    (dist.ReduceOp.MAX, lambda stacked: stacked.amax(0)),
    (dist.ReduceOp.MIN, lambda stacked: stacked.amin(0)),
    (dist.ReduceOp.PRODUCT, lambda stacked: stacked.prod(0, dtype=stacked.dtype)),
)


class _Done(dist.Work):
    """A collective that has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._future.set_result(None)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class _Rendezvous:
    """Where the threads of a group leave tensors for each other.

    Args:
        size: Number of threads.
        seconds: How long a thread waits for the others before all fail.
    """

    def __init__(self, size: int, *, seconds: float) -> None:
        self._seconds = seconds
        self._barrier = threading.Barrier(size)
        self._left: list[Any] = [None] * size
        self._parts: dict[tuple[int, int], _Rendezvous] = {}
        self._lock = threading.Lock()
        self._is_aborted = False

    def exchange(self, rank: int, value: Any, reduce: Callable[[list[Any]], object]) -> None:
        """Show this rank's value to all, and call `reduce` with the values of all, which do not change before it has returned."""
        self._left[rank] = value
        self._wait()
        reduce(self._left)
        self._wait()

    def part(self, first: int, length: int) -> _Rendezvous:
        """Return the rendezvous of a run of neighbours; one that is made after an abort is aborted too."""
        with self._lock:
            part = self._parts.setdefault((first, length), _Rendezvous(length, seconds=self._seconds))
            if self._is_aborted:
                part.abort()
            return part

    def abort(self) -> None:
        """Let the threads that wait here and in parts fail, now and later."""
        with self._lock:
            self._is_aborted = True
            self._barrier.abort()
            for part in self._parts.values():
                part.abort()

    def _wait(self) -> None:
        try:
            self._barrier.wait(self._seconds)
        except threading.BrokenBarrierError:
            if self._is_aborted:
                raise
            raise TimeoutError(
                f"a rank did not join a collective of {self._barrier.parties} threads within {self._seconds:g} s"
            ) from None


class ThreadGroup(dist.ProcessGroup):
    """One thread's view of a group whose other ranks are threads too.

    Args:
        rendezvous: Shared by the ranks.
        rank: Rank of this thread.
        size: Number of ranks.
    """

    def __init__(self, rendezvous: _Rendezvous, *, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rendezvous, self._rank = rendezvous, rank
        self._name = f"threads-{next(_names)}"
        self._parts = ExitStack()
        _register_process_group(self.group_name, self)  # type: ignore[arg-type]

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """Name by which torch's collectives find the group."""
        return self._name

    def part(self, num_parts: int) -> dist.ProcessGroup:
        """Split the group into `num_parts` equal runs of neighbours, and return this rank's; it is closed with this group.

        Raises:
            ValueError: If `num_parts` does not divide the group.
        """
        length, left_over = divmod(self.size(), num_parts)
        if left_over:
            raise ValueError(f"num_parts={num_parts} does not divide a group of {self.size()} ranks")
        first = self._rank // length * length
        own = ThreadGroup(self._rendezvous.part(first, length), rank=self._rank - first, size=length)
        self._parts.callback(own.close)
        return own

    def close(self) -> None:
        """Forget the group and its parts."""
        self._parts.close()
        _unregister_process_group(self.group_name)  # type: ignore[arg-type]

    def abort(self) -> None:
        """Let the ranks that wait for this one fail."""
        self._rendezvous.abort()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce tensors in place."""
        reduction, results = _reduction(opts), list[torch.Tensor]()

        def reduce(all_ranks: list[list[torch.Tensor]]) -> None:
            for place in range(len(tensors)):
                results.append(reduction(torch.stack([of_rank[place] for of_rank in all_ranks])))

        self._rendezvous.exchange(self._rank, tensors, reduce)
        for tensor, result in zip(tensors, results, strict=True):
            tensor.copy_(result)
        return _Done()

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        self._rendezvous.exchange(self._rank, own, lambda all_ranks: output.copy_(torch.cat(all_ranks).view_as(output)))
        return _Done()

    def _reduce_scatter_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        reduction = _reduction(opts)

        def reduce(all_ranks: list[torch.Tensor]) -> None:
            output.copy_(reduction(torch.stack(all_ranks)).chunk(self.size())[self._rank].view_as(output))

        self._rendezvous.exchange(self._rank, own, reduce)
        return _Done()

    def all_to_all_single(
        self, output: torch.Tensor, own: torch.Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        """Give each rank its piece of every rank's tensor; pieces are equal where no sizes are given."""

        def pick(all_ranks: list[tuple[torch.Tensor, list[int]]]) -> None:
            pieces = [
                (torch.split(rows, sizes) if sizes else rows.chunk(self.size()))[self._rank]
                for rows, sizes in all_ranks
            ]
            output.copy_(torch.cat(pieces).view_as(output))

        self._rendezvous.exchange(self._rank, (own, list(input_sizes)), pick)
        return _Done()

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # its older name

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Overwrite tensors by those of the root."""
        found: list[list[torch.Tensor]] = []
        self._rendezvous.exchange(
            self._rank, tensors, lambda all_ranks: found.append([x.clone() for x in all_ranks[opts.rootRank]])
        )
        for tensor, sent in zip(tensors, found[0], strict=True):
            tensor.copy_(sent)
        return _Done()

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], own: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several tensors."""
        for output, tensor in zip(outputs, own, strict=True):
            self._allgather_base(output, tensor)
        return _Done()

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], own: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors, of which each rank gets a part."""
        for output, tensor in zip(outputs, own, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _Done()


def _reduction(opts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what a collective's options ask for.

    Raises:
        NotImplementedError: For an operation that threads do not have, such as one on bits.
    """
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for operation, reduction in _REDUCTIONS:
        if wanted == operation:
            return reduction
    names = ", ".join(operation.name for operation, _ in _REDUCTIONS)
    raise NotImplementedError(f"ranks that are threads reduce by {names} alone, not by {wanted}")


def run_threads(
    function: Callable[[dist.ProcessGroup], T], num_ranks: int, *, seconds: float = _PATIENCE_SECONDS
) -> list[T]:
    """Call a function on each rank of a group of threads, and return its results by rank.

    Args:
        function: Called with the group as a rank sees it.
        num_ranks: Number of ranks.
        seconds: How long a rank waits in a collective for the others.

    Raises:
        TimeoutError: If a rank does not join a collective in time.
        Exception: The first that a rank raised on its own; the others then fail too.
    """
    rendezvous = _Rendezvous(num_ranks, seconds=seconds)

    def on_rank(rank: int) -> T:
        group = ThreadGroup(rendezvous, rank=rank, size=num_ranks)
        try:
            return function(group)
        except BaseException:
            group.abort()
            raise
        finally:
            group.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(on_rank, rank) for rank in range(num_ranks)]
    raised = [error for future in futures if (error := future.exception()) is not None]
    for error in (*(each for each in raised if not isinstance(each, threading.BrokenBarrierError)), *raised):
        raise error
    return [future.result() for future in futures]
