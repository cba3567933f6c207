"""Runs a script that imports Horovod: `python -m toolkit.compat.horovod SCRIPT [ARGS]…`, under any launcher."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import NoReturn

from toolkit.compat.horovod.alias import install
from toolkit.compat.horovod.engine import ENGINE_THREAD
from toolkit.compat.horovod.runtime import shutdown
from toolkit.errors import ToolkitError
from toolkit.launch.identity import rank_from_environment
from toolkit.launch.outcome import write_worker_error


def main(argv: list[str] | None = None) -> int:
    """Run the script as `python SCRIPT` would, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.compat.horovod", description=__doc__)
    parser.add_argument("--log-dir", type=Path, help="folder in which the launcher looks for this rank's error")
    parser.add_argument("script", help="Python script that imports horovod.torch")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args(argv)
    if not Path(options.script).is_file():
        parser.error(f"{options.script} is not a file")
    install()
    identity = rank_from_environment(os.environ)
    if identity is not None:
        for name, value in identity.as_environment().items():  # as horovodrun sets them, for scripts that look there
            os.environ.setdefault(f"HOROVOD_{name.replace('WORLD_', '')}", value)
    sys.argv = [options.script, *options.arguments]
    sys.path.insert(0, str(Path(options.script).resolve().parent))
    try:
        runpy.run_path(options.script, run_name="__main__")
    except Exception as error:
        if options.log_dir is not None:
            write_worker_error(options.log_dir, identity.rank if identity else 0, error)
        if not isinstance(error, ToolkitError):
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _end(code: int) -> NoReturn:
    """End the process, also while an operation waits for a rank that has gone, which Python's own end would abort."""
    shutdown()
    if code and any(thread.name == ENGINE_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _end(main())
