"""Its presence puts this folder on the import path, so that tests can `from distributed import run_distributed`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

# Their tests run commands that take two cores and find a port by themselves: one at a time.
COMMANDS = {"cli", "examples"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals out whole files, since their tests share fixtures, and those that run commands to one worker.

    Not by `--dist loadgroup`, which pytest-xdist 3.8 forgets under pytest 9.2 (its issue 1386).
    """
    from xdist.scheduler import LoadScopeScheduling

    class FilesAndCommands(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = PurePosixPath(nodeid.split("::", 1)[0])
            return "commands" if path.parent.name in COMMANDS else str(path)

    # In the order of their names: in that of the number of their tests, the commands, which take longest, would come late.
    config.option.loadscopereorder = False
    return FilesAndCommands(config, log)
