"""From a plan to the traces of its model or stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, Unpack

from toolkit.catalog.gpus import Gpu
from toolkit.memory.kernels.dispatch import Device
from toolkit.memory.trace.run import MemoryTrace, StageTracer, TraceOptions, stage_tracer, trace
from toolkit.modeling.build import stage_part
from toolkit.planning.plan import Plan

# One trace of the whole model, or one for each rank of a pipeline.
Traces: TypeAlias = Sequence[MemoryTrace]


def trace_plan(plan: Plan, **options: Unpack[TraceOptions]) -> MemoryTrace:
    """Trace the whole model of a plan on its card.

    Raises:
        PlanError: TRACE_FAILED.
    """
    return trace(plan, device=Device(capability=capability(plan.gpu)), **options)


def trace_ranks(plan: Plan, *, tracer: StageTracer | None = None, **options: Unpack[TraceOptions]) -> Traces:
    """Trace the model of a plan, or each rank of its pipeline.

    Args:
        plan: Plan of the run.
        tracer: Tracer of the same model, batch and checkpointing, with any split into stages.
        options: As in `TraceOptions`.

    Raises:
        PlanError: TRACE_FAILED.
    """
    if plan.grid.pp == 1:
        return (trace_plan(plan, **options),)
    own = tracer or stage_tracer(plan, device=Device(capability=capability(plan.gpu)), **options)
    return tuple(own.trace(stage_part(plan, pp_rank)) for pp_rank in range(plan.grid.pp))


def capability(gpu: Gpu) -> float:
    """Return a card's CUDA compute capability; 8.0 for AMD's, which have flash attention too, and for CPU processes."""
    text = gpu.compute_capability or ""
    try:
        return float(text)
    except ValueError:
        return 8.0
