"""The optional package liger-kernel: its Triton kernels for norms and gated activations, and for head and cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.errors import PlanError, first_line
from toolkit.launch.packages import LIGER, LIGER_KERNELS, Package
from toolkit.modeling.linear_cross_entropy import LogitMap
from toolkit.modeling.loss import IGNORED


def check_installed() -> None:
    """Import liger-kernel for its loss.

    Raises:
        PlanError: LOSS_LIGER_PACKAGE if it, or Triton, cannot be imported.
    """
    import_for(LIGER)


def import_for(package: Package) -> None:
    """Import liger-kernel for the use that an entry of the optional packages describes.

    Raises:
        PlanError: The code of the entry, if liger-kernel or Triton cannot be imported.
    """
    try:
        import liger_kernel.ops.fused_linear_cross_entropy  # noqa: F401
    except ImportError as error:
        raise PlanError(package.problem(first_line(error))) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedFunctions:
    """Liger's kernels as functions of tensors.

    Args:
        rms_norm: Of input, weight, ε, offset of the weight, casting, and whether the gradient is written in place.
        silu_product: Of gate and up: silu(gate)·up.
        gelu_product: The same with tanh GELU.
        joined_silu_product: silu(gate)·up of rows that hold both.
    """

    rms_norm: Callable[..., Any]
    silu_product: Callable[..., Any]
    gelu_product: Callable[..., Any]
    joined_silu_product: Callable[..., Any]


def fused_functions() -> FusedFunctions:
    """Return the kernels for norms and gated activations.

    Raises:
        PlanError: KERNELS_PACKAGE if liger-kernel, or Triton, cannot be imported.
    """
    import_for(LIGER_KERNELS)
    from liger_kernel import ops

    return FusedFunctions(
        rms_norm=ops.LigerRMSNormFunction.apply,
        silu_product=ops.LigerSiLUMulFunction.apply,
        gelu_product=ops.LigerGELUMulFunction.apply,
        joined_silu_product=ops.LigerFusedGateUpSiLUMulFunction.apply,
    )


def liger_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_T: torch.Tensor,
    mapped: LogitMap,
) -> torch.Tensor:
    """Return what `linear_cross_entropy` does, by Liger's kernel, which computes gradients in the forward pass.

    Source:
        liger_kernel transformers/fused_linear_cross_entropy.py LigerFusedLinearCrossEntropyLoss.
    """
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    # (c x) Wᵀ + c b = c (x Wᵀ + b): the kernel supports a cap, but no factor.
    if mapped.scale != 1:
        hidden_TD = hidden_TD * mapped.scale
        bias_V = None if bias_V is None else bias_V * mapped.scale
    evaluate = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum", softcap=mapped.cap)
    return evaluate(weight_VD, hidden_TD, targets_T, bias=bias_V)  # type: ignore[no-any-return]
