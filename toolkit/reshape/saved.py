"""A checkpoint of any layout as the state of one whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checkpoint.layout import MODEL, tag_of
from toolkit.checkpoint.state import State
from toolkit.distributed.deepspeed_flats import LossScale, saved_loss_scale
from toolkit.engine.initialize import parameter_groups
from toolkit.exporter.adapter import Weights
from toolkit.exporter.engine_files import is_sharded
from toolkit.exporter.opening import OpenedRanks, open_checkpoint
from toolkit.exporter.zero_reader import ZeroCheckpoint, as_damage
from toolkit.modeling.build import freeze_weights
from toolkit.planning.plan import Plan
from toolkit.reshape.sharded_states import sharded_states
from toolkit.reshape.zero_states import zero_states


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state of a run without its layout: nothing is read before it is asked for.

    Args:
        opened: The checkpoint's files and the model that they describe; its `weights` are those in training precision.
        parts: Numbers of each trained weight, whole and by the name of the weight: `master`, the weight as the optimizer steps it,
            and each state of the optimizer, such as `exp_avg`.
        steps: Steps that the optimizer has done on each weight.
        schedule_steps: Steps that the learning-rate schedule has done.
        skipped_steps: Steps that overflowed in fp16.
        loss_scale: State of the loss scaler; None where the loss is not scaled.
    """

    opened: OpenedRanks
    parts: Mapping[str, Weights]
    steps: Mapping[str, int]
    schedule_steps: int
    skipped_steps: int
    loss_scale: LossScale | None


def open_saved(folder: Path, plan: Plan, state: State, *, trust_remote_code: bool) -> SavedState:
    """Open a verified checkpoint.

    Args:
        folder: Checkpoint folder.
        plan: Its plan.
        state: Its state.
        trust_remote_code: Whether to run model code that it brings.

    Raises:
        CheckpointError: EXPORT_DAMAGED, EXPORT_CONFIG, EXPORT_REMOTE_CODE, and those of the readers of `toolkit.exporter`.
    """
    tag_dir = folder / tag_of(state.step)
    opened = open_checkpoint(
        tag_dir,
        folder / MODEL,
        trust_remote_code=trust_remote_code,
        grid=plan.grid,
        experts=plan.settings.experts,
    )
    if is_sharded(tag_dir):
        held = sharded_states(tag_dir)
        return SavedState(
            opened=opened,
            parts=held.parts,
            steps=held.steps,
            schedule_steps=held.record.scheduler_epoch,
            skipped_steps=held.record.skipped_steps,
            loss_scale=held.record.loss_scale,
        )
    files = [rank for rank in opened.ranks if isinstance(rank, ZeroCheckpoint)]
    groups = _names_by_group(opened, plan)
    ranks = [zero_states(each, groups) for each in files]
    kinds = dict.fromkeys(kind for rank in ranks for kind in rank.parts)
    engine = files[0].engine_state
    with as_damage(tag_dir):
        return SavedState(
            opened=opened,
            parts={kind: opened.united([rank.parts[kind] for rank in ranks]) for kind in kinds},
            steps={name: count for rank in ranks for name, count in rank.steps.items()},
            schedule_steps=int(engine["lr_scheduler"]["last_epoch"]),
            skipped_steps=int(engine["skipped_steps"]),
            loss_scale=saved_loss_scale(_scaled(files[0])),
        )


def _scaled(files: ZeroCheckpoint) -> Mapping[str, Any]:
    """Return the part of a rank's state that has its loss scaler."""
    states: Sequence[Mapping[str, Any]] = files.optimizer_states() or [files.engine_state["optimizer"]]
    return states[0]


def _names_by_group(opened: OpenedRanks, plan: Plan) -> list[list[str]]:
    """Return the names of the trained weights in the optimizer's order, which the files of stage 0 do not tell."""
    if plan.settings.zero_stage:
        return []
    model, train = opened.peft_model or opened.model, plan.job.train
    if opened.peft_model is None:
        freeze_weights(opened.model, train.freeze)
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = parameter_groups(
        model,
        weight_decay=train.weight_decay,
        rate=plan.settings.learning_rate,
        rates=train.learning_rates,
        of_b=train.adapters.loraplus_lr_ratio,
    )
    weights = [group["params"] if isinstance(group, dict) else [group] for group in groups]
    return [[names[id(weight)] for weight in group] for group in weights]
