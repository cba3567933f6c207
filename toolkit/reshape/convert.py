"""`toolkit checkpoint convert`: a checkpoint as one of whole tensors by the names of the model, which any layout reads.

Its files are those of DDP and FSDP2 (`toolkit.engine.sharded_files`), with each tensor whole: `model.NAME` is a weight as its optimizer steps
it, in fp32 where it keeps such a copy, `optimizer.NAME.exp_avg` a state of it, `optimizer.NAME.step` a count. Plan, state, random states
and the model's configuration are the checkpoint's own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from toolkit.arguments import Positive, checks_arguments
from toolkit.checkpoint.compatibility import inexact
from toolkit.checkpoint.layout import LATEST, tag_of
from toolkit.checkpoint.manifest import hash_files, is_shard, list_files, verify, write_manifest
from toolkit.checkpoint.state import State, saved_plan
from toolkit.engine.sharded_files import ENGINE_FILE, OPTIMIZER, WEIGHT, EngineRecord
from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.adapter import Weights
from toolkit.exporter.writer import Entry, ShardWriter, check_apart, check_free, staged_folder
from toolkit.io import open_plain, sync_folder, write_text
from toolkit.planning.plan import Plan
from toolkit.reshape.saved import SavedState, open_saved
from toolkit.reshape.zero_states import MASTER, STEP

Progress = Callable[[int, int], None]
_MAX_THREADS = 8  # each holds a tensor in memory
_SCRIPTS = frozenset({"zero_to_fp32.py", "zero_to_torch.py"})  # of DeepSpeed, for its own files


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion wrote.

    Args:
        folder: The new checkpoint.
        step: Its step.
        num_tensors: Number of tensors.
        num_bytes: Their size, bytes.
        workers: Threads that each had one tensor in memory.
        largest_bytes: Size of the largest tensor.
    """

    folder: Path
    step: int
    num_tensors: int
    num_bytes: int
    workers: int
    largest_bytes: int


@checks_arguments
def convert(
    checkpoint: str | Path,
    output_dir: str | Path,
    *,
    max_file_bytes: Positive = 5 * 10**9,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a checkpoint of any layout as one without, complete or not at all; no code of the checkpoint runs.

    Host memory: a tensor for each thread, at most eight.

    Args:
        checkpoint: Folder that `tk.save` or `toolkit train` wrote.
        output_dir: Folder of the new checkpoint.
        max_file_bytes: Size above which a new file begins, bytes.
        overwrite: Whether to replace the contents of `output_dir`.
        trust_remote_code: Whether to run model code that the checkpoint brings.
        progress: Called with tensors written and their total.

    Raises:
        CheckpointError: The checkpoint is damaged, has no optimizer state, or one without an exact form; EXPORT_EXISTS.
        RunError: EXPORT_WRITE.
    """
    source, target = Path(checkpoint), Path(output_dir).absolute()
    check_apart(source, target)
    check_free(target, overwrite=overwrite)
    manifest = verify(source)
    state, plan = State.load(source), saved_plan(source)
    _check_exact(source, plan)
    saved = open_saved(source, plan, state, trust_remote_code=trust_remote_code)

    def copy_rest(folder: Path) -> None:
        for name in manifest:
            if not is_shard(name) and name not in _SCRIPTS:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with open_plain(source, name) as content, (folder / name).open("wb") as copy:
                    shutil.copyfileobj(content, copy)

    return write_whole(
        saved,
        plan,
        state.step,
        target,
        write_rest=copy_rest,
        max_file_bytes=max_file_bytes,
        overwrite=overwrite,
        progress=progress,
    )


def write_whole(
    saved: SavedState,
    plan: Plan,
    step: int,
    target: Path,
    *,
    write_rest: Callable[[Path], None],
    max_file_bytes: int,
    overwrite: bool,
    progress: Progress | None,
) -> Converted:
    """Write a state as a complete checkpoint of whole tensors, or leave nothing.

    Args:
        saved: The state.
        plan: Plan of the run that has it.
        step: Its optimizer step.
        target: Folder of the checkpoint.
        write_rest: Writes all but the engine's files, `latest` and the manifest into a folder.
        max_file_bytes: Size above which a new file begins, bytes.
        overwrite: Whether to replace the contents of `target`.
        progress: Called with tensors written and their total.
    """
    tensors = sorted(_tensors(saved), key=lambda tensor: tensor.entry.name)  # the same files from every layout
    workers = min(_MAX_THREADS, os.cpu_count() or 1)
    with staged_folder(target, overwrite=overwrite) as folder:
        tag_dir = folder / tag_of(step)
        tag_dir.mkdir()
        write_rest(folder)
        entries = [tensor.entry for tensor in tensors]
        with ShardWriter(tag_dir, entries, max_file_bytes) as writer, ThreadPoolExecutor(workers) as pool:

            def write(tensor: _Tensor) -> None:
                writer.write(tensor.entry.name, tensor.read())

            try:
                for done, _ in enumerate(pool.map(write, tensors), start=1):
                    if progress is not None:
                        progress(done, len(tensors))
            finally:
                pool.shutdown(cancel_futures=True)
        write_text(tag_dir / ENGINE_FILE, _record(saved, plan).model_dump_json(indent=2), sync=True)
        write_text(folder / LATEST, tag_of(step), sync=True)
        write_manifest(folder, hash_files(folder, list_files(folder), sync=True))
        for made in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            sync_folder(made)
    return Converted(
        folder=target,
        step=step,
        num_tensors=len(tensors),
        num_bytes=sum(entry.num_bytes for entry in entries),
        workers=workers,
        largest_bytes=max((entry.num_bytes for entry in entries), default=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor to write, and where its values come from."""

    entry: Entry
    weights: Weights | None
    name: str
    value: float = 0.0

    def read(self) -> Tensor:
        if self.weights is None:
            return torch.tensor(self.value)
        return self.weights.read(self.name, self.entry.dtype).contiguous()


def _tensors(saved: SavedState) -> Iterator[_Tensor]:
    """Yield what the new checkpoint has: of weights that share a tensor the first name alone."""
    masters, whole = saved.parts[MASTER].tensors, saved.opened.weights
    trained = [name for name in masters if not _is_copy(saved, name)]
    for name in trained:
        yield _taken(saved.parts[MASTER], name, f"{WEIGHT}{name}")
        for kind, weights in saved.parts.items():
            if kind != MASTER and name in weights.tensors:
                yield _taken(weights, name, f"{OPTIMIZER}{name}.{kind}")
        if name in saved.steps:
            entry = Entry(name=f"{OPTIMIZER}{name}.{STEP}", shape=(), dtype=torch.float32)
            yield _Tensor(entry=entry, weights=None, name=name, value=float(saved.steps[name]))
    for name, stored in whole.tensors.items():
        if name not in masters and stored.owner == name:
            yield _taken(whole, name, f"{WEIGHT}{name}")


def _is_copy(saved: SavedState, name: str) -> bool:
    """Return whether a weight is a stage's copy of a tied one."""
    return saved.opened.tied.get(name) in saved.parts[MASTER].tensors


def _taken(weights: Weights, name: str, key: str) -> _Tensor:
    stored = weights.tensors[name]
    return _Tensor(entry=Entry(name=key, shape=stored.shape, dtype=stored.dtype), weights=weights, name=name)


def _record(saved: SavedState, plan: Plan) -> EngineRecord:
    kinds = {kind for kind in saved.parts if kind != MASTER} | ({STEP} if saved.steps else set())
    return EngineRecord(
        scheduler_epoch=saved.schedule_steps,
        optimizer_state=tuple(sorted(kinds)),
        dtype=plan.settings.dtype,
        shared={name: stored.owner for name, stored in saved.opened.weights.tensors.items() if stored.owner != name},
        skipped_steps=saved.skipped_steps,
        loss_scale=saved.loss_scale,
    )


def _check_exact(folder: Path, plan: Plan) -> None:
    """Refuse a state that no other layout could take over.

    Raises:
        CheckpointError: CHECKPOINT_WEIGHTS_ONLY, CHECKPOINT_LAYOUT.
    """
    if plan.job.train.save_only_model:
        raise CheckpointError.of(
            code="CHECKPOINT_WEIGHTS_ONLY",
            key=str(folder),
            message=f"{folder} was saved with save_only_model=true: it has no optimizer state to convert",
            fix=f"Export it: `toolkit export {folder}`",
        )
    reasons = inexact(plan)
    if reasons:
        raise CheckpointError(
            *(
                Problem(
                    code="CHECKPOINT_LAYOUT",
                    key=str(folder),
                    message=f"{folder} cannot be converted exactly: {why}",
                    fix=f"Resume it with its own layout, or export it (`toolkit export {folder}`)",
                )
                for why in reasons
            )
        )
