"""Reduction of a pipeline's gradients over data-parallel ranks: once per step under ZeRO-1, and after each backward pass
under ZeRO-2 and 3, which keep no full gradients.

DeepSpeed expects micro-batches in sequence, each forward and then backward. Here several are in flight and a backward
pass may go through only some of a rank's layers, so the engine's counters are set explicitly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import nn

from toolkit.distributed.deepspeed_private import (
    allow_backward_without_gradients,
    begin_backward,
    end_accumulation,
    forget_averaged_gradients,
    hold_back,
    reduce_now,
    reduced_at_end,
)
from toolkit.distributed.p2p import P2PChannels
from toolkit.distributed.world import World
from toolkit.pipeline_parallel.grads import DeferredTiedGrad, Fp32GradAccumulator, all_reduce_tied_grad
from toolkit.pipeline_parallel.part import inner_model, stage_info
from toolkit.planning.plan import Plan


class Reduction(Protocol):
    """The reduction of a step's gradients."""

    sums: Fp32GradAccumulator | None
    """Accumulator of full gradients in fp32, if used."""

    def step(self) -> AbstractContextManager[None]:
        """Run the passes of a step, and leave its gradients as `engine.step` expects them, unless a pass has failed."""

    def before_backward(self, chunk: int) -> None:
        """Prepare the engine for a backward pass through a chunk."""


def reduction(plan: Plan, world: World, engine: Any, channels: P2PChannels) -> Reduction:
    """Return the reduction for a plan's ZeRO stage."""
    settings = plan.settings
    tied = _tied_weight(engine.module) if plan.job.train.method == "full" and channels.ends is not None else None
    kind = ReduceAtStepEnd if settings.reduces_once else ReduceEachBackward
    return kind(engine, tied, ends=channels.ends, dp_size=world.grid.dp, in_fp32=settings.sums_in_fp32)


class ReduceAtStepEnd:
    """Reduction after the last pass, of full gradients.

    Args:
        engine: The DeepSpeed engine.
        tied: This rank's copy of a weight tied between the first and the last stage, if it has one.
        ends: Group of the first and last stages of all replicas.
        dp_size: Number of replicas.
        in_fp32: Whether 16-bit gradients are accumulated in fp32.

    Collectives:
        A step ends with the reduction over the replicas, after an all-reduce of the gradient of `tied` over `ends`.
    """

    def __init__(self, engine: Any, tied: nn.Parameter | None, *, ends: Any, dp_size: int, in_fp32: bool) -> None:
        self._engine, self._tied, self._ends, self._dp_size = engine, tied, ends, dp_size
        self.sums = Fp32GradAccumulator(engine.module.parameters()) if in_fp32 else None

    @contextmanager
    def step(self) -> Iterator[None]:
        with reduced_at_end(self._engine):
            yield
            self._finish()

    def before_backward(self, chunk: int) -> None: ...

    def _finish(self) -> None:
        if self._tied is not None:
            total = None if self.sums is None else self.sums.of(self._tied)
            if total is None:
                assert self._tied.grad is not None, "an embedding and a head have a gradient after each step"
                total = self._tied.grad
            all_reduce_tied_grad(total, group=self._ends, dp_size=self._dp_size)
        if self.sums is not None:
            self.sums.settle()


class ReduceEachBackward:
    """Reduction at the end of each backward pass; a rank keeps its partition of the gradients, or of their fp32 sums.

    A tied weight of two stages is the exception: its gradient stays full until both have all of it.

    Args:
        engine: As in `ReduceAtStepEnd`.
        tied: As in `ReduceAtStepEnd`.
        ends: As in `ReduceAtStepEnd`.
        dp_size: As in `ReduceAtStepEnd`.
        in_fp32: As in `ReduceAtStepEnd`.

    Collectives:
        Each backward pass ends with the reduction over the replicas. At the end of a step the gradient of `tied` is
        all-reduced over `ends` and then reduced as well.

    Source:
        deepspeed runtime/engine.py step (managed_gradient_accumulation=False), which leaves the work after the last backward
        pass to finalize_gradient_accumulation_boundary.
    """

    sums: Fp32GradAccumulator | None = None

    def __init__(self, engine: Any, tied: nn.Parameter | None, *, ends: Any, dp_size: int, in_fp32: bool) -> None:
        self._engine, self._optimizer, self._ends, self._dp_size = engine, engine.optimizer, ends, dp_size
        self._partitions_weights = engine.zero_optimization_partition_weights()
        self._passes: Counter[int] = Counter()  # passes of each chunk in this step
        self._held = (
            None if tied is None else DeferredTiedGrad(tied, in_fp32=in_fp32, partitioned=self._partitions_weights)
        )
        if self._held is not None:
            hold_back(self._optimizer, self._held.take)
        if not self._partitions_weights:
            allow_backward_without_gradients(self._optimizer)

    @contextmanager
    def step(self) -> Iterator[None]:
        self._passes.clear()
        self._engine.set_gradient_accumulation_boundary(False)
        if not self._partitions_weights:
            forget_averaged_gradients(self._optimizer)
        yield
        if self._held is not None:
            all_reduce_tied_grad(self._held.total, group=self._ends, dp_size=self._dp_size)
            begin_backward(self._engine, 0)  # its gradient has not been reduced in this step
            with self._held.released():
                reduce_now(self._engine)
        end_accumulation(self._engine)

    def before_backward(self, chunk: int) -> None:
        begin_backward(self._engine, self._passes[chunk])
        self._passes[chunk] += 1


def _tied_weight(model: Any) -> nn.Parameter | None:
    """Return this rank's copy of a weight tied between the first and the last stage, if it has one."""
    info = stage_info(model)
    if info is None or info.tied_key is None:
        return None
    weight: nn.Parameter = inner_model(model).get_parameter(info.tied_key)
    return weight
