"""The forward and backward passes of one optimizer step, and what every order of them shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from toolkit.distributed.world import World
from toolkit.engine.memory_tracker import PhaseMemoryTracker
from toolkit.modeling.loss import auxiliary_loss, cross_entropy_over, token_loss
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
            micro_batches: Micro-batches of this data-parallel rank, on its device.
            num_targets: Number of unmasked tokens of the whole step, over all ranks. Scalar fp32.
        """

    def outputs(self, batch: MicroBatch) -> Any:
        """Return the whole model's outputs for a batch on this rank's device; None if other ranks have the last stage."""


class StepLoss:
    """The loss of a step, computed from a model's outputs.

    Args:
        plan: Resolved plan.
        world: Process groups and place of this rank.
        engine: The DeepSpeed engine.
    """

    def __init__(self, plan: Plan, world: World, engine: Any) -> None:
        self._given_labels = plan.job.train.loss != "full"
        self._dp_size = world.grid.dp
        self._engine = engine
        self._cross_entropy = cross_entropy_over(world.tp_group, vocab_size=plan.model.vocab_size)

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's keyword arguments; only a model that computes its own loss is given the labels."""
        return {name: value for name, value in batch.items() if name != "labels" or self._given_labels}

    def summed(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss summed over the unmasked tokens."""
        return token_loss(outputs, labels, cross_entropy=self._cross_entropy)

    def of_step(
        self, outputs: Any, labels: torch.Tensor, num_targets: torch.Tensor, *, share: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss to differentiate, and this rank's part of the mean loss, detached.

        Args:
            outputs: Outputs of the model.
            labels: Labels of the micro-batch.
            num_targets: Number of unmasked tokens, as in `ForwardBackward.run`.
            share: Share of the step that the micro-batch makes up, for router losses.
        """
        loss = self.summed(outputs, labels) / num_targets
        reported = loss.detach()
        router = auxiliary_loss(outputs, self._engine.module.config)
        if router is not None:
            loss = loss + router * share / self._dp_size
        # The engine averages gradients over the data-parallel ranks; the loss is its part of a global mean.
        return loss * self._dp_size, reported


class GradientAccumulation:
    """Micro-batches in sequence, each forward and then backward: every strategy but a pipeline."""

    failed = False

    def __init__(self, plan: Plan, world: World, engine: Any, memory: PhaseMemoryTracker) -> None:
        self.plain_norm: torch.Tensor | None = None
        self._keeps_no_norm = plan.optimizer_wrapper == "none"
        self._world, self._engine, self._memory = world, engine, memory
        self.losses = StepLoss(plan, world, engine)

    def run(self, micro_batches: Sequence[dict[str, torch.Tensor]], num_targets: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=self._world.device)
        for index, batch in enumerate(micro_batches):
            outputs = self._engine(**self.losses.inputs(batch))
            loss, reported = self.losses.of_step(outputs, batch["labels"], num_targets, share=1 / len(micro_batches))
            # Drop the last reference to the logits, so that the backward pass can free them.
            del outputs
            self._memory.end("forward")
            self._engine.backward(loss, scale_wrt_gas=False)
            self._memory.end("backward")
            total += reported
            if index == len(micro_batches) - 1 and self._keeps_no_norm:
                self.plain_norm = norm_without_wrapper(self._engine.module, self._world)
            self._engine.step()
            self._memory.end("step")
        return total

    def outputs(self, batch: MicroBatch) -> Any:
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
