"""What another program's checkpoint is, and what can load it; whether its files can be read, as far as that shows without a manifest."""

from __future__ import annotations

import math
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoint.pickles import read_pickle, read_tensor
from toolkit.errors import CheckpointError, Problem, raise_all
from toolkit.exporter.engine_files import check_model_ranks, model_files, optimizer_files
from toolkit.exporter.other_folders import INDEX, OPTIMIZER_FOLDER, OtherFolder
from toolkit.exporter.other_readers import MOMENTS, DistributedCheckpoint, StatesOfOptimizer, UniversalCheckpoint
from toolkit.exporter.zero_reader import StoredTensor, ZeroCheckpoint, as_damage
from toolkit.io import open_plain, read_plain_object
from toolkit.topology.grid import Grid

_STEP = "step"
_TRAINER_STATE = "trainer_state.json"
_LIGHTNING = "pytorch-lightning_version"
_RANK = re.compile(r"__(\d+)_\d+\.distcp")
_OF_OPTIMIZER = re.compile(rf"optim.*|.*\.({'|'.join((*MOMENTS, _STEP))})")
_ITS_OWN = {
    "universal": "DeepSpeed's load_checkpoint with `checkpoint.load_universal`, on any ranks",
    "distributed": "torch.distributed.checkpoint, on any ranks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What a folder says of itself.

    Args:
        weights: Its weights; none of a format whose ranks' files are not joined here.
        step: Optimizer steps done.
        world_size: Ranks that wrote it.
        zero_stage: Stage of ZeRO.
        versions: Versions of what wrote it.
        has_optimizer: Whether it has the optimizer's state.
        has_moments: Whether that names weights, and has AdamW's moments.
        no_join: Why its weights are not joined here.
    """

    weights: Mapping[str, StoredTensor] = field(default_factory=dict)
    step: int | None = None
    world_size: int | None = None
    zero_stage: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    has_optimizer: bool = False
    has_moments: bool = False
    no_join: str | None = None

    @property
    def is_adapted(self) -> bool:
        """Whether the weights are those of a LoRA."""
        return any(".lora_" in name for name in self.weights)


def inspect_other(other: OtherFolder) -> dict[str, Any]:
    """Describe a checkpoint of another program by the keys of `toolkit.checkpoint.inspection.inspect`; what it does not say is None.

    Raises:
        CheckpointError: CHECKPOINT_UNSAFE, EXPORT_DAMAGED, EXPORT_INCOMPLETE, EXPORT_NO_CHECKPOINT.
    """
    facts = {"deepspeed": _of_deepspeed, "universal": _of_universal, "distributed": _of_distributed}[other.format](
        other
    )
    own = [stored for name, stored in facts.weights.items() if stored.owner == name]
    dtypes = Counter[torch.dtype]()
    for stored in own:
        dtypes[stored.dtype] += math.prod(stored.shape)
    step = facts.step or _trainer_step(other.root) or other.step
    return {
        "checkpoint": str(other.root),
        "format": other.format,
        "tag": other.weights.name,
        "step": step,
        "strategy": "zero" if other.format != "distributed" else None,
        "zero_stage": facts.zero_stage,
        "world_size": facts.world_size,
        "parameters": sum(dtypes.values()) or None,
        "dtype": str(dtypes.most_common(1)[0][0]).removeprefix("torch.") if dtypes else None,
        "method": ("lora" if facts.is_adapted else "full") if own else None,
        "bytes": sum(path.stat().st_size for path in _files(other)),
        "versions": dict(facts.versions),
        "has_optimizer": facts.has_optimizer,
        "loads": list(_loads(other, facts, step)),
    }


def _loads(other: OtherFolder, facts: _Facts, step: int | None) -> Iterator[str]:
    """Yield what can load it."""
    model = "" if other.model_dir is not None else " --model MODEL"
    if facts.no_join is not None:
        yield f"not `toolkit export`: it has {facts.no_join}"
    elif facts.is_adapted and other.adapter_dir is None:
        yield f"`toolkit export {other.root}{model}`, once its adapter_config.json is in that folder"
    else:
        yield f"`toolkit export {other.root}{model}`, whose folder transformers{' and peft' * facts.is_adapted} load"
    if facts.no_join is None and facts.has_moments and not facts.is_adapted:
        number = "" if step else " --step N"
        yield f"`toolkit checkpoint adopt {other.root} OUT --job JOB{number}`, for a job of optimizer adamw"
    else:
        reason = (
            "an adapter"
            if facts.is_adapted
            else (facts.no_join or "no optimizer state that names the weights and has AdamW's moments")
        )
        yield f"not `toolkit checkpoint adopt`: it has {reason}"
    if other.format in _ITS_OWN:
        yield _ITS_OWN[other.format]
    else:
        stage = "" if facts.zero_stage is None else f" with stage {facts.zero_stage}"
        yield f"DeepSpeed's load_checkpoint, on {facts.world_size} rank(s){stage}"


def verify_other(other: OtherFolder, *, deep: bool) -> list[Path]:
    """Read the pickles and indexes of all files of weights and optimizer by the one reader, and check that no rank's is missing.

    Args:
        other: The folder.
        deep: Whether to read every byte, and compare each tensor with its CRC-32 in the archive.

    Returns:
        The files.

    Raises:
        CheckpointError: CHECKPOINT_UNSAFE, EXPORT_DAMAGED, EXPORT_INCOMPLETE, EXPORT_NO_CHECKPOINT.
    """
    if other.format == "distributed":
        for folder in _folders(other):
            held = DistributedCheckpoint(folder)
            held.check_files()
            for name, stored in held.tensors.items() if deep else ():
                held.read(name, stored.dtype)
        return _files(other)
    found = _files(other)
    names = [path.relative_to(other.weights).as_posix() for path in found if path.suffix == ".pt"]
    problems = []
    for name in names:
        try:
            if deep:
                _compare_crc(other.weights, name)
            if name.count("/") < 2:
                read_pickle(other.weights, name, mmap=True, stand_ins=True)
            else:  # a universal checkpoint's zero/NAME/KIND.pt
                read_tensor(other.weights, name)
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            problems.append(_damaged(other.weights / name, str(error)))
    raise_all(CheckpointError, problems)
    if other.format == "universal":
        raise_all(CheckpointError, _missing_states(other.weights))
        return found
    _, tensor_ranks, layers = _engine_state(other.weights)
    if not layers:
        grid = Grid(tp=tensor_ranks)
        for mp_rank in range(tensor_ranks):
            ZeroCheckpoint(other.weights, mp_rank, grid).optimizer_states()
    return found


def _compare_crc(folder: Path, name: str) -> None:
    with open_plain(folder, name) as file, zipfile.ZipFile(file) as archive:
        bad = archive.testzip()
        if bad is not None:
            raise ValueError(f"has another CRC-32 of {bad}")


def _missing_states(tag: Path) -> Iterator[Problem]:
    """Yield weights that have one of AdamW's moments and not the other, or no weight, or in another size."""
    whole = UniversalCheckpoint(tag).tensors
    first, second = (UniversalCheckpoint(tag, f"{kind}.pt").tensors for kind in MOMENTS)
    for name in sorted(first.keys() | second.keys()):
        sizes = [math.prod(kind[name].shape) if name in kind else None for kind in (whole, first, second)]
        if len({*sizes}) > 1:
            shown = ", ".join("none" if size is None else f"{size} elements" for size in sizes)
            yield _damaged(tag / "zero" / name, f"has {shown} of fp32, exp_avg and exp_avg_sq")


def _engine_state(tag: Path) -> tuple[dict[str, Any], int, list[str]]:
    """Return what the first rank saved beside the module, the number of model-parallel ranks, and files of layers."""
    files = model_files(tag, mp_rank=0)
    layers = sorted(path.name for path in tag.glob("layer_*.pt"))
    if not files:
        check_model_ranks(tag, Grid())
    try:
        state = read_pickle(tag, files[0].name, mmap=True, stand_ins=True)
    except ValueError as error:
        raise CheckpointError(_damaged(tag / files[0].name, str(error))) from None
    with as_damage(tag):
        return state, max(1, int(state.get("mp_world_size") or 1)), layers


def _of_deepspeed(other: OtherFolder) -> _Facts:
    state, tensor_ranks, layers = _engine_state(other.weights)
    no_join = "files of DeepSpeed's own pipeline" if layers else "tensor ranks of another program" * (tensor_ranks > 1)
    buffers = frozenset(state.get("buffer_names") or ())
    weights: Mapping[str, StoredTensor] = {}
    if not no_join:
        weights = {key: value for key, value in ZeroCheckpoint(other.weights).tensors.items() if key not in buffers}
    has_files = bool(optimizer_files(other.weights, mp_rank=0))
    with as_damage(other.weights):
        return _Facts(
            weights=weights,
            step=int(state.get("global_steps") or 0) or None,
            world_size=int(state["dp_world_size"]) * tensor_ranks,
            zero_stage=_stage(state, is_partitioned=model_files(other.weights, mp_rank=0)[0].name.startswith("zero_")),
            versions=_versions(state),
            has_optimizer=has_files or bool(state.get("optimizer")),
            has_moments=has_files,
            no_join=no_join or None,
        )


def _of_universal(other: OtherFolder) -> _Facts:
    whole = UniversalCheckpoint(other.weights)
    moments = [UniversalCheckpoint(other.weights, f"{kind}.pt").tensors for kind in MOMENTS]
    state: dict[str, Any] = {}
    if model_files(other.weights, mp_rank=0):  # the converter copies it
        state, *_ = _engine_state(other.weights)
    with as_damage(other.weights):
        return _Facts(
            weights={name: stored for name, stored in whole.tensors.items() if name not in whole.copies},
            step=int(state.get("global_steps") or 0) or None,
            world_size=int(state["dp_world_size"]) if "dp_world_size" in state else None,
            zero_stage=_stage(state, is_partitioned=False),
            versions=_versions(state),
            has_optimizer=any(moments),
            has_moments=all(moments),
        )


def _of_distributed(other: OtherFolder) -> _Facts:
    *_, held = parts = [DistributedCheckpoint(folder) for folder in _folders(other)]
    ranks = {found[1] for name in parts[0].sizes if (found := _RANK.fullmatch(Path(name).name))}
    counts = [name for name, stored in held.tensors.items() if name.endswith(f".{_STEP}") and not stored.shape]
    return _Facts(
        weights={name: stored for name, stored in parts[0].tensors.items() if not _OF_OPTIMIZER.fullmatch(name)},
        step=int(held.read(counts[0], torch.float32)) if counts else None,
        world_size=len(ranks) or None,
        has_optimizer=any(map(_OF_OPTIMIZER.fullmatch, held.tensors)),
        has_moments=all(StatesOfOptimizer(held, kind).tensors for kind in MOMENTS),
    )


def _stage(state: Mapping[str, Any], *, is_partitioned: bool) -> int | None:
    config = state.get("ds_config")
    found = (config.get("zero_optimization") or {}).get("stage", 0) if isinstance(config, dict) else None
    return found if isinstance(found, int) else 3 if is_partitioned else None


def _versions(state: Mapping[str, Any]) -> dict[str, str]:
    found = {"deepspeed": state.get("ds_version"), "lightning": state.get(_LIGHTNING)}
    return {name: version for name, version in found.items() if isinstance(version, str)}


def _trainer_step(root: Path) -> int | None:
    try:
        step = read_plain_object(root, _TRAINER_STATE).get("global_step")
    except (OSError, ValueError):
        return None
    return step if isinstance(step, int) else None


def _folders(other: OtherFolder) -> Sequence[Path]:
    """Return the folder of the weights, and that of the optimizer where FSDP has one beside it."""
    beside = other.weights.parent / OPTIMIZER_FOLDER
    is_beside = other.format == "distributed" and (beside / INDEX).is_file()
    return (other.weights, beside) if is_beside else (other.weights,)


def _files(other: OtherFolder) -> list[Path]:
    """Return the files of weights and optimizer."""
    found = (path for folder in _folders(other) for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if path.suffix in (".pt", ".distcp") or path.name == INDEX)


def _damaged(path: Path, what: str) -> Problem:
    return Problem(
        code="EXPORT_DAMAGED", key=str(path), message=f"{path} {what}", fix="Copy it again from where it was made"
    )
