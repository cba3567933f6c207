"""`python -m toolkit` is the `toolkit` command."""

from __future__ import annotations

import sys

from toolkit.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
