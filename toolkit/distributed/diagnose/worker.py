"""One rank of `toolkit diagnose`: `python -m toolkit.distributed.diagnose.worker --tp 2 --backend gloo …`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.distributed.diagnose.blocked_ranks import Wait
from toolkit.distributed.diagnose.check import CheckReport, check_groups
from toolkit.errors import ToolkitError
from toolkit.io import write_json
from toolkit.launch.identity import rank_from_environment
from toolkit.launch.outcome import write_worker_error
from toolkit.topology.grid import AXES, Grid


def main(arguments: list[str] | None = None) -> int:
    """Run the check as one rank of a launch; rank 0 writes the result. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.distributed.diagnose.worker", description=__doc__)
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=1, help="size of this axis of the grid")
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument(
        "--timeout", type=float, required=True, help="seconds within which some rank must make progress"
    )
    parser.add_argument(
        "--log-dir", type=Path, required=True, help="folder for a machine-readable error for the launcher"
    )
    parser.add_argument("--result", type=Path, required=True, help="file that rank 0 writes")
    options = parser.parse_args(arguments)
    identity = rank_from_environment(os.environ)
    assert identity is not None, "a launcher starts this"
    # There is nothing to save; Python's own handler would wait for the library that hangs.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def on_hang(error: ToolkitError, waits: tuple[Wait, ...]) -> None:
        if identity.rank == 0:
            write_result(options.result, hang_to_dict(options.backend, error, waits))
        write_worker_error(options.log_dir, identity.rank, error)

    try:
        report = check_groups(
            Grid(**{axis: getattr(options, axis) for axis in AXES}),
            identity=identity,
            backend=options.backend,
            timeout_seconds=options.timeout,
            on_hang=on_hang,
        )
    except Exception as error:
        return write_worker_error(options.log_dir, identity.rank, error)
    if report is not None:
        write_result(options.result, report_to_dict(report))
    return 0


def report_to_dict(report: CheckReport) -> dict[str, Any]:
    """Return the report of a completed check as the object that `--json` prints."""
    return {
        "passed": not report.problems,
        "backend": report.backend,
        "operations": list(report.operations),
        "kinds": {
            kind.kind: {name: value for name, value in asdict(kind).items() if name != "kind"} for kind in report.kinds
        },
        "clock_skew_seconds": report.clock_skew_seconds,
        "waiting": [],
        "problems": [problem.as_dict() for problem in report.problems],
    }


def hang_to_dict(backend: str | None, error: ToolkitError, waits: tuple[Wait, ...]) -> dict[str, Any]:
    """Return the same object for a check that hung."""
    return {
        "passed": False,
        "backend": backend,
        "operations": [],
        "kinds": {},
        "clock_skew_seconds": None,
        "waiting": [wait.as_dict() for wait in waits],
        "problems": [problem.as_dict() for problem in error.problems],
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write the result atomically: other ranks' errors may end this process meanwhile."""
    write_json(path, result, ensure_ascii=True)


if __name__ == "__main__":
    sys.exit(main())
