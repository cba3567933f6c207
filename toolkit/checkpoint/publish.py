"""The last act of a save: when all ranks have written their files, the folder is made complete by one rename."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import final

import torch.distributed as dist

from toolkit.checkpoint.disk import disk_errors
from toolkit.checkpoint.files import Files
from toolkit.checkpoint.manifest import Entry, hash_files, list_files, share, write_manifest
from toolkit.distributed.world import World
from toolkit.io import sync_folder


@final
class Unpublished:
    """A checkpoint that all ranks have begun to write.

    Args:
        world: All ranks.
        files: Files of this rank's engine.
        partial: Folder in which they are.
        target: Folder that it becomes.
        then: Called on every rank when it has.
    """

    def __init__(
        self, world: World, files: Files, *, partial: Path, target: Path, then: Callable[[Path], None]
    ) -> None:
        self._world, self._files, self._then = world, files, then
        self._partial, self._target = partial, target

    @property
    def is_done(self) -> bool:
        """Whether this rank's files are written, or have failed."""
        return self._files.is_done

    def publish(self) -> None:
        """Wait for this rank's files and for all other ranks, then give the folder its name.

        Collectives:
            Three gathers of errors, two of the manifest's entries.

        Raises:
            RunError: DISK_FULL, CHECKPOINT_UNWRITABLE, on all ranks if one could not write.
        """
        partial, world = self._partial, self._world
        self._together(self._files.close)
        entries = self._gathered(self._files.entries)
        rest = [name for name in list_files(partial) if name not in entries]
        small: dict[str, Entry] = {}
        mine = share(rest, rank=world.rank, world_size=world.size)
        self._together(lambda: small.update(hash_files(partial, mine, sync=True)))
        entries |= self._gathered(small)
        self._together(lambda: self._rename(entries) if world.is_main else None)
        self._then(self._target)

    def _together(self, work: Callable[[], object]) -> None:
        """Do this rank's part of what all ranks do; raise on each of them what prevented it on one, and leave no partial folder."""
        error: Exception | None = None
        try:
            with disk_errors(self._target):
                work()
        except Exception as failed:
            error = failed
        try:
            self._world.agree(error)
        except Exception:
            if self._world.is_main:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise

    def _rename(self, entries: dict[str, Entry]) -> None:
        """Write the manifest and give the folder its name."""
        partial, target = self._partial, self._target
        write_manifest(partial, entries)
        for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
            sync_folder(folder)
        replaced = target.parent / f".{target.name}.removed"
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        partial.rename(target)
        sync_folder(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    def _gathered(self, mine: dict[str, Entry]) -> dict[str, Entry]:
        found: list[dict[str, Entry]] = [{}] * self._world.size
        dist.all_gather_object(found, mine)
        return {name: entry for part in found for name, entry in part.items()}
