"""Horovod's environment variables: those that set the pace of operations, and those that have no effect here."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

from toolkit.compat.horovod.errors import DOCS, refuse_value

# Horovod's defaults: docs/tensor-fusion.rst and horovod/common/operations.cc.
_FUSION_BYTES = 128 * 2**20
_CYCLE_SECONDS = 0.001
_STALL_WARN_SECONDS = 60.0

# What Horovod reads at run time and this package does not (horovod/common/common.h, utils/env_parser.cc, logging.cc).
_WITHOUT_EFFECT = (
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
    "HOROVOD_AUTOTUNE",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
    "HOROVOD_AUTOTUNE_LOG",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "HOROVOD_CACHE_CAPACITY",
    "HOROVOD_CCL_BGT_AFFINITY",
    "HOROVOD_CCL_CACHE",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_DISABLE_GROUP_FUSION",
    "HOROVOD_DISABLE_NVTX_RANGES",
    "HOROVOD_ENABLE_ASYNC_COMPLETION",
    "HOROVOD_ENABLE_XLA_OPS",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_LOG_LEVEL",
    "HOROVOD_LOG_TIMESTAMP",
    "HOROVOD_MPI_THREADS_DISABLE",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_THREAD_AFFINITY",
    "HOROVOD_TIMELINE",
    "HOROVOD_TIMELINE_MARK_CYCLES",
    "HOROVOD_TORUS_ALLREDUCE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How operations are gathered before they are done, and how long one may wait for a rank.

    Args:
        fusion_bytes: Largest buffer into which tensors of one type are joined.
        cycle_seconds: Shortest time between two rounds of joined operations.
        warn_seconds: After so long rank 0 names an operation that waits for a rank; 0 for never.
        fail_seconds: After so long it fails; 0 for never.
    """

    fusion_bytes: int = _FUSION_BYTES
    cycle_seconds: float = _CYCLE_SECONDS
    warn_seconds: float = _STALL_WARN_SECONDS
    fail_seconds: float = 0.0

    @classmethod
    def from_environment(cls) -> Pace:
        """Read Horovod's variables.

        Source:
            horovod docs/tensor-fusion.rst, docs/troubleshooting.rst: HOROVOD_CYCLE_TIME is in milliseconds;
            horovod/common/utils/env_parser.cc: HOROVOD_STALL_CHECK_DISABLE turns off warnings and failures.
        """
        checked = _number("HOROVOD_STALL_CHECK_DISABLE", 0.0) == 0
        warn_seconds = _number("HOROVOD_STALL_CHECK_TIME_SECONDS", _STALL_WARN_SECONDS)
        fail_seconds = _number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)
        return cls(
            fusion_bytes=int(_number("HOROVOD_FUSION_THRESHOLD", _FUSION_BYTES)),
            cycle_seconds=_number("HOROVOD_CYCLE_TIME", 1000 * _CYCLE_SECONDS) / 1000,
            warn_seconds=warn_seconds if checked else 0.0,
            fail_seconds=fail_seconds if checked else 0.0,
        )


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        refuse_value(
            name, f"{name}={text!r} is not a number of at least 0", f"Set it to one, or unset it for {default:g}"
        )
    return value


def warn_without_effect() -> None:
    """Warn, in one line, of the variables that are set for Horovod and that nothing here reads; 0 and nothing are not set."""
    given = [f"{name}={os.environ[name]}" for name in _WITHOUT_EFFECT if os.environ.get(name, "") not in ("", "0")]
    if given:
        warnings.warn(
            f"{', '.join(given)}: set for Horovod, without effect here. {DOCS} has what to do instead",
            RuntimeWarning,
            stacklevel=2,
        )
