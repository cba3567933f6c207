"""At the end of a run: what was predicted of rank 0's memory, and what it took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from toolkit.engine.run import Run
from toolkit.memory.account import PHASES
from toolkit.memory.estimate import estimate
from toolkit.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryComparison:
    """One run's prediction and measurement; bytes, of rank 0.

    Args:
        gpu: Name in the catalogue.
        num_ranks: Ranks of the run.
        predicted: Peak allocated by phase.
        measured: The same as torch counted it.
        context_and_nccl_bytes: Predicted memory outside of torch's allocator.
        reserved_bytes: What torch's allocator held at the end.
        device_used_bytes: What the driver called used at the end, all processes of the card.
    """

    gpu: str
    num_ranks: int
    predicted: dict[str, int]
    measured: dict[str, int]
    context_and_nccl_bytes: int
    reserved_bytes: int
    device_used_bytes: int

    @property
    def peak_error(self) -> float:
        """Predicted over measured peak, less one."""
        return max(self.predicted.values()) / max(self.measured.values()) - 1

    def to_dict(self) -> dict[str, Any]:
        """Gives the object that metrics.jsonl keeps under `memory`."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Says it in words."""
        yield f"memory of rank 0, predicted and measured: peak {self.peak_error:+.1%}"
        for phase in PHASES:
            if phase in self.measured:
                predicted, measured = self.predicted[phase], self.measured[phase]
                error = predicted / measured - 1
                yield f"  {phase:<9} {format_bytes(predicted):>11} {format_bytes(measured):>11} {error:+.1%}"
        outside = self.device_used_bytes - self.reserved_bytes
        yield (
            f"  context and NCCL {format_bytes(self.context_and_nccl_bytes)} predicted, {format_bytes(outside)} "
            "measured: `toolkit calibrate` learns from it"
        )


def compare_memory(run: Run) -> MemoryComparison | None:
    """Estimates a finished run and lays what was measured beside it; None on CPU and on all ranks but the first.

    A model that cannot be traced has been trained all the same: nothing is compared then.
    """
    if not run.world.is_main or run.world.device.type != "cuda":
        return None
    try:
        report = estimate(run.plan)
    except Exception:  # whatever a trace may stumble over must not fail a run that has been trained
        return None
    free, total = torch.cuda.mem_get_info(run.world.device)
    return MemoryComparison(
        gpu=run.plan.gpu.name,
        num_ranks=run.world.size,
        predicted={phase: part.allocated_bytes for phase, part in report.ranks[0].phases.items()},
        measured={phase: size for phase, size in run.memory.peaks.items() if phase in PHASES},
        context_and_nccl_bytes=report.context_and_nccl_bytes,
        reserved_bytes=int(torch.cuda.memory_reserved(run.world.device)),
        device_used_bytes=total - free,
    )
