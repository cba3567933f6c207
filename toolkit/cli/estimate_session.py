"""The estimator of the `estimate` command: with progress on a terminal, and ended at once by Ctrl-C."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from toolkit.errors import INTERRUPTED_EXIT_CODE

if TYPE_CHECKING:
    from toolkit.memory.search.estimator import Estimator
    from toolkit.planning.plan import Plan


@contextmanager
def estimating(
    *, as_json: bool, cached: bool, plan: Plan | None = None, estimator: Estimator | None = None
) -> Iterator[Estimator]:
    """Yield an estimator; show its progress on a terminal, as its imports and traces take seconds.

    Args:
        as_json: Whether standard output is JSON alone.
        cached: Whether it may read and keep results on disk; the variable TOOLKIT_NO_CACHE turns that off too.
        plan: Plan whose model, adapters and compilation all that is estimated shares; by default they may differ.
        estimator: Estimator that goes on; by default one is made.
    """
    from toolkit.launch.packages import quiet_torchao

    quiet_torchao()
    if not gc.isenabled():  # many traces leave garbage, of which the modules that are imported are no part
        gc.freeze()
        gc.enable()
    with _left_at_once(), warnings.catch_warnings():
        # Libraries warn each other of their next versions, which the user cannot fix.
        warnings.simplefilter("ignore", FutureWarning)
        if as_json or not sys.stderr.isatty():
            yield estimator or _make_estimator(plan, cached=cached)
            return
        from rich.console import Console

        from toolkit.memory.search.estimator import silent

        with Console(stderr=True, markup=False, emoji=False).status("loading") as status:
            made = estimator or _make_estimator(plan, cached=cached)
            made.notify = status.update
            yield made
            made.notify = silent


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

    from toolkit.launch.terminal import restore_terminal

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


def _make_estimator(plan: Plan | None, *, cached: bool) -> Estimator:
    from toolkit.artifacts.record_cache import RecordCache
    from toolkit.cli.calibrate import calibration_path
    from toolkit.launch.environment import other_allocator
    from toolkit.launch.user_cache import user_cache_folder
    from toolkit.memory.report.calibration import load_calibrations
    from toolkit.memory.search.estimator import Estimator
    from toolkit.modeling.lean_imports import lean_imports, quick_imports

    folder = user_cache_folder()
    return Estimator(
        calibrations=load_calibrations(calibration_path()),
        other_allocator=other_allocator(os.environ),
        importing=lean_imports if plan is not None and _is_plain(plan) else quick_imports,
        cache=RecordCache(folder / "traces") if cached and folder is not None else None,
    )


def _is_plain(plan: Plan) -> bool:
    """Return whether a trace needs neither adapters, nor the compiler, nor what a model's own code may import."""
    train = plan.job.train
    return train.method == "full" and not train.torch_compile and not plan.job.model.trust_remote_code
