"""The estimator of the `estimate` command: with progress on a terminal, and ended at once by Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from toolkit.errors import INTERRUPTED_EXIT_CODE

if TYPE_CHECKING:
    from toolkit.memory.search.estimator import Estimator


@contextmanager
def estimating(*, as_json: bool) -> Iterator[Estimator]:
    """Yield an estimator; show its progress on a terminal, as its imports and traces take seconds."""
    from toolkit.launch.packages import quiet_torchao

    quiet_torchao()
    with _left_at_once(), warnings.catch_warnings():
        # Libraries warn each other of their next versions, which the user cannot fix.
        warnings.simplefilter("ignore", FutureWarning)
        if as_json or not sys.stderr.isatty():
            yield _make_estimator(lambda line: None)
            return
        from rich.console import Console

        with Console(stderr=True, markup=False, emoji=False).status("loading torch and transformers") as status:
            yield _make_estimator(status.update)


@contextmanager
def _left_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process at once: an estimate has nothing to save.

    An exception would be raised amid the imports of torch and transformers, which mistake it for a missing package, or
    crash in C++.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    from toolkit.launch.supervisor import restore_terminal

    def leave(*_: object) -> None:
        try:
            restore_terminal()  # the status line hides the cursor
        finally:
            os._exit(INTERRUPTED_EXIT_CODE)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _make_estimator(notify: Callable[[str], None]) -> Estimator:
    from toolkit.cli.calibrate import calibration_path
    from toolkit.launch.environment import other_allocator
    from toolkit.memory.report.calibration import load_calibrations
    from toolkit.memory.search.estimator import Estimator

    return Estimator(
        calibrations=load_calibrations(calibration_path()),
        notify=notify,
        other_allocator=other_allocator(os.environ),
    )
