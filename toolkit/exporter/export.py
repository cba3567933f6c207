"""Export of an engine's checkpoint to a folder that `from_pretrained` loads: HF names, safetensors, config, tokenizer."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from toolkit.checkpoint.archives import ReadChecks
from toolkit.checkpoint.layout import LATEST
from toolkit.config.job import ExpertSharding
from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.adapter import is_adapted, read_adapter_config
from toolkit.exporter.contents import Contents, Kind, Opened, choose_contents
from toolkit.exporter.engine_files import read_tag
from toolkit.exporter.model_folder import adapted_model, copy_companions, empty_model
from toolkit.exporter.opening import open_checkpoint
from toolkit.exporter.other_folders import OtherFolder
from toolkit.exporter.readback import verify_written
from toolkit.exporter.writer import Entry, ShardWriter, check_apart, staged_folder
from toolkit.introspect import tied_keys
from toolkit.modeling.conversion import revert
from toolkit.modeling.weights import full_shapes
from toolkit.topology.grid import Grid

Progress = Callable[[int, int], None]
_ONE_RANK = Grid()
# Reading, conversion and writing of a tensor let other threads run. Each holds a tensor in memory.
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export wrote.

    Args:
        output_dir: Folder of the export.
        kind: Full model, adapter alone, or adapter merged into its base.
        files: Weight files, in order.
        num_tensors: Number of tensors written; tied ones count once.
        num_bytes: Total size, bytes.
        dtype: Dtype of the token embedding, as in `config.json`; for an adapter that of its first matrix.
        untied: Weights that the config tied, but that training made differ; written separately, and untied in the config.
        verified: Whether names, shapes and the ends of all values were read back.
    """

    output_dir: Path
    kind: Kind
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    dtype: str
    untied: tuple[str, ...]
    verified: bool


def export_checkpoint(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    *,
    tag_dir: Path | None = None,
    model_dir: Path | None = None,
    peft_dir: Path | None = None,
    base_dir: Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size_bytes: int = 5 * 10**9,
    merge_adapter: bool = False,
    packed: bool = False,
    verify: bool = True,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    grid: Grid = _ONE_RANK,
    experts: ExpertSharding = "sliced",
    checks: ReadChecks | None = None,
    other: OtherFolder | None = None,
    progress: Progress | None = None,
    inspect: Callable[[Path, ExportReport], None] | None = None,
) -> ExportReport:
    """Write a checkpoint of ZeRO 0 to 3, DDP or FSDP2 as Hugging Face safetensors, on one CPU process.

    Host memory: for each of a few threads a group of tensors that are converted together (mostly one matrix; of a mixture of experts,
    one layer's stacked matrix), and one rank's shard of one, whatever the size of the model or of a shard.

    Args:
        checkpoint_dir: A `checkpoint-STEP` folder.
        output_dir: Folder of the export; created complete at the end, or not at all.
        tag_dir: Folder of the engine's files; `checkpoint_dir/TAG`, where the file `latest` names TAG, when left out.
        model_dir: Folder with config.json and the tokenizer; `checkpoint_dir/model` when left out.
        peft_dir: Folder with adapter_config.json, for LoRA; `model_dir` when left out.
        base_dir: Folder of the base model's safetensors, to merge into when the checkpoint leaves frozen weights out.
        dtype: Dtype of the floating-point tensors; the training dtype when left out. fp32 reads the master weights.
        max_shard_size_bytes: Size above which a new file begins, bytes.
        merge_adapter: Whether to write the base with the adapter merged into it, not the adapter.
        packed: Whether the adapter was trained over linear layers in NF4, as which they are merged.
        verify: Whether to read back every name and shape, as `from_pretrained` would match them, and the ends of all values.
        overwrite: Whether to replace the contents of `output_dir`.
        trust_remote_code: Whether to run model code in `model_dir`.
        grid: Grid of the run, whose stages and tensor shards are joined. Its replicas are identical.
        experts: How its tensor ranks shared stacked experts (`parallel.experts`).
        checks: Checks of the tensors that are read of archives.
        other: What another program left in `checkpoint_dir`, which is read in its format.
        progress: Called with tensors written and total tensors.
        inspect: Called with the finished folder before it takes its place; if it raises, nothing is left.
    Raises:
        CheckpointError: EXPORT_LATEST, EXPORT_CONFIG, EXPORT_REMOTE_CODE, EXPORT_KEYS, EXPORT_SHAPE, EXPORT_NOT_ADAPTED, EXPORT_EXISTS,
            EXPORT_VERIFY, and those of `ZeroCheckpoint`, `JoinedCheckpoint`, `UnitedCheckpoint` and `toolkit.exporter.adapter`.
        RunError: EXPORT_WRITE.
    """
    source = Path(checkpoint_dir)
    target = Path(output_dir).absolute()
    check_apart(source, target)
    opened = open_folder(
        tag_dir or _latest(source),
        model_dir or source / "model",
        peft_dir,
        trust_remote_code=trust_remote_code,
        grid=grid,
        experts=experts,
        checks=checks,
        other=other,
    )
    if merge_adapter and opened.peft_model is None:
        raise CheckpointError(_not_adapted(source))
    with staged_folder(target, overwrite=overwrite) as folder:
        plan = choose_contents(opened, dtype, base_dir=base_dir, merge_adapter=merge_adapter, packed=packed)
        writer = _write(plan, opened.model, folder, max_shard_size_bytes=max_shard_size_bytes, progress=progress)
        architecture = type(opened.model).__name__
        copy_companions(opened.model_dir, folder, plan, architecture=architecture, known_only=other is not None)
        if verify:
            loaded = opened.model
            if plan.untied:
                loaded = empty_model(
                    folder, trust_remote_code=trust_remote_code, num_tensors=len(opened.weights.tensors)
                )
            verify_written(folder, writer, loaded, adapter_of=opened.peft_model if plan.kind == "adapter" else None)
        report = ExportReport(
            output_dir=target,
            kind=plan.kind,
            files=tuple(sorted(set(writer.file_of.values()))),
            num_tensors=len(writer.entries),
            num_bytes=writer.num_bytes,
            dtype=plan.dtype_name,
            untied=plan.untied,
            verified=verify,
        )
        if inspect is not None:
            inspect(folder, report)
    return report


def open_folder(
    tag_dir: Path,
    model_dir: Path,
    peft_dir: Path | None,
    *,
    trust_remote_code: bool,
    grid: Grid = _ONE_RANK,
    experts: ExpertSharding = "sliced",
    checks: ReadChecks | None = None,
    other: OtherFolder | None,
) -> Opened:
    """Open a tag's files, or what another program left; arguments and errors are those of `export_checkpoint`."""
    if other is not None and other.format != "deepspeed":
        return _open_other(other, model_dir, peft_dir, trust_remote_code=trust_remote_code)
    return open_checkpoint(
        tag_dir,
        model_dir,
        peft_dir,
        trust_remote_code=trust_remote_code,
        grid=grid,
        experts=experts,
        checks=checks,
    )


def _open_other(other: OtherFolder, model_dir: Path, peft_dir: Path | None, *, trust_remote_code: bool) -> Opened:
    from toolkit.exporter.other_readers import DistributedCheckpoint, OtherWeights, UniversalCheckpoint

    read = UniversalCheckpoint if other.format == "universal" else DistributedCheckpoint
    weights: DistributedCheckpoint | UniversalCheckpoint = read(other.weights)

    def described() -> PreTrainedModel:
        return empty_model(model_dir, trust_remote_code=trust_remote_code, num_tensors=len(weights.tensors))

    model = described()
    lora = read_adapter_config(peft_dir or model_dir) if is_adapted(weights) else {}
    peft_model = adapted_model(described(), lora) if lora else None
    wanted = full_shapes(model) if peft_model is None else peft_model.state_dict()
    tied = tied_keys(model) if peft_model is None else {}
    trained = getattr(model.config, "dtype", None)
    own = OtherWeights(weights, wanted, tied, trained if isinstance(trained, torch.dtype) else None)
    return Opened(weights=own, model=model, model_dir=model_dir, lora=lora, peft_model=peft_model)


def _write(
    plan: Contents, model: PreTrainedModel, folder: Path, *, max_shard_size_bytes: int, progress: Progress | None
) -> ShardWriter:
    entries: list[Entry] = []
    for group in plan.groups:
        metas = _reverted(plan, model, {key: plan.meta(key) for key in group})
        entries.extend(Entry(name=name, shape=tuple(value.shape), dtype=value.dtype) for name, value in metas.items())
    # peft reads one file only
    limit = max_shard_size_bytes if plan.kind != "adapter" else sum(entry.num_bytes for entry in entries) + 1
    stem = "adapter_model" if plan.kind == "adapter" else "model"
    done = 0

    def convert(group: tuple[str, ...]) -> int:
        values = _reverted(plan, model, {key: plan.read(key) for key in group})
        count = len(values)
        while values:
            name = next(iter(values))
            writer.write(name, values.pop(name))
        return count

    workers = min(_MAX_THREADS, os.cpu_count() or 1)
    with ShardWriter(folder, entries, limit, stem) as writer, ThreadPoolExecutor(workers) as pool:
        groups = iter(plan.groups)
        running = deque(pool.submit(convert, group) for group in islice(groups, 2 * workers))
        try:
            while running:
                done += running.popleft().result()
                running.extend(pool.submit(convert, group) for group in islice(groups, 1))
                if progress is not None:
                    progress(done, len(entries))
        finally:
            pool.shutdown(cancel_futures=True)
    return writer


def _reverted(plan: Contents, model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors if plan.kind == "adapter" else revert(model, tensors)


def _latest(checkpoint_dir: Path) -> Path:
    latest = checkpoint_dir / LATEST
    try:
        return checkpoint_dir / read_tag(checkpoint_dir)
    except (OSError, ValueError) as error:
        raise CheckpointError.of(
            code="EXPORT_LATEST",
            key=str(latest),
            message=f"{latest} cannot be read ({error}): saving this checkpoint did not finish, or it is not a "
            "checkpoint",
            fix="Name a checkpoint-STEP folder of output_dir with a file named latest",
            source="deepspeed, runtime/engine.py, DeepSpeedEngine.save_checkpoint",
        ) from error


def _not_adapted(source: Path) -> Problem:
    return Problem(
        code="EXPORT_NOT_ADAPTED",
        key="merge_adapter",
        message=f"merge_adapter=True, but {source} has no LoRA weights",
        fix="Leave merge_adapter out",
    )
