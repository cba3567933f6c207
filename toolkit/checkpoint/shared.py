"""Check that all ranks see one shared folder: each of them writes its part of a checkpoint there."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path

from toolkit.distributed.world import World
from toolkit.errors import PlanError

# NFS clients may cache the attributes of a folder for as long (acdirmin, man 5 nfs), unless they list it.
SEEN_WITHIN_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 2.0


def check_shared(folder: Path, made: Path, world: World) -> None:
    """Refuse a folder in which a rank does not see a path that rank 0 has created there.

    Args:
        folder: Folder as each rank resolves it.
        made: Path below it that rank 0 has just created.
        world: All ranks; they call this together, after rank 0 has created `made`.

    Collectives:
        One gather of errors.

    Raises:
        PlanError: OUTPUT_NOT_SHARED, on all ranks.
    """
    if world.size == 1:
        return
    error = None
    if not _sees(made):
        error = PlanError.of(
            code="OUTPUT_NOT_SHARED",
            key="train.output_dir",
            message=f"output_dir={folder} of rank {world.rank} on {socket.gethostname()} is not that of rank 0: each rank writes "
            "its part of a checkpoint there",
            fix="Set train.output_dir to a folder of a file system that all nodes share, such as NFS or Lustre, under one path",
        )
    world.agree(error)


def _sees(path: Path) -> bool:
    deadline, pause = time.monotonic() + SEEN_WITHIN_SECONDS, 0.05
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        for folder in (path.parent.parent, path.parent):
            with suppress(OSError):
                any(folder.iterdir())  # makes an NFS client refresh its listing
    return True
