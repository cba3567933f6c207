"""Entry point of one rank: `python -m toolkit.train.worker --plan plan.json [--resume CHECKPOINT]`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from toolkit.errors import INTERRUPTED_EXIT_CODE, ToolkitError
from toolkit.launch.environment import rank_from_environment
from toolkit.launch.outcome import write_worker_error
from toolkit.launch.packages import quiet_torchao
from toolkit.plan.plan import Plan
from toolkit.train.progress import Silent, Terminal

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def main(arguments: list[str] | None = None) -> int:
    """Trains as one rank of a launch; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.train.worker", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the run")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--stop-after", type=int, help="optimizer step after which this session saves and ends")
    parser.add_argument("--log-dir", type=Path, help="where to leave a machine-readable error for the launcher")
    options = parser.parse_args(arguments)
    quiet_warnings()
    interrupt = Interrupt()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where whoever started this has it ignored
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = interrupt.unraisable
    try:
        return _train(options)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BaseException as error:
        if interrupt.came:  # and was lost here, but not on a rank that this one waited for
            return INTERRUPTED_EXIT_CODE
        if options.log_dir is not None:
            identity = rank_from_environment(os.environ)
            return write_worker_error(options.log_dir, identity.rank if identity else 0, error)
        if isinstance(error, ToolkitError):
            sys.stderr.write(f"{error}\n")
            return error.exit_code
        raise


class Interrupt:
    """Raises KeyboardInterrupt as Python does, and remembers it: one that comes while an object is finalised is dropped.

    While the loop trains it takes the signal itself.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def unraisable(self, unraisable: UnraisableHookArgs) -> None:
        """Says nothing of a KeyboardInterrupt that was dropped."""
        if not (self.came and unraisable.exc_type is KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)


def quiet_warnings() -> None:
    """Hides warnings inside the libraries: they are not the user's to mend, and bury the progress bar."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|deepspeed|transformers|peft)\b.*")
    quiet_torchao()


def leave(code: int) -> NoReturn:
    """Ends a rank without waiting for threads of collectives in which other ranks may still be."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a terminal closed while the run saved and ended is no failure of it
            stream.flush()
    os._exit(code)


def _train(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    identity = rank_from_environment(os.environ)
    with Terminal() if identity is None or identity.rank == 0 else Silent() as reporter:
        reporter.stage("importing torch and DeepSpeed")
        # They load here, once the arguments are known to be good.
        from toolkit.train.loop import train

        result = train(plan, resume=options.resume, stop_after=options.stop_after, reporter=reporter)
    return INTERRUPTED_EXIT_CODE if result.interrupted else 0


if __name__ == "__main__":
    leave(main())
