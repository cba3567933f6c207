"""Entry point of one rank: `python -m toolkit.trainer.worker --plan plan.json [--resume CHECKPOINT]`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from toolkit.config.user_code import find_beside
from toolkit.errors import INTERRUPTED_EXIT_CODE, OUT_OF_TIME_EXIT_CODE, ToolkitError
from toolkit.launch.identity import rank_from_environment
from toolkit.launch.outcome import write_worker_error
from toolkit.launch.quiet import quiet_packages
from toolkit.launch.signals import Interrupt, hear_of_the_launchers_end, ignore_from_here
from toolkit.planning.plan import Plan
from toolkit.trainer.limits import Limits
from toolkit.trainer.progress import Silent, Terminal


def main(arguments: list[str] | None = None) -> int:
    """Train as one rank of a launch; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.trainer.worker", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the run")
    parser.add_argument("--resume", help="checkpoint to resume from, `latest` or `auto`")
    parser.add_argument("--no-convert", action="store_true", help="refuse a checkpoint of another layout")
    parser.add_argument("--stop-after", type=int, help="optimizer step after which this session saves and ends")
    parser.add_argument("--ends-at", type=float, help="time at which this session must have ended, seconds since 1970")
    parser.add_argument("--signal-seconds", type=float, help="seconds between a signal to end and a kill")
    parser.add_argument("--job", type=Path, help="job file beside which modules of the user's lie")
    parser.add_argument("--log-dir", type=Path, help="folder for a machine-readable error for the launcher")
    options = parser.parse_args(arguments)
    find_beside(options.job or options.plan)
    return run_rank(
        lambda: Plan.load(options.plan),
        resume=options.resume,
        convert=not options.no_convert,
        limits=Limits(stop_after=options.stop_after, ends_at=options.ends_at, signal_seconds=options.signal_seconds),
        log_dir=options.log_dir,
    )


def run_rank(
    read_plan: Callable[[], Plan],
    *,
    resume: str | None = None,
    convert: bool = True,
    limits: Limits | None = None,
    log_dir: Path | None = None,
    go_on: Callable[[int], None] | None = None,
) -> int:
    """Train as one rank of a launch; return the exit code. After a stop signal, further ones are ignored.

    Args:
        read_plan: Function that returns the plan, or raises its errors.
        resume: Checkpoint to resume from, as `toolkit.trainer.loop.train` takes it.
        convert: Whether one of another layout may be read.
        limits: What ends this session before its run.
        log_dir: Folder of error files for the launcher; None prints errors on stderr.
        go_on: Called on one rank of a run that hangs, with the exit code, to print how to go on.
    """
    quiet_warnings()
    hear_of_the_launchers_end()
    with Interrupt() as interrupt:
        try:
            code = _train(read_plan(), resume, convert, limits or Limits(), log_dir, go_on)
        except KeyboardInterrupt:
            code = INTERRUPTED_EXIT_CODE
        except BaseException as error:
            if not interrupt.came:
                return told(error, log_dir)
            code = INTERRUPTED_EXIT_CODE  # interrupted here, but perhaps not on a rank that this one waited for
        if code in (INTERRUPTED_EXIT_CODE, OUT_OF_TIME_EXIT_CODE):
            ignore_from_here()  # a launcher that sees one rank end signals the others again, whatever they are doing
    return code


def told(error: BaseException, log_dir: Path | None) -> int:
    """Write an error for the launcher, or print it if there is none; return the exit code."""
    if log_dir is not None:
        identity = rank_from_environment(os.environ)
        return write_worker_error(log_dir, identity.rank if identity else 0, error)
    if isinstance(error, ToolkitError):
        sys.stderr.writelines(f"{problem.with_key}\n" for problem in error.problems)
        return error.exit_code
    raise error


def quiet_warnings() -> None:
    """Hide warnings inside the libraries: the user cannot fix them, and bury the progress bar."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|deepspeed|transformers|peft)\b.*")
    quiet_packages()


def leave(code: int) -> NoReturn:
    """End a rank without waiting for threads of collectives that other ranks may still be in."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a terminal closed meanwhile is not a failure of the run
            stream.flush()
    os._exit(code)


def _train(
    plan: Plan,
    resume: str | None,
    convert: bool,
    limits: Limits,
    log_dir: Path | None,
    go_on: Callable[[int], None] | None,
) -> int:
    identity = rank_from_environment(os.environ)
    with Terminal() if identity is None or identity.rank == 0 else Silent() as reporter:
        reporter.stage("importing torch and DeepSpeed")
        # Imported here, after the arguments have been checked.
        from toolkit.trainer.loop import train_within

        result = train_within(
            plan, limits, resume=resume, convert=convert, reporter=reporter, log_dir=log_dir, go_on=go_on
        )
    return OUT_OF_TIME_EXIT_CODE if result.out_of_time else INTERRUPTED_EXIT_CODE if result.interrupted else 0


if __name__ == "__main__":
    leave(main())
