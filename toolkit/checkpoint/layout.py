"""The files of a checkpoint folder.

checkpoint-120/
  manifest.json         size and SHA-256 of every other file; written last, so its presence means "complete"
  plan.json             plan of the run
  state.json            step, length of the run, versions
  latest                name of the engine's tag
  global_step120/       the engine's shards
  random/rank-00000.pt  random states of each rank
  model/                config, generation config, tokenizer, adapter config
  probe.safetensors     scores of the live model, at the end of a run
"""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"
PLAN = "plan.json"
STATE = "state.json"
LATEST = "latest"
PROBE = "probe.safetensors"
RANDOM = "random"
MODEL = "model"

_NAME = re.compile(r"^checkpoint-(\d+)$")
_TAG = re.compile(r"global_step\d+")


def checkpoint_name(step: int) -> str:
    """Return the folder's name for an optimizer step."""
    return f"checkpoint-{step}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None for another folder."""
    found = _NAME.match(folder.name)
    return int(found.group(1)) if found else None


def tag_of(step: int) -> str:
    """Return DeepSpeed's tag for an optimizer step."""
    return f"global_step{step}"


def is_tag(name: str) -> bool:
    """Return whether a folder of this name holds DeepSpeed's files."""
    return _TAG.fullmatch(name) is not None
