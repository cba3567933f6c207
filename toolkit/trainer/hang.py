"""The last words of a run that hangs: the error for the launcher or the terminal, and how to go on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from toolkit.checkpoint.discovery import list_checkpoints
from toolkit.distributed.hangs.watch import OnHang
from toolkit.errors import RunError
from toolkit.launch.identity import rank_from_environment
from toolkit.launch.outcome import write_worker_error
from toolkit.planning.plan import Plan


def last_words(plan: Plan, *, log_dir: Path | None, go_on: Callable[[int], None] | None) -> OnHang:
    """Return what a rank does with the error of a run that hangs before it ends.

    Args:
        plan: Plan of the run.
        log_dir: Folder of error files, where the launcher is the toolkit's own; it tells the error and how to go on.
        go_on: Called on one rank under another launcher, with the exit code, to print how to go on; None names the last checkpoint.
    """

    def on_hang(error: RunError, tells: bool) -> int:
        if log_dir is not None:
            identity = rank_from_environment(os.environ)
            assert identity is not None, "a launcher starts several ranks"
            return write_worker_error(log_dir, identity.rank, error)
        if tells:
            sys.stderr.writelines(f"{problem.with_key}\n" for problem in error.problems)
            if go_on is None:
                found = list_checkpoints(plan.output_dir)
                goes_on = ': tk.train(plan, resume="auto") goes on from it'
                last = f"The last complete checkpoint is {found[-1]}{goes_on}" if found else "Nothing was saved yet"
                print(last, file=sys.stderr)
            else:
                go_on(error.exit_code)
        return error.exit_code

    return on_hang
