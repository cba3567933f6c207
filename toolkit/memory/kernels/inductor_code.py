"""Inductor's wrapper code run on fake tensors: its allocations, releases and reuse of buffers, with kernels that do nothing.

Attention's kernels, for which the code calls ATen, are stand-ins that allocate what the card's do. Products, attention and
each fused kernel are noted for the time of a step (`operations`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from toolkit.memory.kernels.fake_fused import attention_gradients, attention_results
from toolkit.memory.kernels.operations import current, note

# What the code imports, also from a wheel of torch without CUDA, or from Triton: names that `_space` has.
_IMPORTS = re.compile(
    r"^((empty_strided_\w+|assert_size_stride\w*|assert_alignment|reinterpret_tensor) = .*"
    r"|import triton.*|from torch\._inductor\.runtime\.(triton_heuristics|runtime_utils) import .*"
    r"|from torch\._C(\._dynamo\.guards)? import .*|from torch\._inductor\.async_compile import .*"
    r"|from torch\._inductor\.select_algorithm import extern_kernels)$",
    re.MULTILINE,
)
_PARAMETERS = re.compile(r"^def \w+\(([^)]*)\)", re.MULTILINE)


def load_code(code: str) -> Callable[[list[Any]], Any]:
    """Make a function of inductor's wrapper code, which takes a list of inputs and empties it."""
    code = _IMPORTS.sub("", code)
    code = re.sub(r"torch\.cuda\._DeviceGuard\(\d+\)", "contextlib.nullcontext()", code)
    code = re.sub(r"torch\.cuda\.set_device\(\d+\)", "pass", code)
    code = re.sub(r"torch\.ops\.(aten\._scaled_dot_product_(?:cudnn|flash|efficient)_)", r"_ops.\1", code)
    # Under checkpointing inside of a graph, operators that draw random numbers keep the generator's state, on the host.
    code = re.sub(r"torch\.ops\.higher_order\.(run_and_save_rng_state|run_with_rng_state)\b", r"_ops.\1", code)
    code = code.replace("device(type='cuda', index=0)", "device(type='cpu')").replace("device='cuda:0'", "device='cpu'")
    space = _space()
    exec(compile(code, "<inductor's wrapper code>", "exec"), space)
    return space["call"]  # type: ignore[no-any-return]


def _space() -> dict[str, Any]:
    return {
        "AsyncCompile": _FusedKernels,
        "extern_kernels": _ExternKernels(),
        "_ops": _OPS,
        "contextlib": contextlib,
        "get_raw_stream": lambda index: 0,
        "copy_if_misaligned": lambda tensor: tensor,  # what the allocator gives is aligned
        "empty_strided_cuda": _empty_strided,
        "empty_strided_cpu": _empty_strided,
        # These would check the stand-ins' layouts; the code goes on with the strides that it has checked.
        "assert_size_stride": lambda *_, **__: None,
        "assert_size_stride_grouped": lambda *_, **__: None,
        "assert_alignment": lambda *_, **__: None,
        "assert_tensor_metadata": lambda *_, **__: None,
        "reinterpret_tensor": _reinterpret,
        "__name__": "inductor_wrapper",
    }


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


class _FusedKernels:
    """Stands for AsyncCompile: a kernel of Triton does nothing to the tensors that it is given."""

    def triton(self, name: str, source: str, **_: Any) -> _FusedKernel:
        return _FusedKernel(name, source)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: None


class _FusedKernel:
    def __init__(self, name: str, source: str) -> None:
        self._name = name
        found = _PARAMETERS.search(source)
        self._parameters = [] if found is None else [each.strip() for each in found.group(1).split(",")]

    def run(self, *given: Any, **_: Any) -> None:
        """Note what is read and written: parameters are named in_ptr0, out_ptr0, in_out_ptr0."""
        named = [pair for pair in zip(self._parameters, given, strict=False) if isinstance(pair[1], Tensor)]
        note(
            "fused",
            self._name,
            reads=[tensor for name, tensor in named if name.startswith("in_")],
            writes=[tensor for name, tensor in named if name.startswith(("out_", "in_out_"))],
        )


class _ExternKernels:
    """Stands for `extern_kernels`: mm, addmm, bmm and _scaled_mm write to `out`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operator = getattr(torch.ops.aten, name).default

        def call(*given: Any, out: Tensor | None = None, **options: Any) -> Any:
            if out is None:
                return operator(*given, **options)
            recorder = current()
            if recorder is not None:
                recorder.dispatched(operator, given, options, out)
            return out

        return call


def _seed() -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _random_state() -> Tensor:
    """Return what `torch.cuda.get_rng_state` does: 16 bytes on the host."""
    return torch.empty(16, dtype=torch.uint8, device="cpu")


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    **__: Any,
) -> tuple[Any, ...]:
    out, logsumexp = attention_results(query, key, value, bias, kernel="cudnn", causal=is_causal)
    lengths = query.shape[-2], key.shape[-2]
    return out, logsumexp.unsqueeze(-1), None, None, *lengths, _seed(), _seed(), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *_: Any, **__: Any
) -> tuple[Any, ...]:
    out, logsumexp = attention_results(query, key, value, None, kernel="flash", causal=is_causal)
    return out, logsumexp, None, None, query.shape[-2], key.shape[-2], _seed(), _seed(), None


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Any, ...]:
    out, logsumexp = attention_results(query, key, value, attn_bias, kernel="efficient", causal=is_causal)
    return out, logsumexp, _seed(), _seed()


def _cudnn_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any, **_: Any
) -> Any:
    _seed, _offset, bias, *_lengths, _dropout, causal = rest
    others = [grad, logsumexp, bias]
    return attention_gradients(query, key, value, out, others=others, kernel="cudnn", causal=causal)


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *rest: Any, **_: Any
) -> Any:
    *_lengths, _dropout, causal, _seed, _offset = rest
    return attention_gradients(query, key, value, out, others=[grad, logsumexp], kernel="flash", causal=causal)


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Any,
    is_causal: bool = False,
    **_: Any,
) -> Any:
    others = [grad, logsumexp, attn_bias]
    gradients = attention_gradients(query, key, value, out, others=others, kernel="efficient", causal=is_causal)
    return *gradients, None if attn_bias is None else torch.empty_like(attn_bias)


_ATTENTION = {
    "cudnn_attention": _cudnn,
    "cudnn_attention_backward": _cudnn_backward,
    "flash_attention": _flash,
    "flash_attention_backward": _flash_backward,
    "efficient_attention": _efficient,
    "efficient_attention_backward": _efficient_backward,
}
# What the code calls in `torch.ops`, by names there.
_OPS = SimpleNamespace(
    run_and_save_rng_state=lambda operator, *given, **options: (_random_state(), operator(*given, **options)),
    run_with_rng_state=lambda state, operator, *given, **options: operator(*given, **options),
    aten=SimpleNamespace(
        **{f"_scaled_dot_product_{name}": SimpleNamespace(default=function) for name, function in _ATTENTION.items()}
    ),
)
