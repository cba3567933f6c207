"""`toolkit checkpoint adopt`: a checkpoint of another program as one of a job, with weights, fp32 copies, moments and counts of steps.

It has the form that `toolkit checkpoint convert` writes, so that the job resumes from it on any ranks and with any strategy.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.arguments import Positive, checks_arguments
from toolkit.checkpoint.fingerprint import identify
from toolkit.checkpoint.layout import MODEL, PLAN, RANDOM
from toolkit.checkpoint.pickles import read_tensor
from toolkit.checkpoint.random_state import save_random_state
from toolkit.checkpoint.state import State
from toolkit.engine.seed import seed_random_state
from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.adapter import Weights
from toolkit.exporter.model_folder import copy_plain, empty_model
from toolkit.exporter.opening import OpenedRanks, open_checkpoint
from toolkit.exporter.other_folders import INDEX, OPTIMIZER_FOLDER, OtherFolder, find_other
from toolkit.exporter.other_readers import (
    MOMENTS,
    DistributedCheckpoint,
    OtherWeights,
    StatesOfOptimizer,
    UniversalCheckpoint,
)
from toolkit.exporter.writer import check_apart
from toolkit.exporter.zero_reader import ZeroCheckpoint, as_damage
from toolkit.introspect import tied_keys
from toolkit.modeling.weights import full_shapes
from toolkit.planning.plan import Plan
from toolkit.reshape.convert import Converted, Progress, write_whole
from toolkit.reshape.saved import SavedState
from toolkit.reshape.zero_states import MASTER, STEP, zero_states
from toolkit.topology.grid import Grid
from toolkit.version import installed_version


@checks_arguments
def adopt(
    folder: str | Path,
    output_dir: str | Path,
    plan: Plan,
    *,
    step: int | None = None,
    max_file_bytes: Positive = 5 * 10**9,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write another program's checkpoint as one of a job; no code of it runs.

    The position in the data is the step: the job's own order of rows, after as many batches of the job.

    Args:
        folder: Folder of DeepSpeed, of Trainer or Accelerate, a universal one, or of torch's distributed checkpoint.
        output_dir: Folder of the new checkpoint.
        plan: Plan of the job, of a whole model and AdamW.
        step: Optimizer steps done, where the folder does not say it.
        max_file_bytes: Size above which a new file begins, bytes.
        overwrite: Whether to replace the contents of `output_dir`.
        progress: Called with tensors written and their total.

    Raises:
        CheckpointError: CHECKPOINT_OTHER_TOOL for what cannot be adopted; EXPORT_EXISTS; and those of `toolkit.exporter`.
        RunError: EXPORT_WRITE.
    """
    other = find_other(Path(folder))
    if other is None:
        raise CheckpointError(
            _refused(
                Path(folder),
                "is no checkpoint of another program",
                "Name a folder that DeepSpeed, Trainer, Accelerate or FSDP saved",
            )
        )
    check_apart(other.root, Path(output_dir).absolute())
    if plan.job.train.method != "full" or plan.job.train.optimizer != "adamw":
        what = f"cannot be adopted by a job of method={plan.job.train.method} and optimizer={plan.job.train.optimizer}"
        raise CheckpointError(
            _refused(other.root, what, "Set train.method to full and train.optimizer to adamw, or export it")
        )
    if plan.model.path is None:
        raise CheckpointError(
            _refused(
                other.root,
                "needs the model's folder, and the job names one of a hub",
                "Set model.name to a local folder with config.json and tokenizer",
            )
        )
    found = read_other(other, plan.model.path)
    if not found.parts:
        fix = "Export its weights, or save it with ZeRO 1 to 3"
        raise CheckpointError(
            _refused(other.root, "has states of an optimizer by number, or none: stage 0 names no weights", fix)
        )
    done = step if step is not None else max(found.steps.values(), default=0) or found.schedule_steps or other.step
    if not done:
        raise CheckpointError(_refused(other.root, "does not say how many steps were done", "Say it: --step N"))
    saved = SavedState(
        opened=found.opened,
        parts=found.parts,
        steps=found.steps or dict.fromkeys(found.parts[MASTER].tensors, done),
        schedule_steps=done,
        skipped_steps=0,
        loss_scale=None,
    )
    _check_states(other, saved)
    return write_whole(
        saved,
        plan,
        done,
        Path(output_dir).absolute(),
        write_rest=_rest(plan, done),
        max_file_bytes=max_file_bytes,
        overwrite=overwrite,
        progress=progress,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a folder has for a whole model.

    Args:
        opened: Its weights.
        parts: Numbers of each trained weight, by kind as in `SavedState`; none where the optimizer's states name no weights.
        steps: Steps that the optimizer has done on each weight, if it says so.
        schedule_steps: Steps that the engine has done, if it says so.
    """

    opened: OpenedRanks
    parts: Mapping[str, Weights]
    steps: Mapping[str, int]
    schedule_steps: int = 0


def read_other(other: OtherFolder, model_dir: Path, *, trust_remote_code: bool = False) -> Found:
    """Open what another program left of a whole model; nothing is read before it is asked for.

    Raises:
        CheckpointError: Those of the readers of `toolkit.exporter`.
    """
    read = {"deepspeed": _from_deepspeed, "universal": _from_universal, "distributed": _from_distributed}[other.format]
    return read(other, model_dir, trust_remote_code)


def _from_deepspeed(other: OtherFolder, model_dir: Path, trust_remote_code: bool) -> Found:
    opened = open_checkpoint(other.weights, model_dir, trust_remote_code=trust_remote_code, grid=Grid())
    (files,) = [rank for rank in opened.ranks if isinstance(rank, ZeroCheckpoint)]
    if not files.optimizer_states():
        return Found(opened=opened, parts={}, steps={})
    states = zero_states(files, [])
    with as_damage(other.weights):
        steps = int(files.engine_state.get("global_steps") or 0)
    parts = {kind: opened.united([part]) for kind, part in states.parts.items()}
    return Found(
        opened=opened,
        parts=parts,
        steps={k.removeprefix(opened.prefix): v for k, v in states.steps.items() if v},
        schedule_steps=steps,
    )


def _from_universal(other: OtherFolder, model_dir: Path, trust_remote_code: bool) -> Found:
    whole = UniversalCheckpoint(other.weights)
    steps = {}
    for path in sorted(other.weights.glob(f"zero/*/{STEP}.pt")):
        name = path.parent.name
        try:
            steps[name] = int(read_tensor(other.weights, f"zero/{name}/{STEP}.pt"))
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(
                _refused(other.root, f"has no count of steps of {name}: {error}", "Copy it again")
            ) from None
    states = {kind: UniversalCheckpoint(other.weights, f"{kind}.pt") for kind in MOMENTS}
    return _by_model(other, model_dir, whole, states, steps, trust_remote_code)


def _from_distributed(other: OtherFolder, model_dir: Path, trust_remote_code: bool) -> Found:
    whole = DistributedCheckpoint(other.weights)
    beside = other.weights.parent / OPTIMIZER_FOLDER
    held = DistributedCheckpoint(beside) if (beside / INDEX).is_file() else whole
    counts = StatesOfOptimizer(held, STEP)
    steps = {name: int(counts.read(name, torch.float32)) for name, stored in counts.tensors.items() if not stored.shape}
    states = {kind: StatesOfOptimizer(held, kind) for kind in MOMENTS}
    return _by_model(other, model_dir, whole, states, steps, trust_remote_code)


def _by_model(
    other: OtherFolder,
    model_dir: Path,
    whole: UniversalCheckpoint | DistributedCheckpoint,
    states: Mapping[str, UniversalCheckpoint | StatesOfOptimizer],
    steps: Mapping[str, int],
    trust_remote_code: bool,
) -> Found:
    """Return the tensors under the keys of the model."""
    model = empty_model(model_dir, trust_remote_code=trust_remote_code, num_tensors=len(whole.tensors))
    wanted, tied = full_shapes(model), tied_keys(model)
    own = {name for name, _ in model.named_parameters()} - tied.keys()
    trained = {name: shape for name, shape in wanted.items() if name in own}
    weights = OtherWeights(whole, wanted, tied, None)
    parts: dict[str, Weights] = {MASTER: OtherWeights(whole, trained, {}, None)}
    parts |= {kind: OtherWeights(part, trained, {}, None) for kind, part in states.items() if part.tensors}
    opened = OpenedRanks(
        tag_dir=other.weights,
        model_dir=model_dir,
        model=model,
        lora={},
        peft_model=None,
        ranks=[weights],
        tp_size=1,
        shards={},
        tied=tied,
        weights=weights,
    )
    most = max(steps.values(), default=0)
    return Found(opened=opened, parts=parts, steps=dict.fromkeys(trained, most) if most else {})


def _check_states(other: OtherFolder, saved: SavedState) -> None:
    """Refuse a folder that lacks a state of a weight, or has one of another shape."""
    masters = saved.parts[MASTER].tensors
    kinds = saved.parts.keys() - {MASTER}
    if kinds != set(MOMENTS):
        what = f"has {', '.join(sorted(kinds)) or 'no states'} of an optimizer, and AdamW needs {', '.join(MOMENTS)}"
        raise CheckpointError(
            _refused(
                other.root, what, f"Export its weights (`toolkit export {other.root}`) and set model to the export"
            )
        )
    wanted: Mapping[str, Tensor] = full_shapes(saved.opened.model)
    for kind in (MASTER, *MOMENTS):
        held = saved.parts[kind].tensors
        for name, parameter in _trained(saved.opened.model):
            if name not in held or held[name].shape != tuple(wanted[name].shape):
                shape = held[name].shape if name in held else "none"
                what = f"has {kind} of {name} in shape {shape}; the job's model has {tuple(parameter.shape)}"
                raise CheckpointError(_refused(other.root, what, "Name the job of this model"))
        if held.keys() - masters.keys():
            raise CheckpointError(_refused(other.root, f"has {kind} of other weights", "Name the job of this model"))


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    tied = tied_keys(model)
    return [(name, weight) for name, weight in model.named_parameters() if name not in tied]


def _rest(plan: Plan, step: int) -> Callable[[Path], None]:
    """Return what writes plan, state, fresh random states and the model's files."""

    def write(folder: Path) -> None:
        grid = plan.grid
        (folder / PLAN).write_text(plan.to_json(), encoding="utf-8")
        State(
            step=step,
            num_steps=plan.settings.max_steps,
            zero_stage=plan.settings.zero_stage,
            world_size=grid.world_size,
            train_batch_size=plan.settings.batch.train,
            saved_at=time.time(),
            versions={"toolkit": installed_version()},
            sources=identify(plan.job),
        ).save(folder)
        (folder / RANDOM).mkdir()
        with _random_state_kept():
            for rank in range(grid.world_size):
                place = grid.coordinate(rank)
                seed_random_state(plan.job.train.seed, dp_rank=place.dp, pp_rank=place.pp, step=step)
                save_random_state(folder, rank=rank)
        (folder / MODEL).mkdir()
        assert plan.model.path is not None, "or it is refused before"
        copy_plain(plan.model.path, folder / MODEL)

    return write


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Give the caller's random states back, of Python, NumPy, torch and its cards."""
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _refused(folder: Path, what: str, fix: str) -> Problem:
    return Problem(code="CHECKPOINT_OTHER_TOOL", key=str(folder), message=f"{folder} {what}", fix=fix)
