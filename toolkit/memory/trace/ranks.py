"""From a plan to the traces of its model or stages, and to what its engine's memory depends on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, Unpack

from toolkit.catalog.gpus import Gpu
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.kernels.dispatch import Device
from toolkit.memory.trace.run import MemoryTrace, StageTracer, TraceOptions, stage_tracer, trace
from toolkit.modeling.build import stage_part
from toolkit.planning.plan import Plan

# One of the whole model, or one of each rank of a pipeline.
Traces: TypeAlias = Sequence[MemoryTrace]


def keeps_frozen_inputs(plan: Plan, settings: EngineSettings) -> bool:
    """Tells whether linear modules under adapters keep what only a gradient of their frozen weight would need."""
    partitioned = settings.zero_stage == 3 and settings.zero.memory_efficient_linear
    return partitioned and plan.job.parallel.strategy == "zero" and plan.job.train.method != "full"


def trace_plan(plan: Plan, **options: Unpack[TraceOptions]) -> MemoryTrace:
    """Traces the whole model of a plan on its card.

    Raises:
        PlanError: TRACE_FAILED.
    """
    return trace(plan, device=Device(capability=capability(plan.gpu)), **options)


def trace_ranks(plan: Plan, *, tracer: StageTracer | None = None, **options: Unpack[TraceOptions]) -> Traces:
    """Traces the model of a plan, or each rank of its pipeline.

    Args:
        plan: What runs.
        tracer: Of the same model, batch and checkpointing under any cut.
        options: As in `TraceOptions`.

    Raises:
        PlanError: TRACE_FAILED.
    """
    if plan.grid.pp == 1:
        return (trace_plan(plan, **options),)
    own = tracer or stage_tracer(plan, device=Device(capability=capability(plan.gpu)), **options)
    return tuple(own.trace(stage_part(plan, pp_rank)) for pp_rank in range(plan.grid.pp))


def engine_settings(
    plan: Plan, deepspeed_config: Mapping[str, Any] | None = None, *, zero_init: bool = True
) -> EngineSettings:
    """Return what the engine's memory depends on, from a DeepSpeed configuration or from the plan's own."""
    if deepspeed_config is not None:
        return EngineSettings.read(deepspeed_config, dp_size=plan.grid.dp, zero_init=zero_init)
    settings = EngineSettings.read(plan.deepspeed_config(), dp_size=plan.grid.dp, zero_init=zero_init)
    if plan.grid.pp > 1 and not plan.settings.reduces_once:
        settings = replace(settings, adds_up_on_host=True)
    if plan.job.train.optimizer == "adamw_8bit":
        return replace(settings, optimizer="adamw_8bit")
    if plan.job.parallel.strategy != "zero" and settings.optimizer == "fused_adam":
        return replace(settings, optimizer="torch_adamw")  # DeepSpeed's kernel comes with DeepSpeed alone
    return settings


def capability(gpu: Gpu) -> float:
    """Return a card's CUDA compute capability; 8.0 for AMD's, which have flash attention too, and for CPU processes."""
    text = gpu.compute_capability or ""
    try:
        return float(text)
    except ValueError:
        return 8.0
