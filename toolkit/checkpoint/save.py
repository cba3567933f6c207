"""Saving of a checkpoint: written to a partial folder, then published by one rename, so that it is complete or absent."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.arguments import checks_arguments
from toolkit.checkpoint.disk import disk_errors, disk_full
from toolkit.checkpoint.files import Files
from toolkit.checkpoint.fingerprint import Source, Sources, identify
from toolkit.checkpoint.host_copy import HostCopy
from toolkit.checkpoint.layout import LATEST, MANIFEST, MODEL, PLAN, RANDOM, STATE, is_tag, step_of, tag_of
from toolkit.checkpoint.nvme_state import finish_swapped
from toolkit.checkpoint.publish import Unpublished
from toolkit.checkpoint.random_state import save_random_state
from toolkit.checkpoint.reference_logits import record_probe
from toolkit.checkpoint.shared import check_shared
from toolkit.checkpoint.state import State
from toolkit.data.formats import TransformersTokenizer
from toolkit.distributed.deepspeed_private import count_parameters, saving_files_by, saving_weights_alone
from toolkit.engine.run import Run
from toolkit.errors import PlanError, RunError
from toolkit.io import make_folder
from toolkit.modeling.first_rank import agree
from toolkit.planning.state_bytes import copied_bytes, leaves_frozen_out, written_bytes
from toolkit.units import format_bytes
from toolkit.version import installed_version


@checks_arguments
def save(
    run: Run,
    path: str | Path,
    *,
    tokenizer: TransformersTokenizer | None = None,
    probe: bool = False,
    sources: Sources | None = None,
) -> Path:
    """Save a run so that it resumes exactly, or leave nothing under `path`; with `train.save_only_model` weights alone.

    Args:
        run: The run; all ranks call this together.
        path: Folder of the checkpoint, on a file system that all ranks share. An empty folder or an earlier checkpoint is
            replaced when the new one is complete; a file, or a folder that holds anything else, is refused.
        tokenizer: Tokenizer to save with the model's configuration, for the export.
        probe: Whether to save logits of the live model to compare an export with; one forward pass.
        sources: On rank 0: sources of the run, from `toolkit.checkpoint.fingerprint.identify`; determined now when left out,
            which reads all of the data files.

    Returns:
        The checkpoint folder. With `train.save_async` it is complete after a later step, at the latest when the run is closed.

    Collectives:
        Barriers; one gather of the manifest's entries; the engine's own.

    Raises:
        PlanError: OUTPUT_EXISTS, OUTPUT_NOT_SHARED.
        RunError: DISK_FULL before anything is written when the space is too small, or while writing; whatever was
            under `path` stays. With `train.save_async` the step at which that is known raises it.
    """
    begin_save(run, path, tokenizer=tokenizer, probe=probe, sources=sources, then=lambda folder: None)
    return Path(path)


def begin_save(
    run: Run,
    path: str | Path,
    *,
    tokenizer: TransformersTokenizer | None,
    probe: bool,
    sources: Sources | None,
    then: Callable[[Path], None],
) -> Files:
    """Save a run as `save` does, and call `then` on every rank when the checkpoint is complete.

    Returns:
        The files of this rank's engine, which with `train.save_async` are still being written.
    """
    run.finish_saving()
    target = Path(path)
    partial = target.parent / f".{target.name}.partial"
    _prepare(run, target, partial)
    files = Files(partial, copy=_copy_of(run), num_ranks=run.plan.job.cluster.gpus_per_node)
    with disk_errors(target):
        _save_engine(run, partial, files)
        if run.plan.profile.optimizer == "nvme":
            finish_swapped(run.engine, partial / tag_of(run.step_count), rank=run.world.rank)
        if not run.plan.job.train.save_only_model:
            save_random_state(partial, rank=run.world.rank, stream=run.stream_position)
        if run.world.is_main:
            _write_plan(
                run,
                partial,
                identify(run.plan.job) if sources is None else {key: tuple(value) for key, value in sources.items()},
            )
            _write_model_files(run, partial / MODEL, tokenizer)
        if probe:
            record_probe(run, partial)

    def complete(folder: Path) -> None:
        then(folder)
        run.call_hooks("save", folder)

    unpublished = Unpublished(run.world, files, partial=partial, target=target, then=complete)
    if run.plan.job.train.save_async:
        files.start()
        run.save_behind(unpublished)
    else:
        unpublished.publish()
    return files


def prepare_copy(run: Run) -> None:
    """Begin to prepare the host memory of `train.save_async`: the first save then takes no longer than the others."""
    if run.plan.job.train.save_async and run.host_copy is None:
        run.host_copy = HostCopy(run.world.device)
        total, trainable = count_parameters(run.model)
        coordinate = run.world.coordinate
        first, others = copied_bytes(run.plan, total=total, trainable=trainable, num_replicas=run.world.grid.dp)
        run.host_copy.prepare(others if coordinate.dp else first)


def _copy_of(run: Run) -> HostCopy | None:
    prepare_copy(run)
    copy: HostCopy | None = run.host_copy
    if copy is not None:
        copy.begin()
    return copy


def _save_engine(run: Run, partial: Path, files: Files) -> None:
    """Make the engine write its files by `files`."""
    options: dict[str, Any] = {
        "tag": tag_of(run.step_count),
        "exclude_frozen_parameters": leaves_frozen_out(run.plan),
    }
    if run.plan.job.parallel.strategy != "zero":
        run.engine.save_checkpoint(str(partial), **options, write=files.save_tensors)
        return
    alone = saving_weights_alone(run.engine) if run.plan.job.train.save_only_model else nullcontext()
    with saving_files_by(run.engine, files.save), alone:
        run.engine.save_checkpoint(str(partial), **options)


def foreseen_bytes(run: Run) -> int:
    """Estimate the size of a checkpoint over all ranks, in bytes.

    Collectives:
        One all-reduce of two numbers: stages have different layers.
    """
    counts = torch.tensor(count_parameters(run.model), device=run.world.device)
    dist.all_reduce(counts)
    total, trainable = (counts // run.world.grid.dp).tolist()
    return written_bytes(run.plan, total=total, trainable=trainable)


def _prepare(run: Run, target: Path, partial: Path) -> None:
    """Create an empty partial folder, or raise the same error on every rank."""
    needed = foreseen_bytes(run)

    def on_first_rank() -> None:
        _check_replaceable(target)
        _check_state(run)
        shutil.rmtree(partial, ignore_errors=True)
        with disk_errors(target):
            make_folder(partial.parent)
            (partial / RANDOM).mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < needed:
            shutil.rmtree(partial, ignore_errors=True)
            raise disk_full(target, f"it needs about {format_bytes(needed)}, and {format_bytes(free)} are free")

    agree(on_first_rank if run.world.is_main else None, None)
    try:
        check_shared(target.parent, partial / RANDOM, run.world)
    except PlanError:
        if run.world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_state(run: Run) -> None:
    """Refuse values of hooks that a checkpoint cannot hold, before anything is written."""
    try:
        json.dumps(run.state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RunError.of(
            code="RUN_STATE",
            key="run.state",
            message=f"run.state cannot be saved with a checkpoint: {error}",
            fix="Keep finite numbers, text, true or false, null, lists and mappings of these with text as keys",
        ) from None


def _check_replaceable(target: Path) -> None:
    """Refuse a path where something else than a checkpoint is: it would be deleted.

    Raises:
        PlanError: OUTPUT_EXISTS.
    """
    if not os.path.lexists(target):
        return
    if target.is_dir():
        names = {entry.name for entry in target.iterdir()}
        complete = {MANIFEST, STATE} <= names or (step_of(target) is not None and MANIFEST in names)
        has_tag = any(map(is_tag, names))
        if not names or complete or (has_tag and names & {MANIFEST, PLAN, RANDOM}):  # damaged since
            return
        holds = "another program's checkpoint" if has_tag else "a folder without a checkpoint"
        what = f"is {holds}, with {', '.join(sorted(names)[:3])}{' and more' if len(names) > 3 else ''}"
    else:
        what = "is not a folder"
    raise PlanError.of(
        code="OUTPUT_EXISTS",
        key="path",
        message=f"path={target} {what}: a checkpoint saved there would delete it",
        fix="Name a new folder, or an earlier checkpoint to replace, or delete it first",
    )


def _write_plan(run: Run, partial: Path, sources: dict[str, tuple[Source, ...]]) -> None:
    settings = run.plan.settings
    (partial / PLAN).write_text(run.plan.to_json(), encoding="utf-8")
    State(
        step=run.step_count,
        num_steps=run.num_steps,
        zero_stage=settings.zero_stage,
        world_size=run.world.size,
        train_batch_size=settings.batch.train,
        saved_at=time.time(),
        versions={name: version(name) for name in ("torch", "deepspeed", "transformers")}
        | {"toolkit": installed_version()},
        sources=sources,
        hooks=run.state,
    ).save(partial)
    assert (partial / LATEST).exists(), "the engine names its tag in `latest`"


def _write_model_files(run: Run, folder: Path, tokenizer: Any) -> None:
    model: Any = run.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.config.save_pretrained(folder)
    if getattr(base, "generation_config", None) is not None:
        generation_config(base.generation_config, tokenizer, fresh=run.plan.settings.init == "random").save_pretrained(
            folder
        )
    for adapter in getattr(model, "peft_config", {}).values():
        adapter.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def generation_config(own: Any, tokenizer: Any, *, fresh: bool) -> Any:
    """Return a model's generation config with the special tokens of the tokenizer that it was trained with.

    Training learns the tokenizer's end-of-sequence token, so generation must stop there; the tokens at which a pretrained model stopped
    before are kept too, as in transformers trainer.py _align_special_tokens.

    Args:
        own: Generation config of the model; not modified.
        tokenizer: Tokenizer; None changes nothing.
        fresh: Whether the weights were randomly initialized, so that no other token has a meaning.
    """
    aligned = copy.deepcopy(own)
    if tokenizer is None:
        return aligned
    end = tokenizer.eos_token_id
    if end is not None:
        known = [] if fresh or own.eos_token_id is None else own.eos_token_id
        others = [token for token in (known if isinstance(known, list) else [known]) if token != end]
        aligned.eos_token_id = [end, *others] if others else end
    for name in ("bos_token_id", "pad_token_id"):
        value = getattr(tokenizer, name)
        if value is not None:
            setattr(aligned, name, value)
        elif fresh:
            setattr(aligned, name, None)
    return aligned
