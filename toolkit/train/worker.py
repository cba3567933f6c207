"""Entry point of one rank: `python -m toolkit.train.worker --plan plan.json [--resume CHECKPOINT]`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from toolkit.errors import INTERRUPTED_EXIT_CODE, ToolkitError
from toolkit.launch.environment import rank_from_environment
from toolkit.launch.outcome import write_worker_error
from toolkit.plan.plan import Plan


def main(arguments: list[str] | None = None) -> int:
    """Trains as one rank of a launch; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.train.worker", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json of the run")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--stop-after", type=int, help="optimizer step after which this session saves and ends")
    parser.add_argument("--log-dir", type=Path, help="where to leave a machine-readable error for the launcher")
    options = parser.parse_args(arguments)
    quiet_warnings()
    try:
        return _train(options)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BaseException as error:
        if options.log_dir is not None:
            identity = rank_from_environment(os.environ)
            return write_worker_error(options.log_dir, identity.rank if identity else 0, error)
        if isinstance(error, ToolkitError):
            sys.stderr.write(f"{error}\n")
            return error.exit_code
        raise


def quiet_warnings() -> None:
    """Hides warnings inside the libraries: they are not the user's to mend, and bury the progress bar."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|deepspeed|transformers|peft)\b.*")


def _train(options: argparse.Namespace) -> int:
    # torch, DeepSpeed and transformers load here, once the arguments are known to be good.
    from toolkit.train.loop import train

    result = train(Plan.load(options.plan), resume=options.resume, stop_after=options.stop_after)
    return INTERRUPTED_EXIT_CODE if result.interrupted else 0


if __name__ == "__main__":
    # A rank that ends while others are in a collective must not wait for their threads at exit.
    code = main()
    with suppress(OSError):  # the terminal was closed while the run saved and ended: that is no failure of it
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
