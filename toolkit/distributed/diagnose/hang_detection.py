"""Where each rank is among steps that ranks take together, so that those that wait for ever can say for whom.

Ranks write on the launcher's key-value store, through a connection of their own: the one that process groups use is taken
as long as one of them waits on it. Rank 0 looks whether anybody moves; when nobody does, it says who waits for whom, and all
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
# How long rank 0, which may keep the store, waits for the others to read from it: ranks that hang may never do so.
_LONG_FAREWELL_SECONDS, _SHORT_FAREWELL_SECONDS = 60.0, 5.0


@final
class ProgressStore:
    """This rank's view of where all ranks are.

    Args:
        store: Connection to the launcher's store that nothing else uses.
        rank: This rank.
        grid: All ranks.
    """

    def __init__(self, store: Store, *, rank: int, grid: Grid) -> None:
        self._store = PrefixStore("progress", store)
        self._rank = rank
        self._grid = grid
        self._entered: list[str] = []

    @contextmanager
    def inside(self, step: Step) -> Iterator[None]:
        """Shows this rank inside a step; one that fails stays there."""
        self._entered.append(step.name)
        self._show(is_inside=True)
        yield
        self._show(is_inside=False)

    def place(self, rank: int) -> Place:
        """Return where a rank is."""
        key = f"place-{rank}"
        if not self._store.check([key]):
            return Place()
        found = json.loads(self._store.get(key))
        return Place(entered=tuple(found["entered"]), is_inside=found["is_inside"])

    def moves(self) -> int:
        """Counts the steps that all ranks have entered and left so far."""
        return int(self._store.add("moves", 0))

    def agree(self, on: str, value: bool) -> bool:
        """Waits for all ranks to say something on a matter, and tells whether each of them said True."""
        self._store.add(f"yes-{on}", int(value))
        self._store.add(f"said-{on}", 1)
        while self._store.add(f"said-{on}", 0) < self._grid.world_size:
            time.sleep(_POLL_SECONDS / 5)  # not Store.wait, which would keep the watch from the store
        return int(self._store.add(f"yes-{on}", 0)) == self._grid.world_size

    def gather(self, report: Any) -> list[Any]:
        """Waits for all ranks, and gives on rank 0 the reports of all, JSON documents, in rank order; else nothing."""
        self._store.set(f"report-{self._rank}", json.dumps(report))
        self.agree("reports", True)
        ranks = range(self._grid.world_size if self._rank == 0 else 0)
        return [json.loads(self._store.get(f"report-{rank}")) for rank in ranks]

    def announce(self, problems: Sequence[Problem]) -> None:
        """Tells the other ranks the end, with what is wrong if anything, and returns when they have heard it or will not."""
        self._store.set("end", json.dumps([problem.as_dict() for problem in problems]))
        deadline = time.monotonic() + (_SHORT_FAREWELL_SECONDS if problems else _LONG_FAREWELL_SECONDS)
        while self._store.add("heard", 0) < self._grid.world_size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 5)

    def heard(self) -> tuple[Problem, ...] | None:
        """Return what rank 0 has announced, and lets it know; None while it has not."""
        if not self._store.check(["end"]):
            return None
        problems = tuple(Problem(**found) for found in json.loads(self._store.get("end")))
        self._store.add("heard", 1)
        return problems

    def _show(self, *, is_inside: bool) -> None:
        self._store.set(f"place-{self._rank}", json.dumps({"entered": self._entered, "is_inside": is_inside}))
        self._store.add("moves", 1)


# What a rank does when nobody moves, before its process ends: prints, or leaves a file for the launcher.
OnHang = Callable[[ToolkitError, tuple[Wait, ...]], None]


@contextmanager
def watched(
    board: ProgressStore, grid: Grid, steps: Sequence[Step], *, rank: int, timeout_seconds: float, on_hang: OnHang
) -> Iterator[None]:
    """Ends this process with exit code 1 when no rank moves for so long, as do all that run this.

    The block ends on rank 0 with what it announces, and on the others once they have heard it.

    Args:
        board: This rank's.
        grid: All ranks.
        steps: Every step, in order.
        rank: This rank.
        timeout_seconds: Time without a move.
        on_hang: Called with the error, and on rank 0 with who waits for whom; elsewhere with no waits.
    """
    over = threading.Event()

    def end(error: ToolkitError, waits: tuple[Wait, ...] = ()) -> None:
        if over.is_set():
            return
        on_hang(error, waits)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(error.exit_code)  # the main thread is inside a library that waits for ever

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
        over.set()  # this rank ends with an error of its own
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
        message="the process that keeps the ranks' store has ended, so this rank ends too",
        fix="See the end of rank 0's output, and the launcher's; then start again",
    )
