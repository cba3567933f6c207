"""Which process holds a lock, as its file says: named so that it is told from those of other machines and times."""

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

# Where a clock is set, the time at which a process began moves by as much (man 5 proc: it is counted from boot).
_SAME_PROCESS_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds an output folder.

    Args:
        host: Name of its machine.
        machine: What tells its process numbers from those of other machines and containers.
        pid: Its number there.
        started: When it began, seconds since the epoch: numbers are given again.
    """

    host: str
    machine: str
    pid: int
    started: float

    @classmethod
    def of(cls, process: psutil.Process) -> Holder:
        """Return what a lock file says of a process of this machine."""
        return cls(host=socket.gethostname(), machine=_machine(), pid=process.pid, started=process.create_time())

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """Reads what a lock file says; None where there is none, or nothing is written in it yet."""
        try:
            value = read_json_object(path)
            holder = cls(**{name: kind(value[name]) for name, kind in _FIELDS.items()})
            datetime.fromtimestamp(holder.started)
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return None
        return holder

    def as_text(self) -> str:
        """Return what `read` reads."""
        return json.dumps(asdict(self))

    @property
    def is_of_this_machine(self) -> bool:
        """Whether its number is one of a process of this machine, alive or not."""
        return self.machine == _machine()

    @property
    def lives(self) -> bool:
        """Whether it is a process of this machine that has not ended."""
        import psutil

        try:
            return self.is_of_this_machine and self.is_one_of([psutil.Process(self.pid)])
        except (psutil.Error, ValueError, OverflowError):
            return False

    @property
    def is_of_this_run(self) -> bool:
        """Whether it is this process, or one that has started it: the launcher of a rank."""
        import psutil

        own = psutil.Process()
        return self.is_of_this_machine and self.is_one_of([own, *own.parents()])

    def is_one_of(self, processes: Iterable[psutil.Process]) -> bool:
        """Whether it is among processes of this machine."""
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
