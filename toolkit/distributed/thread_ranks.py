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


class _Meeting:
    """Where the threads of a group leave tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self._left: list[Any] = [None] * size
        self.parts: dict[tuple[int, int], _Meeting] = {}
        self.lock = threading.Lock()

    def exchange(self, rank: int, value: Any, take: Callable[[list[Any]], object]) -> None:
        """Show this rank's value to all, and call `take` with the values of all, which do not change before it has returned."""
        self._left[rank] = value
        self.barrier.wait()
        take(self._left)
        self.barrier.wait()

    def part(self, first: int, length: int) -> _Meeting:
        """Return the meeting of a run of neighbours."""
        with self.lock:
            return self.parts.setdefault((first, length), _Meeting(length))


class ThreadGroup(dist.ProcessGroup):
    """One thread's view of a group whose other ranks are threads too.

    Args:
        meeting: Shared by the ranks.
        rank: Rank of this thread.
        size: Number of ranks.
    """

    def __init__(self, meeting: _Meeting, *, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._meeting, self._rank = meeting, rank
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
        own = ThreadGroup(self._meeting.part(first, length), rank=self._rank - first, size=length)
        self._parts.callback(own.close)
        return own

    def close(self) -> None:
        """Forget the group and its parts."""
        self._parts.close()
        _unregister_process_group(self.group_name)  # type: ignore[arg-type]

    def abort(self) -> None:
        """Let the ranks that wait for this one fail."""
        self._meeting.barrier.abort()
        for part in self._meeting.parts.values():
            part.barrier.abort()

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduce tensors in place."""
        greatest = opts is not None and opts.reduceOp == dist.ReduceOp.MAX
        results: list[torch.Tensor] = []

        def take(all_ranks: list[list[torch.Tensor]]) -> None:
            for place in range(len(tensors)):
                stacked = torch.stack([of_rank[place] for of_rank in all_ranks])
                results.append(stacked.amax(0) if greatest else stacked.sum(0))

        self._meeting.exchange(self._rank, tensors, take)
        for tensor, result in zip(tensors, results, strict=True):
            tensor.copy_(result)
        return _Done()

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        self._meeting.exchange(self._rank, own, lambda all_ranks: output.copy_(torch.cat(all_ranks).view_as(output)))
        return _Done()

    def _reduce_scatter_base(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> dist.Work:
        def take(all_ranks: list[torch.Tensor]) -> None:
            output.copy_(torch.stack(all_ranks).sum(0).chunk(self.size())[self._rank].view_as(output))

        self._meeting.exchange(self._rank, own, take)
        return _Done()

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Overwrite tensors by those of the root."""
        found: list[list[torch.Tensor]] = []
        self._meeting.exchange(
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
            self._reduce_scatter_base(output, tensor)
        return _Done()


def run_threads(function: Callable[[dist.ProcessGroup], T], num_ranks: int) -> list[T]:
    """Call a function on each rank of a group of threads, and return its results by rank.

    Raises:
        Exception: The first that a rank raised on its own; the others then fail too.
    """
    meeting = _Meeting(num_ranks)

    def on_rank(rank: int) -> T:
        group = ThreadGroup(meeting, rank=rank, size=num_ranks)
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
