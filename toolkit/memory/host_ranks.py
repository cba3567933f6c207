"""Host memory of the fullest node, whose ranks may hold different stages."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.memory.courses import course_of
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.engines.stage3 import Stage3
from toolkit.memory.host import HostReport, host_bytes, host_bytes_without_zero, pinned
from toolkit.memory.report import RankReport
from toolkit.memory.trace import Trace
from toolkit.memory.traces import Traces
from toolkit.plan.plan import Plan
from toolkit.units import GIB


def host_report(plan: Plan, traces: Traces, settings: EngineSettings, *, ranks: Sequence[RankReport]) -> HostReport:
    """Gives the host memory of the fullest node.

    Args:
        plan: What will run.
        traces: Of its model, or of each rank of its pipeline.
        settings: What the engine's memory depends on.
        ranks: All of them, whose tensors are host memory on CPU.
    """
    gib = plan.job.cluster.host_memory_gib or (plan.gpu.host.host_memory_gib if plan.gpu.host else None)
    peaks = [0] * plan.grid.pp
    for rank in ranks:
        peaks[rank.coordinate.pp] = max(peaks[rank.coordinate.pp], rank.peak_allocated_bytes)
    of_stages = [
        _host_of_rank(plan, events, settings, pp_rank, peak_bytes=peaks[pp_rank])
        for pp_rank, events in enumerate(traces)
    ]
    width = plan.job.cluster.gpus_per_node
    nodes = [
        [of_stages[rank.coordinate.pp] for rank in ranks[start : start + width]]
        for start in range(0, len(ranks), width)
    ]
    fullest = max(nodes, key=lambda node: sum(sum(found.values()) for found in node))
    return HostReport(
        bytes_per_rank=max(fullest, key=lambda found: sum(found.values())),
        ranks_per_node=width,
        capacity_bytes=None if gib is None else int(gib * GIB),
        bytes_on_node={
            cause: sum(found.get(cause, 0) for found in fullest)
            for cause in dict.fromkeys(c for f in fullest for c in f)
        },
    )


def _host_of_rank(
    plan: Plan, events: Trace, settings: EngineSettings, pp_rank: int, *, peak_bytes: int
) -> dict[str, int]:
    if plan.job.parallel.strategy == "zero":
        found = _host_under_zero(events, settings)
    else:
        found = host_bytes_without_zero(events, upcast=plan.job.parallel.strategy == "fsdp2")
    if events.chunks:
        waiting = course_of(plan, pp_rank).most_held([sum(map(pinned, chunk.host_copies)) for chunk in events.chunks])
    else:
        waiting = sum(map(pinned, events.host_copies))
    if waiting:
        found["layer inputs"] = waiting
    if plan.on_cpu:  # the ranks' tensors are host memory, too
        found["tensors"] = peak_bytes
    return found


def _host_under_zero(events: Trace, settings: EngineSettings) -> dict[str, int]:
    trainable = [parameter for parameter in events.parameters if parameter.trainable]
    engine = Stage3(events, settings, workspace_bytes=0) if settings.zero_stage == 3 else None
    return host_bytes(
        events,
        settings,
        partition_numel=-(-sum(parameter.numel for parameter in trainable) // settings.dp_size),
        largest_numel=max((parameter.numel for parameter in trainable), default=0),
        host_groups=engine.host_groups if engine is not None else (),
        largest_group=engine.largest_group if engine is not None else 0,
    )
