"""Folders that other programs wrote: DeepSpeed's own, those of Trainer and Accelerate, torch's distributed checkpoint, universal ones.

Nothing of them runs: their pickles are read by `toolkit.checkpoint.pickles`, as ours are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from toolkit.checkpoint.layout import LATEST, MANIFEST, PLAN, STATE
from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.engine_files import is_engine_tag, read_tag
from toolkit.units import whole_number

Format = Literal["deepspeed", "universal", "distributed"]

UNIVERSAL_LATEST = "latest_universal"
INDEX = ".metadata"
# Folders of weights inside those that Accelerate and Trainer save under FSDP (accelerate utils/constants.py FSDP_MODEL_NAME).
_FSDP = "pytorch_model_fsdp"
OPTIMIZER_FOLDER = "optimizer_0"  # accelerate utils/fsdp_utils.py save_fsdp_optimizer
_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherFolder:
    """A checkpoint of another program.

    Args:
        root: Folder that was named.
        format: Format of the weights.
        weights: Folder of their files.
        model_dir: Folder with config.json, near the weights; None if there is none.
        adapter_dir: Folder with adapter_config.json, which peft saves without the config.json of the base; None if there is none.
        step: Optimizer steps done, if a file or a name says it.
    """

    root: Path
    format: Format
    weights: Path
    model_dir: Path | None
    adapter_dir: Path | None
    step: int | None = None


def find_other(folder: Path) -> OtherFolder | None:
    """Return what another program left in a folder; None for a checkpoint of ours, whole or not, and for anything else.

    Raises:
        CheckpointError: EXPORT_LATEST for a `latest` that names no folder.
    """
    if not folder.is_dir() or (folder / MANIFEST).exists() or {PLAN, STATE} <= {path.name for path in folder.iterdir()}:
        return None
    for format_, weights in _candidates(folder):
        near = (folder, folder / "model", weights, folder.parent)
        model_dir, adapter_dir = (
            next((path for path in near if (path / name).is_file()), None) for name in (_CONFIG, _ADAPTER_CONFIG)
        )
        step = _step(weights.name) or _step(folder.name)
        return OtherFolder(
            root=folder, format=format_, weights=weights, model_dir=model_dir, adapter_dir=adapter_dir, step=step
        )
    return None


def _candidates(folder: Path) -> Iterator[tuple[Format, Path]]:
    for tag in _named_tags(folder):
        if (tag / "zero").is_dir():
            yield "universal", tag
        elif is_engine_tag(tag):
            yield "deepspeed", tag
    if (folder / "zero").is_dir() and any(folder.glob("zero/*/fp32.pt")):
        yield "universal", folder
    if is_engine_tag(folder):
        yield "deepspeed", folder
    for path in (folder, *sorted(folder.glob(f"{_FSDP}*"))):
        if (path / INDEX).is_file():
            yield "distributed", path


def _named_tags(folder: Path) -> list[Path]:
    """Return the tags that files name, the latest first: a run that was converted may have gone on since, in the same folder."""
    tags: list[Path] = []
    for name in (UNIVERSAL_LATEST, LATEST):
        if (folder / name).is_file():
            try:
                tags.append(_named_tag(folder, name))
            except CheckpointError:
                if not tags:  # what was converted may be gone
                    raise
    return sorted(tags, key=lambda tag: _step(tag.name) or 0, reverse=True)


def _named_tag(folder: Path, name: str) -> Path:
    try:
        tag = read_tag(folder, name)
    except (OSError, ValueError) as error:
        raise CheckpointError(_no_tag(folder / name, f"cannot be read: {error}")) from None
    if not (folder / tag).is_dir():
        raise CheckpointError(_no_tag(folder / name, f"names {tag}, which is not there"))
    return folder / tag


def _no_tag(path: Path, what: str) -> Problem:
    return Problem(
        code="EXPORT_LATEST",
        key=str(path),
        message=f"{path} {what}",
        fix="Name a folder whose saving has finished, or the folder of its tag itself",
        source="deepspeed, runtime/engine.py, DeepSpeedEngine.save_checkpoint",
    )


def _step(name: str) -> int | None:
    digits = name.removesuffix("_universal").rpartition("-" if "-" in name else "step")[2]
    return whole_number(digits)


def names_by_model(stored: Mapping[str, object], wanted: Mapping[str, object]) -> dict[str, str]:
    """Map a model's keys to the names under which a folder has them: all of them begin with one prefix, such as `model.` or `module.`.

    Keys that the folder lacks are left out.
    """
    found = prefix_of(stored, wanted)
    return {key: found + key for key in wanted if found + key in stored}


def prefix_of(stored: Collection[str], wanted: Collection[str]) -> str:
    """Return the prefix with which most of a model's keys are among the names of a folder; the shortest of equals."""
    starts = {""}
    for key in islice(wanted, 4):
        starts |= {name.removesuffix(key) for name in stored if name.endswith(f".{key}")}
    return max(starts, key=lambda start: (sum(start + key in stored for key in wanted), -len(start)))
