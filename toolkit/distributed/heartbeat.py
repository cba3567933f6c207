"""Work of unbounded duration that single ranks do outside collectives: tokenising, downloading, hashing.

A collective would end a healthy run at the groups' timeout while one rank works and the others wait. Here they wait on the
launcher's key-value store, and a working rank shows there that it is alive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from toolkit.distributed.world import World
from toolkit.errors import RunError

T = TypeVar("T")

PULSE_SECONDS = 2.0
# Launchers end the ranks of a run when one dies; this is for those that do not. No library holds the GIL so long.
LOST_SECONDS = 600.0
_LONGEST_PAUSE_SECONDS = 0.5


def run_with_heartbeat(world: World, work: Callable[[], T], *, lost_seconds: float = LOST_SECONDS) -> T:
    """Run `work`, which may take hours and enters no collective, and return when all ranks have done theirs.

    Args:
        world: All ranks; they call this together, and `work` may differ by rank.
        work: This rank's work.
        lost_seconds: Seconds without a heartbeat after which an unfinished rank counts as dead.

    Returns:
        Result of `work` on this rank.

    Collectives:
        One gather of errors, after all ranks have finished.

    Raises:
        Exception: As in `World.agree`, if the work of some rank failed.
        RunError: RANK_LOST.
    """
    if world.size == 1:
        return work()
    try:
        store = _own_round(world)
    except dist.DistError as lost:
        raise _store_lost() from lost
    done: list[T] = []
    error: Exception | None = None
    with _pulse(store, world.rank):
        try:
            done.append(work())
        except Exception as caught:  # the others must not wait for a rank that has failed
            error = caught
    try:
        store.set(_done(world.rank), "")
        for rank in range(world.size):
            with world.progress.doing(f"the wait for rank {rank}'s work", "waiting"):
                _await(store, rank, lost_seconds=lost_seconds)
    except dist.DistError as lost:
        raise _store_lost() from lost
    world.agree(error)
    return done[0]


def _own_round(world: World) -> Store:
    """Return a key prefix for this call: each rank counts its own calls, and all ranks make equally many."""
    store = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"apart-{store.add(f'apart-by-{world.rank}', 1)}", store)


@contextmanager
def _pulse(store: Store, rank: int) -> Iterator[None]:
    stopped = threading.Event()

    def beat() -> None:
        try:
            while not stopped.wait(PULSE_SECONDS):
                store.add(_pulse_of(rank), 1)
        except dist.DistError:
            return  # the store's process has died; this rank finds out when its work is done

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _await(store: Store, rank: int, *, lost_seconds: float) -> None:
    beats, heard, pause = -1, time.monotonic(), 0.005
    while not store.check([_done(rank)]):
        now = store.add(_pulse_of(rank), 0)
        if now != beats:
            beats, heard = now, time.monotonic()
        elif time.monotonic() - heard > lost_seconds:
            raise _lost(f"rank {rank} has not responded for {lost_seconds:g} s")
        time.sleep(pause)  # not Store.wait: it would block Ctrl-C, and logs each timeout
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _done(rank: int) -> str:
    return f"done-{rank}"


def _pulse_of(rank: int) -> str:
    return f"pulse-{rank}"


def _store_lost() -> RunError:
    return _lost("the process that hosts the ranks' store has ended")


def _lost(what: str) -> RunError:
    return RunError.of(
        code="RANK_LOST",
        message=f"{what}, so this rank ends too",
        fix="See the last lines of that rank's output, and the launcher's; then start again",
    )
