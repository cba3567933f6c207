"""Memory of a card in addition to what torch allocates: the CUDA context, NCCL's buffers, and the allocator's slack.

These cannot be read off source code: they depend on the driver, the card and the version of NCCL. The figures are of an
H100 SXM with driver 580, torch 2.11 and NCCL 2.28, from `device_used - peak_reserved` of measured runs; `toolkit
calibrate` replaces them by those of the current machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolkit.memory.report.calibration import Calibration
from toolkit.units import GIB

Allocator = Literal["expandable", "native"]

# Device memory outside of torch's allocator at the end of a run on one card: context, loaded kernels, NCCL's base.
CONTEXT_BYTES = int(1.70 * GIB)
# The same on two and on four cards, less the above: the first communicator over NVLink.
COMMUNICATOR_BYTES = int(0.37 * GIB)
# Each further communicator, once it has run an all-reduce, an all-gather and a reduce-scatter: eight more, one by one, on two H200
# (run `communicators-2` of tests/data/cards).
FURTHER_COMMUNICATOR_BYTES = int(0.475 * GIB)

# Page size of our launches (toolkit.launch.environment). Partly used pages cannot be released: those of each stream's
# segment, and those with live tensors between freed ones.
PAGE_BYTES = 128 * 2**20
PARTIAL_PAGES = 4
# Share of the peak on top of them: room to place large tensors with at most one or two releases of memory per step.
EXPANDABLE_SLACK = 0.02
TIGHT_EXPANDABLE = (
    "peak is what tensors take at once, required what the card must have, and reserved, which nvidia-smi shows, what the "
    "allocator has taken: with room up to 40 % above the peak, without harm; at exactly the required size it gives freed pages "
    "back in most steps, which large pages keep cheap in our launches"
)
# Torch's default allocator splits blocks and cannot merge free ones of different segments: 20 measured runs reserved 5 to
# 36 % more than they allocated. (The same 8B run: 71 GiB reserved by default, 56 with expandable segments, for 52.5 allocated.)
NATIVE_SLACK = 0.36

# CublasHandlePool.cpp getChosenWorkspaceSize: 32 MiB from Hopper on, ":4096:2:16:8" before it.
WORKSPACE_BYTES_HOPPER = 32 * 2**20
WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Memory of a card outside of the model's tensors, bytes."""

    context_and_nccl_bytes: int
    slack_bytes: int


def workspace_bytes(capability: float) -> int:
    """Return the cuBLAS workspace of each thread that multiplies, bytes."""
    return WORKSPACE_BYTES_HOPPER if capability >= 9.0 else WORKSPACE_BYTES


def overhead(
    peak_allocated_bytes: int, *, num_communicators: int, allocator: Allocator, calibration: Calibration | None = None
) -> Overhead:
    """Return the memory that a card needs in addition to the peak.

    Args:
        peak_allocated_bytes: Peak of the bytes that torch allocates.
        num_communicators: NCCL communicators of more than one rank.
        allocator: Setting of torch's allocator.
        calibration: Figures learned from runs on the card.
    """
    known = calibration or Calibration()
    context = known.context_bytes if known.context_bytes is not None else CONTEXT_BYTES
    learned = known.communicator_bytes
    first, each = (COMMUNICATOR_BYTES, FURTHER_COMMUNICATOR_BYTES) if learned is None else (learned, learned)
    slack = NATIVE_SLACK * peak_allocated_bytes
    if allocator == "expandable":
        slack = EXPANDABLE_SLACK * peak_allocated_bytes + PARTIAL_PAGES * PAGE_BYTES
    communicators = min(num_communicators, 1) * first + max(num_communicators - 1, 0) * each
    return Overhead(
        context_and_nccl_bytes=context + communicators,
        slack_bytes=int(slack),
    )
