"""The progress of each rank through common steps, so that a hang can be reported with the missing ranks.

Ranks write on the launcher's key-value store, through a connection of their own: the one that process groups use is busy
as long as one of them waits on it. Rank 0 checks for progress; without any, it reports which rank waits for which, and all
ranks end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from toolkit.distributed.diagnose.blocked_ranks import Place, Step, Wait, find_blocked, hang_error
from toolkit.errors import CheckError, Problem, RunError, ToolkitError
from toolkit.topology.grid import Grid

_POLL_SECONDS = 0.25
# How long rank 0, which may keep the store, waits for the others to read from it: hanging ranks may never do so.
_LONG_FAREWELL_SECONDS, _SHORT_FAREWELL_SECONDS = 60.0, 5.0


@final
class ProgressStore:
    """This rank's view of the progress of all ranks.

    Args:
        store: Exclusive connection to the launcher's store.
        rank: Global rank of this process.
        grid: Grid of all ranks.
    """

    def __init__(self, store: Store, *, rank: int, grid: Grid) -> None:
        self._store = PrefixStore("progress", store)
        self._rank = rank
        self._grid = grid
        self._entered: list[str] = []

    @contextmanager
    def inside(self, step: Step) -> Iterator[None]:
        """Record this rank as inside a step; if the block fails it stays there."""
        self._entered.append(step.name)
        self._show(is_inside=True)
        yield
        self._show(is_inside=False)

    def place(self, rank: int) -> Place:
        """Return the place of a rank."""
        key = f"place-{rank}"
        if not self._store.check([key]):
            return Place()
        found = json.loads(self._store.get(key))
        return Place(entered=tuple(found["entered"]), is_inside=found["is_inside"])

    def moves(self) -> int:
        """Count the steps that all ranks have entered and left so far."""
        return int(self._store.add("moves", 0))

    def agree(self, on: str, value: bool) -> bool:
        """Wait until all ranks have voted on the question `on`, and return whether each voted True."""
        self._store.add(f"yes-{on}", int(value))
        self._store.add(f"said-{on}", 1)
        while self._store.add(f"said-{on}", 0) < self._grid.world_size:
            time.sleep(_POLL_SECONDS / 5)  # not Store.wait, which would block the hang detection's access to the store
        return int(self._store.add(f"yes-{on}", 0)) == self._grid.world_size

    def gather(self, report: Any) -> list[Any]:
        """Wait for all ranks; return on rank 0 the reports (JSON values) of all in rank order, elsewhere an empty list."""
        self._store.set(f"report-{self._rank}", json.dumps(report))
        self.agree("reports", True)
        ranks = range(self._grid.world_size if self._rank == 0 else 0)
        return [json.loads(self._store.get(f"report-{rank}")) for rank in ranks]

    def announce(self, problems: Sequence[Problem]) -> None:
        """Announce the end and any problems to the other ranks; return when they have read it, or after a time limit."""
        self._store.set("end", json.dumps([problem.as_dict() for problem in problems]))
        deadline = time.monotonic() + (_SHORT_FAREWELL_SECONDS if problems else _LONG_FAREWELL_SECONDS)
        while self._store.add("heard", 0) < self._grid.world_size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 5)

    def heard(self) -> tuple[Problem, ...] | None:
        """Return what rank 0 has announced, and acknowledge it; None if nothing yet."""
        if not self._store.check(["end"]):
            return None
        problems = tuple(Problem(**found) for found in json.loads(self._store.get("end")))
        self._store.add("heard", 1)
        return problems

    def _show(self, *, is_inside: bool) -> None:
        self._store.set(f"place-{self._rank}", json.dumps({"entered": self._entered, "is_inside": is_inside}))
        self._store.add("moves", 1)


# Called when there is no progress, before the process ends: prints, or writes a file for the launcher.
OnHang = Callable[[ToolkitError, tuple[Wait, ...]], None]


@contextmanager
def watched(
    board: ProgressStore, grid: Grid, steps: Sequence[Step], *, rank: int, timeout_seconds: float, on_hang: OnHang
) -> Iterator[None]:
    """End this process, and all that run this, with exit code 1 when no rank makes progress for `timeout_seconds`.

    At the end of the block rank 0 announces the end, and the others wait until they have read it.

    Args:
        board: Board of this rank.
        grid: Grid of all ranks.
        steps: Every step, in order.
        rank: Global rank of this process.
        timeout_seconds: Time without progress, seconds.
        on_hang: Called with the error, and with the waits on rank 0; elsewhere with none.
    """
    over = threading.Event()

    def end(error: ToolkitError, waits: tuple[Wait, ...] = ()) -> None:
        if over.is_set():
            return
        on_hang(error, waits)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(error.exit_code)  # the main thread is inside a library that hangs

    def lead() -> None:
        moves, moved_at = -1, time.monotonic()
        while not over.wait(min(_POLL_SECONDS, timeout_seconds / 4)):
            now = board.moves()
            if now != moves:
                moves, moved_at = now, time.monotonic()
            elif time.monotonic() - moved_at > timeout_seconds:
                waits = find_blocked(grid, steps, {other: board.place(other) for other in range(grid.world_size)})
                error = hang_error(waits, seconds=timeout_seconds)
                board.announce(error.problems)
                end(error, waits)

    def follow() -> None:
        while not over.wait(_POLL_SECONDS):
            problems = board.heard()
            if problems is not None:
                if problems:
                    end(CheckError(*problems))
                over.set()

    def watch() -> None:
        try:
            (lead if rank == 0 else follow)()
        except dist.DistError:
            end(_lost())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        over.set()  # this rank ends with its own error
        raise
    if rank == 0:
        over.set()
        thread.join()
        board.announce(())
    else:
        thread.join()


def _lost() -> RunError:
    return RunError.of(
        code="RANK_LOST",
        message="the process that hosts the ranks' store has ended, so this rank ends too",
        fix="See the last lines of rank 0's output, and the launcher's; then start again",
    )
