"""At the end of a run: what was predicted of rank 0's memory, and what it took."""

from __future__ import annotations

import torch

from toolkit.engine.run import Run
from toolkit.memory.report.calibration import MeasuredRun


def compare_memory(run: Run) -> MeasuredRun | None:
    """Estimates a finished run and lays what was measured beside it; None on CPU and on all ranks but the first.

    A model that cannot be traced has been trained all the same: nothing is compared then.
    """
    if not run.world.is_main or run.world.device.type != "cuda":
        return None
    from toolkit.memory.estimate import estimate  # here: every rank starts without it, and one needs it at the end

    try:
        report = estimate(run.plan)
    except Exception:  # whatever a trace may stumble over must not fail a run that has been trained
        return None
    free, total = torch.cuda.mem_get_info(run.world.device)
    return MeasuredRun(
        gpu=run.plan.gpu.name,
        num_ranks=run.world.size,
        predicted={phase: part.allocated_bytes for phase, part in report.ranks[0].phases.items()},
        measured={phase: size for phase, size in run.memory.peaks.items() if phase in report.ranks[0].phases},
        context_and_nccl_bytes=report.ranks[0].context_and_nccl_bytes,
        reserved_bytes=int(torch.cuda.memory_reserved(run.world.device)),
        device_used_bytes=total - free,
        num_communicators=report.ranks[0].num_communicators,
    )
