"""The files of a checkpoint folder.

checkpoint-120/
  manifest.json         size and SHA-256 of every other file; written last, so its presence means "complete"
  plan.json             what ran
  state.json            step, length of the run, versions
  latest                names DeepSpeed's tag
  global_step120/       DeepSpeed's shards
  random/rank-00000.pt  random states of each rank
  model/                config, generation config, tokenizer, adapter config
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError

MANIFEST = "manifest.json"
PLAN = "plan.json"
STATE = "state.json"
LATEST = "latest"
RANDOM = "random"
MODEL = "model"

_NAME = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stood.

    Args:
        step: Optimizer steps done, which is also the position in the data.
        num_steps: Optimizer steps of the whole run.
        zero_stage: Stage that wrote the shards.
        world_size: Ranks that wrote them.
        train_batch_size: Sequences an optimizer step.
        saved_at: Seconds since the epoch.
        versions: Library versions that wrote the checkpoint.
        sources: What the run reads, as `toolkit.checkpoint.sources.identify` gives it; earlier versions kept none.
    """

    step: int
    num_steps: int | None
    zero_stage: int
    world_size: int
    train_batch_size: int
    saved_at: float
    versions: dict[str, str]
    sources: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Writes `state.json`."""
        write_json(folder / STATE, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> State:
        """Reads `state.json`."""
        try:
            return cls(**json.loads((folder / STATE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError.of(
                code="CHECKPOINT_DAMAGED",
                key=str(folder),
                message=f"{folder / STATE} cannot be read: {error}",
                fix="Resume from another checkpoint",
            ) from None


def checkpoint_name(step: int) -> str:
    """Gives the folder's name for an optimizer step."""
    return f"checkpoint-{step}"


def step_of(folder: Path) -> int | None:
    """Gives the step in a checkpoint folder's name, or None for another folder."""
    found = _NAME.match(folder.name)
    return int(found.group(1)) if found else None


def tag_of(step: int) -> str:
    """Gives DeepSpeed's tag for an optimizer step."""
    return f"global_step{step}"


def write_json(path: Path, value: Any) -> None:
    """Writes JSON and forces it to disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Forces a folder's entries to disk, so that a rename survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
