"""Compile and load DeepSpeed's extensions: `python -m toolkit.distributed.extension_build NAME…`; a line of JSON for each."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from contextlib import redirect_stdout

from toolkit.forks import end_with

_LONGEST_REASON = 300


def main(arguments: list[str] | None = None) -> int:
    """Build what is named, in order; return 1 if something could not be built."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.distributed.extension_build", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="name of an extension, such as fused_adam")
    parser.add_argument("--verbose", action="store_true", help="print what the compiler prints")
    options = parser.parse_args(arguments)
    end_with(os.getppid())
    failed = False
    for name in options.names:
        began, error = time.perf_counter(), None
        try:
            with redirect_stdout(sys.stderr):
                from toolkit.distributed.deepspeed_private import load_extension

                load_extension(name)
        except (Exception, SystemExit) as caught:  # whatever a compiler, ninja, the builder and the loader raise
            failed, error = True, reason_of(caught)
            if options.verbose:
                print(caught, file=sys.stderr)
        print(json.dumps({"name": name, "seconds": time.perf_counter() - began, "error": error}), flush=True)
    return int(failed)


def reason_of(error: BaseException) -> str:
    """Return the line of a failed build that says why: the first that a compiler calls an error, else the last.

    >>> reason_of(RuntimeError("Error building extension 'fused_adam': [1/2] c++ -c a.cpp\\na.cpp:1:1: fatal error: b.h: No such file"))
    'a.cpp:1:1: fatal error: b.h: No such file'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = [line for line in lines if re.search(r"\berror\s*:|: cannot find|No space left", line)]
    return (told or lines[-1:])[0][:_LONGEST_REASON]


if __name__ == "__main__":
    sys.exit(main())
