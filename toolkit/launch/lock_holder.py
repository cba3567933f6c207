"""The process that owns a lock, as recorded in its file: identified across machines and reuse of process ids."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.io import read_json_object

if TYPE_CHECKING:
    import psutil

# When the clock is set, a process's start time shifts by as much (man 5 proc: it is counted from boot).
_SAME_PROCESS_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that owns the lock of an output folder.

    Args:
        host: Name of its machine.
        machine: Identifier that separates its process ids from those of other machines and containers.
        pid: Its process id on that machine.
        started: Start time, seconds since the epoch: process ids are reused.
    """

    host: str
    machine: str
    pid: int
    started: float

    @classmethod
    def of(cls, process: psutil.Process) -> Holder:
        """Return the record of a process of this machine."""
        return cls(host=socket.gethostname(), machine=_machine(), pid=process.pid, started=process.create_time())

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """Read a lock file's record; None if there is no file, or it is still empty."""
        try:
            value = read_json_object(path)
            holder = cls(**{name: kind(value[name]) for name, kind in _FIELDS.items()})
            datetime.fromtimestamp(holder.started)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None
        return holder

    def as_text(self) -> str:
        """Return the text that `read` parses."""
        return json.dumps(asdict(self))

    @property
    def is_of_this_machine(self) -> bool:
        """True if its process id belongs to this machine, alive or not."""
        return self.machine == _machine()

    @property
    def lives(self) -> bool:
        """True if it is a process of this machine that is still alive."""
        import psutil

        try:
            return self.is_of_this_machine and self.is_one_of([psutil.Process(self.pid)])
        except (psutil.Error, ValueError, OverflowError):
            return False

    @property
    def is_of_this_run(self) -> bool:
        """True if it is this process, or an ancestor: the launcher of a rank."""
        import psutil

        own = psutil.Process()
        return self.is_of_this_machine and self.is_one_of([own, *own.parents()])

    def is_one_of(self, processes: Iterable[psutil.Process]) -> bool:
        """Return whether it is one of these processes of this machine."""
        return any(
            process.pid == self.pid and abs(process.create_time() - self.started) < _SAME_PROCESS_SECONDS
            for process in processes
        )

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started).astimezone().isoformat(sep=" ", timespec="seconds")
        return f"process {self.pid} on {self.host}, started {since}"


_FIELDS = {"host": str, "machine": str, "pid": int, "started": float}


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()
