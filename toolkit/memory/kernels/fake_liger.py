"""Stand-ins for Liger's Triton kernels, which need neither a card nor the package: they allocate, save and release as those do.

T: tokens, D: width, F: features between gate and output, V: vocabulary, P: multiprocessors of the card.

Source:
    arXiv 2410.10989; liger_kernel 0.8.5 ops/rms_norm.py, swiglu.py, geglu.py, fused_linear_cross_entropy.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toolkit.memory.kernels.operations import note
from toolkit.modeling.liger import FusedFunctions
from toolkit.modeling.linear_cross_entropy import LogitMap


def functions_stand_in(*, num_multiprocessors: int) -> FusedFunctions:
    """Return stand-ins for the functions of `toolkit.modeling.liger.fused_functions`.

    Args:
        num_multiprocessors: Of the card; each sums a part of a norm's weight gradient.
    """

    def norm(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> Any:
        return _RMSNorm.apply(x, weight, num_multiprocessors)  # type: ignore[no-untyped-call]

    return FusedFunctions(
        rms_norm=norm, silu_product=_Gated.apply, gelu_product=_Gated.apply, joined_silu_product=_JoinedGated.apply
    )


class _RMSNorm(torch.autograd.Function):
    """RMS norm that keeps its input, which is the residual stream, and 1 / rms (rms_norm_forward, rms_norm_backward)."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor, num_multiprocessors: int) -> torch.Tensor:
        """Allocate the output and 1 / rms, in fp32 under both castings that toolkit uses."""
        x_TD = x_TD.contiguous()
        out_TD = torch.empty_like(x_TD)
        scale_T = x_TD.new_empty(x_TD.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x_TD, weight_D, scale_T)
        ctx.num_multiprocessors = num_multiprocessors
        note("fused", "liger_rms_norm", reads=[x_TD, weight_D], writes=[out_TD, scale_T])
        return out_TD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Allocate the gradient of the input, which toolkit does not write over that of the output, and partial sums."""
        x_TD, weight_D, _ = ctx.saved_tensors
        grad_TD = grads[0].contiguous()
        partial_PD = None
        if ctx.needs_input_grad[1]:
            partial_PD = x_TD.new_empty((ctx.num_multiprocessors, x_TD.shape[-1]), dtype=torch.float32)
        grad_x_TD = torch.empty_like(grad_TD)
        note("fused", "liger_rms_norm", reads=[grad_TD, x_TD, weight_D], writes=[grad_x_TD, partial_PD])
        return grad_x_TD, None if partial_PD is None else partial_PD.sum(dim=0).to(weight_D.dtype), None


class _Gated(torch.autograd.Function):
    """act(gate)·up, which writes both gradients over its inputs (LigerSiLUMulFunction, LigerGELUMulFunction)."""

    @staticmethod
    def forward(ctx: Any, gate_TF: torch.Tensor, up_TF: torch.Tensor) -> torch.Tensor:
        """Allocate the product."""
        gate_TF, up_TF = gate_TF.contiguous(), up_TF.contiguous()
        ctx.save_for_backward(gate_TF, up_TF)
        out_TF = torch.empty_like(gate_TF)
        note("fused", "liger_gated", reads=[gate_TF, up_TF], writes=[out_TF])
        return out_TF

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the inputs' storage."""
        gate_TF, up_TF = ctx.saved_tensors
        grad_TF = grads[0].contiguous()
        note("fused", "liger_gated", reads=[grad_TF, gate_TF, up_TF], writes=[gate_TF, up_TF])
        return gate_TF.view(gate_TF.shape), up_TF.view(up_TF.shape)


class _JoinedGated(torch.autograd.Function):
    """The same for the halves of one tensor, whose gradient is not in place (LigerFusedGateUpSiLUMulFunction)."""

    @staticmethod
    def forward(ctx: Any, both_TF: torch.Tensor) -> torch.Tensor:
        """Allocate the product."""
        both_TF = both_TF.contiguous()
        ctx.save_for_backward(both_TF)
        out_TF = both_TF.new_empty((*both_TF.shape[:-1], both_TF.shape[-1] // 2))
        note("fused", "liger_gated", reads=[both_TF], writes=[out_TF])
        return out_TF

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Allocate the gradient of both halves."""
        (both_TF,) = ctx.saved_tensors
        grad_TF = grads[0].contiguous()
        grad_both_TF = torch.empty_like(both_TF)
        note("fused", "liger_gated", reads=[grad_TF, both_TF], writes=[grad_both_TF])
        return grad_both_TF


def cross_entropy_stand_in(*, sums_in_place: bool) -> Callable[..., torch.Tensor]:
    """Return a stand-in for `toolkit.modeling.liger.liger_cross_entropy`.

    Args:
        sums_in_place: Whether products are added to the head's gradient in place, rather than through a product of its size
            and an fp32 copy of that.
    """

    def evaluate(
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_T: torch.Tensor,
        mapped: LogitMap,
    ) -> torch.Tensor:
        scaled_TD = hidden_TD * mapped.scale if mapped.scale != 1 else hidden_TD
        return _LigerLoss.apply(scaled_TD, weight_VD, bias_V, targets_T, sums_in_place)  # type: ignore[no-any-return, no-untyped-call]

    return evaluate


class _LigerLoss(torch.autograd.Function):
    """Liger's head and cross entropy: both gradients are made in the forward pass and kept for the backward.

    Source:
        liger_kernel ops/fused_linear_cross_entropy.py fused_linear_cross_entropy_forward, with accum_dtype=None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_T: torch.Tensor,
        sums_in_place: bool,
    ) -> torch.Tensor:
        """Allocate the gradients, the logits of one chunk and, where the sum is not in place, a chunk's own gradient."""
        (num_tokens, width), num_rows = hidden_TD.shape, len(weight_VD)
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden_TD)
        grad_weight = torch.empty_like(weight_VD) if needs_hidden and needs_weight else None
        grad_bias = torch.empty_like(bias_V) if needs_hidden and bias_V is not None else None
        loss_T = hidden_TD.new_empty(num_tokens, dtype=torch.float32)
        mask_T = targets_T.new_empty(num_tokens, dtype=torch.bool)
        chunk = min(num_tokens, _next_power_of_2(-(-num_tokens // -(-num_rows // width))))
        scores = hidden_TD.new_empty((chunk, num_rows))
        part_CD, chunks = hidden_TD[:chunk], -(-num_tokens // chunk)
        note(
            "product", "mm", dims=(1, chunk, num_rows, width), reads=[part_CD, weight_VD], writes=[scores], count=chunks
        )
        note("fused", "liger_cross_entropy", reads=[scores, scores], writes=[scores], count=chunks)
        if needs_hidden:
            dims = (1, chunk, width, num_rows)
            note("product", "mm", dims=dims, reads=[scores, weight_VD], writes=[part_CD], count=chunks)
        if grad_weight is not None:
            reads = [scores, part_CD, weight_VD]
            note("product", "addmm", dims=(1, num_rows, width, chunk), reads=reads, writes=[weight_VD], count=chunks)
        if grad_weight is not None and not (sums_in_place and hidden_TD.dtype != torch.float32):
            product = torch.empty_like(weight_VD)
            copy = product.float()
            del product, copy
        del scores, mask_T
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss_T.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients, scaled in place."""
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        for scaled in (grad_hidden, grad_weight):
            if scaled is not None:
                note("fused", "liger_element_mul", reads=[scaled], writes=[scaled])
        return grad_hidden, grad_weight, grad_bias, None, None


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
