"""A linear layer whose three products run in float8: torchao's casts and kernels in our own autograd function.

T: tokens, K: features in, N: features out. Importing this module needs the package torchao.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

# Alignment of a product's inner dimension in float8 kernels (aten/src/ATen/native/cuda/ScaledBlas.cpp _scaled_mm_cuda).
ALIGNMENT = 16


class Fp8Linear(Float8Linear):  # type: ignore[misc]
    """Linear layer Y = X W^T + b, with X, W and dY rounded to float8 in each product; parameters and output keep their dtype.

    Attributes:
        in_fp8: Whether to use float8; if False, products run in the dtype of the parameters.
    """

    in_fp8: bool = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer."""
        if not self.in_fp8:
            return functional.linear(input, self.weight, self.bias)
        output: torch.Tensor = _Fp8Product.apply(input, self.weight, self.linear_mm_config, self.config)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias


@torch._dynamo.allow_in_graph
class _Fp8Product(torch.autograd.Function):
    """The products Y = X W^T; dX = dY W; dW = dY^T X.

    It differs from torchao's own function in three ways. The parameter itself is saved, since a view of it would keep each
    gathered weight of ZeRO-3 alive from the forward pass to the backward pass. For frozen weights or inputs no gradient is
    computed and nothing saved. Any number of tokens works: they are padded with zeros for the product over tokens.

    Source:
        arXiv 2209.05433; torchao float8/float8_linear.py matmul_with_hp_or_float8_args; deepspeed runtime/zero/linear.py
        LinearFunctionForZeroStage3.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight_NK: torch.Tensor, products: LinearMMConfig, config: Float8LinearConfig
    ) -> torch.Tensor:
        """Compute the output, and save the tensors for the gradients that are needed."""
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(input if needs_weight else None, weight_NK if needs_input else None)
        ctx.products, ctx.config, ctx.shape = products, config, input.shape
        cast = _Cast(products, config)
        input_TK = cast(input.reshape(-1, input.shape[-1]), config.cast_config_input, GemmInputRole.INPUT, dim=-1)
        weight_KN = cast(weight_NK.t(), config.cast_config_weight, GemmInputRole.WEIGHT, dim=0)
        return torch.mm(input_TK, weight_KN).reshape(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Compute the gradients that are needed."""
        input, weight_NK = ctx.saved_tensors
        config = ctx.config
        cast = _Cast(ctx.products, config)
        grad_TN = gradients[0].reshape(-1, gradients[0].shape[-1])
        grad_input = grad_weight = held = None
        if weight_NK is not None:
            held = cast(grad_TN, config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, dim=-1)
            weight_KN = cast(weight_NK.t(), config.cast_config_weight_for_grad_input, GemmInputRole.WEIGHT, dim=-1)
            grad_input = torch.mm(held, weight_KN.t()).reshape(ctx.shape)
            del weight_KN
        if input is not None:
            input_TK, missing = input.reshape(-1, input.shape[-1]), -grad_TN.shape[0] % ALIGNMENT
            if missing:
                grad_TN, input_TK = (functional.pad(rows, (0, 0, 0, missing)) for rows in (grad_TN, input_TK))
            kind = config.cast_config_grad_output_for_grad_weight
            # With one scale per tensor the rounding is the same along either dimension.
            if held is None or missing or not _is_tensorwise(kind) or kind != config.cast_config_grad_output:
                held = cast(grad_TN, kind, GemmInputRole.GRAD_OUTPUT, dim=0)
            input_TK = cast(input_TK, config.cast_config_input_for_grad_weight, GemmInputRole.INPUT, dim=0)
            grad_weight = torch.mm(held.t(), input_TK)
        return grad_input, grad_weight, None, None


class _Cast:
    """Cast of matrices to float8 by a recipe; matrices that the recipe does not round are returned unchanged."""

    def __init__(self, products: LinearMMConfig, config: Float8LinearConfig) -> None:
        self._products = products
        self._config = config

    def __call__(self, matrix: torch.Tensor, kind: CastConfig, role: GemmInputRole, *, dim: int) -> torch.Tensor:
        """Return the matrix in float8, with one scale, or scales along `dim`, over which the product sums."""
        if kind.scaling_type is ScalingType.DISABLED:
            return matrix
        rounded: torch.Tensor = hp_tensor_to_float8_dynamic(
            matrix,
            kind.target_dtype,
            self._products,
            gemm_input_role=role,
            scaling_granularity=kind.scaling_granularity,
            axiswise_dim=None if _is_tensorwise(kind) else dim,
            round_scales_to_power_of_2=self._config.round_scales_to_power_of_2,
        )
        return rounded


def _is_tensorwise(kind: CastConfig) -> bool:
    return kind.scaling_type is ScalingType.DYNAMIC and kind.scaling_granularity is ScalingGranularity.TENSORWISE
