"""`python -m toolkit` is the `toolkit` command."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the working directory first, where a queue.py or random.py of the user would shadow the standard
    # library's. This package is already loaded, and finds its modules without that entry.
    with suppress(OSError):  # the folder was deleted, which `main` reports
        if sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - pathlib would load modules by that path
            del sys.path[0]

from toolkit.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
