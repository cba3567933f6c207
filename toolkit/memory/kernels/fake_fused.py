"""Stand-ins for CUDA kernels whose CPU counterparts save other tensors for the backward pass.

They allocate, save and release what the CUDA kernels do, and compute nothing.
B: sequences, H: heads, S: tokens, D: width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from toolkit.memory.kernels.operations import note


@cache
def _attention_operator() -> Any:
    """Return fused attention as an operator, by whose results a layer that recomputes may keep them (modeling.checkpointing)."""
    library: Any = torch.library.Library("toolkit_trace", "DEF")  # type: ignore[no-untyped-call]
    library.define(
        "fused_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, str kernel, bool causal) -> (Tensor, Tensor)"
    )

    def made(q: Any, k: Any, v: Any, bias: Any, kernel: str, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_results(q, k, v, bias, kernel=kernel, causal=causal)

    torch.library.register_fake("toolkit_trace::fused_attention", made, lib=library)
    return torch.ops.toolkit_trace.fused_attention, library


class FusedAttention(torch.autograd.Function):
    """Flash, cuDNN and memory-efficient attention: all save q, k, v, the output and the log-sum-exp.

    Source:
        aten/src/ATen/native/transformers/cuda/attention.cu, attention_backward.cu, flash_attn/flash_api.cpp mha_bwd,
        mem_eff_attention/kernel_backward.h (workspace_elements_gq).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_BHSD: torch.Tensor,
        key_BHSD: torch.Tensor,
        value_BHSD: torch.Tensor,
        bias: torch.Tensor | None,
        kernel: str = "flash",
        causal: bool = True,
    ) -> Any:
        """Allocate the output and the log-sum-exp; `kernel` and `causal` are only noted."""
        ctx.kernel, ctx.causal = kernel, causal
        attend, _ = _attention_operator()
        out_BHSD, logsumexp_BHS = attend(query_BHSD, key_BHSD, value_BHSD, bias, kernel, causal)
        saved = [query_BHSD, key_BHSD, value_BHSD, out_BHSD, logsumexp_BHS]
        ctx.save_for_backward(*saved, *([] if bias is None else [bias]))
        return out_BHSD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Allocate the gradients."""
        query, key, value, out, logsumexp, *bias = ctx.saved_tensors
        grad_bias = torch.empty_like(bias[0]) if bias and ctx.needs_input_grad[3] else None
        gradients = attention_gradients(
            query,
            key,
            value,
            out,
            others=[*grads, logsumexp, *bias],
            kernel=ctx.kernel,
            causal=ctx.causal,
        )
        return *gradients, grad_bias, None, None


def attention_results(
    query_BHSD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    kernel: str,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the output, with the memory layout of the query, and the log-sum-exp of fused attention."""
    out_BHSD = _like_layout(query_BHSD, (*query_BHSD.shape[:-1], value_BHSD.shape[-1]))
    logsumexp_BHS = query_BHSD.new_empty(query_BHSD.shape[:-1], dtype=torch.float32)
    note(
        "attention",
        kernel,
        dims=_attention_dims(query_BHSD, key_BHSD, value_BHSD, causal=causal),
        reads=[query_BHSD, key_BHSD, value_BHSD, bias],
        writes=[out_BHSD, logsumexp_BHS],
    )
    return out_BHSD, logsumexp_BHS


def attention_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    *,
    others: Sequence[torch.Tensor | None],
    kernel: str,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate the gradients; 16-bit kernels sum dq in fp32, and make dk and dv per query head before summing heads.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        out: Output.
        others: What is read too: the gradient of the output, the log-sum-exp, and a bias.
        kernel: Kernel, for the note.
        causal: Whether its mask is causal, for the note.
    """
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    work = [out.new_empty(out.shape[:-1], dtype=torch.float32)]
    if query.dtype != torch.float32:
        work.append(query.new_empty(query.shape, dtype=torch.float32))
    if key.shape[1] != query.shape[1]:
        work += [key.new_empty(query.shape), value.new_empty(out.shape)]
    note(
        "attention",
        kernel,
        dims=_attention_dims(query, key, value, causal=causal),
        reads=[query, key, value, out, *others],
        writes=[*gradients, *work],
    )
    return gradients


def _attention_dims(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
) -> tuple[int, int, int, int, int, int, int]:
    batch, heads, queries, width = query.shape
    return batch, heads, queries, key.shape[-2], width, value.shape[-1], int(causal)


def _like_layout(query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Allocate an output with the memory layout of the query (cudnn/MHA.cpp alloc_with_matching_layout)."""
    order = sorted(range(len(shape)), key=query.stride, reverse=True)
    return query.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


class GroupedMatmul(torch.autograd.Function):
    """`grouped_mm` in fp32 and fp16, which CUDA computes group by group and fake tensors do not support.

    Source:
        aten/src/ATen/native/cuda/GroupedBlas.cpp _grouped_mm_cuda; torch/_meta_registrations.py _meta_grouped_mm_common.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Allocate one row of output per row of input."""
        ctx.save_for_backward(rows, weights, offsets)
        out = rows.new_empty((rows.shape[0], weights.shape[-1]))
        _note_grouped(rows, weights, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Allocate the gradients that are needed."""
        rows, weights, _ = ctx.saved_tensors
        needs_rows, needs_weights, _ = ctx.needs_input_grad
        for needed in (needs_rows, needs_weights):
            if needed:
                _note_grouped(rows, weights, grads[0])
        return (
            torch.empty_like(rows) if needs_rows else None,
            torch.empty_like(weights) if needs_weights else None,
            None,
        )


def _note_grouped(rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    groups = weights.shape[0]
    dims = (groups, -(-rows.shape[0] // groups), weights.shape[-1], rows.shape[-1])
    note("product", "_grouped_mm", dims=dims, reads=[rows, weights], writes=[out])


class Dropout(torch.autograd.Function):
    """CUDA's native_dropout, which keeps a mask of one byte per element (aten/src/ATen/native/cuda/Dropout.cu)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Allocate the mask and the output."""
        mask = torch.empty_like(hidden, dtype=torch.bool)
        ctx.save_for_backward(mask)
        out = torch.empty_like(hidden)
        note("eager", "native_dropout", reads=[hidden], writes=[out, mask])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Allocate the gradient."""
        grad = torch.empty_like(grads[0])
        note("eager", "native_dropout_backward", reads=[grads[0], *ctx.saved_tensors], writes=[grad])
        return grad
