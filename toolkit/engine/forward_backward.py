"""The forward and backward passes of one optimizer step, and what every order of them shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from transformers import masking_utils

from toolkit.context_parallel.slices import SequenceSlice
from toolkit.distributed.world import World
from toolkit.engine.memory_tracker import PhaseMemoryTracker
from toolkit.modeling.loss import StepLoss
from toolkit.planning.plan import Plan
from toolkit.tensor_parallel.param_tags import counts_in_norm

MicroBatch = Mapping[str, torch.Tensor]


class ForwardBackward(Protocol):
    """One way to run the micro-batches of a step through the engine."""

    losses: StepLoss
    plain_norm: torch.Tensor | None
    """Gradient norm of the last step, if the engine keeps none."""
    failed: bool
    """Whether a pass has failed and left a state from which no later one can start."""

    def run(self, micro_batches: Sequence[dict[str, torch.Tensor]], num_targets: torch.Tensor) -> torch.Tensor:
        """Do all forward and backward passes and the optimizer step; return this rank's part of the mean loss.

        Args:
            micro_batches: Micro-batches of this data-parallel rank, as `held_for` leaves them.
            num_targets: Number of unmasked tokens of the whole step, over all ranks. Scalar fp32.
        """

    def outputs(self, batch: MicroBatch) -> Any:
        """Return the whole model's outputs for a batch on this rank's device; None if other ranks have the last stage."""


def held_for(batch: MicroBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """Return a micro-batch that waits for its pass: its integers and labels on the device, images in host memory until then."""
    on_card = device.type == "cuda"
    return {
        name: value.pin_memory()
        if on_card and value.is_floating_point() and not value.is_cuda and name != "labels"
        else value.to(device, non_blocking=True)
        for name, value in batch.items()
    }


def moved_to(device: torch.device, batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Return a micro-batch whose tensors are on a device."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def step_loss(plan: Plan, world: World, engine: Any) -> StepLoss:
    """Return the loss of the plan's steps on this rank."""
    return StepLoss.of(
        plan.job.train,
        config=engine.module.config,
        tp_group=world.tp_group,
        vocab_size=plan.model.vocab_size,
        dp_size=world.grid.dp,
        task=plan.settings.task,
        part=None if world.context_group is None else SequenceSlice.of(world.context_group),
    )


@contextmanager
def without_search_for_documents(batch: MicroBatch) -> Iterator[None]:
    """Let forward passes of a batch without positions take each row for one document, as it is.

    transformers looks for documents in the positions that it makes by itself, and so reads a value from the card in each pass: the
    host waits for all that is queued, and the card then for the host (1 ms a micro-batch of a 4B stage on an H200).

    Source:
        transformers masking_utils.py find_packed_sequence_indices.
    """
    found = masking_utils.find_packed_sequence_indices
    if "position_ids" not in batch:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = found


class GradientAccumulation:
    """Micro-batches in sequence, each forward and then backward: every strategy but a pipeline."""

    failed = False

    def __init__(self, plan: Plan, world: World, engine: Any, memory: PhaseMemoryTracker) -> None:
        self.plain_norm: torch.Tensor | None = None
        self._keeps_no_norm = plan.job.parallel.strategy == "zero" and plan.optimizer_wrapper == "none"
        self._world, self._engine, self._memory = world, engine, memory
        self.losses = step_loss(plan, world, engine)

    def run(self, micro_batches: Sequence[dict[str, torch.Tensor]], num_targets: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=self._world.device)
        for index, held in enumerate(micro_batches):
            self._world.progress.move()
            batch = moved_to(self._world.device, held)
            outputs = self.outputs(batch)
            loss, reported = self.losses.of_step(outputs, batch["labels"], num_targets, share=1 / len(micro_batches))
            # Drop the last references to the logits, which the backward pass can then free, and to the images.
            del outputs, batch
            self._memory.end("forward")
            self._engine.backward(loss, scale_wrt_gas=False)
            self._memory.end("backward")
            self._world.progress.move()
            total += reported
            if index == len(micro_batches) - 1 and self._keeps_no_norm:
                self.plain_norm = norm_without_wrapper(self._engine.module, self._world)
            with torch.profiler.record_function("toolkit::optimizer"):
                self._engine.step()
            self._memory.end("step")
        return total

    def outputs(self, batch: MicroBatch) -> Any:
        with without_search_for_documents(batch):
            return self._engine(**self.losses.inputs(batch))


def norm_without_wrapper(model: nn.Module, world: World) -> torch.Tensor:
    """Return the gradient norm if DeepSpeed wraps no optimizer (fp32, stage 0) and so computes none.

    Source:
        deepspeed runtime/engine.py _do_optimizer_sanity_check, clip_fp32_gradients.
    """
    group = world.tp_group
    counted = [
        parameter.grad
        for parameter in model.parameters()
        if parameter.grad is not None and (group is None or counts_in_norm(parameter, tp_group=group))
    ]
    norm = torch.nn.utils.get_total_norm(counted)
    if group is None:
        return norm
    squared = norm.to(world.device) ** 2
    dist.all_reduce(squared, group=group)
    return squared.sqrt()
