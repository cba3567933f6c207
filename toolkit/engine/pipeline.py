"""Execution of a pipeline: a rank runs its part of a schedule on the plain DeepSpeed engine.

The toolkit orders the passes and sets the engine's counters to match (grad_reduction.py): any schedule runs with ZeRO-1,
2 and 3, and one engine, one loop and one kind of checkpoint serve every strategy.

B: sequences of a micro-batch, S: tokens of a sequence, D: width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from toolkit.distributed.deepspeed_private import expect_backward
from toolkit.distributed.p2p import P2PChannels
from toolkit.distributed.world import World
from toolkit.engine.forward_backward import MicroBatch, moved_to, step_loss, without_search_for_documents
from toolkit.engine.grad_reduction import reduction
from toolkit.engine.memory_tracker import PhaseMemoryTracker
from toolkit.pipeline_parallel import forward_stage, hidden_dtype, hidden_shape
from toolkit.pipeline_parallel.grads import Fp32GradAccumulator
from toolkit.pipeline_parallel.runner import Boundary, ScheduleRunner
from toolkit.pipeline_parallel.zero_bubble_backward import split_backward
from toolkit.planning.plan import Plan
from toolkit.tensor_parallel.deferred_grads import DeferredWeightGrad


class PipelineForwardBackward(ScheduleRunner):
    """One step run by the plan's pipeline schedule.

    Args:
        plan: Resolved plan.
        world: Process groups and place of this rank in a grid with stages.
        engine: The DeepSpeed engine around this rank's stages.
        memory: Tracker that is told when passes end.

    Collectives:
        The ranks of one pipeline create their channels.
    """

    plain_norm: torch.Tensor | None = None
    failed = False  # True while passes run: one that raises leaves messages and gradients

    def __init__(self, plan: Plan, world: World, engine: Any, memory: PhaseMemoryTracker) -> None:
        schedule = plan.schedule
        # An empty tensor with the dtype and device of the activations between stages.
        self._like = torch.empty(0, dtype=hidden_dtype(engine.module), device=world.device)
        channels = P2PChannels(
            world.grid,
            world.rank,
            device=world.device,
            wraps=schedule.virtual_stages > 1,
            max_bytes=max(plan.settings.batch.micro, plan.settings.per_device_eval_batch_size)
            * plan.settings.sequence_length
            * plan.model.hidden_size
            * self._like.itemsize,
        )
        self._world, self._engine, self._memory = world, engine, memory
        self._reduction = reduction(plan, world, engine, channels)
        deferred = split_backward(engine.module) if plan.settings.splits_backward else None
        super().__init__(schedule, world.coordinate.pp, channels, deferred)
        self.losses = step_loss(plan, world, engine)
        self._micro_batches: Sequence[MicroBatch] = ()
        self._num_targets = torch.zeros((), device=world.device)
        self._losses: list[torch.Tensor] = []

    def run(self, micro_batches: Sequence[dict[str, torch.Tensor]], num_targets: torch.Tensor) -> torch.Tensor:
        self.failed = True
        self._micro_batches = [moved_to(self._world.device, batch) for batch in micro_batches]
        self._num_targets, self._losses = num_targets, []
        total = torch.zeros((), device=self._world.device)
        with self._reduction.step():
            self.run_actions()
        self._memory.end("backward")
        with torch.profiler.record_function("toolkit::optimizer"):
            self._engine.step()
        self._memory.end("step")
        for loss in self._losses:
            total += loss
        self._micro_batches, self._losses = (), []
        self.failed = False
        return total

    def outputs(self, batch: MicroBatch) -> Any:
        """Run one batch through all stages; in a sequence of calls, each rank sends its result and continues without waiting."""
        self.failed, self._micro_batches = True, [batch]
        outputs = self.run_evaluation(lambda chunk, hidden_BSD: self._call(chunk, batch, hidden_BSD))
        self.failed, self._micro_batches = False, ()
        return outputs

    def boundary(self, stage: int, micro_batch: int) -> Boundary:
        return hidden_shape(self._engine.module, self._micro_batches[micro_batch]), self._like

    def forward(self, chunk: int, micro_batch: int, received: torch.Tensor | None) -> torch.Tensor:
        batch = self._micro_batches[micro_batch]
        self._world.progress.move()
        outputs = self._call(chunk, batch, received)
        if self.is_last(chunk):
            share = 1 / len(self._micro_batches)
            outputs, reported = self.losses.of_step(outputs, batch["labels"], self._num_targets, share=share)
            self._losses.append(reported)
        self._memory.end("forward")
        return outputs  # type: ignore[no-any-return]

    def backward(self, chunk: int, output: torch.Tensor, gradient: torch.Tensor | None) -> None:
        self._world.progress.move()
        self._reduction.before_backward(chunk)
        if gradient is None:
            self._engine.backward(output, scale_wrt_gas=False)
        elif output.requires_grad:  # False for a frozen first stage
            expect_backward(self._engine)
            output.backward(gradient)  # type: ignore[no-untyped-call]
        self._memory.end("backward")

    def backward_weights(self, waiting: deque[DeferredWeightGrad]) -> None:
        super().backward_weights(waiting)
        self._memory.end("backward")

    @property
    def gradient_sums(self) -> Fp32GradAccumulator | None:
        return self._reduction.sums

    def _call(self, chunk: int, batch: Mapping[str, torch.Tensor], hidden_BSD: torch.Tensor | None) -> Any:
        with without_search_for_documents(batch):
            return forward_stage(self._engine, self.losses.inputs(batch), chunk=chunk, received=hidden_BSD)
