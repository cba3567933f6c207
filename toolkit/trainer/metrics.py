"""Metrics: one JSON object per line in metrics.jsonl.

A line of training holds numbers of its step (`step`, `epoch`, `grad_norm`, `learning_rate`) and means over the steps
since the line before, or since the checkpoint that the run resumed from (`loss`, `tokens_per_second`, `step_seconds`,
`mfu`): as transformers' Trainer logs (trainer.py _maybe_log_save_evaluate).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import Any

from toolkit.catalog.parameters import WHOLE, BackwardShares
from toolkit.checkpoint.disk import disk_errors
from toolkit.engine.memory_tracker import PhaseMemoryTracker
from toolkit.io import write_text
from toolkit.planning.plan import Plan
from toolkit.planning.unchecked_plan import flops_per_token

METRICS = "metrics.jsonl"


class MetricsWriter:
    """Writer of a file of `output_dir` with one JSON object a line, on rank 0 only.

    Args:
        plan: Resolved plan, with the folder.
        resumed_step: Step of the checkpoint; lines of later steps are dropped.
        name: Name of the file.
    """

    def __init__(self, plan: Plan, *, resumed_step: int, name: str = METRICS) -> None:
        self.path = plan.output_dir / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_after(self.path, resumed_step)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Write one record, which has a `step`.

        Non-finite numbers (the norm of a step that fp16 skips) are written as null, as JSON has no such numbers.

        Raises:
            RunError: DISK_FULL, CHECKPOINT_UNWRITABLE.
        """
        finite = {name: None if _is_not_finite(value) else value for name, value in record.items()}
        with disk_errors(self.path):
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Force everything to disk, ignoring disk errors: what ended the run matters more."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())
                self._file.close()


class Meter:
    """A meter of throughput and memory between two calls of `read`.

    Args:
        plan: Resolved plan, with FLOPs per token and the card's peak FLOP/s in its precision, for the model FLOPs utilisation (MFU). MFU of fp8
            is relative to the peak of fp8, though the head, attention and experts run in bf16.
        memory: Tracker of this rank's memory peaks.
        backward: What of the backward pass is computed, under `train.freeze`.
        adapters: Elements that are trained under LoRA and QLoRA.
    """

    def __init__(
        self, plan: Plan, memory: PhaseMemoryTracker, *, backward: BackwardShares = WHOLE, adapters: int = 0
    ) -> None:
        self._flops_per_token = flops_per_token(plan, backward=backward, adapters=adapters)
        rate = plan.gpu.flops_per_second(plan.settings.precision)
        self._peak_flops = rate * plan.grid.world_size if rate else None
        self._memory = memory
        self._start = time.perf_counter()

    def read(self, num_tokens: int, num_steps: int) -> dict[str, Any]:
        """Return tokens/s over all ranks, seconds per step, MFU (null where unknown) and peak memory of this rank."""
        now = time.perf_counter()
        seconds, self._start = max(now - self._start, 1e-9), now
        rate = num_tokens / seconds
        mfu = None
        if self._peak_flops and self._flops_per_token:
            mfu = rate * self._flops_per_token / self._peak_flops
        return {
            "tokens_per_second": rate,
            "step_seconds": seconds / num_steps,
            "mfu": mfu,
            "peak_allocated_bytes": self._memory.peak_bytes,
        }

    def skip(self) -> None:
        """Exclude the time since the last reading: an evaluation or a save."""
        self._start = time.perf_counter()


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # a partial line of a killed run
        if record.get("step", 0) <= step:
            kept.append(line + "\n")
    write_text(path, "".join(kept))
