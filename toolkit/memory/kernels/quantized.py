"""QLoRA's base weights in NF4, as bitsandbytes stores and reads them.

Source: arXiv 2305.14314, section 3; bitsandbytes nn/modules.py Linear4bit, autograd/_functions.py MatMul4Bit;
transformers quantizers/quantizer_bnb_4bit.py (every nn.Linear but the output projection).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from toolkit.memory.kernels.operations import note
from toolkit.modeling.nf4 import packed_linears

# Elements per scale, and scales per second-level scale (double quantization).
BLOCK, NESTED_BLOCK = 64, 256


class Nf4Linear(nn.Linear):
    """A linear layer with 4-bit weights: Y = X W^T + b, where W is unpacked for each product and released."""

    def __init__(self, dense: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = dense.in_features, dense.out_features
        numel, device = dense.weight.numel(), dense.weight.device
        scales = -(-numel // BLOCK)
        packed = torch.empty((-(-numel // 2), 1), dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = dense.bias
        self.register_buffer("absmax", torch.empty(scales, dtype=torch.uint8, device=device))
        nested = torch.empty(-(-scales // NESTED_BLOCK), dtype=torch.float32, device=device)
        self.register_buffer("nested_absmax", nested)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Run the product on fake tensors; its values would be meaningless."""
        out: torch.Tensor = _Nf4Product.apply(input, self.weight, self.out_features)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class _Nf4Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, packed: torch.Tensor, out_features: int) -> torch.Tensor:
        ctx.shape = (out_features, input.shape[-1])
        ctx.save_for_backward(packed)
        return functional.linear(input, _unpacked(input, packed, ctx.shape))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient, (packed,) = gradients[0], ctx.saved_tensors
        return gradient @ _unpacked(gradient, packed, ctx.shape), None, None


def _unpacked(like: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Allocate the dense weight that a product needs, which bitsandbytes writes in one kernel."""
    dense = like.new_empty(shape)
    note("fused", "dequantize_nf4", reads=[packed], writes=[dense])
    return dense


def quantize_linears(model: PreTrainedModel) -> int:
    """Replace the linear layers of a model, except its output projection, and return how many."""
    found = packed_linears(model)
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Nf4Linear(module))
    return len(found)
