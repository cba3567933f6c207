"""The comparison of rank 0's predicted and measured memory at the end of a run."""

from __future__ import annotations

import torch

from toolkit.engine.run import Run
from toolkit.memory.report.calibration import MeasuredRun


def compare_memory(run: Run) -> MeasuredRun | None:
    """Estimate a finished run's memory and compare it with the measured; None on CPU and on all ranks but the first.

    Nothing is compared if the model cannot be traced.
    """
    if not run.world.is_main or run.world.device.type != "cuda":
        return None
    from toolkit.memory.estimate import estimate  # imported here: only one rank needs it, at the end

    try:
        report = estimate(run.plan)
    except Exception:  # an error of the trace must not fail a finished run
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
