"""Which kernels a card runs, and a context in which a trace on fake CPU tensors runs their stand-ins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional
from transformers import masking_utils
from transformers.integrations import moe

from toolkit.memory.kernels.device import Device
from toolkit.memory.kernels.fake_attention import traced_flash
from toolkit.memory.kernels.fake_fused import Dropout, FusedAttention, GroupedMatmul
from toolkit.memory.kernels.fake_liger import cross_entropy_stand_in, functions_stand_in
from toolkit.modeling import liger

Kernel = Literal["flash", "cudnn", "efficient", "math"]

# Limits without another source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
FLASH_MIN_CAPABILITY = 8.0  # check_flash_attention_hardware_support
FLASH_MAX_HEAD_DIM = 256  # check_head_dim_size_flash
EFFICIENT_MIN_CAPABILITY = 5.0  # check_mem_efficient_hardware_support
CUDNN_MAX_HEAD_DIM = 128  # check_cudnn_tensor_shapes
CUDNN_LATENT_HEAD_DIMS = (192, 128)  # the same: queries and values of multi-head latent attention
GROUPED_MM_MIN_CAPABILITY = 8.0  # transformers integrations/moe.py _can_use_grouped_mm
# liger_kernel ops/fused_linear_cross_entropy.py (0.8.2 and later): addmm into the head's gradient.
LIGER_IN_PLACE_MIN_CAPABILITY = 8.0
# Attribute of fake tensors that are made of ones (trace/fake_ops.py marked_ones).
ALL_ONES = "is_all_ones"
# check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120: 192 < width <= 224, or > 224 with dropout.
SMALL_SHARED_MEMORY = ((8.6, 8.9), (12.0, 12.1))


def choose_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    device: Device,
    dropout: float = 0.0,
    causal: bool = True,
    enable_gqa: bool = True,
) -> Kernel:
    """Return the kernel that `scaled_dot_product_attention` runs on a CUDA card when gradients are needed.

    Args:
        query: Queries, shape (batch, heads, sequence, width).
        key: Keys of the same shape; fewer heads for grouped-query attention.
        value: Values of the shape of keys.
        mask: Boolean or additive mask.
        device: Card that runs the kernel.
        dropout: Dropout probability.
        causal: Whether `is_causal` masks the upper triangle.
        enable_gqa: Whether query heads may share key and value heads; without it, different numbers of heads are
            broadcast, which no fused kernel does (check_batch_size_and_num_heads_dense).

    Source:
        sdp_utils.cpp select_sdp_backend: the first usable one of cuDNN (Hopper and Blackwell), flash, efficient, math.
    """
    grouped = key.shape[1] != query.shape[1]
    # check_last_dim_stride_equals_1_dense (sdp_utils_cpp.h): a bias that is made with the heads last fails it.
    along_rows = all(each.stride(-1) == 1 or each.shape[-1] == 1 for each in (query, key, value))
    if (grouped and not enable_gqa) or not along_rows or (mask is not None and mask.stride(-1) != 1):
        return "math"
    fits = _Shapes(
        half=query.dtype in (torch.bfloat16, torch.float16),
        grouped=grouped,
        masked=mask is not None,
        width=query.shape[-1],
        value_width=value.shape[-1],
        square=query.shape[-2] == key.shape[-2] or not causal,
        dropout=dropout,
    )
    if fits.cudnn(device):
        return "cudnn"
    if fits.flash(device):
        return "flash"
    return "efficient" if fits.efficient(device, query.dtype) else "math"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shapes:
    half: bool
    grouped: bool
    masked: bool
    width: int
    value_width: int
    square: bool
    dropout: float

    def cudnn(self, device: Device) -> bool:
        """Return whether cuDNN's attention can run (can_use_cudnn_attention)."""
        widths = (self.width, self.value_width)
        small = max(widths) <= CUDNN_MAX_HEAD_DIM or widths == CUDNN_LATENT_HEAD_DIMS
        aligned = self.width % 8 == 0 and self.value_width % 8 == 0
        # check_cudnn_dropout: its probabilities are multiples of 1/16.
        return device.prefers_cudnn and self.half and small and aligned and (self.dropout * 16).is_integer()

    def flash(self, device: Device) -> bool:
        """Return whether flash attention can run (can_use_flash_attention)."""
        equal = self.width == self.value_width <= FLASH_MAX_HEAD_DIM
        cramped = any(low <= device.capability <= high for low, high in SMALL_SHARED_MEMORY)
        refused = cramped and not (self.width <= 192 or (self.width > 224 and self.dropout == 0))
        plain = self.half and equal and self.square and not self.masked and not refused
        return plain and device.capability >= FLASH_MIN_CAPABILITY

    def efficient(self, device: Device, dtype: torch.dtype) -> bool:
        """Return whether memory-efficient attention can run (can_use_mem_efficient_attention; minimum_gemm_alignment)."""
        tensor_cores = device.capability >= 8.0 or (device.capability >= 7.0 and self.half)
        alignment = (8 if self.half else 4) if tensor_cores else 1
        aligned = self.width % alignment == 0 and self.value_width % alignment == 0
        computes = dtype != torch.bfloat16 or device.capability >= 8.0
        return aligned and computes and not self.grouped and device.capability >= EFFICIENT_MIN_CAPABILITY


def _sdpa(device: Device) -> Callable[..., torch.Tensor]:
    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        heads, kv_heads = query.shape[-3], key.shape[-3]
        if heads % kv_heads or (heads != kv_heads and kv_heads != 1 and not enable_gqa):
            raise ValueError(f"{heads} query heads cannot share {kv_heads} key and value heads")
        kernel = choose_kernel(
            query,
            key,
            value,
            attn_mask,
            device=device,
            dropout=dropout_p,
            causal=is_causal,
            enable_gqa=enable_gqa,
        )
        if kernel == "math":
            return torch.ops.aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            # attention.cpp convert_boolean_attn_mask: the kernel adds a bias in the query's type.
            bias = torch.empty_like(bias, dtype=query.dtype)
        if bias is not None and bias.requires_grad:
            # attention.cpp preprocess_mask: the kernel gives a learned bias its gradient for every sequence and head.
            bias = bias.expand(*query.shape[:-1], key.shape[-2])
        return FusedAttention.apply(query, key, value, bias, kernel, is_causal)  # type: ignore[no-any-return, no-untyped-call]

    return attend


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return input
    return Dropout.apply(input)  # type: ignore[no-any-return, no-untyped-call]


def _grouped_mm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def multiply(mat_a: torch.Tensor, mat_b: torch.Tensor, *, offs: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if mat_a.dtype == torch.bfloat16 or mat_a.ndim != 2 or mat_b.ndim != 3:
            return original(mat_a, mat_b, offs=offs, **kwargs)
        return GroupedMatmul.apply(mat_a, mat_b, offs)  # type: ignore[no-untyped-call]

    return multiply


# Torch's own functions, which the stand-ins take the place of.
_OF_TORCH = {name: getattr(functional, name) for name in ("scaled_dot_product_attention", "dropout", "grouped_mm")}


@contextlib.contextmanager
def torch_functions() -> Iterator[None]:
    """Run torch's own attention, dropout and grouped products in a `with` block inside of `cuda_kernels`."""
    kept = {name: getattr(functional, name) for name in _OF_TORCH}
    for name, function in _OF_TORCH.items():
        setattr(functional, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(functional, name, function)


@contextlib.contextmanager
def _masks_of_ones() -> Iterator[None]:
    """Drop a mask that a model makes itself for want of one, as decoders behind an encoder do: its ones can be read on real tensors.

    Source:
        transformers models/bart/modeling_bart.py BartDecoder; masking_utils.py _ignore_causal_mask_sdpa.
    """
    preprocess = masking_utils._preprocess_mask_arguments

    def without(given: Any) -> Any:
        return None if getattr(given, ALL_ONES, False) else given

    def without_ones(*args: Any, **kwargs: Any) -> Any:  # the mask is the only argument that may be one
        return preprocess(*map(without, args), **{name: without(value) for name, value in kwargs.items()})

    masking_utils._preprocess_mask_arguments = without_ones
    try:
        yield
    finally:
        masking_utils._preprocess_mask_arguments = preprocess


@contextlib.contextmanager
def cuda_kernels(device: Device, *, packed: bool = False) -> Iterator[None]:
    """Run attention, its masks, experts and dropout as a CUDA card would.

    Args:
        device: Card to imitate.
        packed: Whether a row has several separated documents, so that a mask is always needed.
    """
    attention, dropout = functional.scaled_dot_product_attention, functional.dropout
    find_packed, grouped_mm = masking_utils.find_packed_sequence_indices, functional.grouped_mm
    can_use_grouped_mm = moe._can_use_grouped_mm
    kept = {name: getattr(liger, name) for name in ("check_installed", "fused_functions", "liger_cross_entropy")}
    if not packed:
        # On real positions it finds one document and returns None; it cannot read fake ones, and assumes several.
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    functional.scaled_dot_product_attention = _sdpa(device)
    functional.dropout = _dropout
    liger.check_installed = lambda: None  # no Liger kernel runs
    liger.fused_functions = lambda: functions_stand_in(num_multiprocessors=device.num_multiprocessors)
    sums_in_place = device.capability >= LIGER_IN_PLACE_MIN_CAPABILITY
    liger.liger_cross_entropy = cross_entropy_stand_in(sums_in_place=sums_in_place)
    functional.grouped_mm = _grouped_mm(grouped_mm)
    moe._can_use_grouped_mm = lambda *_: device.capability >= GROUPED_MM_MIN_CAPABILITY
    try:
        with traced_flash(packed=packed), _masks_of_ones():
            yield
    finally:
        functional.scaled_dot_product_attention = attention
        functional.dropout = dropout
        for name, value in kept.items():
            setattr(liger, name, value)
        functional.grouped_mm = grouped_mm
        moe._can_use_grouped_mm = can_use_grouped_mm
        masking_utils.find_packed_sequence_indices = find_packed
