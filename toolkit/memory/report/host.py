"""Memory of one process on the host, replayed from its start, with the rounding of page-locked blocks; and a node's report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from toolkit.units import GIB

# Resident memory of a training process before its tensors: Python, torch, CUDA's libraries, DeepSpeed. Peak RSS of
# ranks that keep nothing on the host, torch 2.11: 1.99 to 2.24 GiB.
PROCESS_BYTES = int(2.0 * GIB)
# A process on CPU loads none of CUDA's libraries: peak RSS of the smallest runs, torch 2.14, 0.53 to 0.61 GiB. It is not
# estimated apart: the figure above is an upper bound of it.
CPU_PROCESS_GIB = 0.6
# The same while the model and the engine are built, before the first pass loads kernels and workspaces: peak RSS of
# ZeRO-3 ranks without offload, less their partitions, 1.43 to 1.53 GiB.
PROCESS_START_BYTES = int(1.5 * GIB)

PROCESS = "process"
# Cause of page-locked blocks that torch's host allocator keeps unused.
UNUSED = "page-locked, unused"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Host memory of the fullest node.

    Args:
        bytes_per_rank: Host memory of the rank that needs most, by cause.
        ranks_per_node: Ranks of a node.
        capacity_bytes: RAM of a node; None if unknown.
        bytes_on_node: Host memory of all ranks of the node, by cause.
    """

    bytes_per_rank: dict[str, int]
    ranks_per_node: int
    capacity_bytes: int | None
    bytes_on_node: dict[str, int]

    @property
    def bytes_per_node(self) -> int:
        """Host memory of all ranks of the node."""
        return sum(self.bytes_on_node.values())

    @property
    def fits(self) -> bool:
        """True if the node's RAM is enough."""
        return self.capacity_bytes is None or self.bytes_per_node <= self.capacity_bytes


def pinned(size: float) -> int:
    """Return the bytes that torch page-locks for `size` bytes: the next power of two.

    Source:
        aten/src/ATen/core/CachingHostAllocator.h: sizes are rounded by PowerOf2Ceil.
    """
    return 1 << math.ceil(math.log2(size)) if size >= 1 else 0


class HostMemory:
    """Host memory of a process while it is replayed, and its peak.

    Attributes:
        peak: Bytes at the peak, by cause.
    """

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self._live: Counter[str] = Counter()
        self._unused: Counter[int] = Counter()  # page-locked blocks, by their size
        self.allocate(PROCESS, PROCESS_START_BYTES)

    def allocate(self, cause: str, size: float) -> None:
        """Add pageable memory that is live until `free`."""
        self._live[cause] += int(size)
        self._observe()

    def free(self, cause: str, size: float) -> None:
        """Release pageable memory."""
        self._live[cause] -= int(size)

    @contextmanager
    def temporary(self, cause: str, size: float) -> Iterator[None]:
        """Keep pageable memory allocated inside a `with` block."""
        self.allocate(cause, size)
        yield
        self.free(cause, size)

    def pin(self, cause: str, size: float) -> None:
        """Allocate a page-locked block: an unused one of the same size, or a new one."""
        block = pinned(size)
        if self._unused[block]:
            self._unused[block] -= 1
            self._live[UNUSED] -= block
        self._live[cause] += block
        self._observe()

    def unpin(self, cause: str, size: float) -> None:
        """Release a page-locked block, which torch keeps for as long as the process lives."""
        block = pinned(size)
        self._live[cause] -= block
        self._live[UNUSED] += block
        self._unused[block] += 1

    def start_passes(self) -> None:
        """Add the kernels and workspaces that the first pass loads."""
        self.allocate(PROCESS, PROCESS_BYTES - PROCESS_START_BYTES)

    def _observe(self) -> None:
        if self._live.total() > sum(self.peak.values()):
            self.peak = {cause: size for cause, size in self._live.items() if size}
