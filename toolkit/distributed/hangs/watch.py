"""A watch over the progress of all ranks, which ends them when they wait for one that will not come.

Each rank reports to the launcher's key-value store, through a connection of its own: that of the process groups is busy as long as
one of them waits on it. Two threads do that, since neither a blocked main thread nor a store that does not answer may stop the
watch. As long as a rank gets on, a report is a write every few seconds, and nobody reads.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, final

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from toolkit.distributed.hangs.places import main_thread_place, process_state
from toolkit.distributed.hangs.recorder import Recorded, recorded
from toolkit.distributed.hangs.stacks import Stacks
from toolkit.distributed.hangs.verdict import Report, Verdict, judge
from toolkit.distributed.world import World
from toolkit.errors import RunError

# The shares of the allowed time after which a still rank begins to read what the others report, and without a report for which
# another counts as silent; what is read must be able to show that in time.
_READS_AFTER, _SILENT_SHARE = 0.25, 0.6
_STACKS_SHARE = 0.4  # of a rank whose watch is not let in: before it counts as silent
_LONGEST_PULSE_SECONDS, _LONGEST_PULSE_OF_STILL_SECONDS = 5.0, 1.0
# A thread that was not run for so many pulses was stopped together with its process: what it saw before says nothing.
_MISSED_PULSES = 8
_MOST_PENDING = 4  # the oldest is what holds a rank up
_FAREWELL_SECONDS, _MEET_SECONDS = 1.0, 0.01
_VERDICT = "verdict"

# Called on a rank before it ends, with the error and whether this rank tells it; returns the exit code.
OnHang = Callable[[RunError, bool], int]


@contextmanager
def watching(
    world: World, *, minutes: float, folder: Path, on_hang: OnHang, ends_silent: bool = True
) -> Iterator[Callable[[], None]]:
    """End this process, and all that run this, if no rank makes progress for `minutes` and none may take longer.

    Args:
        world: All ranks, which call this together; `world.progress` is what is watched.
        minutes: Time that is allowed; 0 watches nothing.
        folder: Folder for the Python stacks of the ranks of a run that hangs.
        on_hang: Called on each rank that still answers, before it ends.
        ends_silent: Whether to kill silent ranks of this machine, where no launcher does so at once.

    Yields:
        A function to call once files may be written in `folder`.
    """
    if minutes == 0 or world.size == 1:
        yield lambda: None
        return
    watch = _Watch(world, seconds=60 * minutes, folder=folder, on_hang=on_hang, ends_silent=ends_silent)
    watch.start()
    try:
        yield watch.keep_stacks
    except BaseException:
        watch.stop()
        raise
    watch.stop(together=True)


@final
class _Watch:
    """The watch of this rank; one thread observes it, another talks to the store."""

    def __init__(self, world: World, *, seconds: float, folder: Path, on_hang: OnHang, ends_silent: bool) -> None:
        self._world, self._seconds, self._folder = world, seconds, folder
        self._on_hang, self._ends_silent = on_hang, ends_silent
        self._stacks = Stacks(folder, world.rank)
        self._store = _own_store(world)
        process = psutil.Process()
        self._report = Report(
            rank=world.rank, host=socket.gethostname(), pid=process.pid, started=process.create_time(), unwell={}
        )
        self._over = threading.Event()
        self._ending = threading.Lock()
        self._seen: tuple[int, str] = (-1, "")
        self._moved_at = self._looked_at = self._told_at = time.monotonic()
        self._reports: dict[int, Report] = {}
        self._heard_at: dict[int, float] = {}
        self._read_at = 0.0
        self._threads = [
            threading.Thread(target=work, name="toolkit-hang-watch", daemon=True)
            for work in (self._observe, self._exchange)
        ]

    def start(self) -> None:
        self._look()
        self._publish(0)  # here, so that a rank that is stopped at once is known
        for thread in self._threads:
            thread.start()

    def keep_stacks(self) -> None:
        """Have the stacks of this rank written also if a library lets no Python thread of it run."""
        self._stacks.open()
        self._stacks.put_off(_STACKS_SHARE * self._seconds)

    def stop(self, *, together: bool = False) -> None:
        """Stop, unless this rank is being ended; threads that wait for the store are left to it.

        Args:
            together: Whether the other ranks stop too: rank 0, which may host the store, then waits for them.
        """
        with self._ending:
            self._over.set()
        for thread in self._threads:
            thread.join(_FAREWELL_SECONDS)
        self._stacks.close()
        if together and not any(thread.is_alive() for thread in self._threads):
            self._meet("stopped", self._world.size, seconds=_FAREWELL_SECONDS)

    @property
    def _pulse(self) -> float:
        longest = _LONGEST_PULSE_OF_STILL_SECONDS if self._is_suspicious else _LONGEST_PULSE_SECONDS
        return min(longest, self._seconds / 25)

    @property
    def _is_suspicious(self) -> bool:
        return self._report.still_seconds >= _READS_AFTER * self._seconds

    def _observe(self) -> None:
        """Keep this rank's own report up to date, and end it if the store does not answer any more."""
        while not self._over.wait(self._pulse):
            self._look()
            unheard = time.monotonic() - self._told_at
            if unheard >= self._seconds and self._report.is_still and not self._report.is_busy:
                self._end(_without_store(self._report, self._reports, unheard))

    def _look(self) -> None:
        self._stacks.put_off(_STACKS_SHARE * self._seconds)
        now, progress = time.monotonic(), self._world.progress
        if now - self._looked_at > _MISSED_PULSES * self._pulse:
            self._moved_at = self._told_at = now
            self._heard_at.clear()
        self._looked_at = now
        doing, moves = progress.now, progress.moves
        seen_moves, seen_mark = self._seen
        # Not while steps follow each other: there is nothing to know.
        reads = moves == seen_moves and now - self._moved_at >= _READS_AFTER * self._seconds
        found = recorded() if reads else Recorded(pending=(), mark="")
        self._seen = (moves, found.mark)
        if moves != seen_moves or (found.mark and seen_mark and found.mark != seen_mark):
            self._moved_at = now
        still = now - self._moved_at
        limit = self._seconds
        if doing.kind == "bounded":
            limit = max(limit, 2 * (progress.shortest_step_seconds or 0.0))
        suspicious = still >= _READS_AFTER * self._seconds
        self._report = replace(
            self._report,
            doing=doing.what,
            kind=doing.kind,
            still_seconds=still,
            is_still=still >= limit,
            pending=found.pending[:_MOST_PENDING],
            place=main_thread_place() if suspicious else "",
            unwell=self._unwell() if suspicious else {},
        )

    def _unwell(self) -> dict[int, str]:
        """Return the ranks of this machine whose processes do not run, as far as their reports are known."""
        own = self._report
        near = [other for rank, other in dict(self._reports).items() if other.host == own.host and rank != own.rank]
        states = {other.rank: process_state(other.pid, other.started) for other in near}
        return {rank: state for rank, state in states.items() if state}

    def _exchange(self) -> None:
        """Report, and read what the others report once this rank is still."""
        beat = 0
        try:
            while not self._over.wait(self._pulse):
                beat += 1
                self._publish(beat)
                if self._store.check([_VERDICT]):
                    self._end_as_told(json.loads(self._store.get(_VERDICT)))
                if 0 not in self._reports:  # known before its store may not answer
                    self._read((0,))
                self._told_at = time.monotonic()
                if not self._is_suspicious:
                    self._heard_at.clear()
                elif time.monotonic() - self._read_at >= self._seconds / 20:
                    self._read(range(self._world.size))
                    self._judge()
        except dist.DistError:
            return  # the store's process has ended: `_observe` ends this rank if it waits for others

    def _publish(self, beat: int) -> None:
        self._store.set(_report_key(self._world.rank), json.dumps(replace(self._report, beat=beat).to_dict()))

    def _read(self, asked: Sequence[int]) -> None:
        now = self._read_at = time.monotonic()
        ranks = [rank for rank in asked if rank in self._reports or self._store.check([_report_key(rank)])]
        for rank, text in zip(ranks, self._store.multi_get([_report_key(rank) for rank in ranks]), strict=True):
            report = Report.from_dict(json.loads(text))
            if rank not in self._heard_at or report.beat != self._reports[rank].beat:
                self._heard_at[rank] = now
            self._reports[rank] = report
        for rank in asked:
            self._heard_at.setdefault(rank, now)

    def _judge(self) -> None:
        if not self._report.is_still:
            return
        now = time.monotonic()
        longest = _SILENT_SHARE * self._seconds
        silent = {rank: now - heard for rank, heard in self._heard_at.items() if now - heard >= longest}
        recent = {rank for rank, heard in self._heard_at.items() if rank not in silent and rank not in self._reports}
        if recent:  # they have not reported yet
            return
        for rank in silent:
            if rank in self._reports:
                self._reports[rank] = replace(self._reports[rank], place=self._stacks.place_of_silent(rank))
        verdict = judge(self._reports, silent_seconds=silent, size=self._world.size)
        if verdict is None:
            return
        told = {"message": verdict.message, "silent": list(verdict.silent), "ends": list(verdict.ends)}
        # The first verdict counts, for all ranks.
        self._end_as_told(json.loads(self._store.compare_set(_VERDICT, "", json.dumps(told))))

    def _end_as_told(self, told: dict[str, Any]) -> None:
        verdict = Verdict(ranks=(), silent=tuple(told["silent"]), message=told["message"], ends=tuple(told["ends"]))
        self._end(verdict, shared=True)

    def _end(self, verdict: Verdict, *, shared: bool = False) -> None:
        """Write this rank's stacks, let the others do so too, tell the error, and end the process."""
        with self._ending:
            if self._over.is_set():
                return
            own = self._world.rank
            self._stacks.write(self._report)
            if shared:
                # With this process the store may end, or the launcher ends the others.
                self._meet("heard", len(verdict.ends), seconds=3 * _LONGEST_PULSE_OF_STILL_SECONDS)
            error = _error(verdict, seconds=self._seconds, folder=self._folder)
            tells = own == min(verdict.ends, default=own)
            for rank in verdict.silent if tells else ():
                self._stacks.keep(rank)
            code = error.exit_code
            try:
                code = self._on_hang(error, tells)
            except Exception:  # the run hangs nevertheless
                traceback.print_exc()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            if self._ends_silent:
                self._kill(verdict.silent)
            os._exit(code)  # the main thread is inside a library that waits

    def _meet(self, where: str, count: int, *, seconds: float) -> None:
        """Wait for so many ranks, or for a time; rank 0 comes last, as it may host the store that they ask."""
        deadline = time.monotonic() + seconds
        with suppress(dist.DistError):
            self._store.add(where, 1)
            while self._store.add(where, 0) < count and time.monotonic() < deadline:
                time.sleep(_MEET_SECONDS)
        if self._world.rank == 0:
            time.sleep(5 * _MEET_SECONDS)

    def _kill(self, silent: tuple[int, ...]) -> None:
        """Kill silent ranks of this machine: they do not hear a launcher's SIGTERM, which waits for them."""
        for rank in silent:
            report = self._reports.get(rank)
            if report is None or report.host != self._report.host:
                continue
            with suppress(psutil.Error):
                process = psutil.Process(report.pid)
                if process.create_time() == report.started:
                    process.kill()


def _report_key(rank: int) -> str:
    return f"report-{rank}"


def _own_store(world: World) -> Store:
    """Return a connection of this watch's own to the launcher's store, and keys that no earlier watch has used."""
    shared: Any = dist.distributed_c10d._get_default_store()
    number = shared.add(f"watches-of-{world.rank}", 1)  # all ranks make equally many
    return PrefixStore(f"watch-{number}", cast("Store", shared.clone()))  # missing in torch's type stub of Store


def _without_store(report: Report, reports: dict[int, Report], seconds: float) -> Verdict:
    """Return the verdict of a rank that hears nothing from anybody: by itself, as the others come to theirs."""
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = reports.get(0)
    state = "" if host is None or host.host != report.host else process_state(host.pid, host.started)
    who = (
        "the launcher's process, which hosts the ranks' store,"
        if by_launcher
        else "rank 0, which hosts the ranks' store,"
    )
    waits = f"is in {report.pending[0]}" if report.pending else f"is at {report.place}"
    return Verdict(
        ranks=() if by_launcher else (0,),
        silent=() if by_launcher else (0,),
        message=f"{who} has not responded for {seconds:.0f} s{f': its process {host.pid} {state}' if state and host else ''}; "
        f"rank {report.rank} {waits}, in {report.doing}",
        ends=(report.rank,),
    )


def _error(verdict: Verdict, *, seconds: float, folder: Path) -> RunError:
    return RunError.of(
        code="RUN_HANG",
        key="train.hang_timeout_minutes",
        message=f"hang_timeout_minutes={seconds / 60:g}, and no rank has made progress for so long: {verdict.message}",
        fix=f"The Python stacks of all ranks that answered are in {folder}/hang-rank-*.txt. If a step may "
        "take longer, raise train.hang_timeout_minutes; 0 ends no run",
    )
