"""Checkpoints that whoever made them has changed: their checksums agree, and reading them in a careless way calls a function."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from toolkit.checkpoint.layout import MANIFEST
from toolkit.checkpoint.manifest import hash_files, list_files, write_manifest

NAMED = "posix.mkdir"


class Calls:
    """Pickled, it is a call of `os.mkdir` that whoever unpickles it makes."""

    def __init__(self, made: Path) -> None:
        self.made = str(made)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.made,)


def make_hostile(path: Path, made: Path) -> None:
    """Adds to what `torch.save` wrote a call that makes the folder `made`."""
    import torch

    torch.save(torch.load(path, weights_only=False) | {"more": Calls(made)}, path)


def agree(folder: Path) -> Path:
    """Writes the manifest of a checkpoint as it now is."""
    (folder / MANIFEST).unlink(missing_ok=True)
    write_manifest(folder, hash_files(folder, list_files(folder)))
    return folder
