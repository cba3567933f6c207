"""Replacement of norms and gated activations by Liger's Triton kernels, module by module.

The formula of a module is found by running its class's own forward pass on known numbers, in fp32 and in bf16, where every
rounding shows: a module that does not match one of the formulas below, to the last bit in bf16, is left unchanged. Rotary
embeddings are not replaced: they are functions in modules of transformers, so a kernel would apply to every model of the
process.

D: features, F: features between gate and output.

Source:
    arXiv 2410.10989; liger_kernel 0.8.5 ops/rms_norm.py, ops/swiglu.py, ops/geglu.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from toolkit.config.job import Kernels
from toolkit.errors import PlanError
from toolkit.modeling import liger
from toolkit.modeling.liger import FusedFunctions

Activation = Literal["silu", "gelu_tanh"]
Forward = Callable[[Any, torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
_SEPARATE, _JOINED = frozenset({"gate_proj", "up_proj", "down_proj"}), frozenset({"gate_up_proj", "down_proj"})
_DTYPES = (torch.bfloat16, torch.float32)
# Norms differ in fp32 by how they take the root, in the last bits; in bf16 by where they round, in a quarter of the values.
_FP32_TOLERANCE = 1e-6
_PROBE_WIDTH = 64
# Magnitudes of a probe's rows: at the smallest ε is as large as the mean square, the largest exceeds any clamp.
_PROBE_SCALES = (1e-3, 0.5, 4.0, 400.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSNorm:
    """RMS norm y = (o + w)·x / √(mean x² + ε), with Liger's names.

    Args:
        offset: Offset o of the weight.
        casting: `llama` rounds x / √… to the dtype of the input and multiplies by w in it; `gemma` rounds only at the end.
        epsilon: Constant ε.
    """

    offset: float
    casting: Literal["llama", "gemma"]
    epsilon: float

    def of(self, x_D: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
        """Compute the norm with torch's operations."""
        wide_D = x_D.float()
        wide_D = wide_D * torch.rsqrt(wide_D.square().mean(-1, keepdim=True) + self.epsilon)
        if self.casting == "llama":
            return weight_D * wide_D.to(x_D.dtype)
        return ((self.offset + weight_D.float()) * wide_D).to(x_D.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """Gated layer y = down(act(g)·u), with g = gate(x) and u = up(x): SwiGLU (arXiv 2002.05202) or GEGLU.

    Args:
        activation: Name of the activation act.
        joined: Whether g and u are the halves of one layer's output.
    """

    activation: Activation
    joined: bool

    def of(self, gate_F: torch.Tensor, up_F: torch.Tensor) -> torch.Tensor:
        """Compute act(g)·u with torch's operations."""
        return _ACTIVATIONS[self.activation](gate_F) * up_F


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusable:
    """The modules of a model that Liger's kernels can compute.

    Args:
        norms: Norms by name.
        gated: Gated feed-forward layers by name.
        left: Classes of norms, gated layers and experts that compute something else and are not replaced.
    """

    norms: dict[str, RMSNorm]
    gated: dict[str, Gated]
    left: tuple[str, ...]


def apply_kernels(model: nn.Module, kernels: Kernels) -> Fusable:
    """Replace a model's RMS norms and gated activations by Liger's kernels; `eager` leaves it unchanged.

    Only the `forward` of these module instances changes, no class: other models are unaffected, and a deep copy runs its own.
    Linear layers, adapters around them, and shards are called as before. The kernel of a gated activation overwrites its
    inputs with gradients, so a graph can be run backward only once (liger_kernel ops/swiglu.py swiglu_backward).

    Args:
        model: A `PreTrainedModel`, or a `peft.PeftModel` around one, dense or a tensor rank's part; adapters and float8
            layers must be in place.
        kernels: Value of `train.kernels`.

    Returns:
        The modules that were found; none under `eager`.

    Raises:
        PlanError: KERNELS_PACKAGE; KERNELS_MODEL if no module can be replaced.
    """
    if kernels == "eager":
        return Fusable(norms={}, gated={}, left=())
    functions = liger.fused_functions()
    found = find_fusable(model)
    for name, norm in found.norms.items():
        _replace(model.get_submodule(name), _norm_forward(norm, functions))
    for name, gated in found.gated.items():
        _replace(model.get_submodule(name), _gated_forward(gated, functions))
    return found


def find_fusable(model: nn.Module) -> Fusable:
    """Find the modules that Liger's kernels can compute, without importing them.

    Args:
        model: Model on any device, meta included: its weights are not read.

    Raises:
        PlanError: KERNELS_MODEL if there are none.
    """
    norms: dict[str, RMSNorm] = {}
    gated: dict[str, Gated] = {}
    left: set[str] = set()
    for name, module in model.named_modules():
        if not _is_sought(module):
            continue
        norm, layer = _norm_of(module), _gated_of(module)
        if norm is not None:
            norms[name] = norm
        elif layer is not None:
            gated[name] = layer
        else:
            left.add(type(module).__name__)
    if not norms and not gated:
        raise PlanError.of(
            code="KERNELS_MODEL",
            key="train.kernels",
            message=f"kernels=liger: {type(model).__name__} has neither an RMS norm of the formula of Llama, OLMo 2 or Gemma, nor "
            f"a feed-forward layer gated by SiLU or tanh GELU; it has {', '.join(sorted(left)) or 'nothing like them'}",
            fix="Set train.kernels to eager",
            source="liger_kernel ops/rms_norm.py, ops/swiglu.py, ops/geglu.py",
        )
    return Fusable(norms=norms, gated=gated, left=tuple(sorted(left)))


def _is_sought(module: nn.Module) -> bool:
    is_norm = "norm" in type(module).__name__.lower() and not module._modules
    names = {*module._modules, *module._parameters}  # experts have matrices instead of layers
    return is_norm or names >= _SEPARATE or names >= _JOINED


def _norm_of(module: nn.Module) -> RMSNorm | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if set(module._parameters) != {"weight"} or module._modules or module._buffers or not isinstance(epsilon, float):
        return None
    for offset, casting in ((0.0, "llama"), (0.0, "gemma"), (1.0, "gemma")):
        norm = RMSNorm(offset=offset, casting=casting, epsilon=epsilon)  # type: ignore[arg-type]
        if all(_is_norm(module, norm, dtype) for dtype in _DTYPES):
            return norm
    return None


def _is_norm(module: nn.Module, norm: RMSNorm, dtype: torch.dtype) -> bool:
    x_D = _probe(dtype)
    weight_D = torch.linspace(-1.3, 1.7, _PROBE_WIDTH, device="cpu").to(dtype)
    given = _run_alone(module, x_D, parameters={"weight": nn.Parameter(weight_D, requires_grad=False)}, modules={})
    return _is_same(given, norm.of(x_D, weight_D), tolerance=0.0 if dtype is torch.bfloat16 else _FP32_TOLERANCE)


def _gated_of(module: nn.Module) -> Gated | None:
    name = "act_fn" if hasattr(module, "act_fn") else "activation_fn"
    layers = set(module._modules) - {name}
    if layers not in (_SEPARATE, _JOINED) or module._parameters or module._buffers:
        return None
    for activation in _ACTIVATIONS:
        gated = Gated(activation=activation, joined=layers == _JOINED)
        if all(_is_gated(module, gated, dtype) for dtype in _DTYPES):
            return gated
    return None


def _is_gated(module: nn.Module, gated: Gated, dtype: torch.dtype) -> bool:
    x_F = _probe(dtype)
    stand_ins: dict[str, nn.Module | None] = {
        name: nn.Identity() for name in _JOINED | _SEPARATE if name in module._modules
    }
    if not gated.joined:
        stand_ins["up_proj"] = _Reversed()
    given = _run_alone(module, x_F, parameters={}, modules=module._modules | stand_ins)
    gate_F, up_F = x_F.chunk(2, dim=-1) if gated.joined else (x_F, x_F.flip(-1))
    return _is_same(given, gated.of(gate_F, up_F), tolerance=0.0)


class _Reversed(nn.Module):
    """Stand-in for a layer whose output differs from that of its sibling."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1)


def _probe(dtype: torch.dtype) -> torch.Tensor:
    """Return rows of different magnitudes and both signs, not exactly representable. Shape (4, width)."""
    row_D = torch.sin(torch.arange(_PROBE_WIDTH, device="cpu") * 2.3 + 0.7)
    return (torch.tensor(_PROBE_SCALES, device="cpu").unsqueeze(-1) * row_D).to(dtype)


def _run_alone(
    module: nn.Module, x: torch.Tensor, *, parameters: dict[str, Any], modules: dict[str, Any]
) -> torch.Tensor | None:
    """Run the forward pass of a module's class, as in training, with other parameters and layers; None if it fails."""
    if "forward" in vars(module):  # it has been changed already
        return None
    alone = copy.copy(module)
    alone.__dict__.update(_parameters=parameters, _modules=modules, training=True)
    try:
        with torch.no_grad():
            given: torch.Tensor | None = type(module).forward(alone, x)
    except Exception:  # any model code, which may need more than its input
        return None
    return given


def _is_same(given: torch.Tensor | None, expected: torch.Tensor, *, tolerance: float) -> bool:
    if not isinstance(given, torch.Tensor) or given.dtype != expected.dtype or given.shape != expected.shape:
        return False
    return torch.allclose(given, expected, rtol=tolerance, atol=0.0)


def _replace(module: nn.Module, forward: Forward) -> None:
    module.forward = MethodType(forward, module)  # bound again to each deep copy


def _norm_forward(norm: RMSNorm, functions: FusedFunctions) -> Forward:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        # Not in place: after a norm that ends a branch, the residual uses the same gradient tensor.
        return functions.rms_norm(x, self.weight, norm.epsilon, norm.offset, norm.casting, False)  # type: ignore[no-any-return]

    return forward


def _gated_forward(gated: Gated, functions: FusedFunctions) -> Forward:
    multiply = {"silu": functions.silu_product, "gelu_tanh": functions.gelu_product}[gated.activation]

    def separate(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(multiply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]

    def joined(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(multiply(*self.gate_up_proj(x).chunk(2, dim=-1)))  # type: ignore[no-any-return]

    def joined_silu(self: Any, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up_proj(x)
        # The kernel returns the gradient as rows, without the batch dimensions.
        product = functions.joined_silu_product(both.flatten(0, -2))
        return self.down_proj(product.unflatten(0, both.shape[:-1]))  # type: ignore[no-any-return]

    if not gated.joined:
        return separate
    return joined_silu if gated.activation == "silu" else joined
