"""What a CUDA kernel allocates in addition to its result and releases before it returns, which fake tensors do not show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.memory.kernels.device import Device

aten = torch.ops.aten

# Reduce.cuh (of torch's headers for CUDA), where no line is named.
_MAX_NUM_THREADS = 512
_WARP_SIZE = 32
_MIN_VALUES_PER_THREAD, _MAX_VALUES_PER_THREAD = 16, 256
_MAX_VECTOR = 4
_MAX_INDEXED_BYTES = 2**31  # above, a reduction is taken in pieces (can_use_32bit_indexing)


def temporary_bytes(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, device: Device
) -> tuple[int, ...]:
    """Return the sizes of the blocks that a call allocates and releases, all at once.

    Source:
        cuda/SoftMax.cu softmax_backward_cuda_out (grad * output); transformers/attention.cpp _safe_softmax (isneginf of the
        scores); ReduceOps.cpp logsumexp_out_impl (the exponentials); Reduce.cuh gpu_reduce_kernel.
    """
    sizes = _WITHIN.get(function)
    return () if sizes is None else sizes(args, kwargs, device)


@dataclass(frozen=True, slots=True)
class _Dim:
    size: int
    stride: int


def reduction_blocks(tensor: torch.Tensor, dims: Sequence[int] | None, *, device: Device) -> tuple[int, ...]:
    """Return the blocks in which thread blocks leave their parts of a sum: its buffer, and the semaphores.

    A sum over rows, such as of a bias's gradient, is divided among thread blocks, each of which reserves fp32 numbers for all of its
    threads times the number of outputs: for many rows that is 8 bytes an element of the tensor.

    Args:
        tensor: What is summed, or averaged.
        dims: Dimensions that are summed; None or none of them for all.
        device: Card.

    Source:
        aten/src/ATen/native/cuda/Reduce.cuh setReduceConfig, ReduceConfig.global_memory_size; TensorIterator.cpp
        reorder_dimensions, coalesce_dimensions.
    """
    summed = {dim % tensor.ndim for dim in dims} if dims and tensor.ndim else set(range(tensor.ndim))
    reduced = _coalesced(tensor, summed)
    kept = _coalesced(tensor, set(range(tensor.ndim)) - summed)
    outputs, inputs = math.prod(dim.size for dim in kept), math.prod(dim.size for dim in reduced)
    # Where outputs are one after another; sums along a row are divided among few blocks, of a number each.
    if not reduced or not kept or not outputs or reduced[0].stride < kept[0].stride:
        return ()
    while outputs * inputs * tensor.element_size() > _MAX_INDEXED_BYTES and inputs > 1:
        inputs = -(-inputs // 2)
    vector = _output_vector(tensor, kept, reduced)
    width, height = _block(outputs // vector, inputs, max_threads=_MAX_NUM_THREADS // vector)
    if inputs < min(height * 16, _MAX_VALUES_PER_THREAD):
        return ()
    values = -(-inputs // height)
    grid = -(-(outputs // vector) // width)
    resident = device.num_multiprocessors * (device.threads_per_multiprocessor // (width * height))
    if values < _MAX_VALUES_PER_THREAD or grid > resident:
        return ()
    divided = min(-(-resident // grid), -(-values // _MIN_VALUES_PER_THREAD))
    blocks = max(divided, -(-values // _MAX_VALUES_PER_THREAD))
    if blocks < 2:
        return ()
    number = 4 if tensor.is_floating_point() else 8
    return number * outputs * blocks * width * vector, 4 * grid


def _coalesced(tensor: torch.Tensor, dims: set[int]) -> list[_Dim]:
    """Return dimensions from the fastest on, those that lie behind each other as one."""
    found: list[_Dim] = []
    for dim in sorted((_Dim(tensor.shape[dim], tensor.stride(dim)) for dim in dims), key=lambda dim: dim.stride):
        if dim.size == 1:
            continue
        if found and found[-1].size * found[-1].stride == dim.stride:
            found[-1] = _Dim(found[-1].size * dim.size, found[-1].stride)
        else:
            found.append(dim)
    return found


def _output_vector(tensor: torch.Tensor, kept: Sequence[_Dim], reduced: Sequence[_Dim]) -> int:
    """Return how many outputs a thread sums (get_output_vec_size)."""
    if kept[0].stride != 1:
        return 1
    strides = [dim.stride for dim in (*kept[1:], *reduced)]
    return math.gcd(_MAX_VECTOR, tensor.storage_offset(), kept[0].size, *strides)


def _block(outputs: int, inputs: int, *, max_threads: int) -> tuple[int, int]:
    """Return width and height of a thread block (set_block_dimension)."""
    across, down = (min(_power_of_two(size), max_threads) for size in (outputs, inputs))
    height = min(down, max_threads // min(across, _WARP_SIZE))
    return min(across, max_threads // height), height


def _power_of_two(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def _sum(args: Sequence[Any], kwargs: Mapping[str, Any], device: Device) -> tuple[int, ...]:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    return reduction_blocks(args[0], dims, device=device)


_Sizes = Callable[[Sequence[Any], Mapping[str, Any], Device], tuple[int, ...]]
_WITHIN: Mapping[Any, _Sizes] = {
    aten._softmax_backward_data.default: lambda args, kwargs, device: (args[0].nbytes,),
    aten._safe_softmax.default: lambda args, kwargs, device: (args[0].numel(),),
    aten.logsumexp.default: lambda args, kwargs, device: (args[0].nbytes,),
    aten.sum.dim_IntList: _sum,
    aten.mean.dim: _sum,
}
