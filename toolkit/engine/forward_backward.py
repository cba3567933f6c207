"""The forward and backward passes of one optimizer step, and what all ways of ordering them share."""

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
    """The gradient norm of the last step where the engine keeps none."""
    failed: bool
    """Whether a pass has failed and left what no later one can begin with."""

    def run(self, micro_batches: Sequence[dict[str, torch.Tensor]], num_targets: torch.Tensor) -> torch.Tensor:
        """Does all forward and backward passes and the optimizer step; gives this rank's part of the mean loss.

        Args:
            micro_batches: Of this data-parallel rank, on its device.
            num_targets: Tokens that count in the whole step, over all ranks. Scalar fp32.
        """

    def outputs(self, batch: MicroBatch) -> Any:
        """Return what the whole model gives for a batch on this rank's device; None where others hold its end."""


class StepLoss:
    """What turns a model's outputs into the loss of a step.

    Args:
        plan: What runs.
        world: This rank's place.
        engine: The DeepSpeed engine.
    """

    def __init__(self, plan: Plan, world: World, engine: Any) -> None:
        self._given_labels = plan.job.train.loss != "full"
        self._dp_size = world.grid.dp
        self._engine = engine
        self._cross_entropy = cross_entropy_over(world.tp_group, vocab_size=plan.model.vocab_size)

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what the model is called with; only one that computes its loss itself is given the labels."""
        return {name: value for name, value in batch.items() if name != "labels" or self._given_labels}

    def summed(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss summed over the tokens that count."""
        return token_loss(outputs, labels, cross_entropy=self._cross_entropy)

    def of_step(
        self, outputs: Any, labels: torch.Tensor, num_targets: torch.Tensor, *, share: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what to differentiate, and this rank's part of the mean loss, detached.

        Args:
            outputs: Of the model.
            labels: Of the micro batch.
            num_targets: As `ForwardBackward.run` takes it.
            share: Of the step that the micro batch is, for losses of the router.
        """
        loss = self.summed(outputs, labels) / num_targets
        reported = loss.detach()
        router = auxiliary_loss(outputs, self._engine.module.config)
        if router is not None:
            loss = loss + router * share / self._dp_size
        # The engine averages gradients over the data-parallel ranks; the loss is a share of a global sum.
        return loss * self._dp_size, reported


class GradientAccumulation:
    """One micro batch after the other, each forward and backward: every strategy but a pipeline."""

    failed = False

    def __init__(self, plan: Plan, world: World, engine: Any, memory: PhaseMemoryTracker) -> None:
        self.plain_norm: torch.Tensor | None = None
        self._keeps_no_norm = plan.settings.zero_stage == 0 and plan.settings.precision == "fp32"
        self._world, self._engine, self._memory = world, engine, memory
        self.losses = StepLoss(plan, world, engine)

    def run(self, micro_batches: Sequence[dict[str, torch.Tensor]], num_targets: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=self._world.device)
        for index, batch in enumerate(micro_batches):
            outputs = self._engine(**self.losses.inputs(batch))
            loss, reported = self.losses.of_step(outputs, batch["labels"], num_targets, share=1 / len(micro_batches))
            # The logits' last reference must go before the backward pass frees what it can.
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
    """Return the gradient norm where DeepSpeed wraps no optimizer (fp32, stage 0) and so keeps none.

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
