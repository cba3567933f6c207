"""What a process that is killed leaves on a terminal."""

from __future__ import annotations

import contextlib
import sys

_SHOW_CURSOR = "\x1b[?25h"


def restore_terminal() -> None:
    """Show the cursor of a terminal again and begin a new line, after a process was killed that may have drawn on it."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(OSError, ValueError):  # the stream is gone or closed
            if stream.isatty():
                stream.write(f"{_SHOW_CURSOR}\n")
                stream.flush()
                return
