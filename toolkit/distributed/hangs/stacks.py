"""The Python stacks of ranks that hang, in files of the run's log folder, also of a rank whose watch is not let in.

A library that holds Python's lock stops every Python thread of its process, and so the watch. faulthandler's own thread needs no lock: it
writes the stacks unless the watch puts it off once more.
"""

from __future__ import annotations

import faulthandler
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO, final

from toolkit.distributed.hangs.places import is_library
from toolkit.distributed.hangs.verdict import Report
from toolkit.io import make_folder

_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


@final
class Stacks:
    """The stacks of a rank, and those that silent ranks have left.

    Args:
        folder: Log folder of the run; one that cannot be written has no stacks.
        rank: Rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._file: TextIO | None = None
        self._lock = threading.Lock()  # one thread puts off, another may close

    def open(self) -> None:
        """Make the folder and the file for stacks that are written without the watch; remove those of an earlier run."""
        with self._lock, suppress(OSError):
            make_folder(self._folder)
            self._kept(self._rank).unlink(missing_ok=True)
            self._file = self._unasked(self._rank).open("w", encoding="utf-8")

    def put_off(self, seconds: float) -> None:
        """Have the stacks written in so many seconds, unless this is called before; it replaces a call of the user's."""
        with self._lock:
            if self._file is not None:
                faulthandler.dump_traceback_later(seconds, file=self._file)

    def close(self) -> None:
        """Write nothing any more."""
        with self._lock:
            if self._file is None:
                return
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            self._file = None
            with suppress(OSError):
                self._unasked(self._rank).unlink()

    def write(self, report: Report) -> None:
        """Write the stacks of this rank, below what it does."""
        self.close()
        with suppress(OSError), self._kept(self._rank).open("w", encoding="utf-8") as file:
            print(f"rank {report.rank}: {report.doing}, no progress for {report.still_seconds:.1f} s", file=file)
            for operation in report.pending:
                print(f"not complete: {operation}", file=file)
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def place_of_silent(self, rank: int) -> str:
        """Return where the main thread of a rank is whose stacks were written without its watch; empty if they were not."""
        with suppress(OSError):
            # The main thread comes last.
            frames = _FRAME.findall(self._unasked(rank).read_text(encoding="utf-8").rpartition("Thread 0x")[2])
            own = next((frame for frame in frames if not is_library(frame[0])), frames[0] if frames else None)
            if own is not None:
                return "{}:{} in {}".format(*own)
        return ""

    def keep(self, rank: int) -> None:
        """Give the stacks that a silent rank has left the name of the others."""
        with suppress(OSError):
            if self._unasked(rank).stat().st_size:
                self._unasked(rank).replace(self._kept(rank))
            else:
                self._unasked(rank).unlink()

    def _kept(self, rank: int) -> Path:
        return self._folder / f"hang-rank-{rank}.txt"

    def _unasked(self, rank: int) -> Path:
        return self._folder / f".stacks-rank-{rank}.txt"
