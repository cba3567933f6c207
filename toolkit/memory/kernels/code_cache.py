"""Texts that take seconds to make, kept in files under the digest of all that they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from toolkit.io import write_text

# Said of what a limit of time has changed, which is not kept.
OUT_OF_TIME = "is not compiled within"
# A text has about 50 KiB, so that the folder stays below 50 MiB.
MAX_ENTRIES = 1000


@final
@dataclass(frozen=True, slots=True)
class TextCache:
    """A folder of texts. What cannot be read, or is damaged, counts as absent; what cannot be written is not kept.

    Args:
        folder: Folder, which is made at the first write; None keeps nothing.
    """

    folder: Path | None

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if there is none."""
        if self.folder is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            found: Any = json.loads(self._path(key).read_text(encoding="utf-8"))
            if isinstance(found, dict) and isinstance(text := found.get("text"), str):
                return text if found.get("sha256") == _digest(text) else None
        return None

    def put(self, key: str, text: str) -> None:
        """Keep a text, and remove the oldest ones where there are too many."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(self._path(key), json.dumps({"sha256": _digest(text), "text": text}))
            kept = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in kept[:-MAX_ENTRIES]:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{_digest(key)}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
