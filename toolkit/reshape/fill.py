"""Filling of a live engine, whatever its layout, with the state of a whole model.

An optimizer of any engine steps flat tensors that are pieces of weights one after the other (`Flat`). Each rank reads its pieces, one at
a time, and copies them: into the flat tensor from the fp32 copy, into the optimizer's states from the saved ones. Of a weight that tensor
ranks share it reads the whole and cuts its shard. The weights in training precision follow from the flat tensors, as after any step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.distributed.deepspeed_flats import Flat, flats_of, flats_of_weights, set_counts, set_loss_scale
from toolkit.distributed.dtensors import copy_whole, is_dtensor
from toolkit.engine.optimizers import MuonWithAdamW
from toolkit.engine.run import Run
from toolkit.errors import CheckpointError, Problem
from toolkit.exporter.adapter import Weights, read_part
from toolkit.modeling.initialization import gathered
from toolkit.modeling.safetensors_folder import some
from toolkit.pipeline_parallel.part import inner_model, stage_info
from toolkit.planning.state_bytes import leaves_frozen_out
from toolkit.reshape.saved import SavedState
from toolkit.reshape.zero_states import MASTER, STEP
from toolkit.tensor_parallel.apply import parameter_shards

Progress = Callable[[int, int], None]


@torch.no_grad()
def fill(run: Run, saved: SavedState, *, progress: Progress | None = None) -> None:
    """Give a run that has done no step the weights, optimizer states and counts of a saved one.

    Host memory: a piece; of a weight that tensor ranks share, or files have in parts, one whole weight and this rank's shard of it.

    Args:
        run: The run; all ranks call this together.
        saved: State of the same model, in files that all ranks read.
        progress: Called with weights of this rank that are filled, and their total.

    Collectives:
        The gathering of the weights that follows a step.

    Raises:
        CheckpointError: CHECKPOINT_LAYOUT if the layout cannot hold the state; CHECKPOINT_DAMAGED, EXPORT_DAMAGED.
    """
    engine, own = run.engine, _OwnWeights(run, saved)
    total = sum(weight.requires_grad for weight in run.model.parameters())
    begun: set[nn.Parameter] = set()
    for flat in _flats(run):
        _fill_flat(flat, own, saved)
        begun.update(piece.weight for piece in flat.pieces)
        if progress is not None:
            progress(len(begun), total)
    _fill_rest(run, own, saved)
    with run.keeping_hyperparameters():
        engine.lr_scheduler.last_epoch = saved.schedule_steps
    if run.plan.job.parallel.strategy != "zero":
        return
    steps, skipped = saved.schedule_steps + saved.skipped_steps, saved.skipped_steps
    set_counts(engine, steps=steps, skipped=skipped, batch=run.plan.settings.batch.train)
    if saved.loss_scale is not None:
        set_loss_scale(engine, saved.loss_scale)


class _OwnWeights:
    """Reads numbers of whole weights as this rank has the weights: its shard among tensor ranks, under its stage's names.

    Args:
        run: The live run.
        saved: State to read from.
    """

    def __init__(self, run: Run, saved: SavedState) -> None:
        self._names = {weight: name for name, weight in run.model.named_parameters()}
        self._shards = parameter_shards(run.model)
        self._rank, self._num_ranks = run.world.coordinate.tp, run.world.grid.tp
        self._tied = _further_names(run.model, saved)
        self.folder = saved.opened.tag_dir

    def name(self, weight: nn.Parameter, weights: Weights) -> str:
        """Return the name under which a weight is saved.

        Raises:
            CheckpointError: CHECKPOINT_DAMAGED.
        """
        own = self._names[weight]
        found = next((name for name in (own, self._tied.get(own)) if name in weights.tensors), None)
        if found is None:
            raise CheckpointError(
                Problem(
                    code="CHECKPOINT_DAMAGED",
                    key=str(self.folder),
                    message=f"{self.folder} has no state of {own}",
                    fix="Resume from another checkpoint, or copy this one again from where it was made",
                )
            )
        return found

    def read_part(self, weight: nn.Parameter, weights: Weights, start: int, stop: int) -> Tensor:
        """Return consecutive elements, row by row, of what `read` returns; a whole weight's others are not read."""
        if self._names[weight] in self._shards:
            return self.read(weight, weights, torch.float32).reshape(-1)[start:stop]
        return read_part(weights, self.name(weight, weights), start, stop, torch.float32)

    def read(self, weight: nn.Parameter, weights: Weights, dtype: torch.dtype) -> Tensor:
        """Return what this rank has of a weight, or of numbers of its shape."""
        whole = weights.read(self.name(weight, weights), dtype)
        shard = self._shards.get(self._names[weight])
        return whole if shard is None else shard.take(whole, rank=self._rank, num_ranks=self._num_ranks)


def _further_names(model: Any, saved: SavedState) -> dict[str, str]:
    """Map names of a stage's copies of tied weights to those of the whole model."""
    info, inner = stage_info(model), inner_model(model)
    if info is None:
        return {}
    prefix = next((name for name, module in model.named_modules() if module is inner), "")
    lead = f"{prefix}." if prefix else ""
    return {f"{lead}{own}": f"{lead}{whole}" for own, whole in info.tied_copy.items()}


def _flats(run: Run) -> Iterator[Flat]:
    """Yield what the run's optimizer steps."""
    if run.plan.job.parallel.strategy == "zero":
        return flats_of(run.engine)
    return flats_of_weights(run.engine.optimizer)


def _fill_flat(flat: Flat, own: _OwnWeights, saved: SavedState) -> None:
    """Fill a tensor that an optimizer steps, and the optimizer's state of it."""
    masters = saved.parts[MASTER]
    names = {own.name(piece.weight, masters) for piece in flat.pieces}
    steps = {saved.steps.get(name) for name in names or saved.steps}  # of padding alone: as those of all others
    if len(steps) > 1:
        raise CheckpointError(_stepped_apart(own.folder, names, steps))
    _copy(flat.stepped, flat, own, masters)
    state: dict[str, Any] = {} if steps <= {None} else {STEP: _count(steps.pop(), flat)}
    for kind, weights in saved.parts.items():
        if kind != MASTER and (not names or names & weights.tensors.keys()):
            state[kind] = torch.zeros_like(flat.stepped, requires_grad=False)
            _copy(state[kind], flat, own, weights)
    flat.optimizer.state.pop(flat.stepped, None)
    if state:
        flat.optimizer.state[flat.stepped] = state


def _copy(target: Tensor, flat: Flat, own: _OwnWeights, weights: Weights) -> None:
    """Copy the pieces of a flat tensor into a tensor of its shape."""
    for piece in flat.pieces:
        if is_dtensor(target):
            copy_whole(target, own.read(piece.weight, weights, torch.float32))
            continue
        taken = own.read_part(piece.weight, weights, piece.start, piece.stop)
        target.data.view(-1)[piece.at : piece.at + len(taken)].copy_(taken)


def _count(step: Any, flat: Flat) -> Any:
    """Return a count of steps as an optimizer keeps it: torch's as a scalar, DeepSpeed's as a number."""
    if not isinstance(flat.optimizer, torch.optim.AdamW | torch.optim.Adam | MuonWithAdamW):
        return step
    group = flat.optimizer.param_groups[0]
    on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(float(step), device=flat.stepped.device if on_device else "cpu")


def _fill_rest(run: Run, own: _OwnWeights, saved: SavedState) -> None:
    """Fill frozen weights, where a checkpoint has them, and the buffers that a model saves."""
    model, weights = run.model, saved.opened.weights
    frozen = (
        [] if leaves_frozen_out(run.plan) else [weight for weight in model.parameters() if not weight.requires_grad]
    )
    for weight in frozen:
        with gathered([weight]):
            copy_whole(weight, own.read(weight, weights, weight.dtype))
    for name, buffer in model.named_buffers():
        if name in weights.tensors:
            copy_whole(buffer, weights.read(name, buffer.dtype))


def _stepped_apart(folder: Path, names: set[str], steps: set[int | None]) -> Problem:
    counts = " and ".join(str(step or 0) for step in sorted(steps, key=lambda step: step or 0))
    return Problem(
        code="CHECKPOINT_LAYOUT",
        key="parallel.strategy",
        message=f"{folder} has {counts} steps of {some(sorted(names))}, which this layout steps together and keeps one count for",
        fix="Set parallel.strategy and parallel.zero_stage to those of the run that saved it",
    )
