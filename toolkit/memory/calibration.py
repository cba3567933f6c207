"""What was learned of one machine: context, communicators and slack, which no source code tells."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from toolkit.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured figures of a machine; None where nothing was measured.

    Args:
        context_bytes: Device memory outside of torch's allocator, without communicators.
        communicator_bytes: Device memory of one NCCL communicator.
        slack: Share of the peak that the allocator needs on top.
    """

    context_bytes: int | None = None
    communicator_bytes: int | None = None
    slack: float | None = None

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Reads what `save` wrote; nothing is known if there is no such file.

        Raises:
            SpecError: CALIBRATION_UNREADABLE.
        """
        if not path.is_file():
            return cls()
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            known = {field.name for field in fields(cls)}
            if not isinstance(value, dict) or not value.keys() <= known:
                raise ValueError(f"it holds other keys than {', '.join(sorted(known))}")
            if not all(item is None or (isinstance(item, int | float) and item >= 0) for item in value.values()):
                raise ValueError("a value is no number of at least 0")
        except (OSError, ValueError) as error:
            raise SpecError.of(
                code="CALIBRATION_UNREADABLE",
                key=str(path),
                message=f"{path} is not a calibration: {error}",
                fix="Delete it, or write it anew with `toolkit calibrate`",
            ) from None
        return cls(**value)

    def save(self, path: Path) -> None:
        """Writes atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
