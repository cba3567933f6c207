"""The estimator of the `estimate` command: with progress on a terminal, and ended at once by Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Self

from toolkit.cli.output import INTERRUPTED
from toolkit.errors import INTERRUPTED_EXIT_CODE

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from toolkit.memory.search.estimator import Estimator
    from toolkit.memory.search.trace_process import TraceProcess


class EstimateSession:
    """The estimator of one command: to be entered as early as possible, as torch is then imported while a job is read.

    Args:
        as_json: Whether standard output is JSON alone, and no progress is shown.
        cached: Whether it may read and keep results on disk; the variable TOOLKIT_NO_CACHE turns that off too.
        interrupted: What Ctrl-C prints.
    """

    def __init__(self, *, as_json: bool, cached: bool = True, interrupted: str = INTERRUPTED) -> None:
        from toolkit.forks import is_of_use
        from toolkit.memory.search.trace_process import TraceProcess

        self.as_json, self._cached, self._interrupted = as_json, cached, interrupted
        self._process = TraceProcess(_answer_questions) if is_of_use() else None
        self._estimator: Estimator | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Let Ctrl-C end the command at once from here on."""
        self._stack.enter_context(_left_at_once(self._interrupted))
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes that make traces."""
        self._stack.close()
        if self._estimator is not None:
            self._estimator.close()
        if self._process is not None:
            self._process.close()

    @contextmanager
    def estimating(self) -> Iterator[Estimator]:
        """Yield the estimator; show its progress on a terminal, as imports and traces take seconds."""
        if not gc.isenabled():  # many traces leave garbage, of which the modules that are imported are no part
            gc.freeze()
            gc.enable()
        with warnings.catch_warnings():
            # Libraries warn each other of their next versions, which the user cannot fix.
            warnings.simplefilter("ignore", FutureWarning)
            if self.as_json or not sys.stderr.isatty():
                yield self._made()
                return
            from rich.console import Console

            from toolkit.memory.search.estimator import silent

            with Console(stderr=True, markup=False, emoji=False).status("loading") as status:
                made = self._made()
                made.notify = status.update
                yield made
                made.notify = silent

    def _made(self) -> Estimator:
        if self._estimator is None:
            self._estimator = _make_estimator(self._process, cached=self._cached)
        return self._estimator


def _answer_questions(connections: Sequence[Connection]) -> None:
    from toolkit.memory.search.tracing import answer_questions

    answer_questions(connections)


@contextmanager
def _left_at_once(line: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once: an estimate has nothing to save.

    An exception would be raised amid the imports of torch and transformers, which mistake it for a missing package, or
    crash in C++, or in pydantic, which mistakes it for a wrong schema.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    from toolkit.launch.terminal import restore_terminal

    def leave(*_: object) -> None:
        try:
            restore_terminal()  # the status line hides the cursor
            os.write(2, f"{line}\n".encode())  # a stream may be amid a write of its own
        finally:
            os._exit(INTERRUPTED_EXIT_CODE)

    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _make_estimator(process: TraceProcess | None, *, cached: bool) -> Estimator:
    from toolkit.artifacts.record_cache import RecordCache
    from toolkit.cli.calibrate import calibration_path
    from toolkit.launch.environment import other_allocator
    from toolkit.launch.user_cache import user_cache_folder
    from toolkit.memory.report.calibration import load_calibrations
    from toolkit.memory.search.estimator import Estimator
    from toolkit.memory.search.tracing import LocalTracing, TracingElsewhere
    from toolkit.modeling.lean_imports import quick_imports

    folder = user_cache_folder()
    return Estimator(
        calibrations=load_calibrations(calibration_path()),
        other_allocator=other_allocator(os.environ),
        tracing=LocalTracing(importing=quick_imports) if process is None else TracingElsewhere(process),
        cache=RecordCache(folder / "traces") if cached and folder is not None else None,
    )
