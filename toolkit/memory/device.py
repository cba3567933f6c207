"""What a card must have beside what torch allocates: the CUDA context, NCCL's buffers, and the allocator's slack.

These cannot be read off source code: they belong to a driver, a card and a version of NCCL. The figures are those of an
H100 SXM with driver 580, torch 2.11 and NCCL 2.28, from `device_used - peak_reserved` of measured runs; `toolkit
calibrate` replaces them by those of the machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolkit.memory.calibration import Calibration
from toolkit.units import GIB

Allocator = Literal["expandable", "native"]

# Device memory outside of torch's allocator at the end of a run on one card: context, loaded kernels, NCCL's start.
CONTEXT_BYTES = int(1.70 * GIB)
# The same on two and on four cards, less the above: the first communicator over NVLink.
COMMUNICATOR_BYTES = int(0.37 * GIB)
# Each further one, once it has run an all-reduce, an all-gather and a reduce-scatter: eight more, one by one, on two H200
# (run `communicators-2` of tests/data/cards).
FURTHER_COMMUNICATOR_BYTES = int(0.475 * GIB)

# With expandable segments 21 runs under a cap of 1.03 to 1.05 times their peak finished, and 12 of 13 under 1.01 (the
# 13th lacked 5 MiB of 12.6 GiB); all 24 under less than their peak failed (tests/data/cards). What torch cannot reuse as
# it lies it gives back and maps anew, in most steps; with room enough runs reserve what that would save.
EXPANDABLE_SLACK = 0.03
TIGHT_EXPANDABLE = (
    "with no more than is required torch maps freed memory anew in most steps: 21 measured runs took 0 to 40 % longer a "
    "step, 9 % at the median; with room, runs reserve 11 % more than their peak at the median, 40 % at most"
)
# Torch's default allocator cuts blocks to size and cannot join what lies apart: 20 measured runs reserved 5 to 36 % more
# than they allocated. (The same 8B run: 71 GiB reserved by default, 56 with expandable segments, for 52.5 allocated.)
NATIVE_SLACK = 0.36

# CublasHandlePool.cpp getChosenWorkspaceSize: 32 MiB from Hopper on, ":4096:2:16:8" before it.
WORKSPACE_BYTES_HOPPER = 32 * 2**20
WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Memory of a card that the model's tensors do not take, bytes."""

    context_and_nccl_bytes: int
    slack_bytes: int


def workspace_bytes(capability: float) -> int:
    """Gives the cuBLAS workspace of each thread that multiplies, bytes."""
    return WORKSPACE_BYTES_HOPPER if capability >= 9.0 else WORKSPACE_BYTES


def overhead(
    peak_allocated_bytes: int, *, num_communicators: int, allocator: Allocator, calibration: Calibration | None = None
) -> Overhead:
    """Gives what a card must have beside the peak.

    Args:
        peak_allocated_bytes: What torch allocates at most.
        num_communicators: NCCL communicators of more than one rank.
        allocator: How torch's allocator is set.
        calibration: What runs have taught of the card.
    """
    known = calibration or Calibration()
    context = known.context_bytes if known.context_bytes is not None else CONTEXT_BYTES
    learned = known.communicator_bytes
    first, each = (COMMUNICATOR_BYTES, FURTHER_COMMUNICATOR_BYTES) if learned is None else (learned, learned)
    share = EXPANDABLE_SLACK if allocator == "expandable" else NATIVE_SLACK
    communicators = min(num_communicators, 1) * first + max(num_communicators - 1, 0) * each
    return Overhead(
        context_and_nccl_bytes=context + communicators,
        slack_bytes=int(share * peak_allocated_bytes),
    )
