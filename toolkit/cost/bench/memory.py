"""Rates of kernels that move bytes: torch's own, compiled ones, Liger's, and losses."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from toolkit.cost.bench.timing import MIB, Bench, noted


def elementwise(bench: Bench, out: dict[str, Any]) -> None:
    """Eager kernels that move bytes: bytes a second (what is read and written) by size of the first input."""
    rows = out["rows"] = []
    for size in bench.sizes([512 * MIB, 64 * MIB, 16 * MIB, 4 * MIB, MIB, 65536], [65536]):
        n = size // 2
        width = min(4096, n)
        x, y = bench.random(n // width, width), bench.random(n // width, width)
        single, scale = x.float(), bench.random(width)
        index = torch.randint(0, n // width, (n // width,), device=bench.device)
        cases: dict[str, tuple[int, Callable[..., Any]]] = {
            "copy": (2 * size, lambda x=x, y=y: y.copy_(x)),
            "add": (3 * size, lambda x=x, y=y: x + y),
            "add_": (3 * size, lambda x=x, y=y: y.add_(x, alpha=0.0)),
            "mul": (3 * size, lambda x=x, y=y: x * y),
            "mul_row": (2 * size, lambda x=x, s=scale: x * s),
            "silu": (2 * size, lambda x=x: F.silu(x)),
            "neg": (2 * size, lambda x=x: -x),
            "to_float": (3 * size, lambda x=x: x.float()),
            "from_float": (3 * size, lambda s=single: s.to(torch.bfloat16)),
            "pow": (4 * size, lambda s=single: s.pow(2)),
            "mean": (2 * size, lambda s=single: s.mean(-1, keepdim=True)),
            "sum": (size, lambda x=x: x.sum()),
            "sum_rows": (size, lambda x=x: x.sum(0)),
            "norm": (size, lambda x=x: torch.linalg.vector_norm(x)),
            "norm_float": (2 * size, lambda s=single: torch.linalg.vector_norm(s)),
            "cat": (2 * size, lambda x=x, w=width: torch.cat((-x[:, w // 2 :], x[:, : w // 2]), dim=-1)),
            "transposed": (
                2 * size,
                lambda x=x, n=n, w=width: x.view(-1, w // 128 or 1, min(w, 128)).transpose(0, 1).contiguous(),
            ),
            "gather_rows": (2 * size, lambda x=x, i=index: F.embedding(i, x)),
            "zero": (size, lambda x=x: torch.zeros_like(x)),
            "softmax": (2 * size, lambda x=x: torch.softmax(x, -1)),
        }
        for name, (moved, function) in cases.items():
            with noted(out, f"{name} {size}"):
                seconds = (bench.device_time if size <= 4 * MIB else bench.time)(function, share=0.25)
                rows.append(
                    {
                        "kernel": name,
                        "size": size,
                        "bytes": moved,
                        "seconds": seconds,
                        "bytes_per_second": moved / seconds,
                    }
                )


class _Norm(nn.Module):
    """Llama's RMSNorm, as transformers writes it."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class _Gated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


def _liger_norm(function: Any, weight: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = function.apply(x, weight, 1e-6)
    return result


def _liger_gated(function: Any, width: int, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = function.apply(x[:, :width], x[:, width:])
    return result


def _passes(bench: Bench, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> dict[str, float]:
    """Return seconds of a forward and of its backward pass."""
    with torch.no_grad():
        forward = bench.time(lambda: function(x), share=0.4)
    result = function(x)
    gradient = torch.randn_like(result)
    wanted = [x, *(function.parameters() if isinstance(function, nn.Module) else ())]
    backward = bench.time(lambda: torch.autograd.grad(result, wanted, gradient, retain_graph=True), share=0.4)
    return {"forward": forward, "backward": backward}


def fused(bench: Bench, out: dict[str, Any]) -> None:
    """RMSNorm and a gated activation, eager, compiled and by Liger's kernels; element counts beside the seconds."""
    for tokens, width in bench.sizes([(16384, 4096), (4096, 4096), (1024, 2048)], [(64, 64)]):
        for name, module, columns in (("rms_norm", _Norm(width, bench.device), width), ("swiglu", _Gated(), 2 * width)):
            x = bench.random(tokens, columns, grad=True)
            into = out.setdefault(f"{name} {tokens}x{width}", {"elements": tokens * width})
            with noted(into, "eager"):
                into["eager"] = _passes(bench, module, x)
            if tokens == 4096 or bench.quick:
                with noted(into, "compiled"):
                    torch._dynamo.reset()
                    start = time.perf_counter()
                    into["compiled"] = _passes(bench, torch.compile(module, dynamic=False), x)
                    into["compile_seconds"] = time.perf_counter() - start
            with noted(into, "liger"):
                from liger_kernel.ops.rms_norm import LigerRMSNormFunction
                from liger_kernel.ops.swiglu import LigerSiLUMulFunction

                if name == "rms_norm":
                    into["liger"] = _passes(bench, partial(_liger_norm, LigerRMSNormFunction, module.weight), x)
                else:
                    into["liger"] = _passes(bench, partial(_liger_gated, LigerSiLUMulFunction, width), x)


def losses(bench: Bench, out: dict[str, Any]) -> None:
    """Cross entropy of logits, as transformers computes it (in fp32), and Liger's fused head and loss."""
    for tokens, vocabulary, width in bench.sizes(
        [(4096, 128256, 4096), (8192, 151936, 2048), (4096, 32000, 2048)], [(16, 128, 32)]
    ):
        into = out[f"{tokens}x{vocabulary}x{width}"] = {}
        labels = torch.randint(0, vocabulary, (tokens,), device=bench.device)
        with noted(into, "eager"):
            logits = bench.random(tokens, vocabulary, grad=True)

            def passes(logits: torch.Tensor = logits, labels: torch.Tensor = labels) -> None:
                loss = F.cross_entropy(logits.float(), labels)
                torch.autograd.grad(loss, logits)

            into["eager"] = bench.time(passes, share=0.6)
            del logits
        with noted(into, "linear"):
            hidden, weight = bench.random(tokens, width, grad=True), bench.random(vocabulary, width, grad=True)

            def head(h: torch.Tensor = hidden, w: torch.Tensor = weight, labels: torch.Tensor = labels) -> None:
                torch.autograd.grad(F.cross_entropy(F.linear(h, w).float(), labels), (h, w))

            into["linear"] = bench.time(head, share=0.6)
        with noted(into, "liger"):
            from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

            def together(h: torch.Tensor = hidden, w: torch.Tensor = weight, labels: torch.Tensor = labels) -> None:
                loss = Fused.apply(h, w, labels)
                torch.autograd.grad(loss[0] if isinstance(loss, tuple) else loss, (h, w))

            into["liger"] = bench.time(together, share=0.6)
        bench.sync()
