"""Host memory of a node: what each rank keeps there, with the rounding of pinned allocations.

Source: deepspeed runtime/zero/stage_1_and_2.py (cpu_offload), runtime/zero/stage3.py (_create_fp32_partitions,
_setup_for_real_optimizer, defragment), runtime/swap_tensor; ATen/cuda/CachingHostAllocator (PowerOf2Ceil).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.trace import Trace
from toolkit.units import GIB

# Resident memory of a training process before its tensors: Python, torch, CUDA's libraries, DeepSpeed. Peak RSS of
# ranks that keep nothing on the host, torch 2.11: 1.99 to 2.15 GiB.
PROCESS_BYTES = int(2.0 * GIB)
# The same while the model is built, before kernels and communicators are loaded: peak RSS of ZeRO-3 ranks without
# offload, less their partitions, 1.43 to 1.53 GiB.
PROCESS_START_BYTES = int(1.5 * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Host memory of the fullest node.

    Args:
        bytes_per_rank: What the rank keeps that keeps most, by cause.
        ranks_per_node: Ranks of a node.
        capacity_bytes: RAM of a node; None if unknown.
        bytes_on_node: What all ranks of the node keep, by cause.
    """

    bytes_per_rank: dict[str, int]
    ranks_per_node: int
    capacity_bytes: int | None
    bytes_on_node: dict[str, int]

    @property
    def bytes_per_node(self) -> int:
        """All ranks of the node together."""
        return sum(self.bytes_on_node.values())

    @property
    def fits(self) -> bool:
        """Whether the node holds it."""
        return self.capacity_bytes is None or self.bytes_per_node <= self.capacity_bytes


def pinned(size: float) -> int:
    """Gives what torch page-locks for `size` bytes: the next power of two.

    Source:
        aten/src/ATen/core/CachingHostAllocator.h: sizes are rounded by PowerOf2Ceil.
    """
    return 1 << math.ceil(math.log2(size)) if size >= 1 else 0


def host_bytes(
    trace: Trace,
    settings: EngineSettings,
    *,
    partition_numel: int,
    largest_numel: int,
    host_groups: Sequence[int] = (),
    largest_group: int = 0,
) -> dict[str, int]:
    """Gives a rank's host memory by cause, bytes.

    Args:
        trace: The model.
        settings: What the engine's memory depends on.
        partition_numel: Trainable elements whose optimizer state this rank owns.
        largest_numel: Elements of the largest parameter.
        host_groups: Elements of the ZeRO-3 sub-groups whose optimizer state the CPU keeps.
        largest_group: Elements of the largest ZeRO-3 sub-group.
    """
    found = {"process": PROCESS_BYTES}
    if settings.zero_stage == 3:
        stored = sum(math.ceil(p.numel / settings.dp_size) * p.itemsize for p in trace.parameters)
        trained = sum(math.ceil(p.numel / settings.dp_size) * p.itemsize for p in trace.parameters if p.trainable)
        found |= _stage3(settings, partition_numel, stored, trained, host_groups, largest_group)
    elif settings.offload_optimizer:
        itemsize, master, held = settings.itemsize, settings.master_itemsize, _holder(settings)
        found["master parameters"] = held(master * partition_numel)
        found["gradients in fp32"] = held(master * partition_numel)
        found["parameter staging"] = held(itemsize * partition_numel)
        found["gradient staging"] = held(itemsize * largest_numel)
        found["optimizer state"] = int(settings.state_bytes * partition_numel)
        compact = settings.accumulation_itemsize > itemsize  # one buffer on the card, instead
        if settings.adds_up_on_host and not compact:
            mine = partition_numel + (largest_numel if settings.dp_size > 1 else 0)
            # One pinned buffer a parameter; rounded up each, half as much again on average.
            found["accumulated gradients"] = int(itemsize * mine * (1.5 if settings.pin_memory else 1.0))
    return {cause: size for cause, size in found.items() if size}


def _holder(settings: EngineSettings) -> Callable[[float], int]:
    return pinned if settings.pin_memory else int


def host_bytes_without_zero(trace: Trace, *, upcast: bool) -> dict[str, int]:
    """Gives a rank's host memory under DDP or FSDP2: each process has the whole model before it moves or is sharded.

    Args:
        trace: The model.
        upcast: Whether what trains becomes fp32 on the host (accelerate utils/fsdp_utils.py fsdp2_prepare_model).
    """
    whole = sum(p.numel * (4 if upcast and p.trainable else p.itemsize) for p in trace.parameters)
    return {"process": PROCESS_BYTES, "weights at the start": max(0, PROCESS_START_BYTES + whole - PROCESS_BYTES)}


def _stage3(
    settings: EngineSettings, numel: int, stored: int, trained: int, host_groups: Sequence[int], largest_group: int
) -> dict[str, int]:
    found: dict[str, int] = {}
    held = _holder(settings)
    if settings.offload_optimizer == "cpu":
        moved = sum(host_groups)
        found["master parameters"] = settings.master_itemsize * moved
        found["gradients in fp32"] = sum(held(settings.master_itemsize * group) for group in host_groups)
        found["optimizer state"] = int(settings.state_bytes * moved)
    elif settings.offload_optimizer == "nvme":
        master = settings.master_itemsize * largest_group
        found["optimizer swap buffers"] = settings.nvme_optimizer_buffers * master
        found["gradients in fp32"] = master
        # The first step makes a sub-group's moments in common memory, from which they are written out.
        found["optimizer state of a sub-group"] = int(settings.state_bytes * largest_group)
    if settings.offload_optimizer:
        found["gradient partition"] = held(settings.accumulation_itemsize * numel)
    if settings.offload_param == "cpu":
        found["parameter partitions"] = held(stored)
        # zero.Init pinned each partition by itself before it was copied into the flat buffer; torch keeps the blocks.
        found["parameter partitions of the start"] = int(stored * (1.5 if settings.pin_memory else 1.0))
    elif settings.offload_param == "nvme":
        size = settings.nvme_param_buffers * settings.nvme_param_buffer_size * settings.itemsize
        found["parameter swap buffers"] = held(size)
        found["parameters kept in memory"] = min(settings.max_in_cpu * settings.itemsize, stored)
    else:
        # defragment() sends the partitions that train through the host, before what comes after needs the host.
        later = PROCESS_BYTES + sum(found.values())
        found["parameter partitions at the start"] = max(0, PROCESS_START_BYTES + trained - later)
    return found
