"""A plan in a few lines, as `toolkit validate` and `toolkit train --dry-run` print it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.planning.plan import Plan


def plan_fields(plan: Plan) -> list[tuple[str, str]]:
    """Return a plan's main values, as names and values."""
    from toolkit.planning.stage_parts import describe_pipeline, describe_tensor
    from toolkit.units import format_count

    settings, cluster = plan.settings, plan.job.cluster
    count = plan.model.num_parameters
    tokens = settings.batch.train * settings.sequence_length
    machines = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
    return [
        ("model", plan.model.name + ("" if count is None else f", {format_count(count)} parameters")),
        ("cluster", f"{cluster.gpus_per_node} × {plan.gpu.name} on {machines}"),
        ("method", f"{plan.job.train.method}, {settings.precision}, {settings.sequence_length} tokens a sequence"),
        ("batch", f"{settings.batch}: {tokens:,} tokens a step"),
        *([("pipeline", describe_pipeline(plan))] if plan.grid.pp > 1 else []),
        *([("tensor", describe_tensor(plan))] if plan.grid.tp > 1 else []),
        ("zero", f"stage {settings.zero_stage}{_reason(plan, 'parallel.zero_stage')}"),
        ("offload", f"{plan.profile.name}: {plan.offload_meaning}"),
    ]


def _reason(plan: Plan, key: str) -> str:
    reasons = [choice.reason for choice in plan.choices if choice.key == key and choice.source != "job"]
    return f": {reasons[-1]}" if reasons else ""
